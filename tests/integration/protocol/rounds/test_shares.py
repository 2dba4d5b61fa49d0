"""Who is leased how much of a round, by how fast each worker is; against a real server."""

import random
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
from redis import Redis

from computeshare.jobspec.sampling_plan import Plan
from computeshare.protocol.lease_policy import (
    EXPECTED_MS,
    TOGETHER_MS,
    TRIED_AGAIN_AFTER,
    Peer,
    is_backed_up,
    lease_share,
    remaining_ms,
    shortest,
)
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.types import Token
from tests.support.rounds import (
    ONE,
    TWO,
    ZERO,
    Join,
    age,
    agree,
    commit,
    current,
    events,
    fill,
    know,
    late,
    opened,
    parts,
    send,
    speed_ms,
)
from tests.support.unequal import QUARTER, Course, Hand, Unequal

Play = Callable[..., Course]


@pytest.fixture
def play(redis: Redis, store: RoundStore) -> Play:
    """Rounds of so many units by workers of these speeds, each of which is leased one unit until it is measured."""

    def play(units: int, rounds: int, slowness: dict[str, float], changes: dict[int, float] | None = None) -> Course:
        """`changes`: from which round on the slow one takes how long."""
        plan = Plan(seed=0, samples=units * rounds, micro_batch=1, micro_batches_per_round=units)
        reducer = opened(redis, store, plan.round(0))
        agree(reducer, unmeasured=1)
        tokens = [Token(1, version, f"{version:016x}") for version in range(rounds + 1)]
        redis.hset(store.keys.round(), "token", str(tokens[0]))
        redis.lset(store.keys.recent(), 0, str(tokens[0]))
        redis.rename(store.keys.state(str(ZERO)), store.keys.state(str(tokens[0])))
        sessions = {name: WorkerSession(redis, store.job_id, name, f"session of {name}") for name in slowness}
        for name, session in sessions.items():
            redis.hset(store.keys.seats(), name, "seat")
            assert session.join("seat", {}) == "running"
        version = 0
        nonces = iter(range(1_000_000))

        def lease(session: WorkerSession) -> Grant:
            return session.lease(str(tokens[version]))

        def submit(session: WorkerSession, grant: Grant) -> str:
            return send(session, tokens[version], *grant.micro_batches, nonce=f"nonce {next(nonces)}")

        hands = {name: Hand(partial(lease, m), partial(submit, m)) for name, m in sessions.items()}
        unequal = Unequal(reducer, hands, slowness)
        for version in range(rounds):
            slowness["slow"] = (changes or {}).get(version, slowness["slow"])
            unequal.play()
            base, counted = current(reducer), parts(reducer)
            following = plan.round(version + 1)
            assert reducer.commit(base, counted, tokens[version + 1], [b"weights"], following, {"version": version + 1})
            reducer.store_state(base.token, [(p.base, p.micro_batch) for p in counted], tokens[version + 1], [b"state"])
        return unequal.course

    return play


def all_of(course: Course) -> Counter[str]:
    return sum(course.done[1:], Counter())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("units", [4, 8, 13, 16])
def test_a_slow_worker_costs_the_others_nothing(play: Play, units: int) -> None:
    """At least 95 % of what any way of sharing whole units out could do, from the second round on."""
    course = play(units, 6, QUARTER)
    best = shortest(units, [*QUARTER.values()])
    assert best <= sum(course.rounds[1:]) / 5 <= best / 0.95
    assert all_of(course).total() == 5 * units


@pytest.mark.parametrize(("units", "rate", "does"), [(13, 3.25, 1), (16, 3.2, 1), (26, 3.25, 2)])
@pytest.mark.slow
def test_a_slow_worker_takes_part_where_that_makes_a_round_shorter(
    play: Play, units: int, rate: float, does: int
) -> None:
    """At least nine tenths of the summed speed, which is 3.25 units in the time that the fastest needs for one."""
    course = play(units, 5, QUARTER)
    assert all_of(course)["slow"] == 4 * does
    assert units / course.rounds[-1] == pytest.approx(rate, rel=0.02) and rate > 0.9 * 3.25


def test_a_fast_worker_whose_lease_has_run_out_is_not_waited_for(reducer: ReducerSession, join: Join) -> None:
    dead, slow = join("dead"), join("slow")
    know(reducer, dead=1000, slow=9000)
    assert dead.lease(str(ZERO)).micro_batches == (0,)
    age(reducer, 4100)
    assert slow.lease(str(ZERO)).micro_batches == (1,)


def test_equal_workers_do_equal_parts_and_nothing_twice(play: Play) -> None:
    course = play(8, 6, dict.fromkeys("abc", 1) | {"slow": 1})
    assert set(all_of(course).values()) == {10} and course.wasted == 0
    assert course.rounds == pytest.approx([2.0] * 6, rel=0.02)


@pytest.mark.slow
def test_a_worker_that_became_slow_is_found_out_and_one_that_became_fast_again_too(play: Play) -> None:
    """Of eight units three workers need 3 units of time, and four 2; the slow one needs 6 for a single one."""
    course = play(8, 24, dict.fromkeys(QUARTER, 1), {2: 6, 10: 1})
    assert course.rounds[:2] == pytest.approx([2, 2], rel=0.02)
    assert course.rounds[9:11] == pytest.approx([3, 3], rel=0.02)
    assert course.rounds[-1] == pytest.approx(2, rel=0.02) and course.done[-1]["slow"] == 2


@pytest.fixture
def two(store: RoundStore, reducer: ReducerSession, join: Join) -> tuple[WorkerSession, WorkerSession]:
    """Two workers that take a second for a unit; each has begun one of the last two of a round."""
    first, second = join("first"), join("second")
    know(store, first=1000, second=1000)
    assert [first.lease(str(ZERO)).micro_batches for _ in range(3)] == [(0,), (1,), (2,)]
    assert second.lease(str(ZERO)).micro_batches == (3,)
    assert send(first, ZERO, 0, 1, 2) == "accepted"
    know(store, first=1000, second=1000)
    return first, second


def test_nothing_is_begun_twice_while_waiting_costs_less(
    store: RoundStore, two: tuple[WorkerSession, WorkerSession]
) -> None:
    first, _ = two
    for _ in range(2):  # as long as it should take, and as long again
        early = first.lease(str(ZERO))
        assert early.answer == "wait" and 600 < early.ask_again_ms <= 2600
        age(store, 1000, runs_out=False)
        know(store, first=1000, second=1000)
    assert first.lease(str(ZERO)).ask_again_ms <= 600
    age(store, 600, runs_out=False)
    assert first.lease(str(ZERO)).micro_batches == (3,)


def test_what_a_slow_worker_has_begun_is_begun_at_once_by_one_that_is_done_well_before(
    store: RoundStore, two: tuple[WorkerSession, WorkerSession]
) -> None:
    first, _second = two
    know(store, first=1000, second=4000)
    assert first.lease(str(ZERO)).micro_batches == (3,)
    age(store, 1000, runs_out=False)
    know(store, first=1000, second=900)
    assert send(first, ZERO, 3, nonce="backup") == "accepted"
    assert 900 < speed_ms(store, "second") < 1000  # it has taken longer by now


def test_a_worker_that_is_overtaken_early_counts_as_no_faster_than_before(
    store: RoundStore, two: tuple[WorkerSession, WorkerSession]
) -> None:
    first, _second = two
    know(store, first=1000, second=60_000)
    assert first.lease(str(ZERO)).micro_batches == (3,)
    assert send(first, ZERO, 3, nonce="backup") == "accepted"
    assert speed_ms(store, "second") >= 60_000


def test_a_batch_is_begun_a_second_time_as_a_whole(store: RoundStore, reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    know(store, slow=400, quick=400)
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches) == "accepted"
    know(store, slow=400, quick=400)
    age(store, 1700, runs_out=False)
    assert quick.lease(str(ZERO)).answer == "wait"  # late by 900 ms: longer than a unit, not than two
    age(store, 500, runs_out=False)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(quick, ZERO, 0, 1, nonce="backup") == "accepted"
    assert 485 < speed_ms(store, "slow") < 500  # by now 2200 ms for two units: 400 * (1100 / 400) ** 0.2


def test_how_often_work_was_begun_twice_is_told_with_the_version(
    store: RoundStore, reducer: ReducerSession, two: tuple[WorkerSession, WorkerSession]
) -> None:
    first, second = two
    know(store, first=1000, second=4000)
    assert first.lease(str(ZERO)).micro_batches == (3,)
    assert send(first, ZERO, 3, nonce="backup") == "accepted" and commit(reducer, ONE)
    assert events(store, "reassigned") == []
    assert events(store, "version") == [{"version": 1, "doubled": [3]}]
    fill(lambda name: {"first": first, "second": second}[name], reducer, "first")
    while len(parts(reducer)) < 4:
        grant = first.lease(str(ONE))
        assert send(first, ONE, *grant.micro_batches, nonce=f"{grant.micro_batches}") == "accepted"
    assert commit(reducer, TWO) and events(store, "version")[-1] == {"version": 2}


@pytest.mark.parametrize("seed", range(40))
def test_the_script_shares_out_as_the_rules_say(
    store: RoundStore, reducer: ReducerSession, join: Join, seed: int
) -> None:
    """Whoever asks, in whatever state the others are: the same units as `computeshare.protocol.lease_policy` gives."""
    draw = random.Random(seed)
    names = "abcde"[: draw.randint(1, 5)]
    sessions = {name: join(name, backup=False) for name in names}
    redis, k = reducer.redis, reducer.keys
    base_ms = draw.choice((100_000, 10_000_000))  # what passes while the test runs is nothing against it
    unit_ms = {name: base_ms * draw.randint(10, 40) / 10 for name in names}
    opened_ms = base_ms * draw.randint(0, 60) / 10
    now = reducer.now_ms()
    total = draw.randint(1, 40)
    round_ = {"count": total, "total": total, "needed": total, "opened": int(now - opened_ms), "cursor": 0}
    redis.hset(k.round(), mapping=round_)  # type: ignore[arg-type]
    asker, *others = draw.sample(names, len(names))
    idle_ms = {name: base_ms * draw.randint(0, 500) / 10 for name in names}
    speeds = {name: f"{unit_ms[name]}|{int(now - idle_ms[name])}" for name in names}
    redis.hset(k.speeds(), mapping=speeds)
    peers, cursor = [], 0
    for other in others:
        held = min(draw.randint(0, 2), total - cursor)
        elapsed_ms = base_ms * draw.randint(0, 90) / 10
        for unit in range(cursor, cursor + held):
            lease = f"session of {other}|{int(now + 10 * base_ms)}|{int(now - elapsed_ms)}|{other}"
            redis.hset(k.leases(), str(unit), lease)
        cursor += held
        if held:
            peers.append(Peer(unit_ms[other], remaining_ms(held, unit_ms[other], elapsed_ms)))
        elif min(opened_ms, idle_ms[other]) < max(EXPECTED_MS, unit_ms[other]):
            peers.append(Peer(unit_ms[other]))
    redis.hset(k.round(), "cursor", cursor)
    expected = lease_share(total - cursor, unit_ms[asker], peers, idle_ms[asker])
    granted = sessions[asker].lease(str(ZERO)).micro_batches
    assert len(granted) == expected.units, expected.reason
    assert min(unit_ms.values()) > TOGETHER_MS and TRIED_AGAIN_AFTER == 8


def test_one_that_has_not_come_for_long_leaves_its_part_to_a_slow_one(store: RoundStore, join: Join) -> None:
    join("quick")
    slow = join("slow")
    know(store, quick=2000, slow=100_000)
    age(store, 60_000)
    know(store, slow=100_000)
    assert slow.lease(str(ZERO)).micro_batches == (0,)


def test_one_that_was_done_just_now_is_waited_for_however_old_the_round_is(store: RoundStore, join: Join) -> None:
    join("quick")
    slow = join("slow")
    age(store, 60_000)
    know(store, quick=2000, slow=100_000)
    assert slow.lease(str(ZERO)).answer == "wait"


def test_one_that_is_done_later_takes_nothing_off_what_the_others_do_meanwhile(store: RoundStore, join: Join) -> None:
    """Of three units that are left the quick one does three before the slow one would have done its first."""
    late_one, slow = join("late one", unmeasured=1, backup=False), join("slow")
    join("quick")
    assert late_one.lease(str(ZERO)).micro_batches == (0,)
    know(store, **{"late one": 1_000_000, "slow": 100_000, "quick": 30_000})
    assert slow.lease(str(ZERO)).answer == "wait"


def test_a_backup_doubles_what_one_worker_holds_not_what_several_do(store: RoundStore, join: Join) -> None:
    slow, slower, quick = join("slow", unmeasured=1), join("slower"), join("quick")
    assert slow.lease(str(ZERO)).micro_batches == (0,) and slower.lease(str(ZERO)).micro_batches == (1,)
    for backup in (False, True):
        know(store, slow=100_000, slower=100_000, quick=100)
        granted = quick.lease(str(ZERO)).micro_batches
        assert granted == ((0,) if backup else (2, 3))
        assert send(quick, ZERO, *granted, nonce=f"{granted}") == "accepted"


@pytest.mark.parametrize(("more", "expected_ms"), [(0, 1600), (8, 1200)])
def test_a_backup_begins_where_it_saves_more_time_than_it_may_waste(
    store: RoundStore,
    reducer: ReducerSession,
    two: tuple[WorkerSession, WorkerSession],
    join: Join,
    more: int,
    expected_ms: int,
) -> None:
    first, _ = two
    for number in range(more):
        join(f"waiting{number}")
    lease = store.redis.hget(store.keys.leases(), "3")
    assert lease is not None
    since_ms = int(bytes(lease).split(b"|")[2])
    early = first.lease(str(ZERO))
    cost_ms = early.ask_again_ms - (1000 - (reducer.now_ms() - since_ms))
    assert early.answer == "wait" and expected_ms <= cost_ms < expected_ms + 300
    assert is_backed_up(1, 1000.0, expected_ms + 1, 2 + more) and not is_backed_up(1, 1000.0, expected_ms, 2 + more)


def test_short_units_are_shared_out_equally(store: RoundStore, join: Join) -> None:
    quick, slow = join("quick"), join("slow")
    know(store, quick=1, slow=4)
    assert quick.lease(str(ZERO)).micro_batches == (0, 1)
    assert slow.lease(str(ZERO)).micro_batches == (2, 3)


def test_where_each_has_a_part_to_make_nobody_is_passed_over(store: RoundStore, join: Join) -> None:
    quick, slow = join("quick", sharers=2), join("slow", sharers=2)
    know(store, quick=1, slow=100_000)
    assert slow.lease(str(ZERO)).micro_batches == (0,)
    assert quick.lease(str(ZERO)).micro_batches == (1, 2)


def test_what_others_are_to_judge_goes_to_them_however_slow(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    quick, slow = join("quick"), join("slow")
    know(store, quick=400, slow=400)
    quick.lease(str(ZERO)), slow.lease(str(ZERO))
    assert send(quick, ZERO, 0, 1, nonce="quick") == "accepted" and send(slow, ZERO, 2, 3) == "accepted"
    reducer.refuse(ZERO, reducer.progress()[1][0], "not finite", "not_finite")
    know(store, quick=1, slow=100_000)
    assert quick.lease(str(ZERO)).answer == "wait"
    assert slow.lease(str(ZERO)).micro_batches == (0,)


def test_a_backup_is_no_more_than_the_share_that_is_left(
    store: RoundStore, reducer: ReducerSession, join: Join
) -> None:
    slow, quick = join("slow", sharers=2), join("quick", sharers=2)
    assert slow.lease(str(ZERO)).micro_batches == (0, 1)
    assert send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches[:1]) == "accepted"
    quick.leave("rests")
    late(store)
    quick = join("quick", "again", sharers=2)
    assert quick.lease(str(ZERO)).micro_batches == (3,)
    assert send(quick, ZERO, 3, nonce="own") == "accepted"
    assert quick.lease(str(ZERO)).answer == "wait"
    agree(store, sharers=1)
    store.redis.hset(store.keys.round(), "needed", 3)
    assert quick.lease(str(ZERO)).micro_batches == (0,)


def test_a_worker_of_unknown_speed_is_taken_to_be_as_fast_as_the_others(store: RoundStore, join: Join) -> None:
    join("unknown")
    known = join("known")
    know(store, known=100_000)
    store.redis.hset(store.keys.round(), "cursor", 3)
    assert known.lease(str(ZERO)).micro_batches == (3,)


def test_one_slow_unit_is_no_slow_machine_and_a_fast_one_is_soon_believed(store: RoundStore, join: Join) -> None:
    def measured(after_ms: int, nonce: str) -> float:
        (unit,) = session.lease(str(ZERO)).micro_batches
        age(store, after_ms, runs_out=False)
        assert send(session, ZERO, unit, nonce=nonce) == "accepted"
        told = store.redis.hget(store.keys.speeds(), "a")
        assert told is not None
        return float(bytes(told).split(b"|")[0])

    session = join("a")
    know(store, a=100_000)
    assert measured(3_200_000, "slow") == pytest.approx(200_000, rel=0.01)  # a fifth of the way, in factors
    assert measured(50_000, "fast") == pytest.approx(100_000, rel=0.01)  # half of it
