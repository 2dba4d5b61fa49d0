"""The gateway behind a real server, with a real broker: who gets in, what passes, who is cut."""

import os
import secrets
import socket
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx2
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect as websocket

from api.gateway import app as gateway
from api.gateway.app import GatewayLimits
from api.gateway.commands import access as access_module
from api.gateway.commands.replies import MOST_OF_ONE, MOST_PARTS
from api.gateway.refusals import Refusals
from api.gateway.relay import REVOKED, SLOW
from computeshare.cli.main import app as cli
from computeshare.errors import Fenced, SettingsError
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.queue import WorkerInfo, register
from computeshare.queue.rq_keys import RqKeys
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.terminal.command import run
from computeshare.transport.connections import by_loopback, connect, is_next_door
from computeshare.transport.forwarder import Forwarder, GatewayAccess
from computeshare.transport.machine_key import MachineKey
from computeshare.transport.wire import Wire
from computeshare.worker.invite import Joined, introduction, join
from tests.support.gateway import HEX, Plane, refusal, seated
from tests.support.rounds import PLAN, ZERO, opened, send, take_seat
from tests.support.wait import wait_until
from tests.support.websocket_frames import frame, head, upgraded
from tests.unit.api.gateway.test_parser import framed

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def refused(plane: Plane, access: GatewayAccess, **options: Any) -> int:
    return refusal(lambda: plane.open(access, **options))[0]


def test_an_invite_names_the_public_address_and_gives_no_broker(plane: Plane, tmp_path: Path, redis_url: str) -> None:
    made, link = plane.invite()
    code = link.rpartition("#")[2]
    assert made["command"] == f"computeshare-worker --join https://home.example#{code}"
    assert made["url"] == f"https://home.example/join/{code}" and made["note"] is None
    sent = introduction("mac", code, SigningKey.new())
    answer = httpx2.post(f"{plane.url}/join/{code}", json=sent)
    signs = (tmp_path / "plane" / "control.pub").read_text().strip()
    way = {"redis_url": None, "gateway": "v1/gateway", "machine": made["id"]}
    assert answer.json() == {"queue": "mnist", "control_key": signs, **way}
    assert urlsplit(redis_url).netloc not in answer.text
    for wrong in ({"name": "mac"}, {"name": "mac", "key": "k" * 32}, sent):  # of an earlier version; for another code
        other = httpx2.post(f"{plane.url}/join/{plane.invite()[1].rpartition('#')[2]}", json=wrong)
        assert other.status_code == 409 and "control plane's version" in other.text


def test_a_machine_keeps_its_access_and_nobody_else_can_use_the_code(plane: Plane, tmp_path: Path) -> None:
    _, link = plane.invite()
    first = join(link, "mac", tmp_path / "worker")
    assert join(link, "mac", tmp_path / "worker") == first  # the next start, from the file
    assert join(link.replace("#", "/join/"), "mac", tmp_path / "worker") == first
    files = [path for path in (tmp_path / "worker").rglob("*") if path.is_file()]
    assert {path.suffix for path in files} == {".json", ".key"}
    assert all(path.stat().st_mode & 0o077 == 0 for path in files)
    with pytest.raises(SettingsError, match="was already used"):
        join(link, "another", tmp_path / "other")
    with pytest.raises(SettingsError, match="no such invite"):
        join(f"{plane.url}#wrong", "mac", tmp_path / "third")


def test_redis_py_and_the_wire_use_the_socket_as_a_broker(plane: Plane, tmp_path: Path, redis_url: str) -> None:
    machine, access = plane.joined(tmp_path)
    blob = os.urandom(45_000_000)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url) as redis, connect(redis_url) as direct:
        worker, keys = seated(direct, machine)
        path = Path(urlsplit(forwarder.redis_url).path)
        assert path.parent.stat().st_mode & 0o777 == 0o700
        assert not is_next_door(redis) and by_loopback(redis) is redis  # so that what goes up is compressed
        assert redis.ping()
        wire, room = Wire(redis), bytearray(len(blob))
        wire.exchange([("SET", keys.probe(worker), blob, "EX", 60)])
        assert wire.exchange([("GET", keys.probe(worker))], into=[room]) and room == blob
        assert direct.get(keys.probe(worker)) == blob
        told, channel = threading.Event(), RqKeys(worker).channel()
        subscription = redis.pubsub()
        subscription.subscribe(**{channel: lambda _: told.set()})
        thread = subscription.run_in_thread(sleep_time=0.01)
        wait_until(lambda: direct.pubsub_numsub(channel)[0][1] == 1)
        assert direct.publish(channel, "x") == 1 and told.wait(5)
        thread.stop()
        thread.join()
        wire.close()
        assert redis.ping()
        wait_until(lambda: plane.gateway.connections[machine] >= 1)
    assert not path.parent.exists()
    wait_until(lambda: plane.gateway.connections[machine] == 0)

    def counted() -> bool:
        [shown] = [one for one in plane.owner.get("/v1/invites").json()["items"] if one["id"] == machine]
        return bool(shown["bytes_up"] > len(blob) and shown["bytes_down"] > len(blob) and shown["gateway"])

    wait_until(counted)


def test_commands_pass_while_a_large_message_is_on_its_way(plane: Plane, tmp_path: Path, redis_url: str) -> None:
    machine, access = plane.joined(tmp_path)
    blob = os.urandom(8_000_000)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url) as redis, connect(redis_url) as direct:
        worker, keys = seated(direct, machine)
        whole = framed(b"SET", keys.probe(worker).encode(), blob, b"EX", b"60")
        with socket.socket(socket.AF_UNIX) as sending:
            sending.connect(urlsplit(forwarder.redis_url).path)
            sending.settimeout(30)
            sending.sendall(whole[: len(whole) // 2])  # as on a thin link: the rest is to come
            assert all(redis.ping() for _ in range(3)) and redis.get(keys.probe(worker)) is None
            sending.sendall(whole[len(whole) // 2 :])
            assert sending.recv(100) == b"+OK\r\n" and direct.get(keys.probe(worker)) == blob


def test_the_list_of_workers_says_what_a_joined_machine_has_sent_and_received(
    plane: Plane, tmp_path: Path, redis_url: str
) -> None:
    machine, access = plane.joined(tmp_path)
    blob = os.urandom(100_000)
    with connect(redis_url) as direct:
        for worker_id, name in ((f"{machine}work", "far"), (secrets.token_hex(6), "anna's mac")):
            register(direct, WorkerInfo(worker_id, name, "cpu", ("mnist",), {}, 1, "host", 1))
        worker, keys = seated(direct, machine)
        with Forwarder(access) as forwarder, connect(forwarder.redis_url) as redis:
            redis.set(keys.probe(worker), blob, ex=60)
            assert redis.get(keys.probe(worker)) == blob

    def moved() -> dict[str, tuple[int | None, int | None]]:
        found = plane.owner.get("/v1/workers").json()["items"]
        return {one["name"]: (one["bytes_up"], one["bytes_down"]) for one in found}

    wait_until(lambda: min(each or 0 for each in moved()["far"]) > len(blob))
    assert moved()["anna's mac"] == (None, None)
    assert "↑&nbsp;10" in plane.owner.get("/workers", headers={"Accept": "text/html"}).text


def test_a_job_that_one_bad_machine_could_spoil_is_created_with_a_warning(
    plane: Plane, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = {"dataset": "digits", "model": "mlp", "queue": "mnist", "rounds": 2, "micro_batches_per_round": 3}

    def warnings(**more: Any) -> list[str]:
        fields = {name: value for name, value in {**wanted, **more}.items() if value is not None}
        made = plane.owner.post("/v1/jobs", json=fields).json()
        assert plane.owner.get(f"/v1/jobs/{made['id']}").json()["warnings"] == []
        return list(made["warnings"])

    assert warnings() == []
    machine, _ = plane.joined(tmp_path)
    with connect(redis_url) as direct:

        def is_heard() -> bool:
            register(direct, WorkerInfo(f"{machine}work", "far", "cpu", ("mnist",), {}, 1, "host", 1))
            return bool(plane.app.state.services.invites.have_joined("mnist"))

        wait_until(is_heard)
    [said] = warnings()
    assert "can spoil this job before an audit finds it: to tolerate a minority" in said
    local = {"strategy": {"kind": "local"}, "micro_batches_per_round": None, "codec": "auto"}
    for unaudited in ({"audit": 0}, local, {"strategy": {"kind": "async"}, "micro_batches_per_round": None}):
        assert "before an audit" not in warnings(**unaudited)[0]
    assert warnings(workers={"min": 3, "max": 3}, strategy={"kind": "sync", "combine": "median"}) == []
    monkeypatch.setenv("COMPUTESHARE_URL", plane.url)
    monkeypatch.setenv("COMPUTESHARE_TOKEN", plane.owner.headers["Authorization"].removeprefix("Bearer "))
    assert run(cli, ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--queue", "mnist"]) == 0
    assert f"warning: {said}" in capsys.readouterr().err


def test_wrong_ids_are_refused_and_then_slowed_down(plane: Plane, tmp_path: Path) -> None:
    machine, access = plane.joined(tmp_path)
    for wrong in ("", "other", machine[:-1], f"{machine}.secret", "\xff.\xfe", "x" * 5000):
        assert refused(plane, replace(access, machine=wrong)) == 401
    assert refused(plane, access, origin="https://evil.example") == 403
    wait_until(lambda: refused(plane, replace(access, machine="x")) == 429)
    with plane.open(access):
        pass  # others behind the same address still get in
    with pytest.raises(InvalidStatus):
        websocket("ws" + plane.url.removeprefix("http") + "/v1/jobs", proxy=None)


def test_an_earlier_versions_secret_is_refused_in_words_that_help(plane: Plane) -> None:
    url = f"ws{plane.url.removeprefix('http')}/v1/gateway"
    headers = {"Authorization": f"Bearer 1234abcd.{'k' * 32}"}
    status, words = refusal(lambda: websocket(url, additional_headers=headers, proxy=None))
    assert status == 401 and "ask for a new invite" in words


def test_an_invite_that_was_not_taken_up_or_gave_the_brokers_address_opens_nothing(
    plane: Plane, tmp_path: Path
) -> None:
    made, link = plane.invite()
    key = MachineKey(tmp_path / "machine.key")
    access = GatewayAccess(f"{plane.url}/v1/gateway", made["id"], key)
    assert refused(plane, access) == 401
    plane.app.state.services.invites._broker_url = "redis://broker.example:6379"
    code = link.rpartition("#")[2]
    taken = httpx2.post(f"{plane.url}/join/{code}", json=introduction("mac", code, key.current()))
    assert taken.json()["redis_url"] and refused(plane, access) == 401


def test_a_withdrawn_machine_is_cut_and_told_why(plane: Plane, tmp_path: Path) -> None:
    machine, access = plane.joined(tmp_path)
    reasons: list[str] = []
    with plane.open(access) as link, Forwarder(access, reasons.append) as forwarder:
        link.send(PING)
        assert link.recv(5) == PONG
        assert plane.owner.delete(f"/v1/invites/{machine}").status_code == 204
        with pytest.raises(ConnectionClosed) as end:
            link.recv(2)
        assert end.value.rcvd is not None and end.value.rcvd.code == REVOKED
        with connect(forwarder.redis_url, retries=0) as redis, pytest.raises(RedisConnectionError):
            redis.ping()
        wait_until(lambda: reasons != [])
    assert "ask for a new invite" in reasons[0] and len(reasons) == 1


def test_nothing_that_a_machine_sends_counts_once_its_invite_was_withdrawn(
    plane: Plane, tmp_path: Path, redis: Redis, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "CHECK_S", 60)  # a gateway that does not know of it yet
    machine, access = plane.joined(tmp_path)
    worker, keys = seated(redis, machine, job_id)
    seat = f"{worker}-{job_id}-0-1"
    store = RoundStore(redis, job_id)
    store.publish("{}")
    opened(redis, store, PLAN.round(0))
    near = WorkerSession(redis, job_id, "feedbeefwork", HEX)
    assert take_seat(near) == "running"
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        session = WorkerSession(far, job_id, worker, HEX)
        assert session.join(seat, {"name": "x"}) == "running"
        units = session.lease(str(ZERO)).micro_batches
        assert plane.owner.delete(f"/v1/invites/{machine}").status_code == 204
        assert send(session, ZERO, *units, nonce=HEX) == "fenced"
        with pytest.raises(Fenced):
            session.join(seat, {"name": "x"})
    assert not redis.exists(keys.received()) and redis.hkeys(keys.sessions()) == [b"feedbeefwork"]
    assert {*units} & {*near.lease(str(ZERO)).micro_batches}


def test_a_machine_stays_known_when_old_invites_are_deleted(plane: Plane, tmp_path: Path) -> None:
    _, access = plane.joined(tmp_path)
    invites = plane.app.state.services.invites
    with invites._database.writing() as connection:
        connection.exec_driver_sql("UPDATE invite SET expires_ms = 1")
    plane.invite()  # which deletes old ones
    with plane.open(access) as link:
        link.send(PING)
        assert link.recv(5) == PONG


def test_connections_are_limited_for_a_machine_and_in_all(plane: Plane, tmp_path: Path) -> None:
    _, first = plane.joined(tmp_path / "a")
    _, second = plane.joined(tmp_path / "b")
    plane.gateway._limits = GatewayLimits(per_machine=2, in_all=3)
    with plane.open(first), plane.open(first):
        assert refused(plane, first) == SLOW
        with plane.open(second):
            assert refused(plane, second) == SLOW
        wait_until(lambda: plane.gateway.connections.total() == 2)
    wait_until(lambda: plane.gateway.connections.total() == 0)
    with plane.open(first):
        pass


def test_a_peer_that_reads_nothing_is_cut_and_holds_little_memory(plane: Plane, tmp_path: Path, redis: Redis) -> None:
    machine, access = plane.joined(tmp_path)
    plane.gateway._limits = GatewayLimits(stall_s=0.5)
    worker, keys = seated(redis, machine)
    redis.set(keys.probe(worker), bytes(40_000_000), ex=60)
    raw = upgraded(access)
    key = keys.probe(worker).encode()
    raw.sendall(frame(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(key), key)))
    wait_until(lambda: plane.gateway.connections[machine] == 1)
    wait_until(lambda: plane.gateway.connections[machine] == 0)  # although it is never read
    raw.close()


def test_replies_to_one_command_do_not_count_for_the_next_ones(
    plane: Plane, tmp_path: Path, redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker answers UNSUBSCRIBE without a name once for each channel."""
    monkeypatch.setattr(access_module, "FRESH_S", 60)  # the gateway itself looks the seat up once only, by HMGET
    machine, access = plane.joined(tmp_path)
    _, keys = seated(redis, machine)
    weights, parts = keys.weights(str(ZERO)), [b"%d" % part for part in range(MOST_OF_ONE)]
    redis.hset(weights, mapping={part: bytes(500_000) for part in parts})
    plane.gateway.refusals = Refusals(10_000)

    def done(name: str) -> int:
        return int(redis.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])

    before = {name: done(name) for name in ("hmget", "unsubscribe")}
    channels = [framed(b"SUBSCRIBE", RqKeys(f"{machine}{number:04}").channel().encode()) for number in range(16)]
    blocked = framed(b"XREAD", b"BLOCK", b"20", b"STREAMS", keys.versions().encode(), b"0-0")
    listening = blocked + b"".join(channels) + framed(b"UNSUBSCRIBE")
    with upgraded(access) as raw:  # which is never read
        raw.sendall(frame(20 * listening + 60 * framed(b"HMGET", weights.encode(), *parts)))
        wait_until(lambda: done("unsubscribe") == before["unsubscribe"] + 20)
        wait_until(lambda: plane.gateway._unread[machine].parts == MOST_PARTS)
        assert done("hmget") - before["hmget"] <= MOST_PARTS // MOST_OF_ONE + 1


def test_a_broker_that_is_away_is_said_so_and_waited_for(plane: Plane, tmp_path: Path) -> None:
    _, access = plane.joined(tmp_path)
    there = plane.gateway._machines.broker_url
    plane.gateway._machines.broker_url = lambda _: "redis://127.0.0.1:1"  # type: ignore[method-assign]
    assert refusal(lambda: plane.open(access)) == (SLOW, "the broker does not answer: try again later")
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as redis:
        timer = threading.Timer(1, lambda: setattr(plane.gateway._machines, "broker_url", there))
        timer.start()
        assert redis.ping()  # the forwarder has tried again meanwhile


def test_messages_that_are_no_bytes_or_too_long_end_the_connection(plane: Plane, tmp_path: Path) -> None:
    _, access = plane.joined(tmp_path)
    # Not the whole long message: the rest of its data would reset the connection, and lose the code.
    for message, code in ((frame(b"PING", opcode=1), 1003), (head(2_000_000), 1009)):
        with upgraded(access) as raw:
            raw.sendall(message)
            end = raw.recv(4)
            assert end[0] == 0x88 and int.from_bytes(end[2:4], "big") == code


def test_pings_whose_answers_nobody_reads_end_the_connection(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, access = plane.joined(tmp_path)
    raw = upgraded(access)
    raw.settimeout(5)
    wait_until(lambda: plane.gateway.connections[machine] == 1)
    with pytest.raises(OSError):
        while True:
            raw.sendall(frame(bytes(125), 9) * 1000)
    wait_until(lambda: plane.gateway.connections[machine] == 0)
    raw = upgraded(access)
    with pytest.raises(OSError):
        for _ in range(100_000):  # fragments of a message that never ends
            raw.sendall(frame(b"", 2, False) if _ == 0 else frame(b"", 0, False))
    wait_until(lambda: plane.gateway.connections[machine] == 0)


def test_addresses_without_encryption_or_with_a_path_are_no_public_ones(tmp_path: Path) -> None:
    for wrong in (
        "http://home.example",
        "https://home.example/x",
        "ftp://x",
        "https://",
        "https://a@b",
        "home.example",
    ):
        with pytest.raises(SettingsError, match="COMPUTESHARE_PUBLIC_URL"):
            Settings(home=tmp_path, public_url=wrong).resolve_public_url()
    for right in ("https://home.example/", "https://home.example:8443", "http://127.0.0.1:8000", "http://localhost"):
        assert Settings(home=tmp_path, public_url=right).resolve_public_url() == right.rstrip("/")


def test_what_a_machine_kept_by_an_earlier_version_still_works() -> None:
    key = MachineKey(Path("none"))
    assert Joined.parse("redis://:x@h:1/0", key) == Joined(redis_url="redis://:x@h:1/0")
    assert Joined.parse(7, key) is None and Joined.parse({"queue": "x"}, key) is None
    secret = {"queue": "x", "redis_url": "", "gateway": {"url": "https://h/v1/gateway", "credential": "1.2"}}
    assert Joined.parse(secret, key) is None
