"""The evaluator process: scores each checkpoint on the test set."""

import os
import random
import threading
import uuid
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from computeshare import handshake
from computeshare.artifacts import Artifacts
from computeshare.broker import connect
from computeshare.commands.run import run_command
from computeshare.loglines import REMARK_EVERY_S, Seldom, Writer
from computeshare.logs import JobLog
from computeshare.processes import configure_logging, end_soon_after, exit_with_parent, hostname, stop_event
from computeshare.rounds import RoundStore, published_jobs
from computeshare.settings import Settings
from computeshare.spec import JobSpec
from computeshare.types import Token

CLAIM_MS = 60_000
LOOK_S = 0.5

log = structlog.get_logger()


class Evaluator:
    """Scores the checkpoints of open jobs whose versions are to be scored, oldest first; any number of them may run."""

    def __init__(self, redis: Redis, artifacts: Path, data_dir: Path, stop: threading.Event) -> None:
        self.redis, self.root, self.data_dir, self.stop = redis, artifacts, data_dir, stop
        self.id = uuid.uuid4().hex
        self._announced: set[tuple[str, str]] = set()
        self._specs: dict[str, JobSpec | None] = {}
        self._loaded: tuple[str, Any] | None = None
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Score until told to stop; an outage of the broker is waited out."""
        while not self.stop.is_set():
            try:
                if not self._turn():
                    self.stop.wait(LOOK_S)
            except RedisError as error:
                kind = type(error).__name__
                self._remarks.tell(log.warning, "broker away, or it refuses", kind, error=str(error))
                self.stop.wait(random.uniform(0.5, 1.5))

    def _turn(self) -> bool:
        """Score one checkpoint, or pass on a score that the control plane may have missed; False if none is due."""
        handshake.check(self.redis, "evaluator")
        for job_id in published_jobs(self.redis):
            artifacts, spec = Artifacts(self.root, job_id), self._spec(job_id)
            if spec is None:
                continue  # deleted meanwhile, or not readable
            for token in artifacts.tokens():
                if (job_id, str(token)) not in self._announced and self._settle(artifacts, job_id, spec, token):
                    return True
        return False

    def _spec(self, job_id: str) -> JobSpec | None:
        if job_id not in self._specs and (raw := RoundStore(self.redis, job_id).spec()):
            try:
                spec = JobSpec.model_validate_json(raw)
                if spec.codec == "auto":
                    return None  # until it is chosen, and with it how many rounds there are
                self._specs[job_id] = spec
            except ValidationError as error:  # another release's, for one: the other jobs can be scored
                log.error("cannot read the specification", job=job_id, error=str(error))
                self._specs[job_id] = None
        return self._specs.get(job_id)

    def _settle(self, artifacts: Artifacts, job_id: str, spec: JobSpec, token: Token) -> bool:
        rounds = RoundStore(self.redis, job_id)
        score = artifacts.score(token)
        if score is None:
            if not spec.wants_score(token.version):
                return False
            if not self.redis.set(rounds.keys.scoring(str(token)), self.id, nx=True, px=CLAIM_MS):
                return False
            try:
                score = self._score(artifacts, job_id, spec, token)
            except Exception as error:  # the data set, the disk, a job deleted meanwhile: the others can be scored
                log.error("cannot score", job=job_id, token=str(token), error=f"{type(error).__name__}: {error}")
                return False  # tried again once the claim has expired
        rounds.append("scored", {"token": str(token), "version": token.version, **score})
        self._announced.add((job_id, str(token)))
        return True

    def _score(self, artifacts: Artifacts, job_id: str, spec: JobSpec, token: Token) -> dict[str, Any]:
        from computeshare.training import datasets, models
        from computeshare.training.scoring import score

        if self._loaded is None or self._loaded[0] != job_id:
            datasets.prepare(spec.dataset, self.data_dir)
            split = datasets.open_split(spec.dataset, "test", self.data_dir, spec.shape)
            module = models.of(spec)
            self._loaded = (job_id, (module, models.layout_of(module), split))
        module, layout, split = self._loaded[1]
        result = score(module, layout, layout.gather(artifacts.tensors(token)), split)
        scored = {"loss": result.loss, "accuracy": result.accuracy, "samples": result.samples}
        artifacts.save_score(token, scored)
        log.info("scored", job=job_id, version=token.version, accuracy=round(result.accuracy, 4))
        return scored


def serve(settings: Settings) -> None:
    """Run one evaluator in this process until a signal ends it."""
    import torch

    stop = stop_event()
    end_soon_after(stop)
    url = settings.resolve_redis_url()
    with JobLog(url, Writer("evaluator", hostname())) as job_log:
        configure_logging(job_log.capture)
        os.nice(5)  # scoring can wait, training cannot
        torch.set_num_threads(1)
        redis = connect(url)
        log.info("evaluator ready", pid=os.getpid())
        Evaluator(redis, settings.artifacts_dir, settings.data_dir, stop).run()


def child(values: dict[str, str]) -> None:
    """Entry point for `computeshare up`: as `serve`, ending with the process that started it."""
    os.environ.update(values)
    exit_with_parent()
    serve(Settings())


def command(
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints and run.json.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
) -> None:
    """Score every checkpoint on its job's test set."""
    serve(Settings.given(redis_url=redis_url, home=home, data=data))


def main() -> None:
    """The command `computeshare-evaluator`."""
    run_command(command)


if __name__ == "__main__":
    main()
