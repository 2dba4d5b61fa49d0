"""Blobs through redis-py to the embedded broker on its unix socket: medians of SET and GET.

python -m bench.blobs            # as installed; with hiredis on the path it is used by itself
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from computeshare.broker import connect
from computeshare.embedded import EmbeddedBroker

SIZES = {"87 kB": 87_360, "1 MB": 1_000_000, "45 MB": 45_000_000}


def median_ms(call: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return round(1000 * statistics.median(seconds), 3)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found: dict[str, object] = {"hiredis": find_spec("hiredis") is not None}
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        try:
            redis = connect(broker.url)
            for name, size in SIZES.items():
                blob, times = os.urandom(size), 11 if size > 10_000_000 else 500
                found[f"SET {name} ms"] = median_ms(lambda b=blob: redis.set("blob", b), times)  # type: ignore[misc]
                found[f"GET {name} ms"] = median_ms(lambda: redis.get("blob"), times)
        finally:
            broker.stop()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
