"""Requests for text from a job's language model: the control plane asks, any evaluator answers.

The control plane imports no torch, and an evaluator has checkpoints, data sets and models at hand (docs/adr/0024).
"""

import json
import secrets
import time
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis import Redis

from computeshare.errors import NoEvaluator, SpecError
from computeshare.protocol import keys

WAIT_S = 12.0
"""How long the control plane waits for an answer."""
ANSWER_LIFE_S = 60
BLOCK_S = 2
"""Seconds of one blocking read: below the time-out of a connection."""
MOST_WAITING = 20
LONGEST_PROMPT, MOST_CHARACTERS, HOTTEST = 2000, 1000, 100


class TextRequest(BaseModel):
    """A request to generate `characters` at most after `prompt`, by version `token` of a job with JobSpec `spec`."""

    model_config = ConfigDict(frozen=True)

    job_id: str
    token: str
    spec: dict[str, Any]
    prompt: str = Field(max_length=LONGEST_PROMPT)
    characters: int = Field(ge=1, le=MOST_CHARACTERS)
    temperature: float = Field(ge=0, le=HOTTEST)
    seed: int = Field(ge=0, lt=2**63)


def ask(redis: Redis, request: TextRequest, wait_s: float = WAIT_S) -> str:
    """The text that an evaluator generates. Raises: NoEvaluator: none runs, or none answered in time; SpecError: the
    request cannot be carried out; RedisError.
    """
    if not redis.exists(keys.EVALUATOR):
        raise NoEvaluator("no evaluator is running, which generates text: start computeshare-evaluator")
    if redis.llen(keys.TEXT_REQUESTS) >= MOST_WAITING:
        raise NoEvaluator("the evaluator has too many requests for text: try again in a minute")
    name = secrets.token_hex(16)
    pipeline = redis.pipeline()
    pipeline.set(keys.text_request(name), request.model_dump_json(), px=int(1000 * wait_s))
    pipeline.rpush(keys.TEXT_REQUESTS, name)
    pipeline.expire(keys.TEXT_REQUESTS, ANSWER_LIFE_S)
    pipeline.execute()
    deadline = time.monotonic() + wait_s
    while (left := deadline - time.monotonic()) > 0:
        if found := cast(Any, redis.blpop([keys.text_answer(name)], timeout=min(BLOCK_S, left))):
            answer = json.loads(found[1])
            if "error" in answer:
                raise SpecError(str(answer["error"]))
            return str(answer["text"])
    redis.delete(keys.text_request(name))
    raise NoEvaluator(f"no evaluator answered within {wait_s:.0f} s: it may be scoring a large model; try again")


def take(redis: Redis) -> tuple[str, TextRequest] | None:
    """The next request that somebody still waits for, and its id; None if none came for `BLOCK_S`."""
    found = cast(Any, redis.blpop([keys.TEXT_REQUESTS], timeout=BLOCK_S))
    raw = cast(Any, redis.getdel(keys.text_request(found[1].decode()))) if found else None
    if raw is None:
        return None
    try:
        return found[1].decode(), TextRequest.model_validate_json(raw)
    except ValidationError:  # of another release, or forged
        return None


def answer(redis: Redis, name: str, found: dict[str, str]) -> None:
    """Send `{"text": ...}` or `{"error": ...}` to whoever asked."""
    pipeline = redis.pipeline()
    pipeline.rpush(keys.text_answer(name), json.dumps(found))
    pipeline.expire(keys.text_answer(name), ANSWER_LIFE_S)
    pipeline.execute()
