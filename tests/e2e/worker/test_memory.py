"""Processes of a long job keep the memory that they began with: the short form of `python -m bench.memory --units`."""

import contextlib

import psutil
import pytest

from bench.memory import Growth
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "1", "--queue", "e2e")
ROUNDS = 750
MOST_GROWTH = 0.05


def pids(plane: ControlPlane) -> dict[str, list[int]]:
    found = {"reducer": plane.pids("reducer"), "worker": plane.pids("worker"), "seat": []}
    for worker in found["worker"]:
        with contextlib.suppress(psutil.Error):
            found["seat"] += [child.pid for child in psutil.Process(worker).children()]
    return found


def test_3000_units_grow_what_worker_seat_and_reducer_have_resident_by_less_than_5_percent(
    plane: ControlPlane,
) -> None:
    job_id = plane.create(**DIGITS_MLP, seed=7, rounds=ROUNDS, checkpoint_every=0, evaluate_every=0)
    growth = Growth()

    def looked_at() -> bool:
        job = plane.job(job_id)
        growth.look(pids(plane), 4 * job["version"])
        assert job["status"] in ("queued", "running", "completed"), job
        return bool(job["status"] == "completed")

    plane.until("the job's end", looked_at, patience_s=300)
    found = {(role, pid): sizes for role, pid in growth.seen if (sizes := growth.of(role, pid))}
    assert {role for role, _ in found} == {"reducer", "worker", "seat"}
    grown = {key: end / settled - 1 for key, (settled, end) in found.items()}
    assert max(grown.values()) < MOST_GROWTH, grown
