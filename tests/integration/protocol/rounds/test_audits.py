"""Units that a second machine computes as well: who gets a copy, what becomes of it, and how a dispute is decided."""

import json
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import DisputeOutcome
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from tests.support.rounds import (
    GONE,
    ONE,
    TWO,
    ZERO,
    Join,
    age,
    agree,
    commit,
    events,
    free,
    know,
    parts,
    send,
    submit_staged,
    take_seat,
)

ALL: dict[str, Any] = {"audit": 1, "secret": "s"}


def of_kind(store: RoundStore, worker: str, **kind: Any) -> WorkerSession:
    session = WorkerSession(store.redis, store.job_id, worker, f"session of {worker}")
    assert take_seat(session, f"seat of {worker}", {"kind": kind}) == "running"
    return session


def both(join: Join) -> tuple[WorkerSession, WorkerSession]:
    """Two machines that hold each other's copies: of 0 to 3, (0, 1) and a copy of 2; (2, 3) and a copy of 0."""
    first, second = join("first", **ALL), join("second", **ALL)
    assert first.lease(str(ZERO)).micro_batches == (0, 1, 2)
    assert second.lease(str(ZERO)).micro_batches == (2, 3, 0)
    return first, second


def test_a_unit_of_each_lease_is_also_another_machines(reducer: ReducerSession, join: Join) -> None:
    first, second = both(join)
    assert send(first, ZERO, 0, 1, 2, nonce="first") == "accepted"
    assert [part.micro_batch for part in parts(reducer)] == [0, 1]
    assert send(second, ZERO, 2, 3, 0, nonce="second") == "accepted"
    assert [(part.micro_batch, part.worker) for part in parts(reducer)] == [
        (0, "first"), (1, "first"), (2, "second"), (3, "second"),
    ]  # fmt: skip
    copies = reducer.audits().copies
    assert {unit: (one.worker, one.nonce, one.size) for unit, one in copies.items()} == {
        0: ("second", "second", 6),
        2: ("first", "first", 6),
    }
    assert reducer.updates([(str(ZERO), "0:copy"), (str(ZERO), 0)], range(1)) == [[b"update"], [b"update"]]
    assert not reducer.redis.exists(reducer.keys.audits())


def test_without_audits_nobody_gets_a_copy(join: Join) -> None:
    first, second = join("first"), join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and second.lease(str(ZERO)).micro_batches == (2, 3)


def test_neither_the_same_machine_nor_another_kind_gets_a_copy(store: RoundStore, join: Join) -> None:
    first = of_kind(store, "0badc0de0001", device="cpu", threads=1)
    agree(store, **ALL)
    store.redis.hset(store.keys.round(), "count", 2)  # nothing is left that has no holder yet
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and not store.redis.exists(store.keys.audits())
    same, other = of_kind(store, "0badc0de0002", threads=1, device="cpu"), of_kind(store, "other", device="cpu")
    store.redis.rpush(store.keys.free(), 7, 8, 9)
    assert same.lease(str(ZERO)).micro_batches == (7, 8)
    assert other.lease(str(ZERO)).micro_batches == (9,)
    like = of_kind(store, "like", device="cpu", threads=1)
    store.redis.rpush(store.keys.free(), 6)
    granted = like.lease(str(ZERO)).micro_batches
    assert granted[0] == 6 and granted[1:] in ((0,), (1,), (7,), (8,))
    leased = store.redis.hgetall(store.keys.audits())
    assert set(leased) <= {b"0", b"1", b"7", b"8"} and len(leased) == 1  # type: ignore[arg-type]


def test_an_update_that_came_already_is_copied_too_but_not_by_its_own_machine(store: RoundStore, join: Join) -> None:
    quick, slow = join("quick"), join("slow")
    assert send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches) == "accepted"
    agree(store, **ALL)
    store.redis.hset(store.keys.round(), "count", 3)
    assert quick.lease(str(ZERO)).micro_batches == (2,)
    store.redis.rpush(store.keys.free(), 3)
    assert slow.lease(str(ZERO)).micro_batches[0] == 3
    assert [*store.redis.hkeys(store.keys.audits())] in ([b"0"], [b"1"], [b"2"])  # type: ignore[misc]


def test_an_update_that_came_already_is_copied_only_if_it_is_to_be_audited(store: RoundStore, join: Join) -> None:
    quick, slow = join("quick"), join("slow")
    assert send(quick, ZERO, *quick.lease(str(ZERO)).micro_batches) == "accepted"
    for share, copies in ((1e-9, 0), (1, 1)):
        agree(store, audit=share, secret="s")
        store.redis.rpush(store.keys.free(), 3)
        slow.lease(str(ZERO))
        assert store.redis.hlen(store.keys.audits()) == copies


def test_a_copy_is_made_once_unless_its_lease_runs_out(store: RoundStore, join: Join) -> None:
    sessions = [join(worker, **ALL) for worker in "abcd"]
    grants = [session.lease(str(ZERO)).micro_batches for session in sessions]
    assert [grant[0] for grant in grants] == [0, 1, 2, 3]
    copied = [grant[1] for grant in grants]
    assert sorted(copied) == sorted({*copied})
    copy = store.redis.hget(store.keys.audits(), str(copied[0]))
    assert bytes(copy or b"").decode().startswith("session of a|")
    for unit in range(4):
        store.redis.hset(store.keys.audits(), str(unit), f"session of x|{2**52}|0|x")
    store.redis.rpush(store.keys.free(), 8)
    assert sessions[0].lease(str(ZERO)).micro_batches == (8,)
    for unit in range(4):
        store.redis.hset(store.keys.audits(), str(unit), "session of x|1|0|x")
    store.redis.rpush(store.keys.free(), 9)
    assert len(sessions[0].lease(str(ZERO)).micro_batches) == 2


def test_a_copy_that_came_is_not_asked_for_again(store: RoundStore, join: Join) -> None:
    first, _ = both(join)
    assert send(first, ZERO, 0, 1, 2, nonce="first") == "accepted"
    store.redis.hset(store.keys.round(), "first", 100)  # nothing ahead
    third = join("third", **ALL)
    store.redis.rpush(store.keys.free(), 8)
    granted = third.lease(str(ZERO)).micro_batches
    assert granted[0] == 8 and granted[1:] in ((1,), (3,))  # 2 was copied, 0 is being copied


def test_who_has_nothing_to_compute_gets_no_copy_either(store: RoundStore, join: Join) -> None:
    both(join)
    assert join("third", **ALL).lease(str(ZERO)).answer == "wait"


def test_which_units_are_copied_depends_on_the_secret_and_on_the_share(store: RoundStore, join: Join) -> None:
    first, second = join("first"), join("second")
    seen = set()
    for secret in range(40):
        agree(store, audit=0.25, secret=f"secret {secret}")
        store.redis.delete(store.keys.audits(), store.keys.leases(), store.keys.free())
        store.redis.hset(store.keys.round(), "cursor", 0)
        for session in (first, second):
            seen.add((session.worker_id, session.lease(str(ZERO)).micro_batches[2:]))
        copied = store.redis.hkeys(store.keys.audits())
        seen.add(("copies", len(copied)))  # type: ignore[arg-type]
    assert {("first", ()), ("second", ()), ("first", (2,)), ("second", (0,)), ("second", (1,))} <= seen
    assert {("copies", 0), ("copies", 1)} <= seen


def test_a_share_of_all_units_is_copied_in_the_long_run(store: RoundStore, join: Join) -> None:
    session, _ = join("a"), join("b")
    agree(store, audit=0.02, secret="s")
    store.redis.hset(store.keys.round(), mapping={"needed": 4, "total": 5})
    copies = 0
    for number in range(300):
        store.redis.delete(store.keys.audits(), store.keys.leases())
        store.redis.hset(store.keys.round(), "cursor", 1000 * number)
        store.redis.hset(store.keys.round(), "count", 1000 * number + 2 + 35)  # of 35 units ahead
        copies += len(session.lease(str(ZERO)).micro_batches) - 2
    expected = 300 * (1 - 0.98**35)
    assert abs(copies - expected) < 4 * (expected * 0.5) ** 0.5


def test_a_copy_counts_for_nothing(reducer: ReducerSession, join: Join) -> None:
    first, second = both(join)
    assert send(second, ZERO, 0, nonce="copy alone") == "accepted"
    assert parts(reducer) == [] and [*reducer.audits().copies] == [0]
    assert send(second, ZERO, 0, nonce="again") == "lease_lost"
    assert send(first, ZERO, 2, nonce="alone") == "accepted" and parts(reducer) == []
    told = events(reducer, "submission")
    assert [one["counted"] for one in told] == [[], [], []]


def test_a_copy_is_the_session_s_that_holds_its_lease(reducer: ReducerSession, join: Join) -> None:
    both(join)
    third = join("third")
    assert send(third, ZERO, 0, nonce="thief") == "lease_lost"
    assert not reducer.audits().copies


def test_a_copy_that_is_too_large_is_not_kept(reducer: ReducerSession, join: Join) -> None:
    first, _ = both(join)
    agree(reducer, **ALL, limit=100)
    assert send(first, ZERO, 2, blob=bytes(101), nonce="large") == "accepted"
    assert reducer.audits().copies[2].size == 101
    assert not reducer.redis.exists(reducer.keys.copy(str(ZERO), 2))


def test_a_copy_whose_blob_expired_is_none(reducer: ReducerSession, join: Join) -> None:
    _, second = both(join)
    submit_staged(reducer, second, '{"micro_batches":[0]}')
    assert not reducer.audits().copies and parts(reducer) == []


def test_a_lease_on_a_copy_lasts_while_it_is_extended(reducer: ReducerSession, join: Join) -> None:
    first, _ = both(join)
    before = bytes(reducer.redis.hget(reducer.keys.audits(), "2") or b"").split(b"|")[1]
    reducer.redis.hset(
        reducer.keys.audits(), "2", f"{first.session_id}|{int(before) - 3_600_000}|{before.decode()}|first"
    )
    assert first.extend([2]) == "running"
    after = bytes(reducer.redis.hget(reducer.keys.audits(), "2") or b"").split(b"|")[1]
    assert int(after) > int(before) - 3_600_000


def test_who_leaves_hands_its_copies_back(reducer: ReducerSession, join: Join) -> None:
    first, _ = both(join)
    first.leave("gone")
    assert reducer.redis.hkeys(reducer.keys.audits()) == [b"0"]
    assert join("third").lease(str(ZERO)).micro_batches == (0, 1, 2)


@pytest.mark.parametrize(("age_h", "unit_s", "kept"), [(5, 1, True), (7, 1, False), (7, 1000, True), (12, 1000, False)])
def test_a_lease_is_not_extended_for_ever(
    reducer: ReducerSession, join: Join, age_h: int, unit_s: int, kept: bool
) -> None:
    first, _ = both(join)
    know(reducer, first=1000 * unit_s)
    k, since = reducer.keys, int(reducer.now_ms()) - 3_600_000 * age_h
    old = f"{first.session_id}|{since}|{since}|first"
    for key, unit in ((k.leases(), "0"), (k.backups(), "3"), (k.audits(), "2")):
        reducer.redis.hset(key, unit, old)
    assert first.extend([0, 2, 3]) == "running"
    for key, unit in ((k.leases(), "0"), (k.backups(), "3"), (k.audits(), "2")):
        assert (bytes(reducer.redis.hget(key, unit) or b"").decode() != old) == kept


def test_a_commit_forgets_copies_and_disputes(reducer: ReducerSession, join: Join) -> None:
    first, second = both(join)
    assert send(first, ZERO, 0, 1, nonce="first") == "accepted"
    assert send(second, ZERO, 2, 3, 0, nonce="second") == "accepted"
    reducer.redis.hset(reducer.keys.disputes(), "9", "{}")
    assert commit(reducer, ONE)
    k = reducer.keys
    assert not reducer.redis.exists(k.audits(), k.copies(), k.disputes(), k.copy(str(ZERO), 0))


def test_a_commit_deletes_the_copy_of_a_unit_that_it_carries_over(reducer: ReducerSession, join: Join) -> None:
    _, second = both(join)
    assert send(second, ZERO, 2, 3, 0, nonce="second") == "accepted"
    copy = reducer.keys.copy(str(ZERO), 0)
    assert reducer.redis.exists(copy) and reducer.close(ZERO, 2)
    assert commit(reducer, ONE, carried=(0, 1), keep=False)
    assert not reducer.redis.exists(copy)


# Disputes


def disputed(reducer: ReducerSession, join: Join) -> tuple[WorkerSession, WorkerSession]:
    first, second = both(join)
    assert send(first, ZERO, 0, 1, 2, nonce="first") == "accepted"
    assert send(second, ZERO, 2, 3, 0, nonce="second") == "accepted"
    assert reducer.close(ZERO, 4)
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    return first, second


def test_a_disputed_unit_is_a_third_machines(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    first, second = disputed(reducer, join)
    k = reducer.keys
    assert [part.micro_batch for part in parts(reducer)] == [1, 2, 3] and free(reducer) == [b"0"]
    assert not redis.exists(k.update(str(ZERO), 0), k.copy(str(ZERO), 0))
    records = reducer.audits()
    assert [*records.copies] == [2] and [*records.disputes] == [0]
    assert records.disputes[0].parties == {"first": "a", "second": "b"} and not records.disputes[0].copied
    assert redis.xrevrange(k.versions(), count=1)[0][1] == {b"freed": b"1"}  # type: ignore[index]
    third = join("third", **ALL)
    for party in (first, second):
        assert party.lease(str(ZERO)).answer == "wait"
    assert third.lease(str(ZERO)).micro_batches[0] == 0
    assert send(third, ZERO, 0, nonce="third") == "accepted"  # the round is not closed any more


def test_a_disputed_unit_waits_for_a_machine_of_the_parties_kind(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    disputed(reducer, join)
    other = of_kind(reducer, "other", device="other")
    third = join("third")
    assert other.lease(str(ZERO)).answer == "wait" and free(reducer) == [b"0"]
    third.leave("gone")
    assert other.lease(str(ZERO)).micro_batches == (0,)  # nobody can decide any more: the audit is undecided
    other.leave("gone")
    third = join("third", "again")
    assert third.lease(str(ZERO)).micro_batches[0] == 0


def test_a_party_computes_a_disputed_unit_where_nobody_else_is_there(reducer: ReducerSession, join: Join) -> None:
    first, _ = disputed(reducer, join)
    assert first.lease(str(ZERO)).micro_batches[0] == 0


def lease_of(store: RoundStore, unit: int, key: str) -> str:
    return bytes(store.redis.hget(key, str(unit)) or b"").decode().rpartition("|")[2]


def test_a_third_machine_decides_whatever_its_share(reducer: ReducerSession, join: Join) -> None:
    first, second = join("first"), join("second")
    third = join("third", sharers=4, fewest=3)
    same = WorkerSession(reducer.redis, reducer.job_id, "third", "session of third")
    for number, session in enumerate((first, second, third)):
        assert session.lease(str(ZERO)).micro_batches == (number,)
        assert send(session, ZERO, number, nonce=f"own {number}") == "accepted"
    agree(reducer, audit=1e-9, secret="s", sharers=4, fewest=3)
    assert third.lease(str(ZERO)).answer == "wait"
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    assert same.lease(str(ZERO)).micro_batches == (0,)
    assert send(third, ZERO, 0, nonce="decides") == "accepted"
    assert third.lease(str(ZERO)).answer == "wait"  # it has had its own share
    assert first.lease(str(ZERO)).micro_batches == (3,)  # which was taken back
    assert send(first, ZERO, 3, nonce="3") == "accepted"
    assert [(part.micro_batch, part.worker) for part in parts(reducer)] == [
        (0, "third"), (1, "second"), (2, "third"), (3, "first"),
    ]  # fmt: skip


def test_what_a_machine_decides_is_none_of_its_share(reducer: ReducerSession, join: Join) -> None:
    first, second = join("first"), join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and send(first, ZERO, 0, nonce="first") == "accepted"
    third = join("third", **ALL, sharers=4)
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    assert third.lease(str(ZERO)).micro_batches == (0,)
    assert third.lease(str(ZERO)).micro_batches[0] == 2  # while it computes that
    third.release([2])
    assert send(third, ZERO, 0, nonce="third") == "accepted"
    assert third.lease(str(ZERO)).micro_batches[0] == 2  # and afterwards
    assert send(third, ZERO, 2, nonce="own") == "accepted"
    assert third.lease(str(ZERO)).answer == "wait" and second.lease(str(ZERO)).answer == "leased"


@pytest.mark.parametrize("expired", [True, False])
def test_no_party_gets_a_disputed_unit_that_a_third_machine_holds(
    reducer: ReducerSession, join: Join, expired: bool
) -> None:
    first, _ = disputed(reducer, join)
    third = join("third", **ALL)
    assert third.lease(str(ZERO)).micro_batches[0] == 0
    know(reducer, first=10, second=10, third=1000)
    age(reducer, 30_000, runs_out=expired)
    assert first.lease(str(ZERO)).answer == "wait"
    assert lease_of(reducer, 0, reducer.keys.leases()) == "third"
    fourth = join("fourth", **ALL)
    know(reducer, fourth=10)
    assert fourth.lease(str(ZERO)).micro_batches == (0,)
    moved = [(one["micro_batch"], one["from"], one["to"]) for one in events(reducer, "reassigned")]
    assert moved == ([(0, "third", "fourth")] if expired else [])  # else as a backup: `doubled` of the version


def test_a_third_machine_gets_a_disputed_unit_whose_lease_has_run_out_whatever_its_share(
    reducer: ReducerSession, join: Join
) -> None:
    first, second, third, fourth = (join(name) for name in ("first", "second", "third", "fourth"))
    agree(reducer, sharers=4)
    for number, session in enumerate((first, second, third, fourth)):
        assert session.lease(str(ZERO)).micro_batches == (number,)
        assert send(session, ZERO, number, nonce=f"own {number}") == "accepted"
    agree(reducer, audit=1e-9, secret="s", sharers=4)
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    assert third.lease(str(ZERO)).micro_batches == (0,) and fourth.lease(str(ZERO)).answer == "wait"
    age(reducer, 30_000)
    assert fourth.lease(str(ZERO)).micro_batches == (0,)


def test_a_unit_that_a_machine_decides_takes_no_room_from_what_it_sends_with_it(
    reducer: ReducerSession, join: Join
) -> None:
    first = join("first")
    join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and send(first, ZERO, 0, nonce="first") == "accepted"
    third = join("third", **ALL, sharers=4)
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    assert third.lease(str(ZERO)).micro_batches == (0,) and third.lease(str(ZERO)).micro_batches[0] == 2
    assert send(third, ZERO, 0, 2, nonce="both") == "accepted"
    assert [(part.micro_batch, part.worker) for part in parts(reducer)] == [(0, "third"), (2, "third")]


def patience_ends(store: RoundStore, unit: int) -> None:
    about = json.loads(store.redis.hget(store.keys.disputes(), str(unit)) or b"")
    store.redis.hset(store.keys.disputes(), str(unit), json.dumps(about | {"ends": 1}))


def test_a_party_gets_a_disputed_unit_once_a_third_machine_has_had_time(reducer: ReducerSession, join: Join) -> None:
    first, _ = disputed(reducer, join)
    join("third", **ALL)  # and asks for nothing
    assert first.lease(str(ZERO)).answer == "wait"
    patience_ends(reducer, 0)
    assert first.lease(str(ZERO)).micro_batches[0] == 0


@pytest.mark.parametrize(("unit_ms", "patience_s"), [((1,), 60), ((1, 9_000, 20_000), 72), ((5_000,), 60)])
def test_a_third_machine_has_as_long_as_eight_units_take(
    reducer: ReducerSession, join: Join, unit_ms: tuple[float, ...], patience_s: int
) -> None:
    first, _ = both(join)
    assert send(first, ZERO, 0, nonce="first") == "accepted"
    reducer.redis.delete(reducer.keys.speeds())
    know(reducer, **{f"w{number}": each for number, each in enumerate(unit_ms)})
    assert reducer.dispute(ZERO, parts(reducer)[0], {"first": "a", "second": "b"})
    left_s = reducer.audits().disputes[0].left_ms / 1000
    assert patience_s - 5 < left_s <= patience_s


# Suspicions


def suspected(reducer: ReducerSession, join: Join, share: float = 1e-9) -> tuple[WorkerSession, WorkerSession]:
    """A complete round of two machines, of which the first one's unit 0 is suspected."""
    first, second = join("first"), join("second", audit=share, secret="s")
    for session in (first, second):
        units = session.lease(str(ZERO)).micro_batches
        assert send(session, ZERO, *units, nonce=session.worker_id) == "accepted"
    assert second.lease(str(ZERO)).answer == "wait"
    assert reducer.suspect(ZERO, parts(reducer)[0], "digest")
    return first, second


def test_a_suspected_unit_is_computed_again_though_the_round_is_complete(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    first, second = suspected(reducer, join)
    assert redis.xrevrange(reducer.keys.versions(), count=1)[0][1] == {b"freed": b"1"}  # type: ignore[index]
    agree(reducer, audit=1e-9, secret="s", fewest=9)
    assert first.lease(str(ZERO)).answer == "wait"
    grant = second.lease(str(ZERO))
    assert grant.token == str(ZERO) and grant.micro_batches == (0,)
    assert second.extend([0]) == "running"
    assert join("third").lease(str(ZERO)).answer == "wait"  # one copy is enough
    assert send(second, ZERO, 0, nonce="copy") == "accepted"
    records = reducer.audits()
    assert next((part.micro_batch, part.worker) for part in parts(reducer)) == (0, "first")
    assert records.copies[0].worker == "second" and records.disputes[0].parties == {"first": "digest"}
    assert join("third", "again").lease(str(ZERO)).answer == "wait"


def test_a_suspected_unit_is_of_its_machines_share_as_long_as_it_counts(reducer: ReducerSession, join: Join) -> None:
    first, _ = join("first"), join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and send(first, ZERO, 0, nonce="first") == "accepted"
    agree(reducer, audit=1e-9, secret="s", sharers=4)
    assert reducer.suspect(ZERO, parts(reducer)[0], "digest")
    assert send(first, ZERO, 1, nonce="second") == "lease_lost"
    first.release([1])
    assert first.lease(str(ZERO)).answer == "wait"


def test_only_another_machine_of_the_kind_copies_a_suspected_unit(reducer: ReducerSession, join: Join) -> None:
    suspected(reducer, join)
    reducer.redis.hdel(reducer.keys.sessions(), "second")
    other = of_kind(reducer, "other", device="other")
    assert other.lease(str(ZERO)).answer == "wait"
    assert join("first-again").lease(str(ZERO)).answer == "leased"


def test_workers_of_one_machine_copy_none_of_its_suspected_units(reducer: ReducerSession, join: Join) -> None:
    session = join("0badc0de0001", audit=1e-9, secret="s")
    assert send(session, ZERO, *session.lease(str(ZERO)).micro_batches) == "accepted"
    assert reducer.suspect(ZERO, parts(reducer)[0], "digest")
    assert join("0badc0de0002").lease(str(ZERO)).answer == "wait"
    assert join("0badc0df0003").lease(str(ZERO)).micro_batches == (0,)


def test_a_copy_of_a_suspected_unit_is_made_again_if_its_lease_runs_out(reducer: ReducerSession, join: Join) -> None:
    _, second = suspected(reducer, join)
    third = join("third")
    assert second.lease(str(ZERO)).micro_batches == (0,) and third.lease(str(ZERO)).answer == "wait"
    reducer.redis.hset(reducer.keys.audits(), "0", "session of second|1|0|second")
    assert third.lease(str(ZERO)).micro_batches == (0,)


def test_a_suspected_unit_that_was_taken_back_is_no_copy(reducer: ReducerSession, join: Join) -> None:
    _, second = suspected(reducer, join)
    assert reducer.refuse(ZERO, parts(reducer)[0], "reason", "damaged") != GONE
    assert second.lease(str(ZERO)).micro_batches == (0,)
    assert lease_of(reducer, 0, reducer.keys.leases()) == "second" and not reducer.redis.exists(reducer.keys.audits())


def test_a_suspected_unit_that_was_taken_back_is_of_the_share_of_who_gets_it(
    reducer: ReducerSession, join: Join
) -> None:
    first, second = join("first"), join("second")
    assert first.lease(str(ZERO)).micro_batches == (0, 1) and second.lease(str(ZERO)).micro_batches == (2, 3)
    assert send(first, ZERO, 0, 1) == "accepted" and send(second, ZERO, 2, 3, nonce="second") == "accepted"
    agree(reducer, audit=1e-9, secret="s", sharers=2)
    assert reducer.suspect(ZERO, parts(reducer)[0], "digest")
    assert reducer.refuse(ZERO, parts(reducer)[0], "reason", "damaged") != GONE
    assert second.lease(str(ZERO)).answer == "wait"


def test_a_unit_that_two_machines_agree_on_is_settled(reducer: ReducerSession, join: Join) -> None:
    _, second = suspected(reducer, join)
    assert send(second, ZERO, *second.lease(str(ZERO)).micro_batches, nonce="copy") == "accepted"
    assert reducer.close_audit(ZERO, parts(reducer)[0], "agreed")
    records = reducer.audits()
    assert records.disputes[0].is_settled and not records.copies
    assert not reducer.redis.exists(reducer.keys.copy(str(ZERO), 0))
    assert join("third").lease(str(ZERO)).answer == "wait"


@pytest.mark.parametrize(("outcome", "left"), [("over", []), ("agreed", [(0, False)]), ("open", [(0, True)])])
def test_an_audit_is_closed_by_the_newest_reducer_on_the_version_it_has(
    redis: Redis, reducer: ReducerSession, join: Join, outcome: DisputeOutcome, left: list[tuple[int, bool]]
) -> None:
    _, second = suspected(reducer, join)
    assert send(second, ZERO, *second.lease(str(ZERO)).micro_batches, nonce="copy") == "accepted"
    part, k = parts(reducer)[0], reducer.keys
    assert not reducer.close_audit(ONE, part, outcome)
    newer = ReducerSession(redis, reducer.job_id, "newer")
    assert reducer.renew(0) and newer.claim("host", 2, 60_000)
    assert not reducer.close_audit(ZERO, part, outcome)
    records = reducer.audits()
    assert [*records.copies] == [0] and records.disputes[0].copied and redis.exists(k.copy(str(ZERO), 0))
    assert newer.close_audit(ZERO, part, outcome)
    records = reducer.audits()
    assert not records.copies and not redis.exists(k.copy(str(ZERO), 0))
    assert [(unit, dispute.copied) for unit, dispute in records.disputes.items()] == left
    assert (second.lease(str(ZERO)).micro_batches == (0,)) == (outcome == "open")  # it makes another copy


def test_a_unit_is_suspected_by_the_newest_reducer_on_the_version_it_has(reducer: ReducerSession, join: Join) -> None:
    first, _ = both(join)
    assert send(first, ZERO, 0, nonce="first") == "accepted"
    assert not reducer.suspect(ONE, parts(reducer)[0], "digest") and not reducer.audits().disputes


def test_a_unit_is_disputed_by_the_newest_reducer_on_the_version_it_has(reducer: ReducerSession, join: Join) -> None:
    first, _ = both(join)
    assert send(first, ZERO, 0, nonce="first") == "accepted"
    part = parts(reducer)[0]
    assert not reducer.dispute(ONE, part, {})
    assert reducer.refuse(ZERO, part, "reason", "lost") != GONE
    age(reducer, 3_600_000)
    again = join("again")
    assert 0 in again.lease(str(ZERO)).micro_batches and send(again, ZERO, 0, nonce="another") == "accepted"
    assert not reducer.dispute(ZERO, part, {})
    assert reducer.renew(0) and ReducerSession(reducer.redis, reducer.job_id, "other").claim("host", 2, 60_000)
    assert not reducer.dispute(ZERO, parts(reducer)[0], {})
    assert [part.micro_batch for part in parts(reducer)] == [0]


def test_a_worker_is_banned_at_once(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    first, second = both(join)
    assert not reducer.ban(TWO, "first", "why")
    assert reducer.ban(ZERO, "first", "why") and not reducer.ban(ZERO, "first", "why")
    assert redis.hgetall(reducer.keys.banned()) == {b"first": b"why"}
    assert redis.hgetall(reducer.keys.strikes()) == {b"first": b"5"}
    assert [*redis.hkeys(reducer.keys.sessions())] == [b"second"] and free(reducer) == [b"0", b"1"]  # type: ignore[misc]
    banned = {"worker": "first", "session": first.session_id, "strikes": 5, "reason": "why"}
    assert events(reducer, "banned") == [banned]
    assert json.loads(json.dumps(banned)) == banned and second.lease(str(ZERO)).answer == "leased"
    assert reducer.ban(ZERO, "gone", "no session any more")
    other = ReducerSession(redis, reducer.job_id, "other")
    assert reducer.renew(0) and other.claim("host", 2, 60_000)
    assert not reducer.ban(ZERO, "second", "why")


@pytest.mark.parametrize("kind", [None, "cpu", [1], {"threads": [1, {"a": 2}]}])
def test_a_kind_of_any_form_is_told_apart(store: RoundStore, reducer: ReducerSession, kind: Any) -> None:
    session = WorkerSession(store.redis, store.job_id, "odd", "s")
    assert take_seat(session, about={"kind": kind} if kind is not None else {}) == "running"
    assert len(reducer.audits().kinds["odd"]) == 40


def test_a_worker_keeps_its_kind_in_a_job_with_audits(store: RoundStore, reducer: ReducerSession) -> None:
    of_kind(store, "a", device="cpu")
    before = reducer.audits().kinds["a"]
    of_kind(store, "a", device="cuda")
    after = reducer.audits().kinds["a"]
    assert after != before
    agree(store, **ALL)
    session = WorkerSession(store.redis, store.job_id, "a", "altered")
    assert take_seat(session, about={"kind": {"device": "cpu"}}) == "altered"
    assert store.redis.hget(store.keys.sessions(), "a") == b"session of a"
    session.leave("x"), of_kind(store, "a", device="cuda").leave("gone")
    assert take_seat(session, about={"kind": {"device": "cpu"}}) == "altered"
    records = reducer.audits()
    assert records.kinds["a"] == after and records.present == frozenset()
    of_kind(store, "a", device="cuda")
    assert reducer.audits().present == {"a"}
