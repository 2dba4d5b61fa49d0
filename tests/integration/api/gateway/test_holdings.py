"""What a machine holds in the broker is bounded and expires, and an honest worker waits where there is no room."""

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from api.gateway import app
from api.gateway.commands import holdings as limits
from api.gateway.commands.holdings import Holdings
from api.gateway.commands.policy import OWN, RECORDED_S, own
from api.http.throttle import Throttle
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import MEASURED_S, PROBED_S, STAGED_S, WorkerSession
from computeshare.queue.roster import ALIVE_MS
from computeshare.queue.rq_keys import RqKeys, RqSeatKeys
from computeshare.transport.connections import connect, when_there_is_room
from computeshare.transport.forwarder import Forwarder
from computeshare.transport.refusals import RefusedForNow
from computeshare.transport.wire import Wire
from tests.support.gateway import HEX, Plane, seated
from tests.support.rounds import PLAN, ZERO, opened
from tests.support.wait import wait_until

MB = bytes(1_000_000)


class Member:
    """A machine with a seat in the job, its connection through the gateway, and the broker itself."""

    def __init__(self, plane: Plane, redis: Redis, far: Redis, machine: str, job_id: str) -> None:
        self.plane, self.redis, self.far, self.machine = plane, redis, far, machine
        self.worker, self.keys = seated(redis, machine, job_id)
        self.seat = f"{self.worker}-{job_id}-0-1"

    def staged(self, unit: int, nonce: str = HEX) -> str:
        return self.keys.staged(f"{self.worker}:{nonce}:{unit}")

    def lives(self, key: str, most_s: int) -> Callable[[], bool]:
        return lambda: 0 < self.redis.ttl(key) <= most_s  # type: ignore[operator]


@pytest.fixture
def member(plane: Plane, redis: Redis, tmp_path: Path, job_id: str) -> Iterator[Member]:
    machine, access = plane.joined(tmp_path)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        yield Member(plane, redis, far, machine, job_id)


def test_whatever_a_machine_writes_under_a_name_of_its_own_expires(member: Member) -> None:
    rq, seat, worker = RqKeys(member.worker), RqSeatKeys(f"{member.worker}-nojob-0-7"), member.worker
    probe, measured, execution = member.keys.probe(worker), member.keys.measured(worker), seat.execution(HEX)
    written: dict[str, tuple[list[Any], int]] = {
        member.staged(0): (["HSET", member.staged(0), 0, b"part"], STAGED_S),
        probe: (["SET", probe, b"x", "EX", PROBED_S], PROBED_S),
        measured: (["SET", measured, "{}", "EX", MEASURED_S], MEASURED_S),
        keys.worker(worker): (["HSET", keys.worker(worker), "name", "x"], ALIVE_MS // 1000),
        rq.worker(): (["HSET", rq.worker(), "state", "idle"], RECORDED_S),
        rq.workers(): (["SADD", rq.workers(), rq.worker()], RECORDED_S),
        rq.executions(): (["SADD", rq.executions(), f"{member.seat}:{HEX}"], RECORDED_S),
        seat.job(): (["HSET", seat.job(), "data", b"x"], RECORDED_S),
        seat.results(): (["XADD", seat.results(), "MAXLEN", "~", 10, "*", "type", "1"], RECORDED_S),
        seat.executions(): (["ZADD", seat.executions(), 10**12, HEX], RECORDED_S),
        execution: (["HSET", execution, "state", "x"], RECORDED_S),
        **{key: (["ZADD", key, 10**12, member.seat], RECORDED_S) for key in rq.registries()[1:]},
        rq.registries()[0]: (["ZADD", rq.registries()[0], 10**12, f"{member.seat}:{HEX}"], RECORDED_S),
    }
    assert {kind for key in written if (found := own(key.encode())) for kind in [found[1]]} == {*OWN.values()}
    replies = Wire(member.far).exchange([command for command, _ in written.values()])
    assert None not in replies
    for key, (_, most_s) in written.items():
        wait_until(member.lives(key, most_s))
    assert member.plane.gateway.refusals.counts[member.machine] == 0


def test_a_longer_expiry_and_none_are_taken_back(member: Member) -> None:
    job = RqSeatKeys(member.seat).job()
    for command in (["EXPIRE", job, 10**9], ["PERSIST", job]):
        Wire(member.far).exchange([["HSET", job, "data", b"x"], command])
        wait_until(member.lives(job, RECORDED_S))


def test_the_record_of_a_seat_that_runs_is_renewed(member: Member) -> None:
    job = RqSeatKeys(member.seat).job()
    member.redis.hset(job, "data", "x")
    member.redis.expire(job, RECORDED_S // 3)
    member.far.hset(job, "last_heartbeat", "now")
    wait_until(lambda: member.redis.ttl(job) > RECORDED_S // 2)  # type: ignore[operator]


@pytest.mark.parametrize("how", ["behind a command that blocks", "in a transaction", "and then hangs up"])
@pytest.mark.slow
def test_what_the_broker_does_later_expires_too(member: Member, how: str) -> None:
    rq = RqKeys(member.worker)
    write: list[Any] = ["HSET", member.staged(0), 0, b"part"]
    wire = Wire(member.far)
    if how == "in a transaction":
        wire.exchange([["MULTI"], write])
        time.sleep(2.5)  # the gateway has looked meanwhile
        wire.exchange([["PING"]], pipelined=[["EXEC"]])
        wire.pipelined_replies()
    elif how == "behind a command that blocks":
        wire.exchange([["BLMOVE", rq.queue(), rq.intermediate(), "LEFT", "RIGHT", 2.5], write])
    else:
        wire.exchange([["PING"]], pipelined=[write])
        wire.close()
    wait_until(lambda: member.redis.exists(member.staged(0)) == 1)
    wait_until(member.lives(member.staged(0), STAGED_S))


def test_a_machine_holds_no_more_than_its_share_and_may_go_on_once_it_has_deleted_some(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 5_000_000)
    sent = 0
    with pytest.raises(RefusedForNow, match=r"values of 5.* MB here, the most it may: try again in 5 s") as refused:
        for sent in range(20):
            member.far.hset(member.staged(sent), "0", MB)
    assert refused.value.wait_s == 5 and sent == 5
    assert not member.redis.exists(member.staged(sent))
    with pytest.raises(ResponseError, match="the most it may"):  # over another connection
        Wire(member.far).exchange([["SET", member.keys.probe(member.worker), b"x", "EX", PROBED_S]])
    assert member.far.hset(keys.worker(member.worker), "name", "x") == 1, "records are counted by themselves"
    member.redis.unlink(*(member.staged(unit) for unit in range(4)))  # as `submit` does
    wait_until(lambda: _passes(lambda: member.far.hset(member.staged(sent), "0", MB)))


def test_rewriting_a_key_takes_no_more_room(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 5_000_000)
    monkeypatch.setattr(limits, "MEASURED_EVERY_S", 0.0)
    for _ in range(20):
        member.far.hset(member.staged(0), "0", MB)


def test_a_machine_may_hold_what_its_jobs_rounds_take(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 2_000_000)
    member.redis.hset(member.keys.round(), mapping={"total": 4, "limit": 1_000_000})
    with pytest.raises(RefusedForNow):
        for sent in range(20):
            member.far.hset(member.staged(sent), "0", MB)
    assert sent == 10


def test_records_are_few(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_RECORDS", 10)
    with pytest.raises(RefusedForNow, match="10 values"):
        for number in range(20):
            member.far.hset(RqSeatKeys(f"{member.worker}-nojob-0-{number}").job(), "data", b"x")
    assert number == 10


def test_a_refused_message_fails_its_transaction_and_the_worker_goes_on_once_there_is_room(
    member: Member, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    store = RoundStore(member.redis, member.keys.job_id)
    store.publish("{}")
    opened(member.redis, store, PLAN.round(0))
    session = WorkerSession(member.far, member.keys.job_id, member.worker, HEX)
    assert session.join(member.seat, {}) == "running"
    grant = session.lease(str(ZERO))
    updates = [(unit, [b"update"], 0.5) for unit in grant.micro_batches]
    member.far.hset(member.staged(10**6), "0", MB)
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 100_000)
    monkeypatch.setattr(limits, "AGAIN_S", 0.5)
    with pytest.raises(RefusedForNow):
        session.submit(str(ZERO), HEX, updates, {})
    assert member.redis.hlen(member.keys.received()) == 0
    timer = threading.Timer(2, lambda: member.redis.unlink(member.staged(10**6)))
    timer.start()
    receipt = when_there_is_room(lambda: session.submit(str(ZERO), HEX, updates, {}), threading.Event())
    assert receipt.outcome == "accepted"
    assert "the gateway refused: this machine holds" in "".join(capfd.readouterr())
    timer.join()


def test_an_honest_worker_waits_until_it_may_announce_again(member: Member) -> None:
    member.plane.gateway.rates._seldom["announce"] = Throttle(2, 0.5)
    RoundStore(member.redis, member.keys.job_id).publish("{}")
    rounds, about = RoundStore(member.far, member.keys.job_id), {"worker": member.worker, "session": HEX, "reason": "x"}
    for _ in range(4):
        assert when_there_is_room(lambda: rounds.append("left", about), threading.Event())
    assert member.redis.xlen(member.keys.events()) == 4


def test_refusals_for_now_do_not_cut_the_connection(member: Member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MOST_RECORDS", 0)
    command: list[Any] = ["HSET", keys.worker(member.worker), "name", "x"]
    wire = Wire(member.far)
    _, *errors = wire.exchange([command] * 300, raise_errors=False)
    assert all("try again" in str(error) for error in errors) and wire.exchange([["PING"]]) == [b"PONG"]


def test_a_machine_that_was_banned_is_told_so_by_a_gateway_that_is_new(member: Member) -> None:
    member.redis.hset(member.keys.banned(), f"{member.machine}other", "bad updates")
    [error] = Wire(member.far).exchange([["GET", member.keys.spec()]], raise_errors=False)
    assert "this machine is banned from this job" in str(error)


def test_what_a_machine_holds_is_limited_over_all_gateways_together(
    redis: Redis, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MESSAGE_BYTES", 1000)
    monkeypatch.setattr(limits, "MOST_RECORDS", 2)
    machine, other = secrets.token_hex(4), secrets.token_hex(4)
    here, there = Holdings(lambda: redis), Holdings(lambda: redis)

    def holds(where: Holdings, count: int) -> str:
        key = JobKeys(job_id).staged(f"{machine}work:{secrets.token_hex(16)}:0")
        found = own(key.encode())
        assert found is not None
        where.begin(machine, *found)
        where.add(machine, key, count)
        return key

    key = holds(here, 500)
    holds(there, 400)
    assert here.has_room(machine, True) and there.has_room(machine, True)
    for gateway in (here, there, here):
        gateway.share()
    assert not here.has_room(machine, True) and not there.has_room(machine, True)
    assert here.has_room(machine, False) and here.has_room(other, True)
    here.end(machine, [key])  # the broker never got it
    here.look()
    here.share()
    there.share()
    assert there.has_room(machine, True) and not redis.exists(keys.gateway(here._id))


def test_a_gateway_that_is_gone_is_forgotten_and_nonsense_changes_nothing(redis: Redis, job_id: str) -> None:
    machine, gone = secrets.token_hex(4), secrets.token_hex(8)
    here = Holdings(lambda: redis)
    redis.sadd(keys.GATEWAYS, gone)
    redis.hset(keys.gateway(gone), machine, f"{1 << 40} 1 0 0")
    here.share()
    assert not here.has_room(machine, True)
    redis.hset(keys.gateway(gone), machine, "many")
    here.share()
    assert not here.has_room(machine, True)
    redis.delete(keys.gateway(gone))
    here.share()
    assert here.has_room(machine, True) and not redis.sismember(keys.GATEWAYS, gone)


def test_an_outage_of_the_broker_leaves_nothing_without_expiry(redis: Redis, job_id: str) -> None:
    key, away = JobKeys(job_id).staged(f"12345678work:{HEX}:0"), connect("redis://127.0.0.1:1", retries=0)
    brokers = [away, redis]
    held = Holdings(lambda: brokers[0])
    found = own(key.encode())
    assert found is not None
    held.begin("12345678", *found)
    redis.hset(key, "0", "x")
    assert held.look(), "its reply has not come"
    held.end("12345678", [key])
    assert held.look() and redis.ttl(key) == -1
    del brokers[0]
    assert held.look() and 0 < redis.ttl(key) <= STAGED_S  # type: ignore[operator]
    redis.unlink(key)


def test_a_gateway_tells_what_machines_hold_also_once_they_are_gone(member: Member) -> None:
    redis, held = member.redis, member.plane.gateway._holdings
    told = keys.gateway(held._id)
    member.far.hset(keys.worker(member.worker), "name", "x")
    member.far.close()
    wait_until(lambda: not member.plane.gateway.connections)
    for _ in range(3):
        redis.delete(told)  # as if it had expired
        wait_until(lambda: redis.exists(told) == 1, timeout_s=10)
    held._clock = lambda: time.monotonic() + 10**6
    wait_until(lambda: not redis.exists(told))


def test_a_gateway_learns_what_machines_hold_elsewhere_as_soon_as_one_is_there(
    member: Member, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = secrets.token_hex(8)
    monkeypatch.setattr(app, "CHECK_S", 3600.0)
    member.redis.sadd(keys.GATEWAYS, other)
    member.redis.hset(keys.gateway(other), member.machine, f"{1 << 40} 1 0 0")
    member.far.ping()
    wait_until(lambda: not member.plane.gateway._holdings.has_room(member.machine, True), timeout_s=10)


def _passes(call: Callable[[], object]) -> bool:
    try:
        call()
    except RefusedForNow:
        return False
    return True
