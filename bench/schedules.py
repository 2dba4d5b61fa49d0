"""Measures the schedules of strategy `pipeline` in one process, on stages that are slowed to equal speed.

    python -m bench.schedules [--stages 2 3] [--pieces 8] [--forward 120] [--backward 240] [--times 2] [--memory]

Each stage of a small GPT runs in a thread and sleeps until a pass has taken its milliseconds; values travel through a
broker over the loopback, as between the workers of a job, or with `--memory` as frames through memory. Prints a
micro-batch's seconds over those of computing alone, beside (m + s - 1) / m for m pieces and s stages, which no schedule
of this kind can beat (goal: 1.3 times that, over the loopback); and of the first stage the most pieces whose
activations it keeps, and the most bytes of values that torch keeps for their backward passes.
"""

import argparse
import contextlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from bench.split_model import Cut, SplitModel, gpt
from bench.support.report import Cell, Part, Table, markdown
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.mail import ChainMail, LetterInbox, LetterOutbox
from computeshare.pipeline.chains.placement import Held
from computeshare.pipeline.schedule import Kind
from computeshare.pipeline.stage_replica import Mailbox, StageReplica
from computeshare.protocol.keys import JobKeys
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker

WIDTH, BLOCK = 128, 64
"""Of the GPT: two stages exchange 32 KB per sample."""
JOB = "schedule"
Mailboxes = Callable[[int], list[Mailbox]]
"""The mailboxes of a chain's stages for a micro-batch, by its number; none: in memory."""


@contextlib.contextmanager
def loopback(stages: int, in_memory: bool) -> Iterator[Mailboxes]:
    """Mailboxes in a broker of its own, reached over TCP."""
    if in_memory:
        yield lambda number: []
        return
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        redis, key_of = connect(broker.tcp_url), JobKeys(JOB).mail
        chain = [Held(f"worker{one}", f"session{one}", one, one + 1) for one in range(stages)]
        ends = [(LetterInbox(redis, key_of(one.session)), LetterOutbox(redis, key_of)) for one in chain]

        def mailboxes(number: int) -> list[Mailbox]:
            for inbox, _ in ends:
                inbox.begin(number)
            return [
                ChainMail(str(number), number, chain, one, *end, lambda: True)
                for one, end in zip(chain, ends, strict=True)
            ]

        try:
            yield mailboxes
        finally:
            broker.stop()


class KeptBytes:
    """Counts the bytes of values that torch keeps for backward passes, without parameters."""

    def __init__(self, parameters: set[int]) -> None:
        """`parameters`: the addresses of their memory."""
        self._parameters, self._now = parameters, 0
        self.most = 0

    def counted(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that counts what a pass keeps."""

        def counting(*args: Any) -> Any:
            with saved_tensors_hooks(self._keep, lambda kept: kept.value):
                return run(*args)

        return counting

    def _keep(self, value: Tensor) -> "_Kept":
        is_counted = value.untyped_storage().data_ptr() not in self._parameters
        return _Kept(self, value.detach(), value.nbytes if is_counted else 0)  # else its graph would hold itself

    def add(self, count: int) -> None:
        self._now += count
        self.most = max(self.most, self._now)


class _Kept:
    """A value that is kept until this is garbage."""

    def __init__(self, counter: KeptBytes, value: Tensor, size: int) -> None:
        self._counter, self.value, self._size = counter, value, size
        counter.add(size)

    def __del__(self) -> None:
        self._counter.add(-self._size)


def count_kept(replica: StageReplica) -> KeptBytes:
    """Count what a replica's stages keep from now on."""
    stages = replica.stages.values()
    counter = KeptBytes({one.untyped_storage().data_ptr() for stage in stages for one in stage._tensors.values()})
    for stage in stages:
        stage.forward = counter.counted(stage.forward)  # type: ignore[method-assign]
        stage.backward = counter.counted(stage.backward)  # type: ignore[method-assign]
    return counter


def slow(replica: StageReplica, forward_s: float, backward_s: float) -> None:
    """Have each pass of a replica's stages take so long."""
    for stage in replica.stages.values():
        stage.forward = padded(stage.forward, forward_s)  # type: ignore[method-assign]
        stage.backward = padded(stage.backward, backward_s)  # type: ignore[method-assign]


def padded(run: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """A function that sleeps until it has taken so long."""

    def paced(*args: Any) -> Any:
        started = time.perf_counter()
        result = run(*args)
        time.sleep(max(0.0, started + seconds - time.perf_counter()))
        return result

    return paced


def measure(stages: int, schedule: Kind, recompute: bool, options: argparse.Namespace) -> list[Cell]:
    """A row of the table."""
    forward_s, backward_s = options.forward / 1000, (options.backward + recompute * options.forward) / 1000
    plan = Plan(0, 2 * options.pieces * options.times, 2 * options.pieces, 1, accumulate=options.pieces)
    split = SplitModel.of(gpt(2 * stages, width=WIDTH, block=BLOCK), plan, Cut(stages, schedule, recompute))
    replicas = split.replicas()
    kept = count_kept(replicas[0])
    for replica in replicas:
        slow(replica, forward_s, backward_s)
    taken = []
    with loopback(stages, options.memory) as mailboxes:
        for unit in range(options.times):
            boxes, started = mailboxes(unit), time.perf_counter()
            found = split.compute(unit, replicas=replicas, mailboxes=boxes)
            taken.append(time.perf_counter() - started)
    computing = options.pieces * (forward_s + backward_s)
    ideal = (options.pieces + stages - 1) / options.pieces
    ratio = statistics.median(taken) / computing
    name = f"{schedule}, recompute" if recompute else schedule
    return [stages, name, ratio, ideal, ratio / ideal, found.updates[0].most_in_flight, kept.most / 1e6]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--pieces", type=int, default=8)
    parser.add_argument("--forward", type=float, default=120, help="milliseconds of a forward pass")
    parser.add_argument("--backward", type=float, default=240, help="milliseconds of a backward pass")
    parser.add_argument("--times", type=int, default=2, help="micro-batches")
    parser.add_argument("--memory", action="store_true", help="values travel through memory")
    options = parser.parse_args()
    kinds: list[tuple[Kind, bool]] = [("gpipe", False), ("1f1b", False), ("1f1b", True)]
    rows = [measure(stages, kind, again, options) for stages in options.stages for kind, again in kinds]
    way = "in memory" if options.memory else "over the loopback"
    columns = (
        "stages",
        "schedule",
        "time / computing",
        "(m + s - 1) / m",
        "ratio",
        "pieces kept by the first stage",
        "MB kept",
    )
    print(
        markdown(Part([Table(f"{options.pieces} pieces, stages of equal speed, values {way}", columns, rows)])),
        flush=True,
    )


if __name__ == "__main__":
    main()
