"""A worker's session over links that lose replies, break in mid-upload, or swallow everything."""

import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import WorkerSession
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.proxy import Proxy
from tests.support.rounds import PLAN, ZERO, events, of, take_seat

TIMEOUT_S = 0.5
BLOB = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("tcp") / "broker.log")
    yield broker
    broker.stop()


@pytest.fixture
def proxy(broker: EmbeddedBroker) -> Iterator[Proxy]:
    url = urlsplit(broker.tcp_url)
    assert url.hostname and url.port
    with Proxy((url.hostname, url.port)) as proxy:
        yield proxy


@pytest.fixture
def reducer(broker: EmbeddedBroker, job_id: str) -> Iterator[ReducerSession]:
    """The reducer, over a good link, of a job that is open at version 0."""
    client = Redis.from_url(broker.url)
    reducer = ReducerSession(client, job_id, "reducer")
    reducer.publish("{}")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ZERO, [b"weights"], [b"state"], PLAN.round(0), {"version": 0})
    yield reducer
    client.close()


def through(proxy: Proxy, broker: EmbeddedBroker, retries: int, **options: float) -> Redis:
    """A client over the bad link."""
    url = broker.tcp_url.replace(f":{broker.place.port}/", f":{proxy.port}/")
    return Redis.from_url(url, retry=Retry(NoBackoff(), retries), protocol=2, **options)


@pytest.fixture
def session(broker: EmbeddedBroker, proxy: Proxy, reducer: ReducerSession) -> Iterator[WorkerSession]:
    """A worker over the bad link, with a lease on the whole round; its scripts are loaded."""
    client = through(proxy, broker, 0, socket_timeout=TIMEOUT_S)
    session = WorkerSession(client, reducer.job_id, "worker", "session")
    assert take_seat(session) == "running"
    assert submit(session, "before there is a lease", b"") == "lease_lost"
    assert session.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    yield session
    client.close()


def submit(session: WorkerSession, nonce: str, blob: bytes = BLOB) -> str:
    return session.submit(str(ZERO), nonce, [(m, [blob], 0.5) for m in range(4)], {}).outcome


def counted(reducer: ReducerSession) -> list[int]:
    return sorted(m for event in events(reducer, "submission") for m in event["counted"])


def test_a_submission_whose_reply_was_lost_is_a_duplicate_when_repeated(
    proxy: Proxy, reducer: ReducerSession, session: WorkerSession
) -> None:
    proxy.drop_next_reply()
    with pytest.raises(RedisConnectionError):
        submit(session, "n", b"small")
    assert counted(reducer) == [0, 1, 2, 3]
    assert submit(session, "n", b"small") == "duplicate"
    assert counted(reducer) == [0, 1, 2, 3]
    assert reducer.updates(of(ZERO), range(1)) == [[b"small"]] * 4


@pytest.mark.parametrize("upload_bytes", [10, 1000, 700_000, 1_048_700, 3_000_000, 4 * len(BLOB)])
def test_no_part_of_an_upload_that_broke_becomes_a_submission(
    proxy: Proxy, reducer: ReducerSession, session: WorkerSession, upload_bytes: int
) -> None:
    proxy.cut_after(upload_bytes)
    with pytest.raises((RedisConnectionError, RedisTimeoutError)):
        submit(session, "n")
    assert reducer.progress()[1] == {} and counted(reducer) == []
    assert submit(session, "n") == "accepted"
    assert counted(reducer) == [0, 1, 2, 3]
    assert reducer.updates(of(ZERO), range(1)) == [[BLOB]] * 4


def test_a_call_into_a_black_hole_times_out_and_the_next_one_works(
    proxy: Proxy, reducer: ReducerSession, session: WorkerSession
) -> None:
    proxy.black_hole(True)
    started = time.monotonic()
    with pytest.raises(RedisTimeoutError):
        session.lease(str(ZERO))
    assert TIMEOUT_S <= time.monotonic() - started < 20 * TIMEOUT_S
    proxy.black_hole(False)
    assert submit(session, "n", b"small") == "accepted"
    assert counted(reducer) == [0, 1, 2, 3]


def test_a_slow_and_distant_link_changes_nothing_but_the_time(
    proxy: Proxy, reducer: ReducerSession, session: WorkerSession
) -> None:
    proxy.delay_s, proxy.bytes_per_s = 0.02, 2_000_000.0
    started = time.monotonic()
    assert submit(session, "n", BLOB[:50_000]) == "accepted"
    assert time.monotonic() - started >= 200_000 / 2_000_000
    assert reducer.updates(of(ZERO), range(1)) == [[BLOB[:50_000]]] * 4


def test_a_client_that_may_retry_rides_out_a_cut_by_itself(
    broker: EmbeddedBroker, proxy: Proxy, reducer: ReducerSession, session: WorkerSession
) -> None:
    client = through(proxy, broker, 3)
    patient = WorkerSession(client, reducer.job_id, "worker", "session")
    assert patient.lease(str(ZERO)).answer == "wait"
    connections = proxy.connections
    proxy.drop_next_reply()
    assert submit(patient, "n", b"small") in ("accepted", "duplicate")
    assert proxy.connections == connections + 1
    assert counted(reducer) == [0, 1, 2, 3]
    client.close()
