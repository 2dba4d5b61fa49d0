"""Checkpoints written beside the rounds."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.spec import JobSpec, KeepPolicy
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.reducer.checkpointer import Checkpointer, Snapshot
from computeshare.tensors.layout import Layout, Weights
from tests.support.rounds import PLAN, ZERO

LAYOUT = Layout.build(iter([("w", (2, 3), "parameter")]))
NONE = np.empty(0, np.float32)


@pytest.fixture
def checkpoints(store: RoundStore, tmp_path: Path) -> Iterator[Checkpointer]:
    reducer = ReducerSession(store.redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    event = {"version": 0, "incarnation": ZERO.incarnation}
    assert reducer.open(ZERO, [b"weights 0"], [b"state 0"], PLAN.round(0), event)
    checkpoints = Checkpointer(reducer, Artifacts(tmp_path, reducer.job_id))
    yield checkpoints
    checkpoints.close()


def snapshot(values: Any, state: Any, sha256: str = "") -> Snapshot:
    weights = Weights(values, NONE, NONE.astype(np.int64))
    return Snapshot(ZERO, weights, sha256, [state.data.cast("B")], PLAN.round(0))


def all_of(checkpoints: Checkpointer) -> Retention:
    return Retention(checkpoints.artifacts, JobSpec(dataset="digits", model="mlp", keep=KeepPolicy(every=1)))


def test_what_comes_of_weights_and_state_later_is_not_in_the_checkpoint(checkpoints: Checkpointer) -> None:
    values, state = np.arange(6, dtype=np.float32), np.arange(1000, dtype=np.float32)
    checkpoints.begin(LAYOUT, snapshot(values, state), all_of(checkpoints))
    values += 1
    state += 1
    checkpoints.wait()
    assert checkpoints.artifacts.tensors(ZERO)["w"].ravel().tolist() == [0, 1, 2, 3, 4, 5]
    assert np.array_equal(np.frombuffer(checkpoints.artifacts.state(ZERO), np.float32), np.arange(1000))
    expected = LAYOUT.digest(Weights(values - 1, NONE, NONE.astype(np.int64)))
    assert checkpoints.artifacts.manifest(ZERO).sha256 == expected


def test_a_digest_that_is_known_is_taken(checkpoints: Checkpointer) -> None:
    checkpoints.begin(LAYOUT, snapshot(np.zeros(6, np.float32), NONE, "ab" * 32), all_of(checkpoints))
    checkpoints.wait()
    assert checkpoints.artifacts.manifest(ZERO).sha256 == "ab" * 32


@pytest.mark.parametrize("fails", ["_write", "flush"])
def test_what_the_disk_refuses_is_written_once_it_lets_it(
    checkpoints: Checkpointer, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no room")

    values, state = np.arange(6, dtype=np.float32), np.ones(10, np.float32)
    with monkeypatch.context() as patch:
        patch.setattr(f"computeshare.checkpoints.store.{fails}", refuse)
        with pytest.raises(OSError, match="no room"):
            checkpoints.begin(LAYOUT, snapshot(values, state), all_of(checkpoints))
            checkpoints.wait()
        assert checkpoints.is_stuck and checkpoints.artifacts.tokens() == []
        with pytest.raises(OSError, match="no room"):
            checkpoints.retry()
    checkpoints.retry()
    assert not checkpoints.is_stuck
    assert checkpoints.artifacts.tokens() == [ZERO]
    assert checkpoints.artifacts.state(ZERO) == state.tobytes()
