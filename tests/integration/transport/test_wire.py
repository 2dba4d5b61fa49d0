"""Blobs to and from a real broker: by unix socket, by TCP, over TLS, and over links that break, stall or are slow."""

import asyncio
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
from redis import Redis
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    DataError,
    ExecAbortError,
    NoScriptError,
    OutOfMemoryError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError
from redis.retry import Retry

from computeshare.errors import CodecError, Interrupted
from computeshare.transport.rate_limit import Pacer
from computeshare.transport.wire import Wire
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.proxy import Proxy

BUCKET = 4 << 20
STALL_S = 0.5


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("wire") / "broker.log")
    yield broker
    broker.stop()


def client_of(url: str, protocol: int = 2) -> Redis:
    return Redis.from_url(url, retry=Retry(NoBackoff(), 0), socket_timeout=5, protocol=protocol)


@pytest.fixture(params=["unix", "tcp", "tcp, RESP3"])
def wire(broker: EmbeddedBroker, request: pytest.FixtureRequest) -> Iterator[Wire]:
    client = client_of(broker.url if request.param == "unix" else broker.tcp_url, 3 if "3" in request.param else 2)
    with closing(client), closing(Wire(client)) as wire:
        wire.exchange([["FLUSHALL"]])
        yield wire


@pytest.fixture
def proxy(broker: EmbeddedBroker) -> Iterator[Proxy]:
    url = urlsplit(broker.tcp_url)
    assert url.hostname and url.port
    with Proxy((url.hostname, url.port)) as proxy:
        yield proxy


@pytest.fixture
def far(broker: EmbeddedBroker, proxy: Proxy) -> Iterator[Wire]:
    """A wire over a link that can be made bad."""
    client = client_of(f"redis://owner:{urlsplit(broker.tcp_url).password}@127.0.0.1:{proxy.port}/0")
    with closing(client), closing(Wire(client, STALL_S)) as wire:
        wire.exchange([["FLUSHALL"]])
        yield wire


@pytest.fixture
def tls_port(broker: EmbeddedBroker, tmp_path: Path) -> Iterator[int]:
    """A port in front of the broker that speaks TLS, with a certificate made for it."""
    files = [str(tmp_path / "key.pem"), str(tmp_path / "certificate.pem")]
    made = ["-newkey", "rsa:2048", "-nodes", "-keyout", files[0], "-out", files[1], "-subj", "/CN=localhost"]
    subprocess.run(["openssl", "req", "-x509", *made], check=True, capture_output=True, timeout=60)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files[1], files[0])

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 16):
                sink.write(piece)
                await sink.drain()
        sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_broker, to_broker = await asyncio.open_connection("127.0.0.1", broker.place.port)
        await asyncio.gather(pump(reader, to_broker), pump(from_broker, writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)  # another test's loop may run in this one
    thread.start()
    start = asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(start, loop).result(10)
    yield int(server.sockets[0].getsockname()[1])

    async def stop() -> None:
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for each in others:
            each.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()


def noise(size: int) -> np.ndarray:
    return np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)


def test_buckets_of_a_hash_go_out_and_come_back_into_a_kept_buffer(wire: Wire) -> None:
    vector = noise(5 * BUCKET + 12_345).view(np.uint8)
    parts = [vector[at : at + BUCKET] for at in range(0, len(vector), BUCKET)]
    fields: list[object] = [each for number, part in enumerate(parts) for each in (number, part)]
    assert wire.exchange([["HSET", "blob", *fields[:4]], ["HSET", "blob", *fields[4:]]]) == [2, 4]  # type: ignore[list-item]
    found = np.zeros_like(vector)
    into = [found[at : at + BUCKET] for at in range(0, len(found), BUCKET)]
    replies = wire.exchange([["HGET", "blob", number] for number in range(len(parts))], into)
    assert np.array_equal(found, vector) and [len(reply) for reply in replies] == [len(part) for part in parts]
    found[:] = 0
    [whole] = wire.exchange([["HMGET", "blob", *range(len(parts))]], [found])
    assert np.array_equal(found, vector) and len(whole) == len(parts)


@pytest.mark.parametrize("size", [0, 1, 4096, 4097, 65_535, 65_536, 65_537, 1_000_001])
def test_values_of_any_size_come_back_as_they_went(wire: Wire, size: int) -> None:
    value = noise(size).tobytes()
    assert wire.exchange([["SET", "k", value], ["GET", "k"], ["ECHO", value], ["GET", "none"], ["INCR", "n"]]) == [
        *(b"OK", value, value, None, 1)
    ]


def test_commands_and_replies_that_fill_every_buffer_on_the_way_do_not_block_each_other(wire: Wire) -> None:
    value = noise(BUCKET)
    commands = [["HSET", "h", number % 4, value] if number % 2 else ["ECHO", value] for number in range(200)]
    replies = wire.exchange(commands)
    expected = value.tobytes()
    assert all(reply == expected for reply in replies[::2])
    assert replies[1::2] == [1, 1] + [0] * 98


def test_a_unix_socket_gets_more_room_than_it_has_by_itself(broker: EmbeddedBroker) -> None:
    with closing(client_of(broker.url)) as client, closing(Wire(client)) as wire:
        wire.exchange([["PING"]])
        assert wire._link is not None
        with socket.socket(socket.AF_UNIX) as plain:
            own, usual = (one.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) for one in (wire._link, plain))
    assert own >= 2 * usual


def test_errors_are_raised_after_the_last_reply_and_the_connection_goes_on(wire: Wire) -> None:
    before = wire.exchange([["CLIENT", "ID"]])
    with pytest.raises(NoScriptError):
        wire.exchange([["SET", "k", "text"], ["EVALSHA", "0" * 40, 0], ["INCR", "k"], ["SET", "after", "yes"]])
    found = wire.exchange([["HGET", "k", 1], ["GET", "after"], ["NOSUCH"], ["LRANGE", "l", 0, -1]], raise_errors=False)
    assert [type(each) for each in found] == [ResponseError, bytes, ResponseError, list]
    assert str(found[0]).startswith("WRONGTYPE") and found[1] == b"yes"
    assert wire.exchange([["CLIENT", "ID"]]) == before


def test_a_transaction_answers_with_its_replies_and_their_errors(wire: Wire) -> None:
    value, kept = noise(BUCKET), bytearray(BUCKET)
    commands = [["MULTI"], ["SET", "k", value], ["INCR", "k"], ["GET", "k"], ["EXEC"]]
    with pytest.raises(ResponseError, match="not an integer"):
        wire.exchange(commands)
    *_, (ok, error, found) = wire.exchange(commands, [None] * 4 + [kept], raise_errors=False)
    assert ok == b"OK" and isinstance(error, ResponseError) and found == value.tobytes() and found.obj is kept
    with pytest.raises(ResponseError, match="unknown command"):
        wire.exchange([["MULTI"], ["NOSUCH"], ["EXEC"]])
    assert type(wire.exchange([["MULTI"], ["NOSUCH"], ["EXEC"]], raise_errors=False)[2]) is ExecAbortError


def test_a_value_larger_than_the_buffer_for_it_is_an_error_and_costs_no_memory(wire: Wire) -> None:
    value, kept = noise(3_000_000), bytearray(1000)
    wire.exchange([["SET", "large", value], ["SET", "small", value[:1000]]])
    with pytest.raises(CodecError, match="3000000 bytes"):
        wire.exchange([["GET", "large"], ["GET", "small"]], [kept, None])
    assert kept == bytes(1000)
    _, small = wire.exchange([["GET", "large"], ["GET", "small"]], [bytearray(10), kept], raise_errors=False)
    assert small == value[:1000].tobytes() == kept


def test_a_giant_array_is_read(wire: Wire) -> None:
    script = "local t = {} for i = 1, 200000 do t[i] = i % 7 == 0 and tostring(i) or i end return t"
    [found] = wire.exchange([["EVAL", script, 0]])
    assert found == [str(i).encode() if i % 7 == 0 else i for i in range(1, 200_001)]


def test_an_argument_of_no_use_is_refused_before_anything_is_sent(wire: Wire) -> None:
    before = wire.exchange([["CLIENT", "ID"]])
    with pytest.raises(DataError):
        wire.exchange([["SET", "k", "v"], ["SET", "k", None]])  # type: ignore[list-item]
    assert wire.exchange([["EXISTS", "k"], ["CLIENT", "ID"]]) == [0, *before]


def test_values_of_resp3_arrive_as_what_they_are(broker: EmbeddedBroker) -> None:
    script = "redis.setresp(3) return {{double=1.5}, redis.call('HGETALL', KEYS[1]), true, {map={a=1}}, false}"
    with closing(client_of(broker.url, 3)) as client, closing(Wire(client)) as wire:
        commands = [["DEL", "h"], ["HSET", "h", "a", "1"], ["HGETALL", "h"], ["GET", "none"], ["EVAL", script, 1, "h"]]
        found = wire.exchange(commands)
        assert found[2:] == [{b"a": b"1"}, None, [1.5, {b"a": b"1"}, True, {b"a": 1}, False]]


def test_pushes_come_in_between_and_disturb_nothing(broker: EmbeddedBroker) -> None:
    with closing(client_of(broker.url, 3)) as client, closing(Wire(client)) as wire:
        wire.exchange([["CLIENT", "TRACKING", "ON", "BCAST"]])
        [number] = wire.exchange([["CLIENT", "ID"]])
        for value in (b"1", b"2"):
            client.set("watched", value)
            assert wire.exchange([["SET", "own", "x"], ["GET", "watched"], ["CLIENT", "ID"]]) == [b"OK", value, number]


def test_a_wrong_password_is_named(broker: EmbeddedBroker) -> None:
    url = broker.url.replace(broker.place.password, "wrong")
    with closing(client_of(url)) as client, closing(Wire(client)) as wire, pytest.raises(AuthenticationError):
        wire.exchange([["PING"]])


def test_a_broker_out_of_memory_refuses_and_the_connection_goes_on(tmp_path: Path) -> None:
    broker = EmbeddedBroker.start(tmp_path / "log", maxmemory_bytes=30_000_000)
    try:
        with closing(client_of(broker.url)) as client, closing(Wire(client)) as wire:
            value = noise(BUCKET)
            with pytest.raises(OutOfMemoryError):
                wire.exchange([["SET", number, value] for number in range(12)])
            assert wire.exchange([["DEL", *range(12)], ["SET", "k", value]])[1] == b"OK"
    finally:
        broker.stop()


def test_the_next_exchange_after_a_restart_of_the_broker_works(tmp_path: Path) -> None:
    broker = EmbeddedBroker.start(tmp_path / "log")
    again = broker
    try:
        with closing(client_of(broker.tcp_url)) as client, closing(Wire(client)) as wire:
            wire.exchange([["PING"]])
            broker.stop()
            for _ in range(2):
                with pytest.raises(RedisConnectionError):
                    wire.exchange([["PING"]])
            again = EmbeddedBroker.start(tmp_path / "log", place=broker.place)
            assert wire.exchange([["PING"]]) == [b"PONG"]
    finally:
        again.stop()


def test_a_connection_that_the_broker_ended_meanwhile_costs_no_error(wire: Wire, broker: EmbeddedBroker) -> None:
    [number] = wire.exchange([["CLIENT", "ID"]])
    with closing(client_of(broker.url)) as client:
        assert client.client_kill_filter(_id=number) == 1
    assert wire.exchange([["CLIENT", "ID"]])[0] > number


def test_what_follows_an_exchange_is_waited_for_later(wire: Wire, broker: EmbeddedBroker) -> None:
    value = noise(BUCKET).tobytes()
    following = [["BLPOP", "list", 0], ["GET", "large"], ["NO SUCH COMMAND"]]
    assert wire.exchange([["SET", "large", value], ["PING"]], pipelined=following[:2]) == [b"OK", b"PONG"]
    with closing(client_of(broker.url)) as client:
        client.rpush("list", "now")
        assert wire.pipelined_replies() == [[b"list", b"now"], value]
        assert wire.exchange([["PING"]], pipelined=following[2:]) == [b"PONG"]
        with pytest.raises(ResponseError, match="unknown command"):
            wire.pipelined_replies()
        with pytest.raises(ResponseError, match="unknown command"):
            wire.exchange(following[2:], pipelined=[["PING"]])
        with pytest.raises(RedisConnectionError):
            wire.pipelined_replies()  # given up: nobody who hears of the error would ask
        assert wire.exchange([["PING"]]) == [b"PONG"]


def test_what_is_to_be_done_meanwhile_is_done_once_when_all_is_sent(wire: Wire, broker: EmbeddedBroker) -> None:
    value, found = noise(BUCKET).tobytes(), list[int]()
    with closing(client_of(broker.url)) as client:

        def push() -> None:
            found.append(wire.bytes_sent)
            client.rpush("list", "now")

        commands = [["SET", "large", value], ["BLPOP", "list", 0]]  # which waits for what is done meanwhile
        assert wire.exchange(commands, meanwhile=push) == [b"OK", [b"list", b"now"]]
        assert found == [wire.bytes_sent] and client.llen("list") == 0


def test_an_exchange_does_not_wait_for_what_followed_the_one_before(wire: Wire, broker: EmbeddedBroker) -> None:
    number, *_ = wire.exchange([["CLIENT", "ID"]], pipelined=[["BLPOP", "nothing", 0]])
    assert wire.exchange([["PING"]]) == [b"PONG"]
    assert wire.exchange([["CLIENT", "ID"]])[0] > number
    with pytest.raises(RedisConnectionError):
        wire.pipelined_replies()


def test_a_connection_that_ends_before_the_rest_has_come_is_an_error(wire: Wire, broker: EmbeddedBroker) -> None:
    [number] = wire.exchange([["CLIENT", "ID"]], pipelined=[["BLPOP", "nothing", 0]])
    with closing(client_of(broker.url)) as client:
        assert client.client_kill_filter(_id=number) == 1
    with pytest.raises(RedisConnectionError):
        wire.pipelined_replies()
    assert wire.exchange([["PING"]]) == [b"PONG"]


def test_what_the_broker_says_before_it_hangs_up_is_told(broker: EmbeddedBroker) -> None:
    with closing(client_of(broker.url)) as client, closing(Wire(client)) as wire:
        wire.exchange([["CONFIG", "SET", "proto-max-bulk-len", 1 << 20]])
        try:
            with pytest.raises(ResponseError, match="invalid bulk length"):
                wire.exchange([["SET", "k", noise(BUCKET)]])
            assert wire._link is None, "the broker closes it, sooner or later"
            assert wire.exchange([["EXISTS", "k"]]) == [0]
        finally:
            wire.exchange([["CONFIG", "SET", "proto-max-bulk-len", 512 << 20]])


@pytest.mark.parametrize("upload_bytes", [1, 30, 1000, 1_000_000, BUCKET + 60, 3 * BUCKET])
def test_a_cut_in_the_middle_is_an_error_and_the_next_exchange_works(
    proxy: Proxy, far: Wire, upload_bytes: int
) -> None:
    commands = [["MULTI"], *(["HSET", "h", number, noise(BUCKET)] for number in range(3)), ["EXEC"]]
    proxy.cut_after(upload_bytes)
    with pytest.raises(RedisConnectionError):
        far.exchange(commands)
    assert far.exchange([["EXISTS", "h"]]) == [0]
    assert far.exchange(commands)[-1] == [1, 1, 1]


def test_a_cut_in_the_middle_of_a_reply_is_an_error_and_the_next_exchange_works(proxy: Proxy, far: Wire) -> None:
    value, kept = noise(BUCKET), bytearray(BUCKET)
    far.exchange([["SET", "k", value]])
    proxy.bytes_per_s = 1e6
    cut = threading.Timer(0.3, proxy.cut_all)
    cut.start()
    with pytest.raises(RedisConnectionError):
        far.exchange([["GET", "k"]], [kept])
    cut.join()
    proxy.bytes_per_s = 0
    assert far.exchange([["GET", "k"]], [kept]) == [value.tobytes()]


@pytest.mark.parametrize("size", [10, 3 * BUCKET])
def test_a_link_on_which_nothing_moves_times_out_and_the_next_exchange_works(
    proxy: Proxy, far: Wire, size: int
) -> None:
    proxy.black_hole(True)
    started = time.monotonic()
    with pytest.raises(RedisTimeoutError, match=r"0\.5 seconds"):
        far.exchange([["SET", "k", noise(size)]])
    assert STALL_S <= time.monotonic() - started < 20 * STALL_S
    proxy.black_hole(False)
    assert far.exchange([["SET", "k", noise(size)], ["STRLEN", "k"]]) == [b"OK", size]


def test_a_broker_that_stops_answering_in_mid_value_times_out(tmp_path: Path) -> None:
    broker = EmbeddedBroker.start(tmp_path / "log")
    try:
        with closing(client_of(broker.url)) as client, closing(Wire(client, STALL_S)) as wire:
            wire.exchange([["PING"]])
            os.kill(broker.pid, signal.SIGSTOP)
            try:
                with pytest.raises(RedisTimeoutError):
                    wire.exchange([["SET", "k", noise(BUCKET)]])
            finally:
                os.kill(broker.pid, signal.SIGCONT)
            assert wire.exchange([["SET", "k", noise(BUCKET)]]) == [b"OK"]
    finally:
        broker.stop()


def test_a_slow_link_takes_longer_than_nothing_may_move_for(proxy: Proxy, far: Wire) -> None:
    value, kept = noise(2_000_000), bytearray(2_000_000)
    proxy.bytes_per_s = 1e6
    started = time.monotonic()
    assert far.exchange([["SET", "k", value]]) == [b"OK"]
    assert far.exchange([["GET", "k"]], [kept]) == [value.tobytes()]
    assert time.monotonic() - started > 4 * STALL_S


@pytest.mark.parametrize("waiting", ["for a reply", "in mid-transfer"])
def test_a_transfer_can_be_given_up(broker: EmbeddedBroker, proxy: Proxy, waiting: str) -> None:
    stop = threading.Event()
    with (
        closing(client_of(f"redis://owner:{urlsplit(broker.tcp_url).password}@127.0.0.1:{proxy.port}/0")) as client,
        closing(Wire(client, 60, interrupt=stop.is_set)) as wire,
    ):
        wire.exchange([["SET", "k", noise(BUCKET)]])
        if waiting == "for a reply":
            proxy.black_hole(True)
        proxy.bytes_per_s = 1e6
        threading.Timer(0.3, stop.set).start()
        started = time.monotonic()
        with pytest.raises(Interrupted):
            wire.exchange([["GET", "k"]])
        assert 0.2 < time.monotonic() - started < 3
        stop.clear()
        proxy.bytes_per_s = 0
        proxy.black_hole(False)
        assert wire.exchange([["STRLEN", "k"]]) == [BUCKET]


def test_wires_that_share_a_pacer_keep_to_its_rate(broker: EmbeddedBroker, proxy: Proxy) -> None:
    """What has arrived by any time after the first second is within the rate, and the whole is not much slower."""
    rate, size = 8e6, 1_000_000
    arrived: list[tuple[float, int]] = []
    forward = proxy._let_up

    def note(piece: bytes) -> tuple[bytes, bool]:
        arrived.append((time.monotonic(), len(piece)))
        return forward(piece)

    proxy._let_up = note  # type: ignore[method-assign]
    client = client_of(f"redis://owner:{urlsplit(broker.tcp_url).password}@127.0.0.1:{proxy.port}/0")

    def reached() -> float:
        """The rate of two wires with a value each; fails if more than the pacer's rate has arrived at any time."""
        pacer = Pacer(rate)
        wires = [Wire(client, pacer=pacer) for _ in range(2)]
        for each in wires:
            each.exchange([["PING"]])
        arrived.clear()
        started = time.monotonic()
        threads = [threading.Thread(target=each.exchange, args=([["SET", "paced", noise(size)]],)) for each in wires]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        took_s = time.monotonic() - started
        for each in wires:
            each.close()
        total = 0
        for at, count in arrived:
            total += count
            assert 8 * total <= 1.05 * rate * max(1.0, at - started)
        assert 2 * size < total < 2 * size + 1000
        return 8 * total / took_s

    with closing(client):
        assert any(reached() > 0.8 * rate for _ in range(5))  # a busy machine delays some of them


def test_a_wire_over_tls_moves_blobs_both_ways(broker: EmbeddedBroker, tls_port: int) -> None:
    url = f"rediss://owner:{broker.place.password}@127.0.0.1:{tls_port}/0?ssl_cert_reqs=none&ssl_check_hostname=false"
    with closing(client_of(url)) as client, closing(Wire(client)) as wire:
        value, kept = noise(BUCKET), bytearray(2 * BUCKET)
        [number] = wire.exchange([["CLIENT", "ID"]])
        commands = [["HSET", "tls", number % 2, value] if number % 3 else ["ECHO", value] for number in range(12)]
        assert all(reply == value.tobytes() for reply in wire.exchange(commands)[::3])
        assert wire.exchange([["HMGET", "tls", 0, 1]], [kept]) == [[value.tobytes()] * 2]
        assert kept == 2 * value.tobytes()
        assert wire.exchange([["CLIENT", "ID"]]) == [number]
