"""Load test of pages and event streams: a long job, very many jobs and very many open streams.

    python -m bench.pages --minutes 10

The control plane runs in a process of its own, on the database of `bench.longjob`, while two versions arrive per
second. The measurements in a browser need Chromium.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx2
from redis import Redis

from bench.longjob import JOB, ROUND_MS, SPEC, database_in, fill, token, worker
from bench.support.report import Cell, Part, Table, markdown
from bench.support.results import ROOT, percentile
from bench.support.wait import wait_until
from computeshare.protocol.keys import JOBS, JobKeys
from computeshare.settings import login_path
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker, free_port

TRIES = 20
MOST_START_S = 60.0


class Feed(Thread):
    """Writes the events of new versions to the broker, submissions first, as the scripts would."""

    def __init__(self, redis: Redis, version: int, workers: int) -> None:
        super().__init__(daemon=True)
        self.redis, self.version, self.workers = redis, version, workers
        self.written: dict[int, float] = {}
        """Version to the time of its writing, by `time.perf_counter`."""
        self.done = Event()

    def run(self) -> None:
        while not self.done.wait(ROUND_MS / 1000):
            made = SPEC.plan.round(self.version)
            pipeline = self.redis.pipeline(transaction=False)
            for unit in made.units:
                self._tell(pipeline, "submission", **self._submission(unit))
            base, self.version = token(self.version), self.version + 1
            counted = [[unit, worker(unit % self.workers), 32] for unit in made.units]
            about = {"token": token(self.version), "version": self.version, "base": base, "epoch": made.epoch}
            self._tell(pipeline, "version", **about, loss=0.07, sha256="0" * 64, counted=counted, seconds={})
            self.written[self.version] = time.perf_counter()
            pipeline.execute()

    def _submission(self, unit: int) -> dict[str, Any]:
        who, current = worker(unit % self.workers), token(self.version)
        seconds = {"waiting": 0.1, "computing": 0.3, "encoding": 0.02, "uploading": 0.05}
        about = {"worker": who, "session": "s", "nonce": f"{self.version}-{unit}", "outcome": "accepted"}
        units = {"micro_batches": [unit], "counted": [unit], "bytes_up": 11_000, "bytes_down": 31_000}
        return {**about, **units, "base": current, "current": current, "seconds": seconds}

    @staticmethod
    def _tell(pipeline: Any, kind: str, **data: Any) -> None:
        fields = {"type": kind, "at": int(time.time() * 1000), "data": json.dumps(data)}
        pipeline.xadd(JobKeys(JOB).events(), fields)


@contextmanager
def serving(versions: int, workers: int, others: int) -> Iterator[tuple[str, str, Redis]]:
    """A control plane on a generated database until the end of the block: address, token, broker connection."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        fill(database_in(home), versions, workers, others)
        broker = EmbeddedBroker.start(home / "broker.log")
        redis = connect(broker.url)
        redis.sadd(JOBS, JOB)
        redis.set(JobKeys(JOB).spec(), SPEC.model_dump_json())
        redis.hset(JobKeys(JOB).round(), mapping={"status": "running", "token": token(versions), "base": ""})
        port = free_port()
        environment = {**os.environ, "COMPUTESHARE_HOME": folder, "COMPUTESHARE_REDIS_URL": broker.url}
        line = [sys.executable, "-m", "api", "--child", "--port", str(port)]
        process = subprocess.Popen(line, cwd=ROOT, env=environment)
        try:
            url = f"http://127.0.0.1:{port}"
            wait_until(lambda: _answers(url), "the control plane to start", MOST_START_S)
            yield url, (home / "token").read_text().strip(), redis
        finally:
            process.terminate()
            process.wait(20)
            redis.close()
            broker.stop()


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx2.HTTPError):
        return httpx2.get(f"{url}/healthz").is_success
    return False


def answers(url: str, headers: dict[str, str]) -> list[list[Any]]:
    """For each path that pages and programs request: path, median ms, largest ms, kB."""
    rows = []
    paths = ["/v1/jobs?limit=50", "/v1/jobs?limit=50&status=completed", "/", f"/jobs/{JOB}", f"/jobs/{JOB}/parts"]
    paths += [f"/jobs/{JOB}/submissions", f"/v1/jobs/{JOB}/metrics", f"/v1/jobs/{JOB}/ledger"]
    with httpx2.Client(base_url=url, headers=headers, timeout=60) as client:
        for path in paths:
            took, size = [], 0
            for _ in range(TRIES):
                began = time.perf_counter()
                answer = client.get(path)
                took.append(1000 * (time.perf_counter() - began))
                assert answer.is_success, answer.text
                size = len(answer.content)
            rows.append([path.replace(JOB, "JOB"), statistics.median(took), max(took), size / 1000])
    return rows


async def lags(url: str, headers: dict[str, str], feed: Feed, streams: int, seconds: float) -> list[float]:
    """Seconds from the writing of a version to its arrival, for every version and each of `streams` streams."""
    found: list[float] = []

    async def watch(client: httpx2.AsyncClient, after: int) -> None:
        async with client.stream("GET", f"/v1/jobs/{JOB}/events", params={"after": after}) as answer:
            event = ""
            async for text in answer.aiter_lines():
                if text.startswith("event: "):
                    event = text[7:]
                elif text.startswith("data: ") and event == "version":
                    version = json.loads(text[6:])["data"]["version"]
                    if (written := feed.written.get(version)) is not None:
                        found.append(time.perf_counter() - written)

    limits = httpx2.Limits(max_connections=streams + 10)
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=60, limits=limits) as client:
        after = (await client.get(f"/v1/jobs/{JOB}")).json()["last_event_id"]
        tasks = [asyncio.create_task(watch(client, after)) for _ in range(streams)]
        await asyncio.sleep(3)
        found.clear()
        await asyncio.sleep(seconds)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


def in_browser(url: str, key: str, minutes: float, chromium: str) -> tuple[list[list[Any]], list[list[float]]]:
    """Measure the long job's page in Chromium: first paint, bytes, heap; and heap and nodes during live updates."""
    from playwright.sync_api import sync_playwright

    arguments = ["--no-sandbox", "--disable-gpu", "--enable-precise-memory-info"]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=arguments)
        page = browser.new_context().new_page()
        page.goto(url + login_path(key))
        page.goto("about:blank")
        session = page.context.new_cdp_session(page)
        session.send("Network.enable")
        received: list[float] = []
        session.on("Network.loadingFinished", lambda event: received.append(event["encodedDataLength"]))
        page.goto(f"{url}/jobs/{JOB}", wait_until="load")
        paint = page.evaluate("() => performance.getEntriesByName('first-contentful-paint')[0].startTime")
        drawn = page.evaluate("() => performance.now()")
        page.wait_for_timeout(1000)
        weight = sum(received) / 1000
        heap = []
        began = time.monotonic()
        while (after_s := time.monotonic() - began) <= 60 * minutes:
            page.wait_for_timeout(min(30_000, 6000 * minutes))
            session.send("HeapProfiler.collectGarbage")
            used = session.send("Runtime.getHeapUsage")["usedSize"] / 1e6
            nodes = session.send("Memory.getDOMCounters")["nodes"]
            heap.append([after_s / 60, used, nodes])
        version = page.locator("[data-field=version]").inner_text()
        browser.close()
    rows = [
        ["first contentful paint, ms", paint],
        ["loaded and run, ms", drawn],
        ["sent to the browser, kB", weight],
        ["heap after the first turns, MB", heap[0][1]],
        [f"heap after {minutes:g} minutes, MB", heap[-1][1]],
        ["nodes after the first turns", heap[0][2]],
        [f"nodes after {minutes:g} minutes", heap[-1][2]],
        ["version that the page shows at the end", version],
    ]
    return rows, heap


def main() -> None:
    """Run all measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30, help="how long the streams are watched")
    parser.add_argument("--minutes", type=float, default=10, help="how long the page is watched")
    parser.add_argument("--chromium", default="/usr/bin/chromium")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not Path(options.chromium).exists():
        sys.exit(f"skipped: there is no {options.chromium}: install Chromium, or name it by --chromium")
    with serving(options.versions, options.workers, options.jobs) as (url, key, redis):
        headers = {"Authorization": f"Bearer {key}"}
        tables = [Table("Answers, medians", ["asked for", "ms", "ms at most", "kB"], answers(url, headers))]
        feed = Feed(redis, options.versions, options.workers)
        feed.start()
        found = asyncio.run(lags(url, headers, feed, options.streams, options.seconds))
        shares: list[list[Cell]] = [[f"{share:.0%}", percentile(found, share)] for share in (0.5, 0.95, 0.99, 1.0)]
        note = f"{options.streams} streams, {len(found):,} arrivals."
        tables.append(Table("Seconds from a version to its arrival at a stream", ["share", "s at most"], shares, note))
        rows, heap = in_browser(url, key, options.minutes, options.chromium)
        tables.append(Table("The long job's page in Chromium", ["", "value"], rows))
        feed.done.set()
    part = Part(tables, details={"heap": heap})
    if options.json:
        part.save(options.json)
    print(markdown(part))


if __name__ == "__main__":
    main()
