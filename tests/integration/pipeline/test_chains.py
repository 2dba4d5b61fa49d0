"""Chains of workers on a real broker: the same weights, bit for bit, whoever holds the stages."""

import json
import math
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from redis import Redis
from redis.exceptions import ResponseError
from structlog.testing import capture_logs
from torch import nn

from bench.split_model import Cut, SplitModel, task_with
from computeshare.codecs.registry import CODECS
from computeshare.errors import CodecError, Interrupted
from computeshare.pipeline.chains import membership
from computeshare.pipeline.chains.mail import LIFE_S, ChainMail, Letter, LetterInbox, LetterOutbox
from computeshare.pipeline.chains.membership import Membership
from computeshare.pipeline.chains.placement import Held, Placement, successor
from computeshare.pipeline.chains.stage_needs import works_of
from computeshare.pipeline.chains.stage_weights import StageParts, StageVersions
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.worker_session import WorkerSession
from computeshare.settings import Settings
from computeshare.transport.wire import Wires
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.seat_loop import SeatStatus
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.stages.chain_replica import TURN_BITS, LeaderOrder
from computeshare.worker.stages.stage_loop import StageLoop, StageSeat, join_members
from computeshare.worker.stages.stage_setup import ModelSetup, StageSetup, await_stages, open_stages
from tests.support.chain_runs import FIELDS, PIPELINE, ROUNDS, Run, digests, losses
from tests.support.job_reducer import Job
from tests.support.rounds import events, take_seat, unseen
from tests.support.stage_seats import Seat
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow


def setup_of(job: Job) -> ModelSetup:
    plan = await_stages(job.store, threading.Event())
    assert plan is not None
    return open_stages(job.spec, "cpu", Settings(), plan)


@pytest.fixture(scope="module")
def known() -> dict[str, list[str]]:
    return {}


@pytest.fixture
def alone(run: Run, known: dict[str, list[str]]) -> Callable[..., list[str]]:
    """The digests of the versions that one worker makes with these activations, found out once."""

    def alone(activations: str = "float32") -> list[str]:
        if activations not in known:
            known[activations] = digests(run(1, strategy=PIPELINE | {"activations": activations}))
        return known[activations]

    return alone


def test_chains_make_the_versions_of_one_worker(run: Run, alone: Callable[..., list[str]]) -> None:
    assert len(alone()) == ROUNDS
    for workers in (2, 4):
        assert digests(run(workers)) == alone(), f"{workers} workers"


def test_the_weights_are_those_of_sync_within_rounding(run: Run, start: Callable[..., Job]) -> None:
    piped = run(2)
    synced = start(**FIELDS, strategy={"kind": "sync"})
    hand = synced.hand("worker")
    while (state := synced.store.read()) and state.version < ROUNDS:
        synced.round(hand)
    assert losses(piped) == pytest.approx(losses(synced), rel=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"schedule": "gpipe"}, {"recompute": True}, {"schedule": "gpipe", "recompute": True}],
    ids=str,
)
def test_schedules_differ_in_time_and_memory_alone(
    run: Run, alone: Callable[..., list[str]], changes: dict[str, Any]
) -> None:
    assert digests(run(2, strategy=PIPELINE | changes)) == alone()


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_rounded_activations_are_rounded_within_a_worker_too(
    run: Run, alone: Callable[..., list[str]], codec: str
) -> None:
    assert digests(run(2, strategy=PIPELINE | {"activations": codec})) == alone(codec)


def test_a_stage_whose_worker_dies_goes_to_another_and_no_bit_changes(
    run: Run, alone: Callable[..., list[str]]
) -> None:
    def kill(version: int, seats: list[Seat], add: Callable[[], None]) -> None:
        if version in (1, 3):
            add()
            seats[version // 2].die()

    job = run(2, kill)
    assert digests(job) == alone()
    counted = [unit for event in events(job.store, "version") for unit in event["counted"]]
    assert [unit[0] if isinstance(unit, list) else unit for unit in counted] == [*range(2 * ROUNDS)]


def test_the_last_worker_takes_over_all_stages(run: Run, alone: Callable[..., list[str]]) -> None:
    def kill(version: int, seats: list[Seat], add: Callable[[], None]) -> None:
        if version == 2:
            seats[0].die()

    assert digests(run(2, kill)) == alone()


def test_workers_that_are_taken_for_dead_but_are_not_change_no_bit(run: Run, alone: Callable[..., list[str]]) -> None:
    def suspect(version: int, seats: list[Seat], add: Callable[[], None]) -> None:
        if 0 < version < ROUNDS:
            seats[version % 2].suspect()

    job = run(2, suspect)
    assert digests(job) == alone()
    counted = [unit for event in events(job.store, "version") for unit in event["counted"]]
    assert [unit[0] if isinstance(unit, list) else unit for unit in counted] == [*range(2 * ROUNDS)]


def test_the_end_of_a_process_is_noticed_by_its_connection(start: Callable[..., Job], redis_url: str) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    (one,) = members_of(job, setup_of(job), "one")

    def holds_all() -> bool:
        unseen(job.store, "two", 1000)  # so that it does not end by its silence
        return holders(one) == [["one"]]

    with one:
        dying = Seat(redis_url, job.job_id, "two")
        wait_until(lambda: holders(one) == [["one", "two"]])
        dying.die()
        wait_until(holds_all)


def test_a_new_placement_ends_the_wait_for_a_message(start: Callable[..., Job], redis: Redis) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    setup = setup_of(job)
    (one,) = members_of(job, setup, "one")
    one.look()
    _, recall = one.current
    key = job.store.keys.mail(one.own.session)
    redis.unlink(key)
    inbox = LetterInbox(redis, key)
    (two,) = members_of(job, setup, "two")
    two.look()
    one.look()
    assert recall.is_set() and redis.xlen(key) == 1 and redis.ttl(key) > 0
    assert inbox.order(lambda: inbox._last == "0-0") is None, "it is no message"


def test_submissions_tell_who_computed_what(run: Run) -> None:
    job = run(2)
    told = [event["stages"] for event in events(job.store, "submission") if event["outcome"] == "accepted"]
    assert all([(one["first"], one["stop"]) for one in shares] == [(0, 1), (1, 2)] for shares in told)
    assert all(one["busy_s"] > 0 for shares in told for one in shares)
    (split,) = events(job.store, "split")
    assert sum(one["parameters"] for one in split["stages"]) == setup_of(job).layout.parameters


def test_a_stage_reads_its_own_part_of_a_version_and_notices_damage(start: Callable[..., Job]) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    setup, session = setup_of(job), WorkerSession(job.redis, job.job_id, "reader", uuid.uuid4().hex)
    state = job.store.read()
    assert state is not None
    token, whole = str(state.token), {}
    for stage in range(2):
        parts = StageParts(setup.layout, setup.stages, range(stage, stage + 1))
        versions = StageVersions(job.redis, session, CODECS["float32"], parts, Wires.to(job.redis))
        weights = versions.read(token)
        assert weights is not None
        found = parts.views(weights)
        assert {*found} == {*setup.stages.stages[stage].names, *setup.stages.stages[stage].borrowed}
        whole |= found
        key = job.store.keys.weights(token)
        theirs = next(bucket for bucket in range(len(setup.layout.buckets)) if bucket not in parts.read)
        before = job.redis.hget(key, str(theirs))
        job.redis.hset(key, str(theirs), b"another stage's part")
        versions.forget()
        weights_again = versions.read(token)
        assert weights_again is not None, "it does not read what it does not use"
        job.redis.hset(key, str(theirs), before or b"")
        mine = parts.read[0]
        right = job.redis.hget(key, str(mine))
        other = CODECS["float32"].encode(np.ones(setup.layout.bucket_sizes[mine], np.float32))
        job.redis.hset(key, str(mine), other)
        assert versions.read(token) is weights_again, "what was read last is not read again"
        versions.forget()
        with pytest.raises(CodecError, match="digest mismatch"):
            versions.read(token)
        job.redis.hset(key, str(mine), right or b"")
    assert {*whole} == {one.name for one in setup.layout.tensors}


def mailbox(redis: Redis, job_id: str, *letters: Letter) -> LetterInbox:
    """A session's messages, after these were sent."""
    keys = JobKeys(job_id)
    outbox = LetterOutbox(redis, keys.mail)
    for letter in letters:
        outbox.send("s", letter)
    outbox.settle()
    return LetterInbox(redis, keys.mail("s"))


def test_a_message_that_comes_twice_counts_once_and_an_earlier_turns_not_at_all(redis: Redis, job_id: str) -> None:
    new = Letter("new", 2, 1, "f0.0", b"1")
    inbox = mailbox(redis, job_id, Letter("old", 1, 1, "f0.0", b"0"), new, new, Letter("new", 2, 1, "f0.1", b"2"))
    inbox.begin(2)
    assert [bytes(inbox.receive("new", 1, f"f0.{piece}", lambda: True)) for piece in (0, 1)] == [b"1", b"2"]
    waits = iter([True, True, False])
    with pytest.raises(Interrupted):
        inbox.receive("old", 1, "f0.0", lambda: next(waits))
    assert 0 < redis.ttl(JobKeys(job_id).mail("s")) <= 120
    inbox.close()
    assert not redis.exists(JobKeys(job_id).mail("s"))


def test_a_message_that_was_sent_again_after_an_outage_counts_once_though_it_was_taken(
    redis: Redis, job_id: str
) -> None:
    first, key = Letter("now", 1, 1, "f0.0", b"1"), JobKeys(job_id).mail("s")
    inbox = mailbox(redis, job_id, first)
    found: Any = redis.xrange(key)
    assert inbox.next(lambda: True) == first
    redis.xadd(key, found[0][1])
    second = replace(first, tag="f0.1")
    mailbox(redis, job_id, second)
    assert inbox.next(lambda: True) == second


def test_values_may_come_before_the_order_that_they_belong_to(redis: Redis, job_id: str) -> None:
    early = Letter("second", 2, 2, "f1.0", b"value")
    inbox = mailbox(redis, job_id, Letter("first", 1, 2, "order", b""), early, Letter("second", 2, 2, "order", b"do"))
    first = inbox.order(lambda: True)
    assert first and first.attempt == "first"
    with pytest.raises(Interrupted):
        inbox.receive("first", 2, "f1.0", lambda: True)
    second = inbox.order(lambda: True)
    assert second and (second.attempt, second.body) == ("second", b"do")
    assert inbox.receive("second", 2, "f1.0", lambda: True) == b"value"


def test_a_worker_without_its_stages_weights_has_the_unit_called_off(redis: Redis, job_id: str) -> None:
    inbox = mailbox(redis, job_id, Letter("now", 1, 0, "failed", b""))
    with pytest.raises(Interrupted, match="another worker"):
        inbox.receive("now", 1, "f0.0", lambda: True)


def test_a_message_that_cannot_be_sent_ends_the_wait_for_its_answer(redis: Redis, job_id: str) -> None:
    keys, chain = JobKeys(job_id), (Held("here", "s", 0, 1), Held("there", "t", 1, 2))
    outbox = LetterOutbox(redis, keys.mail)
    mail = ChainMail("now", 1, chain, chain[0], LetterInbox(redis, keys.mail("s")), outbox, lambda: True)
    redis.set(keys.mail("t"), "no stream")
    mail.send(1, "f0.0", b"value")
    with pytest.raises(ResponseError):
        mail.receive(0, "b1.0")


ABOUT = {"attempt": '"now"', "turn": "1", "stage": "1", "tag": '"f0.0"', "sender": '"s"', "number": "1"}
"""Of a message that is sound."""


def told(**changes: str) -> str:
    """It with changes, as JSON."""
    return "{" + ",".join(f'"{name}":{value}' for name, value in (ABOUT | changes).items()) + "}"


GARBAGE = [
    *(told(turn=turn) for turn in ("1e999", "NaN", "null", '"x"', "9" * 5000)),
    *(told(stage=stage) for stage in ("-1e999", "[]", '"x"')),
    *(told(number=number) for number in ("1e999", "null")),
    told(attempt='["now"]'),
    told(tag="{}"),
    "{}",
    "[]",
    "no JSON",
    "[" * 60_000,
    b"\xff\xfe",
]


@pytest.mark.parametrize("about", GARBAGE, ids=lambda about: str(about)[:60])
def test_a_message_that_is_none_is_dropped_and_the_next_one_read(redis: Redis, job_id: str, about: str | bytes) -> None:
    key = JobKeys(job_id).mail("s")
    redis.xadd(key, {"about": about, "body": b"garbage"})
    redis.xadd(key, {"about": told(sender='"another"')})
    inbox = mailbox(redis, job_id, Letter("now", 1, 1, "f0.0", b"value"))
    with capture_logs() as logs:
        assert bytes(inbox.receive("now", 1, "f0.0", lambda: True)) == b"value"
    assert [line["log_level"] for line in logs] == ["warning", "warning"]


def test_messages_stay_as_long_as_their_reader_is_there(start: Callable[..., Job], redis: Redis) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    setup, session = setup_of(job), WorkerSession(redis, job.job_id, "busy", uuid.uuid4().hex)
    take_seat(session)
    members = join_members(redis, session, setup, SeatMemory(setup.spec, setup.memory, 0), threading.Event())
    key = job.store.keys.mail(session.session_id)
    LetterOutbox(redis, job.store.keys.mail).tell(session.session_id, Letter("now", 1, 0, "f1.0", b""))
    redis.expire(key, 5)
    members.look()
    assert LIFE_S - 5 < redis.ttl(key) <= LIFE_S


def test_all_workers_are_measured_one_of_them_without_a_stage(
    start: Callable[..., Job], redis: Redis, redis_url: str
) -> None:
    job = start(**FIELDS | {"rounds": 10_000, "micro_batches_per_round": 1}, strategy=PIPELINE)
    seats = [Seat(redis_url, job.job_id, f"worker{number}") for number in range(3)]
    rates: list[float] = []
    deadline = time.monotonic() + 120
    while not (len(rates) == 3 and all(rates)) and time.monotonic() < deadline:
        job.reducer.advance()  # a worker that has a stage is measured by what it computes in rounds
        entries: Any = redis.hvals(job.store.keys.members())
        rates = [json.loads(entry.split(b"|", 2)[2])["rate"] for entry in entries]
        time.sleep(0.01)
    for seat in seats:
        seat.leave()
    assert len(rates) == 3 and all(rates)


def members_of(job: Job, setup: StageSetup, *names: str) -> list[Membership]:
    """Memberships of new sessions, whose threads do not run."""
    found = []
    for name in names:
        session = WorkerSession(job.redis, job.job_id, name, uuid.uuid4().hex)
        take_seat(session)
        memory = SeatMemory(setup.spec, setup.memory, 0)
        found.append(join_members(job.redis, session, setup, memory, threading.Event()))
    return found


def holders(one: Membership) -> list[list[str]]:
    return [sorted(held.worker for held in chain) for chain in one.current[0].chains]


def test_a_standby_worker_has_the_placement_weighed_once(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(**FIELDS | {"micro_batches_per_round": 1}, strategy=PIPELINE)
    found = members_of(job, setup_of(job), "one", "two", "three")
    weighed = 0

    def counted(*about: Any) -> Placement | None:
        nonlocal weighed
        weighed += 1
        return successor(*about)

    monkeypatch.setattr(membership, "successor", counted)
    for one in (*found, *found):
        one.look()
    settled, chains = weighed, holders(found[0])
    for _ in range(5):
        for one in found:
            one.look()
    assert weighed == settled and [len(chain) for chain in chains] == [2], "the third stands by"
    found[0].own = replace(found[0].own, rate=1000.0)
    found[0].look()
    found[0].look()
    assert settled < weighed <= settled + 2


def test_a_placement_that_was_not_stored_is_proposed_again(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    one, two = members_of(job, setup_of(job), "one", "two")
    two.look()

    def outrun(*about: Any) -> Placement | None:
        monkeypatch.undo()
        job.redis.hdel(job.store.keys.members(), "two")  # as if it was not seen for long
        return successor(*about)

    monkeypatch.setattr(membership, "successor", outrun)
    one.look()
    assert holders(one) == [["two"]], "the new one was made for both"
    two._told()  # it is seen again, and proposes nothing itself
    one.look()
    assert holders(one) == [["one", "two"]]


def test_a_worker_that_tells_nonsense_of_itself_holds_nothing_and_ends_no_other(start: Callable[..., Job]) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    one, two, liar = members_of(job, setup_of(job), "one", "two", "liar")
    liar.own = replace(liar.own, rate=math.inf)
    for each in (liar, one, two, liar, one):
        each.look()
    assert holders(one) == [["one", "two"]]


@pytest.mark.parametrize(
    "plan",
    [
        '{"chains":1}',
        '{"chains":[[{"worker":"one","session":"s","first":1e999,"stop":2}]]}',
        '{"chains":[[{"worker":"one","session":"s","first":0,"stop":1}]]}',
        '{"no":"chains"}',
        "[" * 60_000,
        b"\xff",
    ],
    ids=lambda plan: str(plan)[:40],
)
def test_a_placement_that_is_none_ends_no_seat_and_is_replaced(start: Callable[..., Job], plan: str | bytes) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    (one,) = members_of(job, setup_of(job), "one")
    job.redis.hset(job.store.keys.placement(), mapping={"number": 7, "plan": plan})
    with one:
        wait_until(lambda: holders(one) == [["one"]])
        assert one.current[0].number == 8


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "1",
        '[1,"l","TOKEN",0]',
        "[1e999,2,3,4]",
        '[1,"l","no token",0]',
        '[1,"l","TOKEN",-1]',
        '[1,"l","TOKEN",1e999]',
        "[" * 60_000,
    ],
)
def test_an_order_that_is_none_ends_no_seat(start: Callable[..., Job], redis: Redis, body: str) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    loop = loop_of(job, setup_of(job), "follower")
    session, state = loop.seat.session, job.store.read()
    chain = Held("leader", "its session", 0, 1), Held("follower", session.session_id, 1, 2)
    assert state is not None
    mail = LetterOutbox(redis, JobKeys(job.job_id).mail)
    garbage = body.replace("TOKEN", str(state.token)).encode()
    mail.tell(session.session_id, Letter("garbage", 1 << 62, 1, "order", garbage))
    real = LeaderOrder(2, "leader", str(state.token), 0).dump()
    mail.tell(session.session_id, Letter("real", 2 << TURN_BITS, 1, "order", real))
    with capture_logs() as logs:
        loop._follow(Placement(1, (chain,)), chain, threading.Event())
    assert "order dropped" in [line["event"] for line in logs]
    kept = loop._inbox.order(lambda: True)
    assert kept and kept.attempt == "real", "of the next placement"


class Inverse(nn.Module):
    """A layer that fails on weights of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(10))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values @ torch.linalg.inv(self.weight)


def loop_of(job: Job, setup: StageSetup, worker: str) -> StageLoop:
    """The loop of a new seat, whose threads do not run."""
    (members,) = members_of(job, setup, worker)
    session = WorkerSession(job.redis, job.job_id, worker, members.own.session)
    about = LeaseKeeper(session), setup, members, SeatMemory(setup.spec, setup.memory, 0), SeatStatus()
    wires, mail = Wires.to(job.redis), Wires.to(job.redis)
    return StageLoop(StageSeat(job.redis, session, *about, wires, mail, threading.Event()))


def test_a_trial_that_is_called_off_is_made_again(start: Callable[..., Job]) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    loop, recall = loop_of(job, setup_of(job), "newcomer"), threading.Event()
    recall.set()
    loop._try_out(recall)
    assert loop.seat.membership.own.rate == 0
    loop._try_out(threading.Event())
    assert loop.seat.membership.own.rate > 0


def test_the_first_unit_of_a_replica_says_nothing_of_its_workers_speed(start: Callable[..., Job]) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    loop = loop_of(job, setup_of(job), "newcomer")
    membership, rates = loop.seat.membership, []
    for stop in (1, 2):
        held = Held("newcomer", membership.own.session, 0, stop)
        loop._hold(held.stages)
        for busy_s in (10.0, 1.0):
            loop._measure(held, busy_s)
            rates.append(membership.own.rate)
    one, both = (works_of(membership.stages, range(stop)) for stop in (1, 2))
    assert rates == [0, one, one, (one + both) / 2]


def test_a_model_that_cannot_compute_zeros_is_not_measured_and_ends_no_seat(start: Callable[..., Job]) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    task = task_with(lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10), Inverse()))
    split = SplitModel.of(task, job.spec.plan, Cut(split=["2"]))
    setup = setup_of(job)
    model = replace(setup.model, task=task, layout=split.layout, stages=split.stage_plan)
    loop = loop_of(job, replace(setup, model=model), "newcomer")
    with capture_logs() as logs:
        for _ in range(2):
            loop._try_out(threading.Event())
    assert [(line["event"], "singular" in line["error"]) for line in logs] == [("speed not measured", True)]
    assert loop.seat.membership.own.rate == 0


def test_an_order_of_the_next_placement_waits_until_this_worker_has_heard_of_it(
    start: Callable[..., Job], redis: Redis
) -> None:
    job = start(**FIELDS, strategy=PIPELINE)
    loop = loop_of(job, setup_of(job), "follower")
    session = loop.seat.session
    chain = Held("leader", "its session", 0, 1), Held("follower", session.session_id, 1, 2)
    state = job.store.read()
    assert state is not None
    mail = LetterOutbox(redis, JobKeys(job.job_id).mail)
    for number in (1, 3):
        order = LeaderOrder(number, "leader", str(state.token), 0).dump()
        mail.tell(session.session_id, Letter(f"attempt {number}", number << TURN_BITS, 1, "order", order))
    loop._follow(Placement(2, (chain,)), chain, threading.Event())
    kept = loop._inbox.order(lambda: True)
    assert kept and LeaderOrder.parse(kept.body).placement == 3
