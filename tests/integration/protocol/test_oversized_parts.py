"""Parts far larger than a model has values cost the reducer no memory, whichever way they got into the broker."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from bench.memory import forget_peak, peak
from computeshare.tensors import layout
from tests.support.job_reducer import Hand, Job, spec_of
from tests.support.rounds import events

HUGE_BYTES = 200_000_000
BOUND_BYTES = 64_000_000
_GROW = """
redis.call("SETRANGE", KEYS[2], ARGV[2] - 1, "x")
redis.call("HSET", KEYS[1], ARGV[1], redis.call("GET", KEYS[2]))
redis.call("DEL", KEYS[2])
"""


def grow(redis: Redis, key: str, part: int = 0, size: int = HUGE_BYTES) -> None:
    """Put a part of this size under a key, made by the broker itself."""
    redis.eval(_GROW, 2, key, f"{key}:grown", part, size)


def grown_bytes(act: Callable[[], object]) -> int:
    """The most memory that this process had beyond what it began with."""
    before = forget_peak(os.getpid())
    act()
    return peak(os.getpid()) - before


def make(redis: Redis, job_id: str, root: Path, micro_batches: int) -> tuple[Job, Hand]:
    """A job whose reducer has worked off a round."""
    spec = spec_of(micro_batches_per_round=micro_batches, checkpoint_every=0)
    job = Job(redis, job_id, spec, root)
    hand = job.hand("solo")
    job.round(hand)
    return job, hand


def reasons(job: Job) -> list[str]:
    return [event["reason"] for event in events(job.store, "refused")]


def test_a_part_that_was_submitted_is_refused_unread(redis: Redis, job_id: str, tmp_path: Path) -> None:
    job, hand = make(redis, job_id, tmp_path, 1)
    assert redis.hget(job.store.keys.round(), "parts") == b"2"  # a bucket and the buffers
    grant = hand.pull()
    (unit,) = grant.micro_batches
    for part in range(2):
        grow(redis, hand.session._staged("huge", unit), part, HUGE_BYTES if part == 0 else 100)
    assert hand.session.submit(grant.token, "huge", [(unit, [None, None], 0.5)], {}).outcome == "accepted"
    assert grown_bytes(job.reducer.advance) < BOUND_BYTES
    assert len(reasons(job)) == 1 and reasons(job)[0].startswith("wrong length: 2000001")
    job.finish(hand)


@pytest.mark.parametrize("micro_batches", [1, 4], ids=["alone", "among others"])
def test_a_part_that_was_put_in_the_place_of_another_is_refused_unread(
    redis: Redis, job_id: str, tmp_path: Path, micro_batches: int
) -> None:
    job, hand = make(redis, job_id, tmp_path, micro_batches)
    job.reducer.handler.expected = []
    grant = hand.pull()
    assert hand.send(grant) == "accepted"
    grow(redis, job.store.keys.update(grant.token, grant.micro_batches[-1]))
    assert grown_bytes(job.reducer.advance) < BOUND_BYTES
    (reason,) = reasons(job)
    assert "200000000 bytes" in reason
    job.finish(hand)


def test_a_part_that_is_read_ahead_is_refused_unread(redis: Redis, job_id: str, tmp_path: Path) -> None:
    job, hand = make(redis, job_id, tmp_path, 4)
    assert job.reducer.handler.expected
    grant = hand.pull()
    grow(redis, job.store.keys.update(grant.token, grant.micro_batches[-1]))
    assert grown_bytes(job.reducer.advance) < BOUND_BYTES  # it looks, and the round is not full
    assert hand.send(grant) == "accepted"
    job.reducer.advance()
    assert reasons(job) == []  # what was submitted took its place
    job.finish(hand)


def test_a_bucket_that_is_longer_than_its_values_is_its_senders_fault(
    redis: Redis, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message as a whole is not longer than an update may be."""
    monkeypatch.setattr(layout, "BUCKET", 5000)
    job, hand = make(redis, job_id, tmp_path, 1)
    job.reducer.handler.expected = []

    def swell(message: list[Any]) -> list[Any]:
        return [bytes(30_000), b"CSF\0....", *message[2:]]

    assert hand.send(hand.pull(), swell) == "accepted"
    job.reducer.advance()
    (reason,) = reasons(job)
    assert reason.startswith("wrong length") or "30000 bytes" in reason
    job.finish(hand)
