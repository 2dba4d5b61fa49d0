"""A worker's part of a split model: consecutive stages, which compute a unit together with other workers' stages."""

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from computeshare.codecs.base import Codec
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import CodecError, Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline import frames, splitter
from computeshare.pipeline.frames import Value
from computeshare.pipeline.graph.cuts import CutGraph
from computeshare.pipeline.graph.trace import Traced, arguments_of, loss_of
from computeshare.pipeline.partition import StagePlan, used
from computeshare.pipeline.schedule import operations
from computeshare.pipeline.stage import Flight, Stage
from computeshare.strategies.base import Staging
from computeshare.tasks import modules
from computeshare.tasks.base import Batch, Split, Task
from computeshare.tensors.layout import Layout
from computeshare.training.work_units import Take
from computeshare.types import Blob, Vector

UNKNOWN_BYTES = 1 << 30
"""The most bytes of a message's tensors, where the plan does not tell."""
BACKWARD_SEED = 1 << 20
"""Added to the seed of a codec that rounds at random, for gradients."""


_Part = tuple[Traced, dict[int, CutGraph]]
"""A traced model, and the held stages' parts of it."""


class Mailbox(Protocol):
    """Messages of one attempt at a unit, by the stage that receives them and a tag that no other message to it has."""

    def send(self, stage: int, tag: str, message: Blob) -> None:
        """Send a message to the worker that holds a stage, or queue it. Raises Interrupted: the unit was called off."""

    def receive(self, stage: int, tag: str) -> Blob:
        """Wait for a message to a stage that this worker holds. Raises Interrupted: the unit was called off."""


@dataclass(frozen=True, slots=True)
class StageUpdate:
    """A unit's result in one stage.

    Attributes:
        gradient: of its own parameters, in the order of its names; on a CPU it changes with the next unit.
        buffers: copies of its own floating-point buffers after the last forward pass, flat, by name.
        loss: the unit's mean loss, of the last stage; None of the others.
        forward_s, backward_s: seconds of computing.
        most_in_flight: the most pieces whose activations were kept at once.
        sent_bytes: of its messages to other workers.
    """

    stage: int
    gradient: Vector
    buffers: Mapping[str, Vector]
    loss: float | None
    forward_s: float
    backward_s: float
    most_in_flight: int
    sent_bytes: int

    @property
    def busy_s(self) -> float:
        return self.forward_s + self.backward_s


class HeldStages(Protocol):
    """Consecutive stages of a split model, wherever they compute."""

    @property
    def room(self) -> Vector | None:
        """Memory for a version's parameters in the buckets that the stages read, joined, from which `load` needs no
        copy; None: any memory will do.
        """

    def load(self, weights: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """As `StageReplica.load`."""

    def compute(self, unit: int, mailbox: Mailbox, goes_on: Callable[[], bool], take: Take | None) -> list[StageUpdate]:
        """As `StageReplica.compute`."""


class StageReplica:
    """Computes the micro-batches of `plan` on consecutive stages of a split model, with the weights loaded last.

    What a unit yields depends on the weights, the unit, the plan of stages and the codec of activations: not on which
    workers hold which stages. Values pass the codec at the border of any two stages, also within a worker.
    """

    room: None = None

    def __init__(
        self,
        task: Task,
        samples: Split,
        layout: Layout,
        plan: Plan,
        staging: Staging,
        stage_plan: StagePlan,
        held: range,
        device: torch.device,
    ) -> None:
        """Take memory for the held stages' weights, and for no others.

        Args:
            samples: training samples; read for the first and the last stage, and others that use the model's inputs.
            layout: of the whole model, with the plan's cuts.
        Raises: SpecError: the model is not split here as the plan says.
        """
        self.held, self._device = held, device
        self._task, self._samples, self._plan, self._staging = task, samples, plan, staging
        self._stage_plan, self._codec = stage_plan, CODECS[staging.activations]
        self._trained = {entry.name for entry in layout.tensors if entry.kind == "parameter"}
        owners = stage_plan.stage_of_buckets(layout)
        self.stages = {
            number: Stage(
                number,
                stage_plan.stages[number],
                layout,
                [bucket for bucket, owner in enumerate(owners) if owner == number],
                device,
                staging.recompute,
            )
            for number in held
        }
        """Those held, by number."""
        self._parts: dict[int, _Part] = {}
        for count in splitter.piece_sizes(plan):
            self._part(count)
        self._inside: dict[tuple[int, str], Sequence[Value]] = {}
        self._sent_bytes = dict.fromkeys(held, 0)
        self.waited_s = 0.0
        """Seconds of waiting for messages in the unit computed last."""

    @property
    def names(self) -> tuple[str, ...]:
        """The entries of the layout that `load` takes."""
        return used([self._stage_plan.stages[number] for number in self.held])

    @property
    def is_unrolled(self) -> bool:
        """Whether the model was traced without its modules, such as those of random layers."""
        return any(traced.is_sized for traced, _ in self._parts.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The held stages' parts of the model."""
        return [part.module for _, parts in self._parts.values() for part in parts.values()]

    def load(self, weights: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """Start the following units from these entries of a version, by name; they are copied."""
        for stage in self.stages.values():
            stage.load(weights)

    def compute(
        self, unit: int, mailbox: Mailbox, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None
    ) -> list[StageUpdate]:
        """Compute a unit's pieces in the held stages, forward and backward, in the order of the job's schedule.

        Args:
            goes_on: is asked before each pass.
            take: is given each of the held stages' buckets once, by its number in the layout, as it becomes ready.
        Raises: Interrupted: the unit was called off. CodecError: another stage sent what cannot be.
        """
        pieces = self._plan.pieces(unit)
        self._inside.clear()
        self._sent_bytes, self.waited_s = dict.fromkeys(self.held, 0), 0.0
        for stage in self.stages.values():
            stage.start()
        batches = self._batches(unit, pieces)
        with ExitStack() as block:
            if take:
                for number, stage in self.stages.items():
                    block.enter_context(stage.buckets_given_to(take, len(pieces), bool(self._borrowers(number))))
            for one in operations(self._staging.schedule, self.held, len(self._stage_plan.stages), len(pieces)):
                if not goes_on():
                    raise Interrupted("the work was called off")
                if one.direction == "forward":
                    self._forward(one.stage, unit, one.piece, batches.get(one.piece), mailbox)
                else:
                    self._backward(one.stage, unit, one.piece, mailbox)
            self._tie(mailbox)
        return [self._update(stage) for stage in self.stages.values()]

    def _forward(self, number: int, unit: int, piece: int, batch: Batch, mailbox: Mailbox) -> None:
        where = self._plan.pieces(unit)[piece]
        count = where.stop - where.start
        traced, parts = self._part(count)
        part, seed = parts[number], self._plan.stage_seed(unit, piece, number)
        received: dict[int, Sequence[Value]] = {}
        for source, names in part.received.items():
            form = self._stage_plan.stages[source].form(number, count)
            limit = UNKNOWN_BYTES if form is None else frames.form_bytes(form)
            found = self._receive(mailbox, source, number, f"f{source}.{piece}", limit, self._codec)
            if len(found) != len(names) or (form is not None and frames.form_of(found) != form):
                raise CodecError(f"stage {source} sent values of another form than the model has there")
            received[source] = found
        inputs: list[Value] = []
        if part.inputs:
            given = traced.inputs(arguments_of(self._task, self._signature, batch))
            inputs = [given[one] for one in part.inputs]
        share = self._plan.size(unit) / count

        def finish(result: Value) -> Tensor:
            loss = loss_of(self._task, traced.result(result), batch)
            return loss / share if share != 1 else loss

        flight = Flight(part, seed, inputs, received, finish if self._is_last(number) else None)
        for target, values in self.stages[number].forward(piece, flight).items():
            self._send(mailbox, number, target, f"f{number}.{piece}", values, seed, self._codec)

    def _backward(self, number: int, unit: int, piece: int, mailbox: Mailbox) -> None:
        stage, seed = self.stages[number], self._plan.stage_seed(unit, piece, number) + BACKWARD_SEED
        gradients = {
            target: self._receive(mailbox, target, number, f"b{target}.{piece}", _bytes(wanted), self._codec)
            for target, wanted in stage.wanted(piece).items()
        }
        for source, found in stage.backward(piece, gradients).items():
            self._send(mailbox, number, source, f"b{number}.{piece}", found, seed, self._codec)

    def _tie(self, mailbox: Mailbox) -> None:
        """Add each borrowed parameter's gradient, over all pieces, to its owner's, in ascending order of borrowers."""
        for number, stage in self.stages.items():
            for owner in range(number):
                if names := self._tied(owner, number):
                    self._send(mailbox, number, owner, f"t{number}", stage.gradients_of(names), 0, EXACT)
        for number, stage in self.stages.items():
            for borrower in self._borrowers(number):
                own = stage.gradients_of(self._tied(number, borrower))
                found = self._receive(mailbox, borrower, number, f"t{borrower}", _bytes(own), EXACT)
                add(own, found, borrower)

    def _tied(self, owner: int, borrower: int) -> list[str]:
        """The parameters that a stage borrows from another."""
        borrowed = self._stage_plan.stages[borrower].borrowed
        return [name for name in borrowed if name in self._trained and self._stage_plan.owners[name] == owner]

    def _borrowers(self, owner: int) -> list[int]:
        """The stages that borrow parameters of a stage."""
        return [one for one in range(owner + 1, len(self._stage_plan.stages)) if self._tied(owner, one)]

    def _send(
        self, mailbox: Mailbox, source: int, target: int, tag: str, values: Sequence[Value], seed: int, codec: Codec
    ) -> None:
        if target in self.stages:
            self._inside[target, tag] = frames.passed(values, codec, seed)
            return
        message = frames.encode(values, codec, seed)
        self._sent_bytes[source] += len(message)
        mailbox.send(target, tag, message)

    def _receive(
        self, mailbox: Mailbox, source: int, target: int, tag: str, limit_bytes: int, codec: Codec
    ) -> Sequence[Value]:
        if source in self.stages:
            return self._inside.pop((target, tag))
        started = time.perf_counter()
        message = mailbox.receive(target, tag)
        self.waited_s += time.perf_counter() - started
        return frames.decode(message, codec, limit_bytes, self._device)

    def _is_last(self, number: int) -> bool:
        return number == len(self._stage_plan.stages) - 1

    def _batches(self, unit: int, pieces: Sequence[slice]) -> dict[int, Batch]:
        """The samples of each piece, on the device, if the held stages use any."""
        _, parts = self._part(pieces[0].stop - pieces[0].start)
        if not any(self._is_last(number) or parts[number].inputs for number in self.held):
            return {}
        indices, seeds = self._plan.indices(unit), self._plan.sample_seeds(unit)
        batches = (self._samples.batch(indices[piece], seeds[piece]) for piece in pieces)
        return {number: self._task.place(batch, self._device) for number, batch in enumerate(batches)}

    def _part(self, count: int) -> _Part:
        """The held stages' parts of the model, for pieces of `count` samples."""
        known = next((one for one in self._parts.values() if not one[0].is_sized), self._parts.get(count))
        if known:
            return known
        module = self._task.outline()
        is_whole = not any(parameter.is_meta for parameter in module.parameters())
        if is_whole or modules.has_frozen(module):  # no version has all of its values
            module = self._task.module(self._plan.seed)
        self._signature = inspect.signature(module.train().forward)
        traced, cut = splitter.cut_model(self._task, module, self._stage_plan.cuts, count)
        names = splitter.first_names(module)
        parts = {number: stage.bound(cut[number], names) for number, stage in self.stages.items()}
        self._parts[count] = traced, parts
        return self._parts[count]

    def _update(self, stage: Stage) -> StageUpdate:
        losses = torch.stack(stage.losses).sum().item() if stage.losses else None
        timing = stage.timing
        return StageUpdate(
            stage.number,
            stage.gradient,
            stage.moved_buffers(),
            losses,
            timing.forward_s,
            timing.backward_s,
            timing.most_in_flight,
            self._sent_bytes[stage.number],
        )


def add(own: Sequence[Tensor], found: Sequence[Value], borrower: int) -> None:
    """Add a later stage's gradients to these. Raises CodecError: they have other shapes."""
    forms = [(one.shape, one.dtype) if isinstance(one, Tensor) else None for one in found]
    if forms != [(one.shape, one.dtype) for one in own]:
        raise CodecError(f"stage {borrower} sent gradients of other shapes than the weights that it borrows")
    torch._foreach_add_([*own], [*found])


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
