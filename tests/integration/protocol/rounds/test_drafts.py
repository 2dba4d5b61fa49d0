"""Parts of updates that are offered before they are submitted, and parts of versions that are read before a commit."""

from typing import Any

import pytest
from redis import Redis
from redis.exceptions import ResponseError

from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession, StagedOffer
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import NO_DRAFT, Draft, WorkerSession
from tests.support.rounds import ONE, PLAN, ZERO, Join, current, opened, parts, send, take_seat

NAME, OTHER = "d" * 32, "e" * 32


@pytest.fixture
def reducer(redis: Redis, store: RoundStore) -> ReducerSession:
    reducer = opened(redis, store, PLAN.round(0))
    redis.hset(store.keys.round(), "parts", 4)
    return reducer


@pytest.fixture
def a(join: Join) -> WorkerSession:
    """It and `b` have leased two of the four units each."""
    first, second = join("a"), join("b")
    assert first.lease(str(ZERO)).micro_batches == (0, 1)
    assert second.lease(str(ZERO)).micro_batches == (2, 3)
    return first


@pytest.fixture
def b(a: WorkerSession) -> WorkerSession:
    return WorkerSession(a.redis, a.keys.job_id, "b", "session of b")


def offer(session: WorkerSession, *units: int, part: int = 3, nonce: str = "nonce", token: str = str(ZERO)) -> None:
    for unit in units:
        session.stage(nonce, unit, {part: b"part"}, token)


def is_woken(reducer: ReducerSession) -> bool:
    return reducer.redis.lrange(reducer.keys.full(), 0, -1) == [str(ZERO).encode()]


def test_an_offer_names_what_is_staged_until_it_is_submitted(reducer: ReducerSession, a: WorkerSession) -> None:
    a.stage("nonce", 0, {3: b"c", 2: b"b"}, str(ZERO))
    a.stage("nonce", 0, {2: b"b", 0: b"a"}, str(ZERO))
    offer(a, 1)
    found = StagedOffer("a", "nonce", frozenset({0, 2, 3}))
    assert reducer.offers() == {0: found, 1: StagedOffer("a", "nonce", frozenset({3}))}
    assert reducer.redis.hget(reducer.keys.offers(), "0") == b"a|nonce|,3,2,0,"
    room = memoryview(bytearray(10))
    assert bytes(reducer.staged_part(0, found, 2, room) or b"") == b"b"
    assert reducer.staged_part(0, found, 1, room) is None
    assert a.submit(str(ZERO), "nonce", [(0, [None, b"x", None, None], 0.5)], {}).outcome == "accepted"
    assert [*reducer.offers()] == [1] and reducer.staged_part(0, found, 2, room) is None


def test_an_offer_of_an_earlier_holder_is_replaced(reducer: ReducerSession, a: WorkerSession, b: WorkerSession) -> None:
    offer(a, 0, part=3)
    offer(a, 0, part=2)
    a.leave("gone")
    again = b.lease(str(ZERO)).micro_batches
    assert 0 in again
    offer(b, 0, part=2, nonce="other")
    assert reducer.offers()[0] == StagedOffer("b", "other", frozenset({2}))


@pytest.mark.parametrize(
    "case", ["not leased", "an older session", "another worker", "fenced", "paused", "another version", "no such part"]
)
def test_only_who_has_the_lease_of_a_running_round_offers_parts_that_there_are(
    reducer: ReducerSession, a: WorkerSession, b: WorkerSession, case: str
) -> None:
    if case == "fenced":
        take_seat(WorkerSession(a.redis, a.keys.job_id, "a", "newer"), "seat of a")
    if case == "paused":
        reducer.pause()
    others = {
        "not leased": b,
        "an older session": WorkerSession(a.redis, a.keys.job_id, "a", "older"),
        "another worker": WorkerSession(a.redis, a.keys.job_id, "b", "session of a"),
    }
    who, token, part = others.get(case, a), str(ONE if case == "another version" else ZERO), 3
    offer(who, 0, token=token, part=4 if case == "no such part" else part)
    assert not any(one.parts for one in reducer.offers().values())


def test_a_nonce_has_a_longest_length(a: WorkerSession) -> None:
    with pytest.raises(ResponseError, match="at most 100 characters"):
        offer(a, 0, nonce="n" * 101)


def test_the_reducer_wakes_once_a_part_is_there_for_all_units(
    reducer: ReducerSession, a: WorkerSession, b: WorkerSession
) -> None:
    offer(a, 0, 1, part=3)
    offer(b, 2, 3, part=2)
    assert not is_woken(reducer), "no part is there for all"
    offer(b, 2, part=3)
    assert not is_woken(reducer)
    offer(b, 3, part=3)
    assert is_woken(reducer)
    offer(a, 0, 1, part=2)
    assert is_woken(reducer), "there is one element, however often it is woken"


def test_what_was_received_counts_as_there(reducer: ReducerSession, a: WorkerSession, b: WorkerSession) -> None:
    offer(a, 0, 1)
    reducer.redis.delete(reducer.keys.full())
    assert send(b, ZERO, 2, 3, nonce="b") == "accepted"
    assert is_woken(reducer), "all are offered or received"
    reducer.redis.delete(reducer.keys.full())
    offer(a, 0, part=2)
    assert not is_woken(reducer)
    offer(a, 1, part=2)
    assert is_woken(reducer)


def test_a_round_of_which_nothing_is_offered_wakes_when_it_is_full(
    reducer: ReducerSession, a: WorkerSession, b: WorkerSession
) -> None:
    assert send(a, ZERO, 0, 1) == "accepted"
    assert not is_woken(reducer)
    assert send(b, ZERO, 2, 3, nonce="b") == "accepted"
    assert is_woken(reducer)


def test_what_no_script_wrote_is_no_offer(reducer: ReducerSession) -> None:
    reducer.redis.hset(reducer.keys.offers(), mapping={"0": "a|nonce", "1": "a|n|3", "2": b"\xff", "3": "a|b|,3,x,"})
    assert reducer.offers() == {}


def told(reducer: ReducerSession) -> list[Any]:
    return [fields for _, fields in reducer.redis.xrange(reducer.keys.drafts())]


def test_a_draft_is_told_and_expires(reducer: ReducerSession, a: WorkerSession) -> None:
    assert reducer.draft(ZERO, NAME, 3, b"three") and reducer.draft(ZERO, NAME, 1, b"one")
    assert a.drafted(1) == [(str(ZERO), NAME, 3), (str(ZERO), NAME, 1)] and a.drafted(1) == []
    room = [memoryview(bytearray(10)) for _ in range(2)]
    assert [bytes(one or b"") for one in a.read_draft(NAME, [3, 0], room)] == [b"three", b""]
    assert 0 < reducer.redis.ttl(reducer.keys.draft(NAME)) <= 120  # type: ignore[operator]
    reducer.drop_draft(NAME)
    assert a.read_draft(NAME, [3], room[:1]) == [None]


def test_only_the_newest_parts_are_told(reducer: ReducerSession) -> None:
    for part in range(600):
        assert reducer.draft(ZERO, NAME, part, b"part")
    assert len(told(reducer)) == 512


def test_who_has_lost_the_claim_or_is_late_tells_of_no_draft(reducer: ReducerSession) -> None:
    assert not reducer.draft(ONE, NAME, 0, b"late")
    reducer.redis.delete(reducer.keys.reducer())
    second = ReducerSession(reducer.redis, reducer.job_id, "second")
    assert second.claim("host", 2, 60_000)
    assert not reducer.draft(ZERO, NAME, 0, b"fenced")
    assert told(reducer) == [] and second.draft(ZERO, OTHER, 0, b"right")


def full(reducer: ReducerSession, a: WorkerSession, b: WorkerSession) -> None:
    offer(a, 0, nonce="left")
    for session, units in ((a, (0, 1)), (b, (2, 3))):
        assert send(session, ZERO, *units, nonce=session.worker_id) == "accepted"


def commit(reducer: ReducerSession, left: list[bytes | None], draft: str = "") -> bool:
    next_round = Round(1, 0, 4, 4, 4)
    return reducer.commit(current(reducer), parts(reducer), ONE, left, next_round, {"version": 1}, draft=draft)


def test_a_commit_turns_a_draft_into_the_version_and_names_it(
    reducer: ReducerSession, a: WorkerSession, b: WorkerSession
) -> None:
    full(reducer, a, b)
    reducer.redis.hset(reducer.keys.offers(), "9", "a|left|,3,")
    reducer.draft(ZERO, NAME, 1, b"one")
    assert commit(reducer, [b"zero", None, b"two"], NAME)
    assert not reducer.redis.exists(reducer.keys.draft(NAME)) and reducer.offers() == {}
    assert reducer.redis.ttl(reducer.keys.weights(str(ONE))) == -1
    assert a.read_weights(str(ONE), 3) == [b"zero", b"one", b"two"]
    room = [memoryview(bytearray(10)) for _ in range(3)]
    for draft, middle in (
        (Draft(str(ZERO), NAME, {1: b"early"}), b"early"),
        (Draft(str(ZERO), OTHER, {1: b"early"}), b"one"),
        (NO_DRAFT, b"one"),
    ):
        found, grant = a.pull(str(ONE), 3, room, draft)
        assert grant.token == str(ONE) and [bytes(part) for part in found or ()] == [b"zero", middle, b"two"]
    reducer.redis.hset(reducer.keys.round(), "token", str(ZERO))
    found, _ = a.pull(str(ONE), 3, room, Draft(str(ZERO), NAME, {1: b"early"}))
    assert found is not None and bytes(found[1]) == b"one", "it may be the draft of another version"


def test_a_version_without_a_draft_names_none(reducer: ReducerSession, a: WorkerSession, b: WorkerSession) -> None:
    full(reducer, a, b)
    reducer.redis.hset(reducer.keys.round(), "draft", NAME)
    assert commit(reducer, [b"zero"])
    assert reducer.redis.hget(reducer.keys.round(), "draft") is None


def test_a_draft_that_lacks_a_part_is_not_committed(
    reducer: ReducerSession, a: WorkerSession, b: WorkerSession
) -> None:
    full(reducer, a, b)
    assert not commit(reducer, [b"zero", None, b"two"], NAME)
    assert current(reducer).token == ZERO
