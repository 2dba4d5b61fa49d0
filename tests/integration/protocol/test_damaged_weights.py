"""Weights that were altered in the broker, in valid frames: nothing computed on them counts, the job mends itself."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from redis import Redis

from computeshare.codecs.messages import fitted
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat
from computeshare.reducer.process import Reducer
from computeshare.settings import Settings
from computeshare.tasks.registry import task_of
from computeshare.types import Blob
from computeshare.worker.seat.seat import SeatSession
from tests.support.job_reducer import spec_of
from tests.support.reducer_process import running, version_of
from tests.support.rounds import events
from tests.support.wait import wait_until

DAMAGED = 3
"""The version that is altered."""


def train(redis: Redis, job_id: str, spec: JobSpec, root: Path, seats: int = 1) -> tuple[str, RoundStore]:
    """The whole job, by a reducer and so many seats; the digest of its last version."""
    store, stop = RoundStore(redis, job_id), threading.Event()
    store.publish(spec.model_dump_json())
    sessions = []
    for number in range(seats):
        seat = Seat(f"worker{number:06d}", job_id, number, 1)
        redis.hset(store.keys.seats(), seat.worker, seat.id)
        sessions.append(SeatSession(redis, seat, spec, Settings(home=root), stop))
    threads = [threading.Thread(target=session.run, args=("cpu",), daemon=True) for session in sessions]
    with running(Reducer(redis, root / "artifacts", root / "bundles", stop)):
        wait_until(
            lambda: store.read() is not None
        )  # a seat in the same process draws from the generator of the first weights
        for thread in threads:
            thread.start()
        wait_until(lambda: version_of(store) == spec.rounds_total)
    for thread in threads:
        thread.join(20)
    state = store.read()
    assert state is not None
    store.end("completed")
    return state.token.digest16, store


def alter_once(monkeypatch: pytest.MonkeyPatch, job_id: str, spec: JobSpec) -> None:
    """Have every value of a version's parameters reach the broker multiplied by 1.01."""
    commit, layout = ReducerSession.commit, task_of(spec).layout()
    codecs = fitted(CODECS[spec.codecs.down], layout)

    def altered(message: Sequence[Blob]) -> list[Blob]:
        parts = zip(codecs, message, layout.bucket_sizes, strict=False)
        wrong = [codec.encode(np.float32(1.01) * codec.decode(part, size)) for codec, part, size in parts]
        return [*wrong, *message[len(wrong) :]]

    def committed(self: ReducerSession, base: Any, parts: Any, token: Any, weights: Sequence[Blob], *rest: Any) -> bool:
        wrong = self.job_id == job_id and token.version == DAMAGED
        return commit(self, base, parts, token, altered([*weights]) if wrong else weights, *rest)

    monkeypatch.setattr(ReducerSession, "commit", committed)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("down", ["float32", "float16", "int8", "int4", "lowrank4"])
@pytest.mark.slow
def test_altered_weights_count_for_nothing_and_are_published_again(
    redis: Redis, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, down: str
) -> None:
    redis.delete("cs:jobs")
    spec = spec_of(rounds=8, checkpoint_every=0, codec={"up": "float32", "down": down})
    expected, _ = train(redis, f"{job_id}calm", spec, tmp_path / "calm")
    alter_once(monkeypatch, f"{job_id}hurt", spec)
    found, store = train(redis, f"{job_id}hurt", spec, tmp_path / "hurt", seats=2)
    assert found == expected
    told = events(store, "doubted")
    assert len(told) >= 2 and {event["version"] for event in told} == {DAMAGED}
    again = [event["version"] for event in events(store, "republished")]
    assert again in ([DAMAGED], [DAMAGED] * 2)  # twice where the other worker had read before and told after
