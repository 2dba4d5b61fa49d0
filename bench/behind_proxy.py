"""Trains behind nginx with TLS: beside direct workers over a thin link, while nginx is killed again and again, or while
messages of 45 MB fill the link.

    python -m bench.behind_proxy --case link --pairs 3              # 20 Mbit/s, 20 ms, two workers; as root
    python -m bench.behind_proxy --case kills --rounds 4000         # three workers; nginx is killed every 20 s
    python -m bench.behind_proxy --case heartbeats --rate 5         # a worker's heartbeats on a full link; as root

`link` compares the samples per second of workers that joined by invites, through nginx and the gateway, with those of
workers that have the broker's address. `kills` compares the final weights with those of one direct worker. `heartbeats`
tells the seconds between a worker's heartbeats, sent every two seconds, while it waits and while it trains.
"""

import argparse
import hashlib
import itertools
import os
import shutil
import signal
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from redis import Redis

from bench.gateway import NGINX, certify
from bench.links import Shape, links
from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown, paired
from bench.support.wait import wait_until
from bench.thin_cases import BASE, DIFFERENCES, RESNET, codec
from computeshare.protocol import keys
from computeshare.queue.roster import list_workers
from computeshare.settings import Settings
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import free_port

JOB: dict[str, Any] = {**BASE, **DIFFERENCES, "model": "simplenet"}
LARGE = BASE | RESNET | codec("float32") | {"micro_batches_per_round": 1, "rounds": 1_000_000}
"""A job whose updates and weights are messages of 45 MB."""
RTT_MS = 20
DOWN_S = 1.0
"""How long nginx stays away when it was killed."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--pairs", type=int, default=3, help="of link: how often each way is measured")
    parser.add_argument("--limit", type=float, default=30, help="seconds of each measurement of link and heartbeats")
    parser.add_argument("--rate", type=float, default=20, help="of link and heartbeats: Mbit/s each way")
    parser.add_argument("--model", default="simplenet", help="of link")
    parser.add_argument("--rounds", type=int, default=4000, help="of kills: rounds of the job")
    parser.add_argument("--every", type=float, default=20, help="of kills: seconds between two kills")
    options = parser.parse_args()
    end_cleanly_when_asked()
    if not (shutil.which("nginx") and shutil.which("openssl")):
        parser.error("nginx or openssl is missing: install both")
    data = Settings().data_dir
    print(markdown(Part([CASES[options.case](data, options)])))


def link(data: Path, options: argparse.Namespace) -> Table:
    pairs, shape = [], Shape(options.rate, RTT_MS)
    document = JOB | {"model": options.model, "rounds": 1_000_000}
    with ExitStack() as stack:
        direct = stack.enter_context(ours.plane(2, data, stack.enter_context(links(2, shape))))
        own = stack.enter_context(links(2, shape, 1))
        _, front = stack.enter_context(proxy(own.host))
        joined = stack.enter_context(ours.plane(2, data, own, front))
        for _ in range(options.pairs):
            pairs.append(tuple(ours.train(each, document, options.limit) for each in (joined, direct)))
            print(*(f"{each.course.samples_per_s:.1f} samples/s" for each in pairs[-1]), file=sys.stderr, flush=True)
    rates = [(a.course.samples_per_s, b.course.samples_per_s) for a, b in pairs]
    sent = [tuple(sum(each.course.bytes_per_round) / 1000 for each in pair) for pair in pairs]
    rows = [paired("samples/s", rates), paired("kB a round on the links", [(a, b) for a, b in sent])]
    title = f"{options.rate:g} Mbit/s, {RTT_MS:g} ms: {options.model}, two workers"
    return Table(title, ["median of", "through nginx and gateway", "direct", "ratio"], rows)


def kills(data: Path, options: argparse.Namespace) -> Table:
    document = JOB | {"rounds": options.rounds, "micro_batches_per_round": 4}
    with proxy("127.0.0.1") as (nginx, front), ours.plane(3, data, front=front) as plane:
        ended = threading.Event()
        killer = threading.Thread(target=nginx.kill_every, args=(options.every, ended))
        began = time.monotonic()
        killer.start()
        try:
            far = ours.train(plane, document | {"workers": {"min": 3, "max": 3}}, scored=False).job
        finally:
            ended.set()
            killer.join()
        took = time.monotonic() - began
        epochs = plane.client.ledger(far["id"])
    exact = all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs)
    with ours.plane(1, data) as plane:
        near = ours.train(plane, document, scored=False).job
    rows: list[list[Cell]] = [
        ["seconds", round(took)],
        ["nginx killed, times", nginx.kills],
        ["samples counted", sum(epoch["counted"] for epoch in epochs)],
        ["ledger", "exact" if exact else f"NOT EXACT: {epochs}"],
        ["weights", "equal to one direct worker's" if far["weights_sha256"] == near["weights_sha256"] else "DIFFERENT"],
    ]
    return Table(f"{options.rounds} rounds of simplenet, three workers behind nginx", ["", "found"], rows)


def heartbeats(data: Path, options: argparse.Namespace) -> Table:
    rows: list[list[Cell]] = []
    with (
        links(1, Shape(options.rate, RTT_MS)) as own,
        proxy(own.host) as (_, front),
        ours.plane(1, data, own, front) as plane,
        connect(plane.stack.redis_urls["owner"]) as redis,
    ):
        wait_until(lambda: list_workers(redis), "the worker to register", 60)
        rows.append(["while it waits", *_gaps(redis, options.limit)])
        gaps: list[Cell] = []
        ours.train(plane, LARGE, options.limit, meanwhile=lambda _: gaps.extend(_gaps(redis, options.limit)))
        rows.append(["while it sends and receives 45 MB", *gaps])
    title = f"{options.rate:g} Mbit/s, {RTT_MS:g} ms: seconds between a worker's heartbeats"
    return Table(title, ["", "heartbeats", "median", "longest"], rows)


def _gaps(redis: Redis, seconds: float) -> list[Cell]:
    """The number of a worker's heartbeats in this time, and the median and longest time between two, in seconds."""
    (worker,) = list_workers(redis)
    until, times, life_ms = time.monotonic() + seconds, [], 0
    while (now := time.monotonic()) < until:
        before, life_ms = life_ms, int(redis.pttl(keys.worker(worker.id)))
        if life_ms > before:
            times.append(now)
        time.sleep(0.01)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return [len(times), statistics.median(gaps), max(gaps)]


CASES = {"link": link, "kills": kills, "heartbeats": heartbeats}


class Nginx:
    """An nginx that runs until `stop`."""

    def __init__(self, folder: Path, address: tuple[str, int]) -> None:
        self._command = ["nginx", "-e", str(folder / "nginx.log"), "-c", str(folder / "nginx.conf")]
        self._address, self.kills = address, 0
        self._process = self._started()

    def _started(self) -> "subprocess.Popen[bytes]":
        process = subprocess.Popen(self._command, start_new_session=True)
        wait_until(self._answers, "nginx to answer", 30)
        return process

    def _answers(self) -> bool:
        try:
            return bool(ssl.get_server_certificate(self._address, timeout=2))
        except OSError:
            return False

    def stop(self) -> None:
        """Kill nginx with its workers, which would go on alone."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def kill_every(self, seconds: float, ended: threading.Event) -> None:
        """Kill nginx and start it again, until `ended`."""
        while not ended.wait(seconds):
            self.stop()
            self.kills += 1
            time.sleep(DOWN_S)
            self._process = self._started()


@contextmanager
def proxy(host: str) -> Iterator[tuple[Nginx, ours.Front]]:
    """nginx with TLS on this address, in front of a port on which no API runs yet."""
    with tempfile.TemporaryDirectory() as name:
        folder, port, target = Path(name), free_port(), free_port()
        certify(folder)
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, host=host, port=port, target=target))
        certificate = ssl.PEM_cert_to_DER_cert((folder / "cert.pem").read_text())
        nginx = Nginx(folder, (host, port))
        try:
            yield nginx, ours.Front(f"https://{host}:{port}", target, hashlib.sha256(certificate).hexdigest())
        finally:
            nginx.stop()


if __name__ == "__main__":
    main()
