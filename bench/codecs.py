"""Measures codecs on real gradients, in buckets as in production: bytes, encode and decode speed, error. One process,
one thread.

python -m bench.codecs                       # as markdown; gradients are made once and kept in a temporary folder
python -m bench.codecs --model resnet18 --times 9

Most of the gradient of `resnet18` on 3x32x32 is zero (its last feature maps are one pixel wide, so that eight of nine
weights of a filter see only padding); on 3x64x64 (`resnet18-64`) the gradient is dense. Speeds are per second of CPU
time, which depends less on other load than wall-clock time; a memory copy is measured beside each codec.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import fitted
from computeshare.codecs.registry import CODECS
from computeshare.settings import Settings
from computeshare.tasks.images import models
from computeshare.tasks.images.datasets import splits
from computeshare.tasks.modules import layout_of
from computeshare.tensors.layout import BUCKET, Layout
from computeshare.types import Vector

GRADIENTS = {  # model, input, steps before the gradient is taken
    "simplenet": ("simplenet", (1, 28, 28), 100),
    "lenet5": ("lenet5", (1, 28, 28), 100),
    "resnet18": ("resnet18", (3, 32, 32), 30),
    "resnet18-64": ("resnet18", (3, 64, 64), 10),
}


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one gradient: compression ratio to float32, MB of float32 per CPU second, and relative L2 error."""

    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    error: float


def gradient(name: str, data_dir: Path, folder: Path) -> Vector:
    """The gradient (d,) a few steps into training on MNIST; cached in `folder`."""
    path = folder / f"{name}.npy"
    if not path.exists():
        np.save(path, _trained(*GRADIENTS[name], data_dir))
    kept: Vector = np.load(path)
    return kept


def _trained(model: str, shape: tuple[int, int, int], steps: int, data_dir: Path) -> Vector:
    module = models.build(model, shape, 10, 0).train()
    split = splits.open_split("mnist", "train", data_dir, shape)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02, momentum=0.9)
    rng = np.random.default_rng(0)
    for _ in range(steps):
        optimizer.step()  # the first step has no gradient and changes nothing
        images, labels = split.batch(rng.integers(0, len(split), 32))
        optimizer.zero_grad()
        functional.cross_entropy(module(images), labels).backward()  # type: ignore[no-untyped-call]
    return np.concatenate([p.grad.numpy().ravel() for p in module.parameters() if p.grad is not None])


def layout(name: str) -> Layout:
    """The layout of a gradient of `GRADIENTS`."""
    model, shape, _ = GRADIENTS[name]
    return layout_of(models.build(model, shape, 10, 0))


def measure(codec: Codec, values: Vector, layout: Layout, times: int) -> Row:
    """Medians over `times` runs through all buckets; decoding writes into one preallocated vector."""
    buckets, codecs = list(_buckets(values)), fitted(codec, layout)
    blobs = [one.encode(bucket, seed) for seed, (one, bucket) in enumerate(zip(codecs, buckets, strict=True))]
    out = np.empty_like(values)
    into = list(_buckets(out))

    def encode() -> None:
        for seed, (one, bucket) in enumerate(zip(codecs, buckets, strict=True)):
            one.encode(bucket, seed)

    def decode() -> None:
        for one, blob, target in zip(codecs, blobs, into, strict=True):
            one.decode(blob, target.size, target)

    encoding, decoding = (values.nbytes / 1e6 / median_s(work, times) for work in (encode, decode))
    lost = np.linalg.norm(out.astype(np.float64) - values) / np.linalg.norm(values.astype(np.float64))
    return Row(values.nbytes / sum(map(len, blobs)), encoding, decoding, float(lost))


def memcpy_mb_s(values: Vector, times: int) -> float:
    """MB of float32 copied per CPU second, bucket by bucket into one preallocated buffer."""
    kept = np.empty(BUCKET, np.float32)

    def copy() -> None:
        for bucket in _buckets(values):
            np.copyto(kept[: bucket.size], bucket)

    return values.nbytes / 1e6 / median_s(copy, times)


def median_s(work: Callable[[], None], times: int) -> float:
    """Median CPU seconds of `work` over all threads; each run repeats short work for 20 ms."""
    work()
    started = time.process_time()
    work()
    repeat = max(1, int(0.02 / max(1e-6, time.process_time() - started)))
    seconds = []
    for _ in range(times):
        started = time.process_time()
        for _ in range(repeat):
            work()
        seconds.append((time.process_time() - started) / repeat)
    return statistics.median(seconds)


def _buckets(values: Vector) -> Iterator[Vector]:
    return (values[start : start + BUCKET] for start in range(0, values.size, BUCKET))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=GRADIENTS, action="append", help="one of these only; may be repeated")
    parser.add_argument("--times", type=int, default=5, help="runs of which the median is taken")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "computeshare-gradients")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.folder.mkdir(exist_ok=True)
    print(
        "| gradient | codec | ratio | encode MB/s | decode MB/s | error | memcpy MB/s |\n|---|---|---|---|---|---|---|"
    )
    for name in options.model or GRADIENTS:
        values, laid_out = gradient(name, Settings().data_dir, options.folder), layout(name)
        for label, codec in CODECS.items():
            row, copied = measure(codec, values, laid_out, options.times), memcpy_mb_s(values, options.times)
            speeds = f"{row.encode_mb_s:.0f} | {row.decode_mb_s:.0f}"
            print(f"| `{name}` | `{label}` | {row.ratio:.1f} | {speeds} | {row.error:.2g} | {copied:.0f} |", flush=True)


if __name__ == "__main__":
    main()
