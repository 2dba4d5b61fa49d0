"""Measures the broker through the gateway beside direct TCP and direct TLS: messages of 45 MB, and small commands; or
how soon a machine is cut once its invite was withdrawn.

    python -m bench.gateway [--pairs 5] [--nginx]
    python -m bench.gateway --revocations 20

The gateway runs in a process of its own with TLS (as `computeshare-gateway` behind nginx with `--nginx`: real TLS by
HTTP/1.1); direct TLS is Debian's `redis-server`, which has TLS built in. All on this machine's loopback. Medians.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from api.database import Database
from api.fleet.invites import Introduction, InviteService
from bench.support.report import Cell, Part, Table, markdown
from bench.support.wait import wait_until
from computeshare.codecs.messages import PART_BYTES
from computeshare.protocol.keys import JobKeys
from computeshare.transport.connections import connect
from computeshare.transport.forwarder import Forwarder, GatewayAccess
from computeshare.transport.machine_key import MachineKey
from computeshare.transport.wire import Wire
from computeshare.up.embedded_broker import EmbeddedBroker, free_port
from computeshare.worker.invite import introduction

BYTES, PINGS = 45_000_000, 500
JOB = JobKeys("bench")
WEIGHTS = JOB.weights("1.0.0123456789abcdef")
"""The hash that is read: machines may not write it, nor read what they have written."""
Way = tuple[Redis, str]
"""A client, and the key of a hash that it may write."""
NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log; worker_processes 1;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  server {{
    listen {host}:{port} ssl; ssl_certificate {folder}/cert.pem; ssl_certificate_key {folder}/key.pem;
    location / {{
      proxy_pass http://127.0.0.1:{target}; proxy_http_version 1.1;
      proxy_read_timeout 30s; proxy_buffer_size 64k; proxy_buffers 4 64k;
      proxy_set_header Upgrade $http_upgrade; proxy_set_header Connection upgrade; proxy_set_header Host $http_host;
    }}
  }}
}}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5, help="rounds in which each way is measured once")
    parser.add_argument("--nginx", action="store_true", help="TLS by nginx in front of the gateway")
    parser.add_argument("--revocations", type=int, default=0, help="instead: withdraw so many invites, one by one")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        certify(folder)
        broker = EmbeddedBroker.start(folder / "broker.log")
        stack.callback(broker.stop)
        if options.revocations:
            print(markdown(Part([Table("Withdrawn invites", *revocations(folder, broker, options.revocations))])))
            return
        ways: dict[str, Way] = {"direct TCP": (Redis.from_url(_tcp(broker.url), socket_timeout=60), "bench")}
        if server := shutil.which("redis-server"):
            ways["direct TLS"] = stack.enter_context(broker_over_tls(server, folder))
        with connect(broker.url) as direct:
            fill(direct)
        ways["gateway"] = stack.enter_context(through_gateway(folder, broker, None))
        if options.nginx:
            ways["gateway, TLS by nginx"] = stack.enter_context(through_gateway(folder, broker, "nginx"))
        rounds = [{name: measure(*way) for name, way in ways.items()} for _ in range(options.pairs)]
    rows: list[list[Cell]] = [
        [name, *(statistics.median(one[name][at] for one in rounds) for at in range(3))] for name in ways
    ]
    columns = ["way", "45 MB up, MB/s", "45 MB down, MB/s", "PING, ms"]
    print(markdown(Part([Table("Through the gateway", columns, rows)])))


def certify(folder: Path) -> None:
    """A certificate for localhost."""
    names = ["-subj", "/CN=localhost", "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    subprocess.run(["openssl", "req", "-x509", "-days", "1", *key, *names], check=True, capture_output=True)


def _tcp(url: str) -> str:
    """The embedded broker's address by TCP."""
    with connect(url) as redis:
        port = redis.info("server")["tcp_port"]
        password = redis.connection_pool.connection_kwargs.get("password") or ""
        user = redis.connection_pool.connection_kwargs.get("username") or ""
    return f"redis://{user}:{password}@127.0.0.1:{port}/0"


def succeeds(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:
        return False
    return True


@contextmanager
def running(command: list[str], folder: Path, ready: Callable[[], object], **environment: str) -> Iterator[None]:
    """A process until the end of the block, from when `ready` raises nothing."""
    with open(folder / "process.log", "ab") as log:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
    try:
        wait_until(lambda: succeeds(ready), f"{command[0]} to be ready", 30)
        yield
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def broker_over_tls(server: str, folder: Path) -> Iterator[Way]:
    """A Redis server with TLS, and a client of it."""
    port = str(free_port())
    files = ["--tls-cert-file", str(folder / "cert.pem"), "--tls-key-file", str(folder / "key.pem")]
    command = [server, "--port", "0", "--tls-port", port, *files, "--tls-auth-clients", "no", "--save", ""]
    redis = Redis.from_url(f"rediss://127.0.0.1:{port}?ssl_cert_reqs=none", socket_timeout=60)
    with running(command, folder, redis.ping), redis:
        fill(redis)
        yield redis, "bench"


@contextmanager
def through_gateway(folder: Path, broker: EmbeddedBroker, proxy: str | None) -> Iterator[Way]:
    """A gateway in a process of its own, a forwarder here, and a client of that, with a key that it may write."""
    home = folder / f"home-{proxy}"
    database = Database(f"sqlite:///{home / 'computeshare.db'}")
    database.migrate()
    machine, key = joined(InviteService(database, None, "https://localhost"), home)
    port, front = free_port(), free_port()
    pem = (folder / "cert.pem").read_text() if proxy else ""
    url = f"https://localhost:{front}" if proxy else f"http://127.0.0.1:{port}"
    access = GatewayAccess(f"{url}/v1/gateway", machine, key, pem)
    worker = f"{machine}bench"
    with connect(broker.url) as direct:
        direct.hset(JOB.seats(), worker, f"{worker}-bench-0-1")
    with ExitStack() as stack:
        forwarder = stack.enter_context(Forwarder(access))
        redis = stack.enter_context(Redis.from_url(forwarder.redis_url, socket_timeout=60))
        if proxy:
            (folder / "nginx.conf").write_text(NGINX.format(folder=folder, host="127.0.0.1", port=front, target=port))
            own = [str(shutil.which("nginx")), "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf")]
            stack.enter_context(running(own, folder, lambda: ssl.get_server_certificate(("127.0.0.1", front))))
        stack.enter_context(gateway_process(folder, home, broker, port, redis.ping))
        yield redis, JOB.staged(f"{worker}:{'0' * 32}:0")
    database.close()


def joined(invites: InviteService, home: Path) -> tuple[str, MachineKey]:
    """A machine that has joined: its id, and its key in this folder."""
    made, code = invites.create("default", 15)
    key = MachineKey(home / "machine.key")
    invites.take_up(code, Introduction(**introduction("bench", code, key.current())), from_here=True)
    return made.id, key


@contextmanager
def gateway_process(
    folder: Path, home: Path, broker: EmbeddedBroker, port: int, ready: Callable[[], object]
) -> Iterator[None]:
    """A gateway in a process of its own, with the database in `home`."""
    environment = {
        "COMPUTESHARE_HOME": str(home),
        "COMPUTESHARE_REDIS_URL": broker.urls["api"],
        "COMPUTESHARE_GATEWAY_REDIS_URL": broker.urls["worker"],
    }
    with running([sys.executable, "-m", "api.gateway.process", "--port", str(port)], folder, ready, **environment):
        yield


def revocations(folder: Path, broker: EmbeddedBroker, count: int) -> tuple[list[str], list[list[Cell]]]:
    """How long the connections of machines stay open once the withdrawal of their invites was answered, at a gateway in
    a process of its own; as a table's columns and row.
    """
    home, port, seconds = folder / "home", free_port(), []
    database = Database(f"sqlite:///{home / 'computeshare.db'}")
    database.migrate()
    with connect(broker.url) as direct, ExitStack() as stack:
        invites = InviteService(database, None, "https://localhost", lambda: direct)
        url = f"http://127.0.0.1:{port}"
        stack.enter_context(gateway_process(folder, home, broker, port, lambda: urlopen(f"{url}/healthz")))
        for number in range(count):
            machine, key = joined(invites, home / str(number))
            with Forwarder(GatewayAccess(f"{url}/v1/gateway", machine, key, "")) as forwarder:
                connection: Any = Redis.from_url(forwarder.redis_url).connection_pool.get_connection()
                time.sleep(random.random())  # the gateway looks once a second
                invites.withdraw(machine)
                answered = time.perf_counter()
                with contextlib.suppress(RedisConnectionError):
                    while True:
                        connection.send_command("PING", check_health=False)
                        connection.read_response()
                seconds.append(time.perf_counter() - answered)
    database.close()
    found: list[Cell] = [count, statistics.median(seconds), max(seconds)]
    return ["revocations", "median until cut, s", "longest, s"], [found]


@functools.cache
def message() -> bytes:
    """45 MB that do not compress."""
    return random.Random(0).randbytes(BYTES)


def parts_of(blob: bytes) -> list[memoryview]:
    """A message's parts, as updates and weights are sent."""
    return [memoryview(blob)[at : at + PART_BYTES] for at in range(0, len(blob), PART_BYTES)]


def fill(redis: Redis) -> None:
    """Store the message that is read."""
    redis.hset(WEIGHTS, mapping={str(at): bytes(part) for at, part in enumerate(parts_of(message()))})


def measure(redis: Redis, key: str) -> tuple[float, float, float]:
    """MB/s up and down of a message in parts, as updates are sent, and the milliseconds of a PING."""
    blob = message()
    parts = parts_of(blob)
    rooms = [memoryview(bytearray(part.nbytes)) for part in parts]
    wire = Wire(redis, stall_s=30)
    wire.exchange([("PING",)])
    began = time.perf_counter()
    wire.exchange([("HSET", key, str(at), part) for at, part in enumerate(parts)])
    sent = time.perf_counter()
    wire.exchange([("HGET", WEIGHTS, str(at)) for at in range(len(parts))], into=rooms)
    received = time.perf_counter()
    assert b"".join(rooms) == blob
    times = []
    for _ in range(PINGS):
        asked = time.perf_counter()
        wire.exchange([("PING",)])
        times.append(time.perf_counter() - asked)
    wire.exchange([("UNLINK", key)])
    wire.close()
    return BYTES / (sent - began) / 1e6, BYTES / (received - sent) / 1e6, 1000 * statistics.median(times)


if __name__ == "__main__":
    main()
