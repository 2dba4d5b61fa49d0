"""Seats that begin units before their version is there: the weights are those of the definition, no unit is lost."""

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from computeshare.jobspec.spec import JobSpec
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
from computeshare.training.server_step import ServerStep
from computeshare.worker.seat.overlap import overlapping_loop
from computeshare.worker.seat.overlap.overlapped_replica import OverlappedReplica
from computeshare.worker.seat.seat import SeatSession
from tests.support.job_reducer import Job
from tests.support.wait import wait_until

STRATEGY = {"kind": "local", "inner_steps": 5, "replicas": 2, "overlap": 2, "inner_state": "kept"}
FIELDS: dict[str, Any] = {"strategy": STRATEGY, "codec": {"up": "float32", "down": "float32"}, "optimizer": None}
FIELDS |= {"epochs": 2, "rounds": None}  # rounds of ten micro-batches; 90 an epoch, which end in a short one


def begin(job: Job, number: int, home: Path) -> threading.Thread:
    """A seat in a thread."""
    seat = Seat(f"worker{number:06d}", job.job_id, number, 1)
    job.redis.hset(job.store.keys.seats(), seat.worker, seat.id)
    session = SeatSession(job.redis, seat, job.spec, Settings(home=home / seat.worker), threading.Event())
    thread = threading.Thread(target=session.run, args=("cpu",))
    thread.start()
    return thread


def complete(job: Job, *seats: threading.Thread) -> list[int]:
    """Have the reducer work until the job ends; the units that versions counted, in order."""
    until = time.monotonic() + 60
    while (state := job.store.read()) and state.status == "running" and time.monotonic() < until:
        job.reducer.advance()
        time.sleep(0.002)
    for seat in seats:
        seat.join(30)
        assert not seat.is_alive()
    assert state and state.status == "finished"
    events: Any = job.redis.xrange(job.store.keys.events())
    versions = [json.loads(fields[b"data"]) for _, fields in events if fields[b"type"] == b"version"]
    return [unit for version in versions for unit, _, _ in version["counted"]]


def by_definition(spec: JobSpec) -> str:
    """The digest of the last version where one worker computes all units in order."""
    torch.set_num_threads(spec.threads)
    instance, initial = (task_of(spec).instance(spec.seed, "train", Path()) for _ in range(2))
    server, layout = ServerStep(spec, instance.layout), instance.layout
    model = server.publish_whole(server.load(weights_of(initial.module, layout), b""))[1]
    recent = deque([model.published], maxlen=2)
    replica = OverlappedReplica(
        replica_of(spec, instance, torch.device("cpu")),
        spec.strategy.early_steps,
        spec.plan,
        layout,
        lambda version, load, goes_on: load(recent[-1]),
    )
    for version in range(spec.rounds_total):
        replica.load(recent[0])
        units = spec.round_from(version).units
        updates = [replica.compute(unit) for unit in units]
        parts = [(update.vector, update.buffers) for update in updates]
        model = server.step(version + 1, model, parts, [spec.plan.unit_size(unit) for unit in units])
        recent.append(model.published)
    return layout.digest(model.published)[:16]


def test_one_seat_trains_as_the_definition_says(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(**FIELDS)
    counted = complete(job, begin(job, 0, tmp_path))
    assert job.digest() == by_definition(job.spec)
    assert counted == [*range(2 * job.spec.plan.units_per_epoch)]


def test_two_seats_train_side_by_side_and_every_unit_counts_once(start: Callable[..., Job], tmp_path: Path) -> None:
    job = start(**FIELDS)
    counted = complete(job, *(begin(job, number, tmp_path) for number in range(2)))
    assert counted == [*range(2 * job.spec.plan.units_per_epoch)]


def test_a_seat_that_waits_for_a_version_gives_its_unit_up_for_one_that_the_version_lacks(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overlapping_loop, "PATIENCE_S", 0.2)
    job, keys = (made := start(**FIELDS)), made.store.keys
    gone = job.hand("gone").session
    grant = gone.lease("")
    assert grant.micro_batches == (0,)
    seat = begin(job, 0, tmp_path)
    wait_until(lambda: job.redis.hlen(keys.received()) == 1 and job.redis.hexists(keys.leases(), "2"), 20)
    job.reducer.advance()
    state = job.store.read()
    assert state and state.version == 0, "the first round lacks unit 0"
    gone.release(grant.micro_batches)
    assert complete(job, seat) == [*range(2 * job.spec.plan.units_per_epoch)]


def test_a_seat_that_joins_in_mid_job_goes_on_from_the_current_version(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    job = start(**FIELDS)
    others = job.hand("other"), job.hand("another")
    for _ in range(3):
        job.round(*others)
    for hand in others:
        hand.session.leave("done")
    job.redis.delete(job.store.keys.versions())  # as after many other notices
    assert complete(job, begin(job, 0, tmp_path)) == [*range(2 * job.spec.plan.units_per_epoch)]
