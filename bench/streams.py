"""Measures what open event streams cost the rest: the rate of versions, and the list of jobs.

    python -m bench.streams --streams 300 --jobs 200

Two real workers train a small model while that many jobs are listed. Periods with and without streams alternate in one
run; the streams are read by a thread that does nothing else, and parses nothing.
"""

import argparse
import contextlib
import selectors
import signal
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.recovery import SPEC
from bench.stage import Stage, stage
from bench.support.wait import wait_until

PATIENCE_S = 120.0
LIST_EVERY_S = 0.25
DRAIN_S = 0.2
"""Seconds between two readings of all streams: a client takes as little as it can of the cores it shares."""
SETTLED_S = 3.0
"""From the opening or closing of streams to the beginning of a measurement."""


@contextmanager
def streams(up: Stage, job_id: str, count: int) -> Iterator[None]:
    """Read this many event streams of a job until the end of the block."""
    address, done = urlsplit(up.run_file().url), threading.Event()
    token = (up.home / "token").read_text().strip()
    request = (
        f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {address.netloc}\r\nAuthorization: Bearer {token}\r\n\r\n"
    )
    with contextlib.ExitStack() as opened, selectors.DefaultSelector() as selector:
        for _ in range(count):
            one = opened.enter_context(socket.create_connection((str(address.hostname), int(address.port or 80)), 30))
            one.sendall(request.encode())
            answer = one.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200"), answer
            one.setblocking(False)
            selector.register(one, selectors.EVENT_READ)

        def drain() -> None:
            into = bytearray(1 << 20)
            while not done.wait(DRAIN_S):
                for key, _ in selector.select(0):
                    assert key.fileobj.recv_into(into), "a stream has ended"  # type: ignore[union-attr]

        reader = threading.Thread(target=drain)
        reader.start()
        try:
            yield
            assert reader.is_alive()
        finally:
            done.set()
            reader.join()


def measure(up: Stage, job_id: str, jobs: int, seconds: float) -> dict[str, float]:
    """Versions per second, the median and the largest seconds that a list of jobs takes, and the processor time of the
    API's process per second, which other work on the machine changes least.
    """
    time.sleep(SETTLED_S)
    began, first, took = time.monotonic(), version(up, job_id), list[float]()
    api = up.process("api")
    assert api
    used = sum(api.cpu_times()[:2])
    while time.monotonic() - began < seconds:
        asked = time.perf_counter()
        found = up.call("GET", f"/v1/jobs?limit={jobs}")
        took.append(time.perf_counter() - asked)
        assert len(found["items"]) == jobs
        time.sleep(LIST_EVERY_S)
    passed = time.monotonic() - began
    rate, cores = (version(up, job_id) - first) / passed, (sum(api.cpu_times()[:2]) - used) / passed
    return {"versions": rate, "list_s": statistics.median(took), "most_s": max(took), "api_cores": cores}


def version(up: Stage, job_id: str) -> int:
    state = up.rounds(job_id)
    assert state
    return state.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=300)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10, help="of each period")
    parser.add_argument("--pairs", type=int, default=5, help="periods with streams, each after one without")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that nothing is left running
    found: dict[int, list[dict[str, float]]] = {0: [], options.streams: []}
    with tempfile.TemporaryDirectory() as folder, stage(Path(folder) / "home", workers=2) as up:
        others: dict[str, Any] = {**SPEC, "queue": "nobody"}
        for _ in range(options.jobs - 1):
            up.create(others)
        job_id = up.create({**SPEC, "workers": {"min": 1, "max": 2}})
        wait_until(lambda: up.job(job_id)["workers"] == 2, "both workers", PATIENCE_S)
        for pair in range(options.pairs):
            for count, results in found.items():
                with streams(up, job_id, count):
                    results.append(measure(up, job_id, options.jobs, options.seconds))
                line = ", ".join(f"{name} {value:.3f}" for name, value in results[-1].items())
                print(f"{pair + 1} of {options.pairs}, {count} streams: {line}", flush=True)
    for name in found[0][0]:
        calm, busy = ([one[name] for one in results] for results in found.values())
        ratios = [b / c for c, b in zip(calm, busy, strict=True)]
        figures = f"{statistics.median(calm):.3f} without, {statistics.median(busy):.3f} with streams"
        print(
            f"{name}: {figures}, median ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
