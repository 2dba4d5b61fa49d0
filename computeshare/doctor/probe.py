"""The torch part of `computeshare doctor`: `python -m computeshare.doctor.probe DATA` prints a line of JSON."""

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from computeshare.errors import ComputeShareError
from computeshare.settings import Settings


def probe(data_dir: Path) -> dict[str, Any]:
    """Device, threads, seconds to import torch, and the problems of torchvision and of each data set that needs no
    decoding.

    `sources` holds the download addresses of missing data sets.
    """
    started = time.perf_counter()
    import torch

    from computeshare.tasks.images.datasets import splits
    from computeshare.tasks.images.datasets.definitions import DEFINITIONS
    from computeshare.tasks.text import texts
    from computeshare.training import devices

    seconds = time.perf_counter() - started
    found = devices.describe(devices.choose(Settings().device))
    try:
        import torchvision  # noqa: F401

        trouble = ""
    except (ImportError, RuntimeError) as error:
        trouble = str(error)
    quick = [name for name, one in DEFINITIONS.items() if one.files != "decoded"]
    sets = {
        name: _trouble(partial(splits.open_split, name, data_dir=data_dir, shape=DEFINITIONS[name].shape))
        for name in quick
    }
    sources = {name: splits.sources(name) for name, why in sets.items() if why == "missing" and not trouble}
    for name, text in texts.DEFINITIONS.items():
        sets[name] = _trouble(partial(texts.open_split, name, data_dir=data_dir, block_size=1))
        sources |= {name: [text.url]} if sets[name] == "missing" else {}
    return {
        "device": found,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
        "torchvision": trouble,
        "data_sets": sets,
        "sources": sources,
    }


def _trouble(open_split: Callable[[Literal["train", "test"]], object]) -> str:
    """The problem of a data set: empty for none, `missing`, or the damage."""
    try:
        open_split("train")
        open_split("test")
    except ComputeShareError as error:
        return "missing" if isinstance(error.__cause__, FileNotFoundError) else str(error)
    return ""


if __name__ == "__main__":
    print(json.dumps(probe(Path(sys.argv[1]))))
