"""Compares test accuracy on real MNIST with a plain single-process loop of the same seed and batches.

python -m bench.mnist --epochs 4
"""

import argparse
import json
import tempfile
import threading
import time
from pathlib import Path

from bench.support import plain
from computeshare.client import Client
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.up.embedded_broker import free_port
from computeshare.up.stack import UpOptions, running, wait_until_ready


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--codec", default="float16")
    options = parser.parse_args()
    spec = JobSpec.model_validate(
        {
            "name": "bench: mnist",
            "queue": "bench",
            "dataset": "mnist",
            "model": options.model,
            "micro_batch": 32,
            "micro_batches_per_round": 4,
            "epochs": options.epochs,
            "optimizer": {"name": "SGD", "lr": 0.02, "momentum": 0.9},
            "codec": {"up": options.codec},
            "threads": 1,
        }
    )
    with tempfile.TemporaryDirectory() as home:
        up = UpOptions(port=free_port(), workers=options.workers, queue="bench", home=Path(home))
        with running(up) as stack:
            wait_until_ready(stack, threading.Event())
            client = Client(stack.url, stack.settings.resolve_token())
            started = time.monotonic()
            job = client.create(spec.model_dump(mode="json", exclude_unset=True))
            for _ in client.follow(job):
                pass
            job = client.show(job["id"])
            assert job["accuracy"] is not None  # the last version is always scored
            seconds = time.monotonic() - started
    alone = plain.train(spec, Settings().data_dir)
    print(
        json.dumps(
            {
                "status": job["status"],
                "accuracy": job["accuracy"],
                "plain_accuracy": alone.accuracy,
                "difference_points": round(100 * abs(job["accuracy"] - alone.accuracy), 3),
                "seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
