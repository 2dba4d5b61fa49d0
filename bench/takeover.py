"""How long until the next version is out when the active reducer is killed with SIGKILL in mid-round.

    python -m bench.takeover --kills 5

Kills follow one another as soon as the next version is out: the reducer standing by, and the one that was restarted,
are all there is. The time is taken from the kill to the commit of the next version, by the broker's own stream.
"""

import argparse
import json
import os
import signal
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from redis import Redis

from computeshare.broker import connect
from computeshare.client import Client
from computeshare.embedded import free_port
from computeshare.keys import JobKeys
from computeshare.rounds import RoundStore
from computeshare.stack import UpOptions, running, wait_until_ready

SPEC = {
    "name": "bench: takeover",
    "queue": "bench",
    "dataset": "digits",
    "model": "mlp",
    "micro_batch": 32,
    "micro_batches_per_round": 4,
    "rounds": 1_000_000,
    "threads": 1,
    "checkpoint_every": 0,
    "evaluate_every": 0,
}
PATIENCE_S = 60.0


def wait_for_version(redis: Redis, job_id: str, above: int) -> float:
    """Seconds until a version above `above` is published. Raises TimeoutError after a minute."""
    started, rounds = time.monotonic(), RoundStore(redis, job_id)
    while time.monotonic() - started < PATIENCE_S:
        state = rounds.read()
        if state and state.version > above:
            return time.monotonic() - started
        time.sleep(0.005)
    raise TimeoutError(f"no version after {above} within {PATIENCE_S:.0f} s")


def kill_active_reducer(redis: Redis, job_id: str) -> int:
    """Kill the reducer that holds the claim; returns the version at that moment."""
    claim: Any = redis.get(JobKeys(job_id).reducer())
    state = RoundStore(redis, job_id).read()
    assert claim is not None and state is not None
    os.kill(int(claim.split(b"|")[2]), signal.SIGKILL)
    return state.version


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    options = parser.parse_args()
    seconds = []
    with tempfile.TemporaryDirectory() as home:
        up = UpOptions(port=free_port(), workers=2, queue="bench", home=Path(home))
        with running(up) as stack:
            wait_until_ready(stack, threading.Event())
            client = Client(stack.url, stack.settings.resolve_token())
            job = client.create(SPEC)
            redis = connect(stack.redis_url)
            wait_for_version(redis, job["id"], 100)
            for _ in range(options.kills):
                version = kill_active_reducer(redis, job["id"])
                # One version may have been committed between reading the number and the kill.
                seconds.append(wait_for_version(redis, job["id"], version + 1))
                print(f"next version after {seconds[-1]:.2f} s", flush=True)
            client.cancel(job["id"])
    print(json.dumps({"kills": len(seconds), "median_s": statistics.median(seconds), "worst_s": max(seconds)}))


if __name__ == "__main__":
    main()
