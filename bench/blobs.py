"""Measures messages to and from the embedded broker, over its unix socket and over loopback: in parts over a connection
of our own, as in production, and in one piece through redis-py (which uses hiredis if installed). Medians.

    python -m bench.blobs
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from redis import Redis

from bench.support.report import Cell, Part, Table, markdown
from computeshare.codecs.messages import PART_BYTES
from computeshare.protocol.channel import Channel
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker

SIZES = {"87 kB": 87_360, "1 MB": 1_000_000, "45 MB": 45_000_000}


def median_s(call: Callable[[], object], size: int) -> float:
    seconds = []
    for _ in range(11 if size > 10_000_000 else 300):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def measure(redis: Redis, size: int) -> list[float]:
    """GB/s out and in: in parts over our own connection, then in one piece through redis-py."""
    blob, channel = os.urandom(size), Channel(redis)
    parts = [memoryview(blob)[at : at + PART_BYTES] for at in range(0, size, PART_BYTES)]
    room = [memoryview(bytearray(part.nbytes)) for part in parts]

    def send() -> None:
        channel.run_staged({"message": parts}, 60, ["PING"])

    def receive() -> None:
        channel.read("message", len(parts), room)

    calls: list[Callable[[], object]] = [send, receive, lambda: redis.set("blob", blob), lambda: redis.get("blob")]
    return [size / median_s(call, size) / 1e9 for call in calls]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        try:
            rows: list[list[Cell]] = [
                [way, name, *measure(connect(url), size)]
                for way, url in (("unix socket", broker.url), ("loopback", broker.tcp_url))
                for name, size in SIZES.items()
            ]
        finally:
            broker.stop()
    hiredis = "with" if find_spec("hiredis") else "without"
    columns = ["over", "size", "out, GB/s", "in, GB/s", "redis-py out, GB/s", "redis-py in, GB/s"]
    part = Part([Table("Messages", columns, rows, f"redis-py {hiredis} hiredis.")])
    print(markdown(part))
    if options.json:
        part.save(options.json)


if __name__ == "__main__":
    main()
