"""Rounds per second beside torch DistributedDataParallel, in one run, in turn; and where a round's time goes.

    python -m bench.ddp --model simplenet --rounds 1000 --pairs 5

Both train the same model on the same micro-batches with two workers of one thread each. The first tenth of the rounds
is not timed. Figures drift from hour to hour on a shared machine: quote the ratio.
"""

import argparse
import json
import sqlite3
import statistics
import tempfile
import threading
from contextlib import closing
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import peer_ddp
from computeshare.client import Client
from computeshare.embedded import free_port
from computeshare.settings import Settings
from computeshare.spec import JobSpec
from computeshare.stack import UpOptions, running, wait_until_ready

WORKERS = 2


def our_rounds_per_second(client: Client, spec: JobSpec, database: Path) -> tuple[float, dict[str, float]]:
    """Train over REST; the rate of the committed versions, and medians of where the time went, in milliseconds."""
    job = client.create(spec.model_dump(mode="json", exclude_unset=True))
    for event in client.follow(job):
        if event.type == "job" and event.data["status"] in ("completed", "failed", "cancelled"):
            job = event.data
    if job["status"] != "completed":
        raise SystemExit(f"the job is {job['status']}: {job['error']}")
    return _rate(client, job["id"], spec.rounds_total), {
        **_profile(client, job["id"]),
        **_reducer_profile(database, job["id"]),
    }


def _rate(client: Client, job_id: str, rounds: int) -> float:
    timed = [p for p in client.metrics(job_id)["train_loss"] if p["version"] >= peer_ddp.WARM_UP * rounds]
    first, last = timed[0], timed[-1]
    seconds = (datetime.fromisoformat(last["at"]) - datetime.fromisoformat(first["at"])).total_seconds()
    return float((last["version"] - first["version"]) / seconds)


def _profile(client: Client, job_id: str) -> dict[str, float]:
    seconds: dict[str, list[float]] = {}
    for submission in client.submissions(job_id):
        for name, value in submission["seconds"].items():
            seconds.setdefault(f"worker {name}", []).append(value)
    return {name: round(1000 * statistics.median(values), 2) for name, values in seconds.items()}


def _reducer_profile(database: Path, job_id: str) -> dict[str, float]:
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as connection:
        rows = connection.execute("SELECT seconds FROM version WHERE job_id = ?", [job_id]).fetchall()
    laps = [json.loads(row[0]) for row in rows if row[0] and row[0] != "{}"]
    return {f"reducer {name}": round(1000 * statistics.median(lap[name] for lap in laps), 2) for name in laps[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="simplenet")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--input", type=int, nargs=3)
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--micro-batch", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--codec", default="float16")
    options = parser.parse_args()
    spec = JobSpec(
        name=f"bench: {options.model}",
        queue="bench",
        dataset=options.dataset,
        model=options.model,
        input=options.input,
        micro_batch=options.micro_batch,
        micro_batches_per_round=WORKERS,
        rounds=options.rounds,
        optimizer={"name": "SGD", "lr": 0.01, "momentum": 0.9},
        codec={"up": options.codec, "down": "float32"},
        threads=1,
        checkpoint_every=0,
        evaluate_every=0,
    )
    ours, theirs = [], []
    profile: dict[str, float] = {}
    data_dir = Settings().data_dir
    with tempfile.TemporaryDirectory() as home:
        up = UpOptions(port=free_port(), workers=WORKERS, queue="bench", home=Path(home))
        with running(up) as stack:
            never = threading.Event()
            wait_until_ready(stack, never)
            client = Client(stack.url, stack.settings.resolve_token())
            for _ in range(options.pairs):
                rate, profile = our_rounds_per_second(client, spec, Path(home) / "computeshare.db")
                ours.append(rate)
                theirs.append(peer_ddp.rounds_per_second(spec, data_dir, WORKERS))
                print(f"ComputeShare {ours[-1]:6.1f}   DDP {theirs[-1]:6.1f} rounds/s", flush=True)
    print(json.dumps(summary(spec, ours, theirs, profile), indent=1))


def summary(spec: JobSpec, ours: list[float], theirs: list[float], profile: dict[str, float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "model": spec.model,
        "ours": round(statistics.median(ours), 1),
        "ddp": round(statistics.median(theirs), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "milliseconds": profile,
    }


if __name__ == "__main__":
    main()
