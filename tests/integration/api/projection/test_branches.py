"""A job that is opened again leaves a branch behind: what comes of that late is never taken for the job's own."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select, update

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.disk_reconcile import reconcile
from api.projection.projector import Projector
from api.tables import LedgerEntry, VersionRow, table
from computeshare.checkpoints import store
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import LostClaim
from computeshare.types import Token
from tests.support.job_reducer import Job, spec_of

SPEC = spec_of(rounds=9)
"""Checkpoints of versions 3, 6 and 9, of 64 samples each."""


class Stored:
    """A job with its reducer on a real broker, its checkpoints, and the control plane that stores it."""

    def __init__(self, redis: Redis, database: Database, jobs: Jobs, root: Path) -> None:
        self.redis, self.database, self.root = redis, database, root
        self.id = jobs.create(SPEC).id
        self.job = Job(redis, self.id, SPEC, root)
        self.projector = Projector(database, root)
        self.artifacts = Artifacts(root, self.id)

    def rounds(self, count: int, worker: str = "first") -> None:
        hand = self.job.hand(worker)
        for _ in range(count):
            self.job.round(hand)
        self.projector.step(self.redis)

    def lose(self) -> Token:
        """Empty the broker; another reducer opens the job. Returns the version it goes on from."""
        self.projector.step(self.redis)
        self.job.store.purge()
        self.job.store.publish(SPEC.model_dump_json())
        self.job.reducer = self.job.new_reducer()
        assert self.job.reducer.advance()
        self.projector.step(self.redis)
        state = self.job.store.read()
        assert state is not None
        return state.token

    def write_later(self, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
        """Have the active reducer's checkpoints wait: returns what writes them."""
        writes: list[Callable[[], None]] = []
        monkeypatch.setattr(self.job.reducer.checkpoints._disk, "submit", writes.append)
        return writes


@pytest.fixture
def stored(redis: Redis, database: Database, jobs: Jobs, tmp_path: Path) -> Stored:
    return Stored(redis, database, jobs, tmp_path / "artifacts")


def once(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, meanwhile: Callable[[], Any]) -> None:
    """Have something happen right before the next call of a function."""
    function = getattr(owner, name)

    def call(*arguments: Any) -> Any:
        monkeypatch.setattr(owner, name, function)
        meanwhile()
        return function(*arguments)

    monkeypatch.setattr(owner, name, call)


def test_a_checkpoint_whose_branch_was_given_up_while_the_disk_took_it_is_none(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.rounds(4)
    writes = stored.write_later(monkeypatch)
    stored.rounds(2)
    once(monkeypatch, store, "flush", stored.lose)
    with pytest.raises(LostClaim, match="incarnation 2 was opened"):
        writes[0]()
    assert 6 not in [token.version for token in stored.artifacts.on_disk()]


def test_a_checkpoint_that_comes_right_after_its_branch_was_given_up_is_never_restored(
    stored: Stored, history: History, jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ledger lacked the samples of versions 4 to 6, which the weights held, for their rows had been voided."""
    stored.rounds(4)
    writes = stored.write_later(monkeypatch)
    stored.rounds(2)
    once(monkeypatch, os, "rename", stored.lose)
    with pytest.raises(LostClaim, match="another reducer has taken over"):
        writes[0]()
    late = next(token for token in stored.artifacts.on_disk() if token.version == 6)
    assert (late.incarnation, stored.artifacts.tokens()[-1].version) == (1, 3)
    reconcile(stored.database, stored.root, stored.id)
    assert jobs.show(stored.id).durable_version == 3
    assert history.checkpoint(stored.id, "latest")[1].version == 3
    stored.rounds(1, "second")
    assert str(stored.lose())[:4] == "3.3."
    stored.job.finish(stored.job.hand("third"))
    stored.projector.step(stored.redis)
    epoch = history.ledger(stored.id).epochs[0]
    assert (jobs.show(stored.id).version, epoch.samples, epoch.counted, epoch.missing) == (9, 576, 576, 0)


def test_a_broker_that_comes_back_with_a_branch_that_was_given_up_is_led_on_from_the_last_checkpoint(
    stored: Stored,
) -> None:
    stored.rounds(5)
    keys = list(stored.redis.scan_iter(stored.job.store.keys.pattern()))
    held = [(key, stored.redis.dump(key)) for key in keys]
    assert str(stored.lose())[:4] == "2.3."
    stored.job.store.purge()
    for key, value in held:
        stored.redis.restore(key, 0, value)
    stored.job.reducer = stored.job.new_reducer()
    assert stored.job.reducer.advance()
    state = stored.job.store.read()
    assert state is not None and (state.token.incarnation, state.version) == (3, 3)


def test_a_reducer_that_comes_late_to_open_a_job_ends_no_incarnation(stored: Stored) -> None:
    late = stored.job.reducer
    late.handler = None
    stored.job.store.purge()
    stored.job.store.publish(SPEC.model_dump_json())
    stored.redis.set(stored.job.store.keys.fence(), late.session.fence)  # as `reset` leaves it
    stored.job.reducer = stored.job.new_reducer()
    with pytest.raises(LostClaim):
        late.advance()
    assert stored.artifacts.incarnation() == 1
    assert stored.job.reducer.advance()
    state = stored.job.store.read()
    assert state is not None and state.token.incarnation == 2


def test_a_reducer_that_was_stopped_while_it_opened_a_job_ends_no_incarnation(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored.job.store.purge()
    stored.job.store.publish(SPEC.model_dump_json())
    stored.job.reducer = late = stored.job.new_reducer()
    unstopped = Artifacts.next_incarnation

    def stopped(artifacts: Artifacts, origin: Token | None) -> int:
        monkeypatch.setattr(Artifacts, "next_incarnation", unstopped)
        stored.job.reducer = stored.job.new_reducer()  # another one opens the job meanwhile
        assert stored.job.reducer.advance()
        return unstopped(artifacts, origin)

    monkeypatch.setattr(Artifacts, "next_incarnation", stopped)
    with pytest.raises(LostClaim):
        late.advance()
    state = stored.job.store.read()
    assert state is not None and state.token.incarnation == stored.artifacts.incarnation() == 2


def test_rows_that_were_voided_and_belong_to_the_branch_restored_stand_again(
    stored: Stored, history: History, database: Database
) -> None:
    stored.rounds(4)
    for rows in (table(VersionRow), table(LedgerEntry)):
        with database.writing() as connection:  # as if another branch had been restored once
            connection.execute(update(rows).where(rows.c.job_id == stored.id, rows.c.version > 1).values(voided=True))
    assert str(stored.lose())[:4] == "2.3."
    with database.engine.connect() as connection:
        rows = table(VersionRow)
        standing = connection.execute(select(rows.c.version).where(~rows.c.voided).order_by(rows.c.version))
        assert list(standing.scalars()) == [1, 2, 3]
    epoch = history.ledger(stored.id).epochs[0]
    assert (epoch.samples, epoch.counted, epoch.missing) == (192, 192, 0)
