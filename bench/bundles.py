"""Measures how a worker fetches a bundle over a broker when it is killed in the middle and continues: bytes that the
broker sent to all, per byte of the bundle, and MB per second from the first piece to the last, the kill included.

    python -m bench.bundles [--megabytes 1000]
"""

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from redis import Redis

from bench.support.report import Part, Table, markdown
from computeshare.bundles.exchange import fetch
from computeshare.bundles.piece_server import PieceServer
from computeshare.bundles.store import BundleStore
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker

MEGABYTE = 1_000_000


def worker(url: str, folder: Path, digest: str) -> None:
    """Fetch, and print the bytes that are there after each piece."""
    store = BundleStore(folder, limit_bytes=10**12)
    fetch(connect(url), store, digest, progress=lambda now: print(now.done_bytes, flush=True))


def run_worker(url: str, folder: Path, digest: str, until: int) -> float:
    """Run a worker, killed once `until` bytes are there; returns the seconds from its first piece on."""
    command = [sys.executable, "-m", "bench.bundles", "--worker", url, str(folder), digest]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        process.stdout.readline()
        began = time.perf_counter()
        for line in process.stdout:
            if int(line) >= until:
                process.kill()
                break
        process.wait()
        return time.perf_counter() - began


def sent_by(redis: Redis) -> int:
    info: Any = redis.info("stats")
    return int(info["total_net_output_bytes"])


def measure(url: str, folder: Path, size: int) -> tuple[float, float]:
    """Bytes sent by the broker per byte of a bundle of `size` bytes, and MB/s."""
    (folder / "mine").mkdir()
    with open(folder / "mine" / "data.bin", "wb") as file:
        for at in range(0, size, MEGABYTE):
            file.write(os.urandom(min(MEGABYTE, size - at)))
    origin = BundleStore(folder / "origin")
    manifest = origin.add(folder / "mine")
    over, redis = threading.Event(), connect(url)

    def serve() -> None:
        server, client = PieceServer(origin), connect(url)
        while not over.is_set():
            server.step(client)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        before = sent_by(redis)
        seconds = run_worker(url, folder / "cache", manifest.digest, size // 2)
        seconds += run_worker(url, folder / "cache", manifest.digest, 2 * size)
        sent = sent_by(redis) - before
    finally:
        over.set()
        thread.join()
    if not BundleStore(folder / "cache", limit_bytes=10**12).has(manifest.digest):
        sys.exit("the bundle is not complete")
    return sent / size, size / MEGABYTE / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        url, folder, digest = options.worker
        worker(url, Path(folder), digest)
        return
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        try:
            ratio, speed = measure(broker.tcp_url, Path(folder), options.megabytes * MEGABYTE)
        finally:
            broker.stop()
    columns = ["bundle", "bytes sent by the broker / size", "MB/s"]
    part = Part([Table("A bundle, by a worker killed halfway", columns, [[f"{options.megabytes} MB", ratio, speed]])])
    print(markdown(part))
    if options.json:
        part.save(options.json)


if __name__ == "__main__":
    main()
