"""`python -m computeshare.training.recipe_process.server SOCKET MEMORY`: the process that runs a recipe's code."""

import contextlib
import itertools
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from computeshare.errors import ComputeShareError, RecipeError
from computeshare.jobspec.sampling_plan import Seeds
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts
from computeshare.jobspec.tasks.recipes import RecipeTask as RecipeTaskSpec
from computeshare.runtime.processes import collect_garbage, keep_freed_memory, spare_the_collector
from computeshare.tasks import metrics
from computeshare.tasks.base import Batch, Indices, Part, Split, SplitName, Task, TaskInstance
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.recipes.functions import load, told
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.tensors.layout import Layout
from computeshare.training import devices
from computeshare.training.computation import LocalComputation, choose_device
from computeshare.training.memory import DeviceMemory, peak_bytes
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import Closed, SocketChannel
from computeshare.training.recipe_process.shared_vectors import SharedVectors
from computeshare.training.work_units import AnyReplica, Compute, SelfTestResult, Update
from computeshare.types import Blob, Precision, Vector

SCORED = 2
"""The most samples that are scored to compare the recipe with its facts."""
STEP_S = 1.0
"""How often steps are told at most."""


def main(kind: "type[Server] | None" = None) -> None:
    """Serve requests until the other side is gone; `kind`: what answers them."""
    with connected(int(sys.argv[1])) as channel:
        head, _ = channel.receive(messages.MOST_REQUEST, 0)
        _serve(channel, messages.request_in(head), int(sys.argv[2]), kind or Server)


@contextlib.contextmanager
def connected(descriptor: int) -> Iterator[SocketChannel]:
    """The channel to the other side; this process ends when that is gone."""
    end = socket.socket(fileno=descriptor)
    threading.Thread(target=_end_with, args=(end,), daemon=True).start()
    keep_freed_memory()
    with contextlib.suppress(Closed):
        yield SocketChannel(end, None)


def _end_with(end: socket.socket) -> None:
    """End this process when the other side is gone, even in mid-computation."""
    poll = select.poll()
    poll.register(end, select.POLLHUP)
    poll.poll()
    os._exit(70)


def _serve(channel: SocketChannel, opening: messages.Open, memory: int, kind: "type[Server]") -> None:
    server: Server | None = None
    request, body = opening, b""
    while True:
        try:
            with told(Path(opening.recipe), "training"):
                server = server or kind.start(opening, SharedVectors(memory, _layout(opening)), channel)
                answer, state = server.answer(request, body)
        except ComputeShareError as error:
            answer, state = messages.Failed.of(error), ()
        channel.send(answer.dumps(), state)
        head, body = channel.receive(messages.MOST_REQUEST, sys.maxsize)
        request = messages.request_in(head)


_OR_THE_RECIPE = (
    "; or the recipe has randomness of its own, and no worker can train it: see what `computeshare recipes check` "
    "remarks"
)
Answer = tuple[messages.Head, Sequence[Blob]]


class Server:
    """Answers requests with a task's model and data; `Open` with a recipe's."""

    def __init__(
        self,
        spec: JobSpec,
        task: Task,
        device: torch.device,
        shared: SharedVectors,
        out: SocketChannel,
        instances: Mapping[Part, TaskInstance] | None = None,
    ) -> None:
        """`instances`: those that are open already."""
        self._spec, self._task, self.device = spec, task, device
        self._shared, self._channel = shared, out
        self._instances: dict[Part, TaskInstance] = dict(instances or {})
        self._tried: dict[Precision, Compute] = {}
        self._replica: AnyReplica | None = None
        self._told_at = 0.0
        self._answers: dict[type[messages.Head], Callable[[Any, bytes], Answer]] = {
            messages.Open: lambda request, _: (self._open(request.part), ()),
            messages.Test: lambda *_: (self._test(), ()),
            messages.MeasureSaved: lambda *_: (self._measure_saved(), ()),
            messages.Try: lambda request, _: (self._try(request), ()),
            messages.Walk: lambda request, _: (self._walk(request), ()),
            messages.Build: lambda request, _: (self._build(request), ()),
            messages.Load: lambda *_: (self._load(), ()),
            messages.Prefetch: lambda request, _: (self._prefetch(request), ()),
            messages.Compute: lambda request, _: (self._compute(request), ()),
            messages.Dump: lambda *_: self._dump(),
            messages.Restore: lambda _, body: (self._restore(body), ()),
            messages.Score: lambda request, _: (self._score(request), ()),
        }

    @classmethod
    def start(cls, opening: messages.Open, shared: SharedVectors, out: SocketChannel) -> Self:
        """Import the recipe. Raises RecipeError."""
        spec = JobSpec.model_validate_json(opening.spec)
        device = choose_device(spec, opening.device)
        its, facts = _recipe(spec), _recipe(spec).recipe_facts
        task = RecipeTask(
            load(Path(opening.recipe)),
            its.recipe,
            its.arguments,
            Path(opening.data) if opening.data else None,
            Path(opening.initial),
            facts.metrics,
            facts.classes,
            spec.label_smoothing,
            spec.validation,
        )
        return cls(spec, task, device, shared, out)

    def answer(self, request: messages.Head, body: bytes) -> Answer:
        """Carry a request out. Raises ComputeShareError; what the recipe raises."""
        return self._answers[type(request)](request, body)

    def _open(self, part: Part) -> messages.Opened:
        facts, task = _recipe(self._spec).recipe_facts, self._task
        assert isinstance(task, RecipeTask)
        if self._built(part) != (facts.layout, facts.frozen):
            raise RecipeError(
                "model() builds other parameters here than where the job was created: install the same versions of "
                "packages, or create the job again"
            )
        split: SplitName = "test" if part == "test" else "train"
        count, expected = len(task.open(split, Path())), facts.test if split == "test" else facts.train
        if count != expected:
            raise RecipeError(
                f"data({split!r}) has {count:,} samples here, and {expected:,} where the job was created: it must "
                "return the same on every machine"
            )
        self._check_scores(part, task, facts)
        described, kind = devices.describe(self.device)[:200], self.device.type
        return messages.Opened.model_validate(
            {"device": described, "device_type": kind, "kind": devices.kind(self.device), "memory": self.memory()}
        )

    def _built(self, part: Part) -> tuple[Layout, str]:
        """The layout of what is trained, and the digest of what is frozen, as the recipe builds them here."""
        instance = self._instance(part)
        return instance.layout, frozen_digest(instance.module)

    def _check_scores(self, part: Part, task: RecipeTask, facts: RecipeFacts) -> None:
        """Raises RecipeError: the recipe's versions are scored otherwise than the facts say."""
        instance = self._instance(part)
        found = task.found_scores(instance.module, instance.split.batch(np.arange(min(SCORED, len(instance.split)))))
        for name, here in found._asdict().items():
            there = getattr(facts, name)
            if here != there and (there or name != "classes"):  # 0: nobody counted them
                raise RecipeError(
                    f"the recipe's {name} {'are' if name.endswith('s') else 'is'} {_listed(here)} here, and "
                    f"{_listed(there)} where the job was created: model() and metrics() must return the same on every "
                    "machine"
                )

    def _instance(self, part: Part) -> TaskInstance:
        """The recipe's module with a part of its data."""
        if part not in self._instances:
            self._instances[part] = self._task.instance(self._spec.seed, part, Path())
        return self._instances[part]

    def _computation(self) -> LocalComputation:
        return LocalComputation(self._instance("train"), self.device)

    def _test(self) -> messages.Tested:
        return self._tested(self._computation().test())

    def _tested(self, found: SelfTestResult) -> messages.Tested:
        if found.trouble and isinstance(self._task, RecipeTask):
            found = replace(found, trouble=found.trouble + _OR_THE_RECIPE)
        return messages.Tested(**asdict(found), memory=self.memory())

    def _measure_saved(self) -> messages.Number:
        return messages.Number(value=self._computation().saved_bytes_in_bfloat16())

    def _try(self, request: messages.Try) -> messages.Done:
        spec = JobSpec.model_validate_json(request.spec)
        self._tried[request.precision] = self._computation().trial(spec, request.precision)
        return messages.Done()

    def _load(self) -> messages.Done:
        self._ready().load(self._shared.weights)
        return messages.Done()

    def _prefetch(self, request: messages.Prefetch) -> messages.Done:
        self._ready().prefetch(request.micro_batches)
        return messages.Done()

    def _dump(self) -> Answer:
        state = kept.dump() if (kept := self._ready().kept) else None
        return messages.State(is_there=state is not None), state or ()

    def _restore(self, body: bytes) -> messages.Done:
        if kept := self._ready().kept:
            kept.restore(body)
        return messages.Done()

    def _ready(self) -> AnyReplica:
        assert self._replica is not None
        return self._replica

    def _build(self, request: messages.Build) -> messages.Built:
        self._tried.clear()
        collect_garbage()  # compiled trials
        self._replica = replica = self._computation().replica(JobSpec.model_validate_json(request.spec))
        spare_the_collector()
        found = replica.compilation
        trouble = found.trouble[: messages.MOST_MESSAGE]
        return messages.Built(compiler=found.compiler[:200], trouble=trouble, is_kept=replica.kept is not None)

    def _walk(self, request: messages.Walk) -> messages.Computed:
        vector, buffers = self._tried[request.precision](request.micro_batches)
        return self._computed(Update(vector, buffers, 0.0))

    def _compute(self, request: messages.Compute) -> messages.Computed:
        replica, unit = self._ready(), request.unit
        if request.part:
            assert replica.kept, "only replicas that keep an inner state take a part of a unit's steps"
            return self._computed(replica.kept.steps(unit, slice(*request.part), self._goes_on()))
        update = replica.compute(unit, self._goes_on(), self._take if request.by_bucket else None)
        return self._computed(update, has_vector=not request.by_bucket)

    def _goes_on(self) -> Callable[[], bool]:
        """Asked before each step of a unit: tells of the steps, and says whether the unit is still wanted."""
        steps = itertools.count()

        def goes_on() -> bool:
            self._tell_step(next(steps))
            return not self._shared.is_called_off

        return goes_on

    @property
    def _layout(self) -> Layout:
        """The layout of the updates."""
        return self._instance("train").layout

    def _take(self, number: int, values: Vector) -> None:
        shared, where = self._shared, self._layout.buckets
        np.copyto(shared.update[where[number]] if number < len(where) else shared.new_buffers, values)
        self._channel.send(messages.Bucket(number=number).dumps())

    def _computed(self, update: Update, has_vector: bool = True) -> messages.Computed:
        if has_vector:
            np.copyto(self._shared.update, update.vector)
        np.copyto(self._shared.new_buffers, update.buffers)
        return messages.Computed(loss=update.loss, peak_bytes=peak_bytes(self.device))

    def _score(self, request: messages.Score) -> messages.Scored:
        instance = self._instance(request.part)
        watched = replace(instance, split=_Watched(instance.split, self._tell_step))
        found = metrics.score(watched, self._shared.weights, request.batch)
        return messages.Scored(
            loss=found.loss, metrics=dict(found.metrics), samples=found.samples, classes=found.classes
        )

    def _tell_step(self, number: int) -> None:
        now = time.monotonic()
        if number and now - self._told_at > STEP_S:
            self._told_at = now
            self._channel.send(messages.Step(number=number).dumps())

    def memory(self) -> messages.Memory:
        meter = DeviceMemory(self.device)
        return messages.Memory(resident=meter.resident_bytes(), peak=meter.peak_bytes(), room=meter.room_bytes())


@dataclass
class _Watched:
    """A split that counts its batches."""

    whole: Split
    tell: Callable[[int], None]
    count: int = 0

    def __len__(self) -> int:
        return len(self.whole)

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> Batch:
        self.tell(self.count)
        self.count += 1
        return self.whole.batch(indices, seeds)


def _recipe(spec: JobSpec) -> RecipeTaskSpec:
    assert isinstance(spec.task, RecipeTaskSpec)
    return spec.task


def _listed(value: str | int | tuple[str, ...]) -> str:
    return (", ".join(value) or "none") if isinstance(value, tuple) else str(value)


def _layout(opening: messages.Open) -> Layout:
    return _recipe(JobSpec.model_validate_json(opening.spec)).layout


if __name__ == "__main__":
    main()
