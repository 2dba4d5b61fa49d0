"""Small weights that come with the news of their version, and a lease on it: one exchange from submission to work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from computeshare.protocol.reducer_session import Claim, Link
from computeshare.protocol.worker_session import Grant, Member, Waiting
from computeshare.transport.connections import BLOCK_MS
from computeshare.types import Token
from tests.support.rounds import ONE, PLAN, TWO, ZERO, Join, current, fill, know, parts, send

SOON = Waiting(20, 1)
LATER = Waiting(10_000, 1)


def publish(claim: Claim, token: Token = ONE, news: bool = True, link: Link | None = None) -> None:
    """Commit the next version, of what the round has received."""
    base, counted, weights = current(claim), parts(claim), f"news of {token.version}".encode()
    event = {"version": token.version}
    assert claim.commit(base, counted, token, [weights], PLAN.round(token.version), event, link, news)
    claim.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])


def make(join: Join, claim: Claim, token: Token = ONE, news: bool = True, link: Link | None = None) -> None:
    """A whole round, and the version that comes of it."""
    fill(join, claim)
    publish(claim, token, news, link)


def blocked(redis: Redis) -> list[Any]:
    """Connections that wait for news."""
    clients: Any = redis.client_list()
    return [client for client in clients if client["cmd"] == "xread" and "b" in client["flags"]]


@contextmanager
def woken() -> Iterator[None]:
    """What happens in the block is not the end of the longest wait there is."""
    started = time.monotonic()
    yield
    assert time.monotonic() - started < BLOCK_MS / 2000


def begun(claim: Claim, member: Member, waiting: Waiting = LATER) -> None:
    """Submit the whole round and begin to wait for what comes of it."""
    numbers = member.lease(str(ZERO)).micro_batches
    updates = [(m, [b"update"], 0.5) for m in numbers]
    receipt = member.submit(str(ZERO), "nonce", updates, {}, and_wait=waiting)
    assert (receipt.outcome, receipt.grant) == ("accepted", None)
    assert len(parts(claim)) == len(numbers) == 4


def test_the_next_versions_weights_come_with_a_lease_on_it(claim: Claim, join: Join) -> None:
    member = join("a")
    make(join, claim)
    grant = member.wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))
    assert grant.micro_batches[:2] == (4, 5)
    again = member.wait_for(str(ONE), SOON)
    assert (again.token, again.weights) == (str(ONE), ())  # they are at hand


def test_weights_come_even_if_there_is_nothing_to_lease(claim: Claim, join: Join) -> None:
    make(join, claim)
    quick = join("quick")
    know(claim, quick=100_000, filler=100_000)
    while quick.lease(str(ONE)).micro_batches:
        pass
    grant = join("late").wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ONE), (b"news of 1",))
    alone = join("alone", fewest=9).wait_for(str(ZERO), SOON)
    assert (alone.answer, alone.weights) == ("wait", (b"news of 1",))


def test_nothing_is_leased_without_the_weights(claim: Claim, join: Join) -> None:
    make(join, claim, news=False)
    member = join("a")
    assert member.wait_for(str(ZERO), SOON) == Grant("stale", str(ONE), 0, ())
    assert member.lease(str(ZERO)) == Grant("stale", str(ONE), 0, ())
    assert not claim.redis.exists(claim.keys.leases())


def test_a_lease_alone_is_on_the_version_that_is_named(claim: Claim, join: Join) -> None:
    make(join, claim)
    assert join("a").lease(str(ZERO)).answer == "stale"


def test_news_are_for_those_who_have_the_version_before(claim: Claim, join: Join) -> None:
    make(join, claim)
    assert join("a").wait_for("", SOON).answer == "stale"
    make(join, claim, TWO)
    assert join("b").wait_for(str(ZERO), SOON).answer == "stale"
    claim.redis.hset(claim.keys.news(str(ZERO)), "0", "left behind")
    assert join("b").wait_for(str(ZERO), SOON).answer == "stale"
    assert join("c").wait_for(str(ONE), SOON).weights == (b"news of 2",)


def test_news_are_kept_until_the_next(claim: Claim, join: Join) -> None:
    make(join, claim)
    news = claim.keys.news
    assert claim.redis.hgetall(news(str(ZERO))) == {b"0": b"news of 1"} and claim.redis.ttl(news(str(ZERO))) == -1
    assert claim.load(claim.keys.weights(str(ONE))) == [b"news of 1"]  # for those who come later
    make(join, claim, TWO)
    assert claim.redis.keys(news("*")) == [news(str(ONE)).encode()]
    state = current(claim)
    assert claim.discard(state)
    assert claim.redis.keys(news("*")) == []


def test_differences_are_news_too(claim: Claim, join: Join) -> None:
    make(join, claim, link=Link())
    grant = join("a").wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))


def test_waiting_ends_with_the_next_version_its_weights_and_a_lease(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    assert len(blocked(claim.redis)) == 1  # before anything more is asked of it
    publish(claim)
    with woken():
        grant = member.waited(str(ZERO))
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))
    assert member.wait_for(str(ONE), SOON).token == str(ONE)


def test_waiting_goes_on_where_the_broker_ended_the_connection(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    (one,) = blocked(claim.redis)
    assert claim.redis.client_kill_filter(_id=one["id"]) == 1
    publish(claim)
    with woken():
        assert member.waited(str(ZERO)).weights == (b"news of 1",)


def test_waiting_goes_on_where_the_broker_forgot_the_scripts(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    claim.redis.script_flush()
    publish(claim)
    with woken():
        assert member.waited(str(ZERO)).weights == (b"news of 1",)


def test_waiting_has_an_end(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member, SOON)
    grant = member.waited(str(ZERO))
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ZERO), ())
    assert member.wait_for(str(ZERO), SOON).answer == "wait"


def test_who_begins_to_wait_may_do_something_else_instead(claim: Claim, join: Join) -> None:
    member = join("a")
    begun(claim, member)
    assert member.lease(str(ZERO)).answer == "wait"
    assert blocked(claim.redis) == []
    publish(claim)
    with woken():
        assert member.wait_for(str(ZERO), LATER).weights == (b"news of 1",)


def test_work_that_is_freed_ends_the_waiting(claim: Claim, join: Join) -> None:
    leaver, member = join("leaver"), join("a")
    assert leaver.lease(str(ZERO)).micro_batches == (0, 1)
    updates = [(m, [b"update"], 0.5) for m in member.lease(str(ZERO)).micro_batches]
    member.submit(str(ZERO), "nonce", updates, {}, and_wait=LATER)
    leaver.leave("asked to")
    with woken():
        grant = member.waited(str(ZERO))
    assert (grant.token, grant.weights, grant.micro_batches) == (str(ZERO), (), (0, 1))


def test_waiting_is_over_at_once_where_more_than_one_version_came(claim: Claim, join: Join) -> None:
    member = join("a")
    for token in (ONE, TWO):
        base = current(claim).token
        assert send(member, base, *member.lease(str(base)).micro_batches, nonce=f"{base}") == "accepted"
        publish(claim, token)
    with woken():
        assert member.wait_for(str(ZERO), LATER) == Grant("stale", str(TWO), 0, ())


def test_news_that_were_left_behind_are_written_over(claim: Claim, join: Join) -> None:
    claim.redis.hset(claim.keys.news(str(ZERO)), mapping={"0": "left behind", "1": "too"})
    member = join("a")
    assert member.wait_for(str(ZERO), SOON).weights == ()
    member.leave("done")
    make(join, claim)
    assert claim.redis.hgetall(claim.keys.news(str(ZERO))) == {b"0": b"news of 1"}
