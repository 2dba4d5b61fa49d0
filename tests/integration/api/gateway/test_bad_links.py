"""The forwarder and the gateway with a proxy between them that buffers and cuts, and peers that send anything."""

import logging
import os
import random
import socket
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from redis import Redis

from api.gateway.machines import JoinedMachine
from api.http.throttle import Throttle
from computeshare.transport import forwarder as forwarder_module
from computeshare.transport.connections import connect
from computeshare.transport.forwarder import Backoff, Forwarder, GatewayAccess
from computeshare.transport.wire import Wire
from tests.support import sample
from tests.support.gateway import Plane, seated
from tests.support.reverse_proxy import ReverseProxy
from tests.support.wait import wait_until
from tests.support.websocket_frames import dialled, frame, handshake, upgraded

SEED = 20
INPUTS = 100_000 if sample.WHOLE else 400
GROWTH_BYTES = 100_000_000
PING = b"*1\r\n$4\r\nPING\r\n"
RESP = (
    b"*1\r\n$4\r\nPING\r\n",
    b"*-1\r\n",
    b"$999999999\r\n",
    b"*1000000\r\n",
    b"\r\n",
    b"PING\r\n",
    b"*2\r\n$3\r\nGET\r\n$1\r\n",
)


def behind(plane: Plane, access: GatewayAccess, proxy: ReverseProxy) -> GatewayAccess:
    return replace(access, url=access.url.replace(plane.url, f"http://127.0.0.1:{proxy.port}"))


def proxy_of(plane: Plane, idle_s: float = 30.0) -> ReverseProxy:
    parts = urlsplit(plane.url)
    return ReverseProxy((str(parts.hostname), int(parts.port or 0)), idle_s)


@pytest.mark.parametrize(("ping_s", "cut"), [(0.2, False), (60.0, True)], ids=["pings", "no pings"])
@pytest.mark.slow
def test_pings_keep_an_idle_connection_and_without_them_it_is_opened_again(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ping_s: float, cut: bool
) -> None:
    monkeypatch.setattr(forwarder_module, "PING_S", ping_s)
    _, access = plane.joined(tmp_path)
    with proxy_of(plane, idle_s=1.0) as proxy, Forwarder(behind(plane, access, proxy)) as forwarder:
        redis = connect(forwarder.redis_url, retries=20)
        assert redis.ping()
        threading.Event().wait(2.5)
        assert (proxy.idle_cuts > 0) is cut
        assert redis.ping()
        assert proxy.upgrades == 1 + cut
        redis.close()


def test_large_messages_pass_a_proxy_that_buffers_and_again_after_it_cut_everything(
    plane: Plane, tmp_path: Path, redis: Redis
) -> None:
    machine, access = plane.joined(tmp_path)
    worker, keys = seated(redis, machine)
    blob = random.Random(SEED).randbytes(45_000_000)
    with proxy_of(plane) as proxy, Forwarder(behind(plane, access, proxy)) as forwarder:
        far = connect(forwarder.redis_url)
        wire, room = Wire(far), bytearray(len(blob))
        wire.exchange([("SET", keys.probe(worker), blob, "EX", 60)])
        assert redis.get(keys.probe(worker)) == blob
        proxy.cut_all()
        assert far.ping()
        wire = Wire(far)
        assert wire.exchange([("GET", keys.probe(worker))], into=[room]) and room == blob
        wire.close()
        far.close()


def test_whatever_a_machine_sends_the_gateway_stays_up_and_small(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, access = plane.joined(tmp_path)
    plane.gateway._openings = Throttle(1_000_000, 1e-6)
    draw = random.Random(SEED)
    kept: list[socket.socket] = []
    before = psutil.Process().memory_info().rss
    with caplog.at_level(logging.ERROR):
        for _ in range(INPUTS):
            raw, head = dialled(access), handshake(access)
            if draw.random() < 0.5:
                raw.close()
                raw, head = upgraded(access), b""
            with suppress(OSError):  # the gateway cuts wrong ones at once
                raw.sendall(_anything(draw, head))
                if draw.random() < 0.5:
                    raw.settimeout(0.01)
                    raw.recv(1 << 16)
            if draw.random() < 0.1 and len(kept) < 30:
                kept.append(raw)  # half-open: nobody closes it
            else:
                raw.close()
        for raw in kept:
            raw.close()
        wait_until(lambda: plane.gateway.connections.total() == 0)
    assert psutil.Process().memory_info().rss - before < GROWTH_BYTES
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
    with plane.open(access) as link:
        link.send(PING)
        assert link.recv(5) == b"+PONG\r\n"


def test_a_wrong_frame_before_the_handshake_is_answered_ends_the_connection_and_is_no_error(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, access = plane.joined(tmp_path)
    asked, answered, find = threading.Event(), threading.Event(), plane.gateway._machines.find

    def slow(machine_id: str) -> JoinedMachine | None:
        asked.set()
        assert answered.wait(30)
        return find(machine_id)

    monkeypatch.setattr(plane.gateway._machines, "find", slow)
    with caplog.at_level(logging.ERROR), dialled(access) as raw:
        raw.sendall(handshake(access))
        assert asked.wait(30)
        raw.sendall(bytes([0xFF, 0x80]) + bytes(4))  # an opcode that does not exist
        try:
            with suppress(ConnectionResetError):
                assert raw.recv(1) == b""
        finally:
            answered.set()
        wait_until(lambda: plane.gateway.connections.total() == 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.slow
def test_text_that_is_no_utf_8_ends_the_connection_and_is_no_error(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, access = plane.joined(tmp_path)
    with caplog.at_level(logging.ERROR), upgraded(access) as raw:
        raw.sendall(frame(b"\xc1\xff", 1))
        raw.settimeout(10)
        while raw.recv(1 << 16):
            pass
        wait_until(lambda: plane.gateway.connections.total() == 0)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def _anything(draw: random.Random, head: bytes) -> bytes:
    """A handshake, if any, that is whole, cut or changed, and after it frames that are right or wrong."""
    kind = draw.randrange(6 if head else 4) + (0 if head else 2)
    if kind == 0:
        return head[: draw.randrange(len(head))]
    if kind == 1:
        at = draw.randrange(len(head))
        return head[:at] + draw.randbytes(3) + head[at + 3 :]
    frames = [frame(draw.choice(RESP) * draw.randrange(1, 4)) for _ in range(draw.randrange(5))]
    if kind == 2:
        frames.append(draw.randbytes(draw.randrange(1, 200)))
    elif kind == 3:  # any opcode, reserved bits and lengths
        frames.append(bytes([draw.randrange(256), draw.randrange(256)]) + draw.randbytes(draw.randrange(20)))
    elif kind == 4:  # fragments, pings and closes in any order
        frames += [frame(draw.randbytes(draw.randrange(100)), draw.choice((0, 2, 8, 9, 10)), draw.random() < 0.5)]
    elif kind == 5:
        frames.append(frame(os.urandom(60_000))[: draw.randrange(1, 60_000)])
    return head + b"".join(frames)


def test_a_forwarder_whose_gateway_is_away_closes_connections_and_pauses_longer_and_longer() -> None:
    now = 0.0
    backoff = Backoff(lambda: now)
    assert backoff.wait_s() == 0
    pauses = []
    for _ in range(12):
        backoff.failed()
        backoff.failed()  # of another connection at the same time
        pauses.append(backoff._pause_s)
        assert 0 < backoff._not_before - now <= backoff._pause_s
        assert backoff.wait_s() <= 1.5 * backoff._pause_s
        now = backoff._not_before
    assert pauses[:4] == [0.2, 0.4, 0.8, 1.6] and pauses[-1] == 10.0
    backoff.succeeded()
    assert backoff.wait_s() == 0


def test_connections_that_cannot_be_carried_are_closed_and_leave_nothing_behind(plane: Plane, tmp_path: Path) -> None:
    _, access = plane.joined(tmp_path)
    with Forwarder(access) as forwarder:
        path = urlsplit(forwarder.redis_url).path
        for _ in range(20):
            with socket.socket(socket.AF_UNIX) as link:
                link.connect(path)
                link.sendall(PING)
        wait_until(lambda: not forwarder._connections)
        wait_until(lambda: plane.gateway.connections.total() == 0)
