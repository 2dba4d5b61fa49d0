"""Small weights that come with the news of their version, and a lease on it: one exchange from submission to work."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import Redis

from computeshare.protocol.reducer_session import Link, ReducerSession
from computeshare.protocol.worker_session import Grant, Waiting, WorkerSession
from computeshare.transport.connections import BLOCK_MS
from computeshare.types import Token
from tests.support.rounds import ONE, PLAN, TWO, ZERO, Join, current, fill, know, parts, send

SOON = Waiting(20, 1)
LATER = Waiting(10_000, 1)


def publish(reducer: ReducerSession, token: Token = ONE, news: bool = True, link: Link | None = None) -> None:
    """Commit the next version, of what the round has received."""
    base, counted, weights = current(reducer), parts(reducer), f"news of {token.version}".encode()
    event = {"version": token.version}
    assert reducer.commit(base, counted, token, [weights], PLAN.round(token.version), event, link, news)
    reducer.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])


def make(join: Join, reducer: ReducerSession, token: Token = ONE, news: bool = True, link: Link | None = None) -> None:
    """A whole round, and the version that comes of it."""
    fill(join, reducer)
    publish(reducer, token, news, link)


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


def begun(reducer: ReducerSession, session: WorkerSession, waiting: Waiting = LATER) -> None:
    """Submit the whole round and begin to wait for what comes of it."""
    numbers = session.lease(str(ZERO)).micro_batches
    updates = [(m, [b"update"], 0.5) for m in numbers]
    receipt = session.submit(str(ZERO), "nonce", updates, {}, and_wait=waiting)
    assert (receipt.outcome, receipt.grant) == ("accepted", None)
    assert len(parts(reducer)) == len(numbers) == 4


def test_the_next_versions_weights_come_with_a_lease_on_it(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    make(join, reducer)
    grant = session.wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))
    assert grant.micro_batches[:2] == (4, 5)
    again = session.wait_for(str(ONE), SOON)
    assert (again.token, again.weights) == (str(ONE), ())  # they are at hand


def test_weights_come_even_if_there_is_nothing_to_lease(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer)
    quick = join("quick")
    know(reducer, quick=100_000, filler=100_000)
    while quick.lease(str(ONE)).micro_batches:
        pass
    grant = join("late").wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ONE), (b"news of 1",))
    alone = join("alone", fewest=9).wait_for(str(ZERO), SOON)
    assert (alone.answer, alone.weights) == ("wait", (b"news of 1",))


def test_nothing_is_leased_without_the_weights(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer, news=False)
    session = join("a")
    assert session.wait_for(str(ZERO), SOON) == Grant("stale", str(ONE), 0, ())
    assert session.lease(str(ZERO)) == Grant("stale", str(ONE), 0, ())
    assert not reducer.redis.exists(reducer.keys.leases())


def test_a_lease_alone_is_on_the_version_that_is_named(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer)
    assert join("a").lease(str(ZERO)).answer == "stale"


def test_news_are_for_those_who_have_the_version_before(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer)
    assert join("a").wait_for("", SOON).answer == "stale"
    make(join, reducer, TWO)
    assert join("b").wait_for(str(ZERO), SOON).answer == "stale"
    reducer.redis.hset(reducer.keys.news(str(ZERO)), "0", "left behind")
    assert join("b").wait_for(str(ZERO), SOON).answer == "stale"
    assert join("c").wait_for(str(ONE), SOON).weights == (b"news of 2",)


def test_news_are_kept_until_the_next(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer)
    news = reducer.keys.news
    assert reducer.redis.hgetall(news(str(ZERO))) == {b"0": b"news of 1"} and reducer.redis.ttl(news(str(ZERO))) == -1
    assert reducer.load(reducer.keys.weights(str(ONE))) == [b"news of 1"]  # for those who come later
    make(join, reducer, TWO)
    assert reducer.redis.keys(news("*")) == [news(str(ONE)).encode()]
    state = current(reducer)
    assert reducer.discard(state)
    assert reducer.redis.keys(news("*")) == []


def test_differences_are_news_too(reducer: ReducerSession, join: Join) -> None:
    make(join, reducer, link=Link())
    grant = join("a").wait_for(str(ZERO), SOON)
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))


def test_waiting_ends_with_the_next_version_its_weights_and_a_lease(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    begun(reducer, session)
    assert len(blocked(reducer.redis)) == 1  # before anything more is asked of it
    publish(reducer)
    with woken():
        grant = session.waited(str(ZERO))
    assert (grant.answer, grant.token, grant.weights) == ("leased", str(ONE), (b"news of 1",))
    assert session.wait_for(str(ONE), SOON).token == str(ONE)


def test_waiting_goes_on_where_the_broker_ended_the_connection(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    begun(reducer, session)
    (one,) = blocked(reducer.redis)
    assert reducer.redis.client_kill_filter(_id=one["id"]) == 1
    publish(reducer)
    with woken():
        assert session.waited(str(ZERO)).weights == (b"news of 1",)


def test_waiting_goes_on_where_the_broker_forgot_the_scripts(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    begun(reducer, session)
    reducer.redis.script_flush()
    publish(reducer)
    with woken():
        assert session.waited(str(ZERO)).weights == (b"news of 1",)


def test_waiting_has_an_end(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    begun(reducer, session, SOON)
    grant = session.waited(str(ZERO))
    assert (grant.answer, grant.token, grant.weights) == ("wait", str(ZERO), ())
    assert session.wait_for(str(ZERO), SOON).answer == "wait"


def test_who_begins_to_wait_may_do_something_else_instead(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    begun(reducer, session)
    assert session.lease(str(ZERO)).answer == "wait"
    assert blocked(reducer.redis) == []
    publish(reducer)
    with woken():
        assert session.wait_for(str(ZERO), LATER).weights == (b"news of 1",)


def test_work_that_is_freed_ends_the_waiting(reducer: ReducerSession, join: Join) -> None:
    leaver, session = join("leaver"), join("a")
    assert leaver.lease(str(ZERO)).micro_batches == (0, 1)
    updates = [(m, [b"update"], 0.5) for m in session.lease(str(ZERO)).micro_batches]
    session.submit(str(ZERO), "nonce", updates, {}, and_wait=LATER)
    leaver.leave("asked to")
    with woken():
        grant = session.waited(str(ZERO))
    assert (grant.token, grant.weights, grant.micro_batches) == (str(ZERO), (), (0, 1))


def test_waiting_is_over_at_once_where_more_than_one_version_came(reducer: ReducerSession, join: Join) -> None:
    session = join("a")
    for token in (ONE, TWO):
        base = current(reducer).token
        assert send(session, base, *session.lease(str(base)).micro_batches, nonce=f"{base}") == "accepted"
        publish(reducer, token)
    with woken():
        assert session.wait_for(str(ZERO), LATER) == Grant("stale", str(TWO), 0, ())


def test_news_that_were_left_behind_are_written_over(reducer: ReducerSession, join: Join) -> None:
    reducer.redis.hset(reducer.keys.news(str(ZERO)), mapping={"0": "left behind", "1": "too"})
    session = join("a")
    assert session.wait_for(str(ZERO), SOON).weights == ()
    session.leave("done")
    make(join, reducer)
    assert reducer.redis.hgetall(reducer.keys.news(str(ZERO))) == {b"0": b"news of 1"}
