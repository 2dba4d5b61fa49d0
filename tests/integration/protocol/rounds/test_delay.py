"""Rounds with a delay: units of two rounds are out at once, each computed on one version whoever computes them."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from redis import Redis

from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession, StoredStep
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.terms import Terms
from computeshare.protocol.worker_session import Grant, WorkerSession
from computeshare.types import Token
from tests.support.rounds import (
    ONE,
    PLAN,
    THREE,
    TWO,
    ZERO,
    Join,
    age,
    agree,
    current,
    events,
    free,
    know,
    of,
    parts,
    send,
)

LAST = 6
"""The number of versions of the whole job: two epochs of rounds of 4, 4 and 2 micro-batches."""
DELAY = Terms(delay=True)


def following(version: int) -> Round:
    """The round from `version`, with the number of micro-batches of the one after it."""
    planned = PLAN.round(version)
    if version == LAST:
        return Round(version, planned.epoch, planned.first, 0, 0)
    return replace(planned, ahead=PLAN.round(version + 1).count if version + 1 < LAST else 0)


def claimed(redis: Redis, store: RoundStore) -> ReducerSession:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    return reducer


@pytest.fixture
def reducer(redis: Redis, store: RoundStore) -> ReducerSession:
    reducer = claimed(redis, store)
    assert reducer.open(ZERO, [b"weights 0"], [b"state 0"], following(0), {"version": 0}, 2, DELAY)
    return reducer


def commit(reducer: ReducerSession, token: Token, keep: bool = True, stored: Token | None = None) -> bool:
    """As `tests.support.rounds.commit`."""
    base, counted, event = current(reducer), parts(reducer), {"version": token.version}
    done = reducer.commit(base, counted, token, [b"weights"], following(token.version), event, stored=stored)
    if done and keep:
        reducer.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])
    return done


def lease(session: WorkerSession, loaded: Token) -> tuple[str, tuple[int, ...]]:
    grant = session.lease(str(loaded))
    return grant.token if grant.answer == "leased" else grant.answer, grant.micro_batches


def is_full(reducer: ReducerSession) -> bool:
    return bool(reducer.redis.llen(reducer.keys.full()))


def bases(reducer: ReducerSession) -> dict[int, str]:
    return {part.micro_batch: part.base for part in parts(reducer)}


def numbers(units: Sequence[int], token: Token) -> dict[int, str]:
    return dict.fromkeys(units, str(token))


def test_units_of_the_next_round_are_computed_while_a_round_is_reduced(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert lease(session, ZERO) == (str(ZERO), (0, 1, 2, 3))
    assert send(session, ZERO, 0, 1, 2, 3, nonce="first") == "accepted" and is_full(reducer)
    assert lease(session, ZERO) == (str(ZERO), (4, 5, 6, 7))
    assert send(session, ZERO, 4, 5, nonce="early") == "accepted"
    assert lease(session, ZERO)[0] == "wait"  # the others are leased, and no round after the next one is open
    assert bases(reducer) == numbers(range(4), ZERO)
    assert commit(reducer, ONE, keep=False)
    assert bases(reducer) == numbers((4, 5), ZERO) and not is_full(reducer)
    assert lease(session, ZERO) == (str(ONE), (8, 9))  # 6 and 7 are still leased
    assert send(session, ZERO, 6, 7, nonce="late") == "accepted" and is_full(reducer)
    assert current(reducer).base == ZERO and reducer.steps() == [StoredStep(ZERO, of(ZERO, range(4)))]
    assert commit(reducer, TWO, keep=False, stored=ZERO)
    assert reducer.steps()[1:] == [StoredStep(ONE, of(ZERO, range(4, 8)))]


def test_an_update_counts_only_on_the_one_version_of_its_round(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    session.lease(str(ZERO))
    assert commit(reducer, ONE)
    assert send(session, ONE, 4, 5, 6, 7, nonce="too new") == "stale" and free(reducer) == [b"4", b"5", b"6", b"7"]
    assert lease(session, ONE) == (str(ZERO), (4, 5, 6, 7))  # on the version before, though the worker has the next
    assert send(session, ZERO, 4, 5, 6, 7, nonce="right") == "accepted"
    assert lease(session, ZERO) == (str(ONE), (8, 9))
    assert send(session, ZERO, 8, 9, nonce="too old") == "stale"
    assert events(reducer, "submission")[-1]["late"] == [8, 9]


def test_a_copy_too_is_taken_only_on_the_one_version_of_its_round(reducer: ReducerSession, join: Join) -> None:
    session, k, redis = join("first"), reducer.keys, reducer.redis
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    assert commit(reducer, ONE)
    second = join("second")
    for unit, right, wrong in ((4, ZERO, ONE), (8, ONE, ZERO)):
        redis.hset(k.audits(), str(unit), f"{second.session_id}|{2**52}|0|second")
        assert send(second, wrong, unit, nonce=f"{unit} wrong") == "lease_lost"
        assert not redis.exists(k.copies(), k.copy(str(wrong), unit))
        assert send(second, right, unit, nonce=f"{unit} right") == "accepted"
        assert redis.exists(k.copy(str(right), unit)) and redis.hkeys(k.copies()) == [str(unit).encode()]
        redis.delete(k.copies())


def test_a_round_that_was_received_early_is_full_as_it_begins(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="second") == "accepted"
    assert session.lease(str(ZERO)).answer == "wait"
    assert commit(reducer, ONE) and is_full(reducer)
    assert reducer.updates(of(ZERO, [0, 4]), range(1)) == [None, [b"update"]]
    assert commit(reducer, TWO) and not is_full(reducer) and parts(reducer) == []


def test_the_whole_job_counts_every_unit_once_and_ends(reducer: ReducerSession, join: Join) -> None:
    first, second, counted = join("a"), join("b"), []
    loaded = {first: ZERO, second: ZERO}
    for version in range(LAST):
        for turn in range(8):
            session = (first, second)[turn % 2]
            grant = session.lease(str(loaded[session]))
            if grant.answer == "leased":
                loaded[session] = Token.parse(grant.token)
                expected = {max(0, unit_round(unit) - 1) for unit in grant.micro_batches}
                assert {loaded[session].version} == expected
                nonce = f"{version} {turn}"
                assert send(session, loaded[session], *grant.micro_batches, nonce=nonce) == "accepted"
        counted += [part.micro_batch for part in parts(reducer)]
        assert commit(reducer, Token(1, version + 1, str(version + 1) * 16))
    assert counted == list(range(20)) and current(reducer).status == "finished" and not is_full(reducer)
    assert first.lease(str(ZERO)).answer == "finished"


def unit_round(unit: int) -> int:
    return next(version for version in range(LAST) if unit in PLAN.round(version).units)


def test_units_of_a_worker_that_died_are_leased_on_the_version_of_their_round(
    reducer: ReducerSession, join: Join
) -> None:
    dies, stays = join("dies"), join("stays")
    assert lease(dies, ZERO) == (str(ZERO), (0, 1)) and lease(stays, ZERO) == (str(ZERO), (2, 3))
    assert send(dies, ZERO, 0, 1, nonce="a") == "accepted" and send(stays, ZERO, 2, 3, nonce="b") == "accepted"
    assert lease(dies, ZERO) == (str(ZERO), (4, 5)) and lease(stays, ZERO) == (str(ZERO), (6, 7))
    assert commit(reducer, ONE) and send(stays, ZERO, 6, 7, nonce="c") == "accepted"
    assert lease(stays, ONE) == (str(ONE), (8,))
    age(reducer, 60_000)
    assert lease(stays, ONE) == (str(ZERO), (4, 5))  # this round's come first
    moved = [(one["micro_batch"], one["version"], one["from"]) for one in events(reducer, "reassigned")]
    assert moved == [(4, 1, "dies"), (5, 1, "dies")]
    assert lease(stays, ZERO) == (str(ONE), (9,))
    assert lease(stays, ONE) == (str(ONE), (8,))


def test_a_slow_worker_is_backed_up_later_if_its_version_has_to_be_fetched(reducer: ReducerSession, join: Join) -> None:
    slow, quick = join("slow"), join("quick")
    assert lease(slow, ZERO) == (str(ZERO), (0, 1)) and lease(quick, ZERO) == (str(ZERO), (2, 3))
    assert send(slow, ZERO, 0, 1, nonce="a") == "accepted" and send(quick, ZERO, 2, 3, nonce="b") == "accepted"
    know(reducer, slow=100, quick=100)
    assert lease(slow, ZERO) == (str(ZERO), (4, 5)) and lease(quick, ZERO) == (str(ZERO), (6, 7))
    assert commit(reducer, ONE) and send(quick, ZERO, 6, 7, nonce="c") == "accepted"
    know(reducer, slow=100_000, quick=100)  # so that nothing is left to the slow one
    assert lease(quick, ONE) == (str(ONE), (8, 9)) and send(quick, ONE, 8, 9, nonce="d") == "accepted"
    know(reducer, slow=100, quick=100)
    age(reducer, 1000, runs_out=False)  # 800 ms late: enough for a backup on a version at hand
    assert quick.lease(str(ONE)).answer == "wait"
    age(reducer, 1500, runs_out=False)
    assert lease(quick, ONE) == (str(ZERO), (4, 5))
    assert send(quick, ZERO, 4, 5, nonce="e") == "accepted" and send(slow, ZERO, 4, 5, nonce="f") == "duplicate"


def test_what_one_machine_may_make_is_counted_by_round(reducer: ReducerSession, join: Join) -> None:
    one, other = join("machine1-a"), join("machine2-a", sharers=2, fewest=2, delay=True)
    assert lease(one, ZERO) == (str(ZERO), (0, 1)) and lease(one, ZERO) == (str(ZERO), (4, 5))
    assert lease(one, ZERO)[0] == "wait"
    assert send(one, ZERO, 0, 1, 4, 5, nonce="a") == "accepted"
    assert lease(one, ZERO)[0] == "wait"
    assert lease(other, ZERO) == (str(ZERO), (2, 3)) and send(other, ZERO, 2, 3, nonce="b") == "accepted"
    assert commit(reducer, ONE)
    assert lease(one, ZERO) == (str(ONE), (8,))
    assert lease(other, ZERO) == (str(ZERO), (6, 7))


def test_a_refused_update_is_computed_again_on_the_same_version(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="second") == "accepted"
    assert commit(reducer, ONE)
    reducer.refuse(ONE, parts(reducer)[1], "damaged", "damaged")
    assert lease(session, ONE) == (str(ZERO), (5,))
    assert send(session, ZERO, 5, nonce="again") == "accepted" and is_full(reducer)


def test_a_restored_job_has_the_version_before_to_compute_its_round_on(redis: Redis, store: RoundStore) -> None:
    reducer = claimed(redis, store)
    opened = reducer.open(
        TWO, [b"weights 2"], [b"state 2"], following(2), {"version": 2}, 2, DELAY, (ONE, [b"weights 1"])
    )
    assert opened and current(reducer).base == ONE
    k = reducer.keys
    assert reducer.load(k.weights(str(ONE))) == [b"weights 1"] and redis.ttl(k.weights(str(ONE))) == -1
    assert redis.lrange(k.recent(), 0, -1) == [str(TWO).encode(), str(ONE).encode()]
    assert reducer.chain()[0] == [str(ONE), str(TWO)]


def test_in_a_restored_job_two_rounds_go_on(redis: Redis, store: RoundStore) -> None:
    reducer = claimed(redis, store)
    before = (ONE, [b"weights 1"])
    assert reducer.open(TWO, [b"weights 2"], [b"state 2"], following(2), {"version": 2}, 2, DELAY, before)
    session = WorkerSession(redis, store.job_id, "only", "session")
    redis.hset(reducer.keys.seats(), "only", "seat")
    assert session.join("seat", {}) == "running"
    assert lease(session, TWO) == (str(ONE), (8, 9))
    assert lease(session, TWO) == (str(TWO), (10, 11, 12, 13))
    assert send(session, TWO, 8, 9, nonce="wrong") == "stale"
    assert lease(session, TWO) == (str(ONE), (8, 9)) and send(session, ONE, 8, 9, nonce="right") == "accepted"
    assert commit(reducer, THREE)
    assert not redis.exists(reducer.keys.weights(str(ONE))) and redis.exists(reducer.keys.weights(str(TWO)))


def test_a_doubt_about_the_version_before_has_the_round_given_up(reducer: ReducerSession, join: Join) -> None:
    session = join("only")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    assert commit(reducer, ONE)
    agree(reducer, delay=False)  # then nobody computes on the version before
    session.doubt(str(ZERO), again=True)
    assert current(reducer).doubted is None and events(reducer, "doubted") == []
    agree(reducer, delay=True)
    assert lease(session, ONE) == (str(ZERO), (4, 5, 6, 7))
    session.doubt(str(ZERO), again=False)
    assert current(reducer).doubted is None and free(reducer) == [b"4", b"5", b"6", b"7"]
    session.doubt(str(ZERO), again=True)
    assert current(reducer).doubted == ZERO and is_full(reducer)
    assert [(one["token"], one["version"]) for one in events(reducer, "doubted")] == [(str(ZERO), 0)] * 2


def test_leases_of_both_rounds_are_handed_back_by_one_who_leaves(reducer: ReducerSession, join: Join) -> None:
    session: WorkerSession = join("leaves")
    first, second = session.lease(str(ZERO)), session.lease(str(ZERO))
    assert isinstance(first, Grant) and second.micro_batches == (4, 5, 6, 7)
    session.leave("done")
    assert sorted(free(reducer)) == [b"%d" % unit for unit in range(8)]
    other = join("other")
    assert lease(other, ZERO) == (str(ZERO), (0, 1, 2, 3)) and lease(other, ZERO) == (str(ZERO), (4, 5, 6, 7))


def test_offers_for_the_next_round_wait_until_it_begins(reducer: ReducerSession, join: Join) -> None:
    reducer.redis.hset(reducer.keys.round(), "parts", 4)
    session = join("only")
    assert lease(session, ZERO) == (str(ZERO), (0, 1, 2, 3)) and lease(session, ZERO) == (str(ZERO), (4, 5, 6, 7))
    for unit in (4, 5, 6, 7, 0, 1, 2):
        session.stage("nonce", unit, {3: b"part"}, str(ZERO))
    assert sorted(reducer.offers()) == [0, 1, 2] and not is_full(reducer), "nothing is there for the whole round"
    session.stage("nonce", 3, {3: b"part"}, str(ZERO))
    assert is_full(reducer)
    reducer.redis.delete(reducer.keys.full())
    session.stage("nonce", 4, {3: b"part"}, str(ZERO))
    assert not is_full(reducer), "it completes nothing of this round"
    for units, nonce in (((0, 1, 2, 3), "first"), ((7,), "second")):
        assert send(session, ZERO, *units, nonce=nonce) == "accepted"
    assert reducer.offers() == {} and commit(reducer, ONE)
    assert sorted(reducer.offers()) == [4, 5, 6] and is_full(reducer)
    assert lease(session, ONE) == (str(ONE), (8, 9))
    for unit, token in ((4, ONE), (8, ZERO)):
        session.stage("another version", unit, {2: b"part"}, str(token))
    assert {one.nonce for one in reducer.offers().values()} == {"nonce"}
    session.stage("nonce", 8, {2: b"part"}, str(ONE))
    assert sorted(reducer.offers()) == [4, 5, 6]
    assert send(session, ZERO, 4, 5, 6, nonce="third") == "accepted" and commit(reducer, TWO)
    assert sorted(reducer.offers()) == [8] and not is_full(reducer), "nothing is there for the whole round"


def test_a_round_of_which_nothing_is_offered_or_received_early_wakes_nobody(
    reducer: ReducerSession, join: Join
) -> None:
    session = join("only")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches, nonce="first") == "accepted"
    assert commit(reducer, ONE) and not is_full(reducer) and reducer.offers() == {}
