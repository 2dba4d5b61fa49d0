"""Jobs trained to their end by chains of workers, each a process, on a real broker."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from computeshare.checkpoints.store import Artifacts
from computeshare.pipeline.chains.placement import Placement
from tests.support.job_reducer import Job
from tests.support.rounds import events
from tests.support.stage_seats import Seat
from tests.support.wait import wait_until

ROUNDS = 5
FIELDS: dict[str, Any] = {"micro_batch": 16, "accumulate": 4, "micro_batches_per_round": 2, "rounds": ROUNDS}
FIELDS |= {"codec": {"up": "float32", "down": "float32"}}
PIPELINE: dict[str, Any] = {"kind": "pipeline", "stages": 2}


def train(job: Job, at_version: Callable[[int], None] = lambda version: None, patience_s: float = 120) -> None:
    """Have the reducer make versions until the job's last."""
    deadline, seen = time.monotonic() + patience_s, -1
    while time.monotonic() < deadline:
        state = job.store.read()
        assert state is not None
        if state.version != seen:
            seen = state.version
            at_version(seen)
        if seen == job.spec.rounds_total:
            return
        job.reducer.advance()
        time.sleep(0.01)
    raise AssertionError(f"the job stands at version {seen}")


def holders(job: Job) -> set[str]:
    """The workers that hold stages."""
    plan: Any = job.redis.hget(job.store.keys.placement(), "plan")
    staging = job.spec.strategy.staging
    assert staging
    placement = Placement.parse(0, plan or b"", staging.stages)
    assert placement
    return {held.worker for chain in placement.chains for held in chain}


def digests(job: Job) -> list[str]:
    return [event["sha256"] for event in events(job.store, "version")]


def losses(job: Job) -> list[float]:
    return [event["loss"] for event in events(job.store, "version")]


def finish(
    job: Job,
    redis_url: str,
    workers: int,
    at: Callable[..., None] | None = None,
    holding: int | None = None,
    **of_seats: Any,
) -> None:
    """Train a job to its end with some workers.

    Args:
        at: is called with each version, the seats, and what adds a seat.
        holding: the number of workers that hold stages from the first round on; None: all.
        of_seats: as of `Seat`.
    """
    seats: list[Seat] = []

    def add() -> None:
        seats.append(Seat(redis_url, job.job_id, f"worker{len(seats)}", **of_seats))

    for _ in range(workers):
        add()
    try:
        wait_until(lambda: len(holders(job)) >= (holding or workers))
        train(job, (lambda version: at(version, seats, add)) if at else lambda version: None)
    finally:
        for seat in seats:
            seat.leave()


Run = Callable[..., Job]


@pytest.fixture
def run(start: Callable[..., Job], redis_url: str) -> Run:
    """Makes a job with `changes`, and trains it as `finish` does."""

    def run(workers: int, at: Callable[..., None] | None = None, **changes: Any) -> Job:
        job = start(**FIELDS | {"strategy": PIPELINE} | changes)
        finish(job, redis_url, workers, at)
        return job

    return run


def final_weights(job: Job) -> dict[str, npt.NDArray[np.generic]]:
    """The entries of the last version, from its checkpoint, by name; ends the reducer."""
    job.reducer.close()
    artifacts = Artifacts(job.root, job.job_id)
    token = artifacts.tokens()[-1]
    assert token.version == job.spec.rounds_total
    return artifacts.tensors(token)


def apart(
    found: Mapping[str, npt.NDArray[np.generic]], expected: Mapping[str, npt.NDArray[np.generic]]
) -> dict[str, float]:
    """The Euclidean distance of each entry over the expected one's norm."""
    assert {*found} == {*expected}
    norms = {name: float(np.linalg.norm(values)) or 1.0 for name, values in expected.items()}
    return {name: float(np.linalg.norm(found[name] - values)) / norms[name] for name, values in expected.items()}
