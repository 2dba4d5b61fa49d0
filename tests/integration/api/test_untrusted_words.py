"""What a machine says of itself, its clock and its work, and what does not follow from it."""

import json
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from tests.support.job_reducer import Job, spec_of

DAY_S = 86_400


@pytest.fixture
def start(redis: Redis, tmp_path: Path) -> Callable[..., Job]:
    def start(**changes: Any) -> Job:
        job_id = secrets.token_hex(4)
        return Job(redis, job_id, spec_of(**changes), tmp_path / job_id)

    return start


@pytest.mark.parametrize("off_s", [-DAY_S, DAY_S], ids=["a day behind", "a day ahead"])
def test_clocks_that_are_off_change_nothing_about_a_round(
    off_s: int, start: Callable[..., Job], redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    hands = [job.hand(name) for name in "ab"]
    job.round(*hands)
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + off_s)
    grant = hands[0].pull()
    leases: Any = redis.hgetall(job.store.keys.leases())
    left_ms = [int(lease.split(b"|")[1]) - 1000 * clock() for lease in leases.values()]
    assert all(0 < ms < 60_000 for ms in left_ms)  # by the broker's clock
    assert hands[0].send(grant) == "accepted"
    rest = hands[1].pull()
    if rest.micro_batches:  # else the other one has had all of the round
        assert hands[1].send(rest) == "accepted"
    job.reducer.advance()
    assert job.finish(*hands) == expected


def test_what_a_worker_says_of_its_samples_weighs_nothing(start: Callable[..., Job], redis: Redis) -> None:
    calm, job = start(), start()
    expected = calm.finish(calm.hand("solo"))
    liar = job.hand("liar")
    submit = liar.session.submit

    def lie(token: str, nonce: str, updates: Any, report: dict[str, Any]) -> Any:
        return submit(token, nonce, updates, {**report, "samples": 10**9, "counted": [1, 2, 3], "outcome": "best"})

    liar.session.submit = lie  # type: ignore[method-assign]
    assert job.finish(liar) == expected
    events: Any = redis.xrange(job.store.keys.events())
    counted = [json.loads(f[b"data"])["counted"] for _, f in events if f[b"type"] == b"version"]
    plan = job.spec.plan
    assert [entry for version in counted for entry in version] == [[m, "liar", plan.size(m)] for m in range(24)]
