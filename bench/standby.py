"""Measures a standby reducer while other reducers serve many jobs: CPU time and commands per second.

    python -m bench.standby --jobs 200 --seconds 10

The broker and the reducer are real; a thread renews the claims of another reducer.
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

from redis import Redis

from bench.dispatcher import commands_processed
from bench.support.wait import wait_until
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.reducer.process import CLAIM_MS, RENEW_S, Reducer
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker

SPEC = JobSpec(dataset="digits", model="mlp", rounds=2)


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        try:
            print(json.dumps(measure(connect(broker.url), Path(folder), arguments.jobs, arguments.seconds)))
        finally:
            broker.stop()


def measure(redis: Redis, folder: Path, jobs: int, seconds: float) -> dict[str, float]:
    """Per second: commands of the reducer alone, and CPU seconds of its thread."""
    stop = threading.Event()
    reducer = Reducer(redis, folder / "artifacts", folder / "bundles", stop)
    names = [f"bench{number}" for number in range(jobs)]
    for name in names:
        RoundStore(redis, name).publish(SPEC.model_dump_json())
    kept = [0]

    def keep() -> None:
        while not stop.is_set():
            pipeline = redis.pipeline(transaction=False)
            for name in names:
                pipeline.set(JobKeys(name).reducer(), "another's", px=CLAIM_MS)
            pipeline.execute()
            kept[0] += jobs
            stop.wait(RENEW_S)

    keeper = threading.Thread(target=keep)
    keeper.start()
    wait_until(lambda: kept[0], "the first claims", CLAIM_MS / 1000, every_s=0.01)
    used: list[float] = []

    def stand_by() -> None:
        began = time.thread_time()
        reducer.run()
        used.append(time.thread_time() - began)

    thread = threading.Thread(target=stand_by)
    before, kept_before = commands_processed(redis), kept[0]
    thread.start()
    stop.wait(seconds)
    after, kept_after = commands_processed(redis), kept[0]
    stop.set()
    thread.join()
    keeper.join()
    asked = after - before - (kept_after - kept_before)
    return {"commands": round(asked / seconds, 1), "cpu_s": round(used[0] / seconds, 5)}


if __name__ == "__main__":
    main()
