"""Gossip: peers average in pairs, agree, survive each other's death, and every sample counts."""

import json
from typing import Any

import psutil
import pytest
from redis import Redis

from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "3", "--queue", "e2e")
SPEC: dict[str, Any] = {name: DIGITS_MLP[name] for name in ("dataset", "model", "queue", "micro_batch")}
SPEC |= {"epochs": 12, "workers": {"min": 3, "max": 3}, "evaluate_every": 0, "checkpoint_every": 5}


def strategy(**changes: Any) -> dict[str, Any]:
    return {"strategy": {"kind": "gossip", "every": 2, "buffer": 8, **changes}}


@pytest.mark.parametrize(
    "changes",
    [{}, {"interpolation": "clock"}, {"interpolation": "loss"}, {"matching": "pairs", "outer_momentum": 0.5}],
    ids=str,
)
def test_peers_learn_and_agree(plane: ControlPlane, changes: dict[str, Any]) -> None:
    job = plane.finish(plane.create(**SPEC, **strategy(**changes)))
    assert job["accuracy"] > 0.9
    epochs = plane.get(f"/v1/jobs/{job['id']}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    found = plane.get(f"/v1/jobs/{job['id']}/workers")
    assert len(found["items"]) == 3 and all(worker["accepted"] > 5 for worker in found["items"])
    ids = {worker["id"] for worker in found["items"]}
    met = {(one["worker"], one["peer"]): one["count"] for one in found["exchanges"]}
    assert all({*pair} <= ids and pair[0] != pair[1] for pair in met) and len(met) >= 4
    assert sum(met.values()) > 20


def consensus(plane: ControlPlane, **changes: Any) -> list[float]:
    """How far the peers of a job are apart, by version."""
    job = plane.finish(plane.create(**SPEC, **strategy(**changes)))
    return [point["value"] for point in plane.get(f"/v1/jobs/{job['id']}/metrics")["consensus"]]


def test_peers_that_do_not_exchange_drift_apart(plane: ControlPlane) -> None:
    together, apart = consensus(plane), consensus(plane, fetch_probability=0)
    assert len(together) > 20 and len(apart) > 20
    assert sum(apart[-5:]) > 2 * sum(together[-5:])


def leased(redis: Redis, job_id: str, worker: str) -> list[int]:
    """The units on which a worker has a lease."""
    leases: Any = redis.hgetall(JobKeys(job_id).leases())
    return [int(unit) for unit, lease in leases.items() if lease.decode().rpartition("|")[2] == worker]


def stop_with_a_lease(
    plane: ControlPlane, redis: Redis, job_id: str, family: list[psutil.Process], worker: str
) -> list[int]:
    """Stop a worker's processes while it has a lease; returns the units, none of which it has submitted."""

    def stop() -> list[int]:
        for one in family:
            one.suspend()
        plane.until("they have stopped", lambda: all(one.status() == psutil.STATUS_STOPPED for one in family))
        for _ in range(3):  # what was sent before, the broker has received by then
            units = leased(redis, job_id, worker)
        for one in family if not units else ():
            one.resume()
        return units

    found: list[int] = plane.until("a lease", stop)
    return found


def test_a_peer_that_dies_costs_its_unpublished_steps_alone_and_another_takes_its_place(plane: ControlPlane) -> None:
    job_id = plane.create(**SPEC | {"epochs": 120}, **strategy(), codec={"up": "int8", "down": "float32"})
    plane.until("three workers", lambda: plane.job(job_id)["workers"] == 3)
    plane.reach(job_id, plane.job(job_id)["version"] + 10)
    pid, redis = plane.pids("worker")[0], plane.broker()
    (victim,) = [one["id"] for one in plane.get("/v1/workers")["items"] if one["pid"] == pid]
    family = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    assert len(family) > 1, "its seat is a process of its own"
    units = stop_with_a_lease(plane, redis, job_id, family, victim)
    received: Any = redis.hgetall(JobKeys(job_id).received())
    published = {int(unit) for unit, entry in received.items() if json.loads(entry)["worker"] == victim}
    version = plane.job(job_id)["version"]
    before = {one["id"] for one in plane.get(f"/v1/jobs/{job_id}/workers")["items"]}
    for one in family:
        one.kill()

    def newcomers() -> list[dict[str, Any]]:
        told = plane.get(f"/v1/jobs/{job_id}/workers")["items"]
        return [one for one in told if one["id"] not in before and one["accepted"]]

    plane.until("another that counts", newcomers)
    job = plane.finish(job_id)
    assert job["accuracy"] > 0.9

    epochs, plan = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"], JobSpec.model_validate(job["spec"]).plan
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    assert 1 <= len(units) <= 2 and job["reassigned"] >= 1, "it may also hold the unit that it is sending"
    for epoch in {plan.epoch_of(unit) for unit in units}:
        samples = sum(plan.unit_size(unit) for unit in units if plan.epoch_of(unit) == epoch)
        assert epochs[epoch]["reassigned"] >= samples, "the ledger tells what was computed again"
    counted = [(one["version"], unit, worker) for one in versions(plane, job_id) for unit, worker, _ in one["counted"]]
    assert len(counted) == len({unit for _, unit, _ in counted})
    for lost in units:
        assert [worker for _, unit, worker in counted if unit == lost] != [victim], "another has computed it"
    of_victim = {unit for number, unit, worker in counted if worker == victim and number <= version}
    assert of_victim and published <= {unit for _, unit, worker in counted if worker == victim}, "published steps stay"


def versions(plane: ControlPlane, job_id: str) -> list[dict[str, Any]]:
    """All of a job's versions."""
    found: list[dict[str, Any]] = []
    since: int | None = 0
    while since is not None:
        page = plane.get(f"/v1/jobs/{job_id}/versions", since=since)
        found, since = found + page["items"], page["next_since"]
    return found
