"""Small weights that come with the news of their version, and a lease on it: one exchange from submission to work."""

from typing import Any

import pytest
from opening import ONE, PLAN, TWO, ZERO, Join, commit, current, fill, of, parts, send
from redis import Redis

from computeshare.rounds import Claim, Link, Member, Published, Waiting

WHOLE = Published(1)
DELTAS = Published(1, deltas=True)
SOON = Waiting(20, WHOLE)
LATER = Waiting(10_000, WHOLE)


def link(join: Join, claim: Claim) -> None:
    """Make and commit the next version, as a difference."""
    fill(join, claim)
    following = PLAN.round(1)
    assert claim.commit(current(claim), parts(claim), ONE, [b"to 1"], following, {"version": 1}, link=Link())


def blocked(redis: Redis) -> list[Any]:
    """Connections that wait for news."""
    clients: Any = redis.client_list()
    return [client for client in clients if client["cmd"] == "xread" and "b" in client["flags"]]


def begun(claim: Claim, member: Member, waiting: Waiting = LATER) -> None:
    """Submit the whole round and begin to wait for what comes of it."""
    numbers = member.lease(str(ZERO)).micro_batches
    updates = [(m, [b"update"], 0.5) for m in numbers]
    receipt = member.submit(str(ZERO), "nonce", updates, {}, and_wait=waiting)
    assert (receipt.outcome, receipt.grant) == ("accepted", None)
    assert len(parts(claim)) == len(numbers) == 4


def test_another_versions_weights_come_with_a_lease_on_it(claim: Claim, join: Join) -> None:
    member = join("a")
    fill(join, claim)
    assert commit(claim, ONE)
    grant = member.lease(str(ZERO), WHOLE)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"weights",))
    assert grant.micro_batches == (4, 5)
    again = member.lease(str(ONE), WHOLE)
    assert (again.token, again.weights) == (str(ONE), ())  # they are at hand


def test_a_newcomer_gets_the_weights_at_once(join: Join) -> None:
    grant = join("a").lease("", WHOLE)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ZERO), (b"weights 0",))


def test_weights_come_even_if_there_is_nothing_to_lease(claim: Claim, join: Join) -> None:
    fill(join, claim)
    grant = join("late").lease("", WHOLE)
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ZERO), (b"weights 0",))
    alone = join("alone", fewest=9).lease("", WHOLE)
    assert (alone.answer, alone.weights) == ("wait", (b"weights 0",))


@pytest.mark.parametrize("published", [None, Published(0), Published(2), DELTAS])
def test_nothing_is_leased_without_the_weights(claim: Claim, join: Join, published: Published | None) -> None:
    grant = join("a").lease("", published)
    assert (grant.answer, grant.token, grant.weights, grant.micro_batches) == ("stale", str(ZERO), (), ())
    assert not claim.redis.exists(claim.keys.leases())


def test_a_difference_comes_to_those_who_have_what_it_is_to_be_added_to(claim: Claim, join: Join) -> None:
    link(join, claim)
    member = join("a")
    assert member.lease("", DELTAS).answer == "stale"
    grant = member.lease(str(ZERO), DELTAS)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"to 1",))


def test_waiting_ends_with_the_next_version_its_weights_and_a_lease(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    assert len(blocked(claim.redis)) == 1  # before anything more is asked of it
    assert commit(claim, ONE)
    grant = member.waited()
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"weights",))
    assert member.wait_for(str(ONE), SOON).token == str(ONE)


def test_waiting_goes_on_where_the_broker_ended_the_connection(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    (one,) = blocked(claim.redis)
    assert claim.redis.client_kill_filter(_id=one["id"]) == 1
    assert commit(claim, ONE)
    assert member.waited().weights == (b"weights",)


def test_waiting_goes_on_where_the_broker_forgot_the_scripts(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    claim.redis.script_flush()
    assert commit(claim, ONE)
    assert member.waited().weights == (b"weights",)


def test_waiting_has_an_end(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member, SOON)
    grant = member.waited()
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ZERO), ())
    assert member.wait_for(str(ZERO), SOON).answer == "wait"


def test_who_begins_to_wait_may_do_something_else_instead(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    assert member.lease(str(ZERO)).answer == "wait"
    assert blocked(claim.redis) == []
    assert commit(claim, ONE)
    assert member.wait_for(str(ZERO), LATER).weights == (b"weights",)


def test_work_that_is_freed_ends_the_waiting(claim: Claim, join: Join) -> None:
    leaver, member = join("leaver"), join("a")
    assert leaver.lease(str(ZERO)).micro_batches == (0, 1)
    updates = [(m, [b"update"], 0.5) for m in member.lease(str(ZERO)).micro_batches]
    member.submit(str(ZERO), "nonce", updates, {}, and_wait=LATER)
    leaver.leave("asked to")
    grant = member.waited()
    assert (grant.token, grant.weights, grant.micro_batches) == (str(ZERO), (), (0, 1))


def test_a_wait_that_another_version_overtook_is_over_at_once(claim: Claim, join: Join) -> None:
    member = join("a")
    fill(join, claim)
    assert commit(claim, ONE)
    assert send(member, ONE, *member.lease(str(ONE)).micro_batches, nonce="more") == "accepted"
    fill(join, claim, "another")
    assert commit(claim, TWO)
    assert member.wait_for(str(ZERO), LATER).token == str(TWO)
    assert claim.updates(of(ONE), range(1)) == [None] * 4
