"""Answers requests for text from jobs' language models, in a thread beside the scoring."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import structlog
from redis import Redis
from redis.exceptions import RedisError

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ComputeShareError
from computeshare.queue import text_requests
from computeshare.queue.text_requests import TextRequest
from computeshare.types import Token

LONGEST_S = 8.0
"""Seconds after which a text ends as it is: whoever asked does not wait much longer."""
PAUSE_S = 1.0
log = structlog.get_logger()


def serve_texts(redis: Redis, artifacts_dir: Path, bundles: BundleStore, stop: threading.Event) -> None:
    """Answer requests until `stop` is set; retry while the broker is away."""
    while not stop.is_set():
        try:
            if asked := text_requests.take(redis):
                name, request = asked
                text_requests.answer(redis, name, _answer(artifacts_dir, bundles, request))
        except RedisError:
            stop.wait(PAUSE_S)


def _answer(artifacts_dir: Path, bundles: BundleStore, request: TextRequest) -> dict[str, str]:
    try:
        return {"text": text_of(artifacts_dir, bundles, request)}
    except (ComputeShareError, ValueError) as error:
        return {"error": str(error)}
    except Exception as error:  # for example weights that are not finite: the next request may fare better
        log.exception("cannot generate text", job=request.job_id, token=request.token)
        return {"error": f"the evaluator cannot generate text: {type(error).__name__}: {error}"[:500]}


def text_of(artifacts_dir: Path, bundles: BundleStore, request: TextRequest) -> str:
    """The requested text. Raises ArtifactError, InputError, ShapeError, SpecError."""
    import torch

    from computeshare.tasks import trained

    torch.set_num_threads(1)  # a setting of each thread: training cannot wait, texts can
    tensors = Artifacts(artifacts_dir, request.job_id).tensors(Token.parse(request.token), averaged=True)
    task = trained.task_of_job(request.spec, bundles)
    module = trained.module_of(
        task, {name: torch.as_tensor(array) for name, array in tensors.items()}, request.spec["seed"]
    )
    following = task.generate(module, request.prompt, request.temperature, request.seed)
    return "".join(_in_time(following, request.characters))


def _in_time(characters: Iterator[str], most: int) -> Iterator[str]:
    deadline = time.monotonic() + LONGEST_S
    for number, character in enumerate(characters, 1):
        yield character
        if number == most or time.monotonic() > deadline:
            return
