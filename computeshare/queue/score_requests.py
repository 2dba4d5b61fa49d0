"""Requests for scores: the control plane asks the worker of a scoring seat, one checkpoint at a time (docs/adr/0034).

The seat's worker fetches the checkpoint as a bundle, whose digest stands in the request. An answer counts only for the
request that names it, and only while whoever asked holds the claim on the checkpoint.
"""

import json
from collections.abc import Callable
from typing import Any, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from redis import Redis

from computeshare.bundles.manifest import Digest
from computeshare.checkpoints.part_score import PartScore, ScoredPart
from computeshare.errors import (
    ArtifactError,
    BundleError,
    ComputeShareError,
    DatasetError,
    RecipeError,
    RecipeUnfit,
    ScorerGone,
    ShapeError,
    SpecError,
)
from computeshare.protocol.keys import JobKeys
from computeshare.queue.seats import Seat

BLOCK_S = 1
"""Seconds of one blocking read: below the time-out of a connection."""
LIFE_S = 3600
"""Seconds after which the broker forgets what nobody reads."""
LONGEST_ERROR = 1000
KINDS: dict[str, type[ComputeShareError]] = {
    one.__name__: one
    for one in (ArtifactError, BundleError, DatasetError, RecipeError, RecipeUnfit, ShapeError, SpecError)
}
"""The errors whose class an answer tells."""


class ScoreRequest(BaseModel):
    """Score the checkpoint `token`, whose files the bundle `files` has, on a part of the data."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str = Field(pattern=r"^[0-9a-f]{32}$")
    token: str
    part: ScoredPart
    files: Digest


def ask(redis: Redis, seat: Seat, request: ScoreRequest, is_there: Callable[[], bool]) -> PartScore:
    """Have a seat score, and wait for as long as it `is_there`.

    Raises: ScorerGone: it is not there any more, or sends a malformed score; ComputeShareError: it could not score,
        with the error's class there; RedisError.
    """
    keys = JobKeys(seat.job)
    _push(redis, keys.score_requests(seat.id), request.model_dump_json())
    while is_there():
        if found := cast(Any, redis.blpop([keys.score_answer(request.id)], timeout=BLOCK_S)):
            return _read(found[1])
    redis.delete(keys.score_requests(seat.id))
    raise ScorerGone(f"{seat.worker} does not score any more")


def take(redis: Redis, seat: Seat) -> ScoreRequest | None:
    """The next request to a seat; None if none came for `BLOCK_S`, or it cannot be read."""
    found = cast(Any, redis.blpop([JobKeys(seat.job).score_requests(seat.id)], timeout=BLOCK_S))
    try:
        return ScoreRequest.model_validate_json(found[1]) if found else None
    except ValidationError:
        return None


def answer(redis: Redis, seat: Seat, request: ScoreRequest, score: PartScore | Exception) -> None:
    """Send a score, or why there is none, to whoever asked."""
    if isinstance(score, Exception):
        told = str(score) if isinstance(score, ComputeShareError) else f"{type(score).__name__}: {score}"
        text = json.dumps({"error": told[:LONGEST_ERROR], "kind": type(score).__name__})
    else:
        text = score.model_dump_json()
    _push(redis, JobKeys(seat.job).score_answer(request.id), text)


def _read(raw: bytes) -> PartScore:
    try:
        found = json.loads(raw)
        if "error" not in found:
            return PartScore.model_validate(found)
        kind, told = str(found["kind"]), str(found["error"])
    except (ValueError, KeyError, TypeError) as error:
        raise ScorerGone(f"a worker sent a malformed score: {str(error)[:200]}") from error
    raise KINDS.get(kind, ComputeShareError)(told)


def _push(redis: Redis, key: str, text: str) -> None:
    pipeline = redis.pipeline()
    pipeline.rpush(key, text)
    pipeline.expire(key, LIFE_S)
    pipeline.execute()
