"""Trains a ResNet-18 on a folder of JPEGs of one's own, beside a plain PyTorch loop, and adds a worker that is killed.

    python -m bench.own_images [--images 20000 --epochs 6 --seconds 30 --pairs 2]

The images are made here (`bench.support.shapes`), added by `computeshare data add`, cropped, mirrored, fitted to
3x32x32, and trained on with SGD, a cosine schedule and bfloat16 autocast, with one thread, by strategy `local` with one
replica. The loop reads the same prepared images. Both accuracies are of the test split, after equal epochs; the two
trainings share the machine. Then samples per second are compared, in turns. At last a second worker, in an empty home,
joins over TCP; it is killed by SIGKILL when half of the training images have arrived, and started again.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import CosineAnnealingLR

from bench.single import OPTIMIZER, ROUNDS
from bench.support import ours, shapes
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.course import WARM_UP
from bench.support.relay import Relay
from bench.support.report import Part, Table, markdown, paired
from bench.support.wait import wait_until
from computeshare.bundles.store import BundleStore
from computeshare.jobspec.tasks.own_data import TRAINING_FILES
from computeshare.tasks.images.datasets import prepared
from computeshare.tasks.own.files import IMAGES

NAME, SIDE, BATCH = "shapes", 32, 64
FETCH_S = 5.0
"""How long the second worker's link takes for the training images, so that it can be killed in between."""
PATIENCE_S = 300.0
POLL_S = 0.02


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of the trainings")
    parser.add_argument("--seconds", type=float, default=30, help="of a measurement of speed, for each of the two")
    parser.add_argument("--pairs", type=int, default=2, help="measurements of speed, in turns")
    parser.add_argument("--inner-steps", type=int, default=20)
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ours.plane(1, Path(folder)) as plane:
        shapes.write(Path(folder) / NAME, options.images)
        say(f"{options.images:,} images made")
        added = ours.add_data(plane, NAME, Path(folder) / NAME)
        say(f"added: {added['bytes'] / 1e6:,.0f} MB")
        data = Data.of(plane, added)
        part = measure(plane, data, options)
    print(markdown(part))
    if options.json:
        part.save(options.json)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')}  {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Data:
    """The prepared images.

    Args:
        folder: with the files of the splits.
        bundle: the digest of the files.
        mean, std: of the channels (3, 1, 1), of values from 0 to 1.
        training_bytes: the size of what a worker fetches.
    """

    folder: Path
    bundle: str
    mean: Tensor
    std: Tensor
    training_bytes: int

    @classmethod
    def of(cls, plane: ours.Plane, added: dict[str, Any]) -> "Data":
        folder = plane.bundles.open_files(added["bundle"])
        mean, std = (torch.tensor(added["facts"][name]).reshape(3, 1, 1) for name in ("mean", "std"))
        size = sum(path.stat().st_size for path in (folder / TRAINING_FILES).iterdir())
        return cls(folder, added["bundle"], mean, std, size)

    def inputs(self, images: Tensor) -> Tensor:
        """A model's inputs, from stored images (n, 3, height, width)."""
        small = functional.interpolate(images / 255, (SIDE, SIDE), mode="bilinear", antialias=True)
        return ((small - self.mean) / self.std).contiguous(memory_format=torch.channels_last)


def measure(plane: ours.Plane, data: Data, options: argparse.Namespace) -> Part:
    """Accuracy, speed, and a second worker."""
    document = job(options.inner_steps, replicas=1)
    accuracies = []
    for seed in options.seeds:
        accuracies.append(accuracy(plane, data, document | {"epochs": options.epochs, "seed": seed}))
        say("accuracy: {:.2%}, plain loop {:.2%}".format(*accuracies[-1]))
    own, plain = map(statistics.mean, zip(*accuracies, strict=True))
    rates = []
    for _ in range(options.pairs):
        rate = ours.train(plane, document | {"rounds": ROUNDS}, options.seconds, scored=False).course.samples_per_s
        rates.append((rate, Loop(data, ROUNDS).samples_per_s(options.seconds)))
        say("worker {:.1f}, plain loop {:.1f} samples/s".format(*rates[-1]))
    fetched, seconds, accepted = second_worker(plane, data, options.inner_steps)
    say(f"second worker: {fetched:.4f} of the size fetched, {accepted} updates accepted")
    classifier = Table(
        f"ResNet-18 on {options.images:,} JPEGs in {len(shapes.SHAPES)} classes, one worker",
        ["", "ComputeShare", "plain loop", "ratio"],
        [["test accuracy, %", 100 * own, 100 * plain, own / plain], paired("samples/s", rates)],
        f"Epochs: {options.epochs}. Difference in accuracy: {100 * (own - plain):+.2f} points, mean of "
        f"{len(options.seeds)} seeds. Pairs: {options.pairs}.",
    )
    second = Table(
        "A second worker with an empty home, killed halfway through fetching and started again",
        ["training images, MB", "bytes fetched / size", "seconds until its first update was accepted"],
        [[data.training_bytes / 1e6, fetched, seconds]],
        "The kill costs at most the piece of 4 MiB that is on its way.",
    )
    details = {"rates": rates, "accuracy": accuracies, "second worker": [fetched, seconds, accepted]}
    return Part([classifier, second], details={"own images": details})


def accuracy(plane: ours.Plane, data: Data, document: dict[str, Any]) -> tuple[float, float]:
    """The accuracy that a job reaches, and that of a plain loop, trained at the same time."""
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(ours.train, plane, document, scored=False)
        loop = Loop(data, document["epochs"], document["seed"])
        for _ in range(document["epochs"]):
            loop.epoch()
        return float(training.result().job["accuracy"]), loop.accuracy()


def job(inner_steps: int, replicas: int) -> dict[str, Any]:
    """A job whose replica makes the steps of plain SGD."""
    return {
        "name": "bench: own images",
        "dataset": NAME,
        "model": "resnet18",
        "input": [3, SIDE, SIDE],
        "micro_batch": BATCH,
        "strategy": {
            "kind": "local",
            "inner_steps": inner_steps,
            "replicas": replicas,
            "inner_optimizer": {"name": "SGD", **OPTIMIZER},
            "inner_state": "kept",
            "outer_lr": 1.0,
            "outer_momentum": 0.0,
        },
        "schedule": {"name": "cosine"},
        "augment": ["crop", "flip"],
        "precision": "bfloat16",
        "threads": 1,
        "workers": {"min": 1, "max": replicas},
        "checkpoint_every": 0,
        "evaluate_every": 0,
    }


class Loop:
    """A plain PyTorch loop with the job's settings, in channels last."""

    def __init__(self, data: Data, epochs: int, seed: int = 0) -> None:
        from torchvision.models import resnet18

        torch.manual_seed(seed)
        self._data = data
        self._images, labels = prepared.read(data.folder / "train" / IMAGES)
        self._labels = torch.from_numpy(labels.astype(np.int64))
        self._module: nn.Module = resnet18(num_classes=len(shapes.SHAPES)).to(memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._module.parameters(), **OPTIMIZER)
        self._schedule = CosineAnnealingLR(self._optimizer, epochs * -(-len(labels) // BATCH))

    def epoch(self, goes_on: Callable[[], bool] = lambda: True) -> int:
        """Train on each image once, in a new order, while `goes_on`; returns how many images."""
        count = 0
        for chosen in torch.split(torch.randperm(len(self._labels)), BATCH):
            self._step(self._data.inputs(augmented(torch.from_numpy(self._images[chosen.numpy()]))), chosen)
            count += len(chosen)
            if not goes_on():
                break
        return count

    def _step(self, inputs: Tensor, chosen: Tensor) -> None:
        self._optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = functional.cross_entropy(self._module(inputs), self._labels[chosen])
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._schedule.step()

    def samples_per_s(self, seconds: float) -> float:
        """Images trained on per second, after a warm-up."""
        rate = 0.0
        for limit_s in (WARM_UP * seconds, seconds):
            began, count = time.perf_counter(), 0
            while not count or time.perf_counter() < began + limit_s:
                count += self.epoch(lambda: time.perf_counter() < began + limit_s)  # noqa: B023
            rate = count / (time.perf_counter() - began)
        return rate

    def accuracy(self) -> float:
        """Share of the test split that is classified correctly, in float32."""
        images, labels = prepared.read(self._data.folder / "test" / IMAGES)
        correct = 0
        self._module.eval()
        with torch.inference_mode():
            for start in range(0, len(labels), 256):
                some = slice(start, start + 256)
                guesses = self._module(self._data.inputs(torch.from_numpy(images[some].copy()))).argmax(1)
                correct += int((guesses.numpy() == labels[some]).sum())
        return correct / len(labels)


def augmented(images: Tensor) -> Tensor:
    """Each image cut out of itself padded by an eighth, at a random place, and mirrored half of the time."""
    side = images.shape[2]
    border = side // 8
    padded = functional.pad(images, [border] * 4)
    tops, lefts = torch.randint(0, 2 * border + 1, (2, len(images))).tolist()
    cut = [image[:, top : top + side, left : left + side] for image, top, left in zip(padded, tops, lefts, strict=True)]
    return torch.stack([image.flip(2) if torch.rand(()) < 0.5 else image for image in cut])


def second_worker(plane: ours.Plane, data: Data, inner_steps: int) -> tuple[float, float, int]:
    """Kill a second worker halfway through fetching, and start it again; returns bytes received until it had all per
    byte of the training images, the seconds from its first start until an update of it was accepted, and the number of
    accepted updates.
    """
    broker = plane.stack.broker
    assert broker is not None
    created = plane.client.create(job(inner_steps, replicas=2) | {"queue": ours.QUEUE, "rounds": ROUNDS})["id"]
    place, began = broker.place, time.monotonic()
    with (
        Relay(("127.0.0.1", place.port), data.training_bytes / FETCH_S) as relay,
        tempfile.TemporaryDirectory() as home,
    ):
        address = broker.tcp_url.replace(f":{place.port}/", f":{relay.port}/")
        store = BundleStore(Path(home) / "bundles", limit_bytes=10**12)
        with worker(Path(home), address):
            wait_until(lambda: relay.bytes_down > data.training_bytes / 2, "half of the files", PATIENCE_S, POLL_S)
            halfway = relay.bytes_down
        if store.has(data.bundle, (TRAINING_FILES,)):
            sys.exit("the worker had all files before it was killed")
        say(f"killed after {halfway / 1e6:.1f} MB")
        with worker(Path(home), address):
            wait_until(lambda: store.has(data.bundle, (TRAINING_FILES,)), "all files", PATIENCE_S, POLL_S)
            fetched = relay.bytes_down / data.training_bytes
            relay.bytes_per_s = 0.0
            wait_until(lambda: accepted_of(plane, created), "an update", PATIENCE_S, POLL_S)
            accepted = accepted_of(plane, created)
        seconds = time.monotonic() - began
        plane.client.cancel(created)
    return fetched, seconds, accepted


def accepted_of(plane: ours.Plane, job_id: str) -> int:
    """Updates of the second worker that counted."""
    return sum(each["accepted"] for each in plane.client.workers(job_id) if each["name"] == "second")


@contextmanager
def worker(home: Path, address: str) -> Iterator[None]:
    """A worker as on another machine, killed with its seat's process at the end of the block."""
    log = home / "worker.log"
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith("COMPUTESHARE_")},
        "COMPUTESHARE_HOME": str(home),
        "COMPUTESHARE_REDIS_URL": address,
    }
    command = [sys.executable, "-m", "computeshare.worker.process", "--queue", ours.QUEUE, "--name", "second"]
    with log.open("ab") as file, subprocess.Popen(command, env=environment, stdout=file, stderr=file) as process:
        try:
            yield
        except BaseException:
            print(log.read_text()[-2000:], file=sys.stderr)
            raise
        finally:
            for each in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
                with suppress(psutil.Error):
                    each.kill()


if __name__ == "__main__":
    main()
