"""Rounds whose units were made for their workers, against a real server."""

from dataclasses import replace

import pytest
from redis import Redis

from computeshare.jobspec.sampling_plan import Plan
from computeshare.protocol.reducer_session import Claim
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Member
from tests.support.rounds import ONE, TWO, ZERO, Join, age, current, events, know, late, opened, parts, send

PLAN = Plan(seed=0, samples=1000, micro_batch=10, micro_batches_per_round=40, inner_steps=10)
"""Rounds of four units of ten micro-batches."""
SIZES = (19, 16, 3, 2)


@pytest.fixture
def claim(redis: Redis, store: RoundStore) -> Claim:
    return opened(redis, store, PLAN.round(0))


@pytest.fixture
def members(claim: Claim, join: Join) -> dict[str, Member]:
    """Four workers, two quick and two slow ones, and the round of version 1, made for them."""
    members = {name: join(name, backup=False) for name in ("quick", "brisk", "slow", "slowest")}
    grants = {name: member.lease(str(ZERO)) for name, member in members.items()}
    for name, grant in grants.items():
        assert grant.sizes == () and send(members[name], ZERO, *grant.micro_batches, nonce=name) == "accepted"
    following = replace(PLAN.round(1), sizes=SIZES, owners=tuple(members))
    base, counted = current(claim), parts(claim)
    assert claim.commit(base, counted, ONE, [b"weights"], following, {"version": 1})
    claim.store_state(base.token, [(part.base, part.micro_batch) for part in counted], ONE, [b"state"])
    return members


def lease(member: Member) -> tuple[int, ...]:
    grant = member.lease(str(ONE))
    assert grant.sizes == (SIZES if grant.micro_batches else ())
    return grant.micro_batches


def test_each_gets_the_unit_that_was_made_for_it_whoever_asks_first(claim: Claim, members: dict[str, Member]) -> None:
    assert current(claim).sizes == SIZES
    assert [lease(members[name]) for name in ("slowest", "brisk", "quick", "slow")] == [(7,), (5,), (4,), (6,)]


def test_a_unit_goes_to_its_worker_however_slow_that_is(store: RoundStore, members: dict[str, Member]) -> None:
    know(store, quick=100, brisk=100, slow=100, slowest=100_000)
    assert lease(members["slowest"]) == (7,)


def test_what_was_leased_and_when_is_known_of_every_update(claim: Claim, members: dict[str, Member]) -> None:
    lease(members["slow"])
    age(claim, 3000)
    assert send(members["slow"], ONE, 6, nonce="slow 1") == "accepted"
    (part,) = parts(claim)
    assert 3000 <= part.at - part.leased < 10_000
    assert [one["sizes"] for one in events(claim, "submission")] == [[]] * 4 + [list(SIZES)]


def test_a_unit_of_one_who_has_not_come_yet_waits_for_it(members: dict[str, Member], join: Join) -> None:
    newcomer = join("newcomer", backup=False)
    grant = newcomer.lease(str(ONE))
    assert (grant.answer, grant.micro_batches) == ("wait", ()) and grant.ask_again_ms <= 250
    assert lease(members["quick"]) == (4,)


def test_a_unit_whose_worker_is_gone_goes_to_another(members: dict[str, Member], join: Join) -> None:
    members["quick"].leave("asleep")
    assert lease(join("newcomer", backup=False)) == (4,)


def test_a_unit_that_is_handed_back_goes_to_another(members: dict[str, Member], join: Join) -> None:
    assert lease(members["quick"]) == (4,)
    members["quick"].leave("asleep")
    assert lease(members["slow"]) == (6, 4)


def test_one_that_is_late_does_not_hold_the_round_up(store: RoundStore, members: dict[str, Member], join: Join) -> None:
    late(store)
    assert lease(join("newcomer", backup=False)) == (4,)


@pytest.mark.parametrize("done", [False, True], ids=["under way", "done"])
def test_what_one_worker_has_not_begun_once_it_has_another_is_given_away(
    claim: Claim, members: dict[str, Member], join: Join, done: bool
) -> None:
    for name, member in members.items():
        assert send(member, ONE, *lease(member), nonce=f"{name} 1") == "accepted"
    following = replace(PLAN.round(2), sizes=SIZES, owners=("quick", "quick", "quick", "slow"))
    assert claim.commit(current(claim), parts(claim), TWO, [b"weights"], following, {"version": 2})
    newcomer = join("newcomer", backup=False)
    assert newcomer.lease(str(TWO)).answer == "wait"
    assert members["quick"].lease(str(TWO)).micro_batches == (8,)
    assert not done or send(members["quick"], TWO, 8, nonce="quick 2") == "accepted"
    assert newcomer.lease(str(TWO)).micro_batches == (9,)


def test_the_step_to_a_version_can_be_repeated_with_the_sizes_of_its_round(
    claim: Claim, members: dict[str, Member]
) -> None:
    state = current(claim)
    assert claim.counted(state) == ([(str(ZERO), unit) for unit in range(4)], ())
    for name, member in members.items():
        assert send(member, ONE, *lease(member), nonce=f"{name} 1") == "accepted"
    assert claim.commit(state, parts(claim), TWO, [b"weights"], PLAN.round(2), {"version": 2})
    assert claim.counted(current(claim)) == ([(str(ONE), unit) for unit in range(4, 8)], SIZES)
    assert current(claim).sizes == ()
