"""One stage of a model on a device: its weights, and its forward and backward passes, piece by piece."""

import copy
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from computeshare.errors import CodecError, SpecError
from computeshare.pipeline.frames import Value, tensors_of
from computeshare.pipeline.graph.cuts import CutGraph
from computeshare.pipeline.graph.module_tensors import bind_device, named_tensors, put
from computeshare.pipeline.partition import StageFacts
from computeshare.tensors.layout import Layout
from computeshare.tensors.layout import Tensor as Entry
from computeshare.training.replica import Buckets, FlatTensors, row_by_row, seed_generators
from computeshare.training.work_units import Take
from computeshare.types import Vector

Array = npt.NDArray[np.generic]
Finish = Callable[[Value], Tensor]
"""From the last stage's result to the loss."""


@dataclass
class Flight:
    """A piece between its forward and its backward pass through `part`."""

    part: CutGraph
    seed: int
    inputs: Sequence[Value]
    received: Mapping[int, Sequence[Value]]
    finish: Finish | None
    outputs: Value = None
    """With the graph of the forward pass; none if it is to be computed again."""
    before: tuple[Array, Array] | None = None
    """Buffers and counters before the forward pass, to compute it again."""
    wanted: Mapping[int, Sequence[Tensor]] = field(default_factory=dict)
    """Tensors sent to each later stage that are to have a gradient, by the stage's number; without values."""


@dataclass
class Timing:
    """In a unit: seconds of computing, pieces computed backward, and the most whose activations were kept at once."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    pieces: int = 0
    most_in_flight: int = 0


class Stage:
    """A stage with memory for its own and borrowed parameters, its gradients and its buffers, and for no others.

    `start` a micro-batch, then call `forward` and `backward` once for each piece, in ascending order each.
    """

    def __init__(
        self,
        number: int,
        facts: StageFacts,
        layout: Layout,
        buckets: Sequence[int],
        device: torch.device,
        recompute: bool,
    ) -> None:
        """`buckets`: the numbers of its own buckets among `layout.buckets`."""
        self.number, self.facts = number, facts
        self._device, self._recompute = device, recompute
        entries = {entry.name: entry for entry in layout.tensors}
        own = [entries[name] for name in facts.names]
        self._own = {kind: [one for one in own if one.kind == kind] for kind in ("parameter", "buffer", "counter")}
        borrowed = [entries[name] for name in facts.borrowed]
        self._borrowed = [one for one in borrowed if one.kind == "parameter"]
        self._read_only = [one for one in borrowed if one.kind != "parameter"]
        self._tensors: dict[str, Tensor] = {}
        self.parameters, self._gradient = self._trainable(self._own["parameter"])
        self._borrowed_parameters, self._borrowed_gradient = self._trainable(self._borrowed)
        self.buffers = self._flat(self._own["buffer"], torch.float32)
        self.counters = self._flat(self._own["counter"], torch.int64)
        for entry in self._read_only:
            dtype = torch.float32 if entry.kind == "buffer" else torch.int64
            self._tensors[entry.name] = torch.zeros(entry.shape, dtype=dtype, device=device)
        self._loaded = self.buffers.read(), self.counters.read()
        self._numbers = buckets
        self._buckets = self._bucketed(layout)
        self._flights: dict[int, Flight] = {}
        self.timing = Timing()
        self.losses: list[Tensor] = []
        """Of the pieces so far, scaled to add up to the micro-batch's mean loss; of the last stage."""

    def bound(self, part: CutGraph, names: Mapping[str, str]) -> CutGraph:
        """This part of the model with this stage's tensors, on its device.

        Args:
            names: of each name of a tensor of the model's, the entry of the layout.
        Raises: SpecError: the part has other tensors than the stage, or tensors without values.
        """
        module = copy.deepcopy(part.module)
        found = named_tensors(module)
        if {names[name] for name, _ in found if name in names} - self._tensors.keys():
            raise SpecError(f"stage {self.number} has other parameters here: use the same torch on all machines")
        for name, tensor in found:
            if name in names:
                put(module, name, self._tensors[names[name]])
            elif tensor.is_meta:
                raise SpecError(f"the model's {name} has no value without the model's weights: split another model")
        module.to(self._device)
        bind_device(module, self._device)
        if self._device.type == "cpu":
            for one in module.modules():
                if isinstance(one, nn.Conv2d):
                    one.register_forward_pre_hook(row_by_row)
        return replace(part, module=module)

    def load(self, weights: Mapping[str, Array]) -> None:
        """Take the values of its own and borrowed entries, which are copied."""
        self.parameters.fill_joined([weights[one.name] for one in self._own["parameter"]])
        self._borrowed_parameters.fill_joined([weights[one.name] for one in self._borrowed])
        self._loaded = (
            _joined(weights, self._own["buffer"], np.float32),
            _joined(weights, self._own["counter"], np.int64),
        )
        for entry in self._read_only:
            self._tensors[entry.name].copy_(torch.from_numpy(np.array(weights[entry.name])))

    def start(self) -> None:
        """Begin a micro-batch: no gradient, buffers as loaded, nothing in flight."""
        self._flights.clear()
        self.buffers.fill(self._loaded[0])
        self.counters.fill(self._loaded[1])
        self._gradient.zero()
        self._borrowed_gradient.zero()
        self.timing, self.losses = Timing(), []

    def forward(self, piece: int, flight: Flight) -> Mapping[int, Sequence[Value]]:
        """A piece's forward pass: returns the values for each later stage, by its number.

        A received tensor that requires grad must be a leaf.
        """
        started = time.perf_counter()
        if self._recompute:
            flight.before = self.buffers.read(), self.counters.read()
        outputs = self._run(flight, copied=self._recompute)
        self._flights[piece] = flight
        self.timing.most_in_flight = max(self.timing.most_in_flight, len(self._flights))
        if flight.finish:
            self.losses.append(outputs.detach())
        sent = _sent(flight, outputs)
        flight.wanted = {
            target: [torch.empty_like(one, device="meta") for one in wanting(sent[target])] for target in sent
        }
        if not self._recompute:
            flight.outputs = outputs
        self.timing.forward_s += time.perf_counter() - started
        return sent

    def backward(self, piece: int, gradients: Mapping[int, Sequence[Tensor | None]]) -> dict[int, list[Tensor | None]]:
        """A piece's backward pass: adds to the gradients of its parameters.

        Args:
            gradients: of the values sent to each later stage that are to have one, in order, by its number.
        Returns: the same for the values received from each earlier stage.
        Raises: CodecError: gradients are not of the values' shapes.
        """
        started = time.perf_counter()
        flight = self._flights.pop(piece)
        if self._recompute:
            flight.outputs = self._again(flight)
        if flight.finish:
            flight.outputs.backward()
        else:
            roots = _summed(_sent(flight, flight.outputs), gradients)
            if roots:
                torch.autograd.backward([tensor for tensor, _ in roots], [value for _, value in roots])
        found = {source: [one.grad for one in wanting(values)] for source, values in flight.received.items()}
        self.timing.backward_s += time.perf_counter() - started
        self.timing.pieces += 1
        return {source: values for source, values in found.items() if values}

    def wanted(self, piece: int) -> Mapping[int, Sequence[Tensor]]:
        """The tensors of a piece in flight whose gradients later stages send back, by their numbers; without values."""
        return {target: tensors for target, tensors in self._flights[piece].wanted.items() if tensors}

    @contextmanager
    def buckets_given_to(self, take: Take, pieces: int, tied: bool) -> Iterator[None]:
        """Pass on each bucket of this stage's gradient once, by its number in the whole layout, when all pieces have
        been computed backward.

        Args:
            tied: later stages borrow from this one, and add to the gradient in this block.
        """
        late = range(len(self._numbers)) if tied else ()
        with self._buckets.given_to(lambda bucket, values: take(self._numbers[bucket], values), pieces, late):
            yield

    @property
    def gradient(self) -> Vector:
        """The gradient of its own parameters, in the order of its names; on a CPU it changes with the next unit."""
        view: Vector = self._gradient.view()
        return view

    def gradients_of(self, names: Sequence[str]) -> list[Tensor]:
        """The live gradients of these of its own and borrowed parameters, over all pieces so far."""
        return [gradient for name in names if (gradient := self._tensors[name].grad) is not None]

    def moved_buffers(self) -> dict[str, Vector]:
        """Copies of its own floating-point buffers, flat, as the forward passes left them."""
        parts: dict[str, Vector] = {}
        start, vector = 0, self.buffers.read()
        for entry in self._own["buffer"]:
            size = entry.stop - entry.start
            parts[entry.name], start = vector[start : start + size], start + size
        return parts

    def _trainable(self, entries: Sequence[Entry]) -> tuple[FlatTensors, FlatTensors]:
        parameters = [nn.Parameter(self._blank(entry, torch.float32)) for entry in entries]
        gradients = [self._blank(entry, torch.float32) for entry in entries]
        flat = [FlatTensors(tensors, torch.float32, self._device, self._apart) for tensors in (parameters, gradients)]
        for entry, parameter, gradient in zip(entries, parameters, gradients, strict=True):
            parameter.grad = gradient
            self._tensors[entry.name] = parameter
        return flat[0], flat[1]

    def _flat(self, entries: Sequence[Entry], dtype: torch.dtype) -> FlatTensors:
        tensors = [self._blank(entry, dtype) for entry in entries]
        self._tensors |= {entry.name: tensor for entry, tensor in zip(entries, tensors, strict=True)}
        return FlatTensors(tensors, dtype, self._device, self._apart)

    @property
    def _apart(self) -> bool:
        return self._device.type != "cpu"

    def _blank(self, entry: Entry, dtype: torch.dtype) -> Tensor:
        """Zeros; where they become views into a vector, without memory of their own."""
        if self._apart:
            return torch.zeros(entry.shape, dtype=dtype, device=self._device)
        return torch.zeros((), dtype=dtype).expand(entry.shape)

    def _bucketed(self, layout: Layout) -> Buckets:
        """Its own buckets, by their places in its own gradient."""
        places = _consecutive(entry.stop - entry.start for entry in self._own["parameter"])
        where = _consecutive(layout.bucket_sizes[number] for number in self._numbers)
        parameters = [self._tensors[entry.name] for entry in self._own["parameter"]]
        return Buckets(where, places, parameters, self._gradient)

    def _run(self, flight: Flight, copied: bool = False) -> Value:
        """`copied`: the model computes on a copy of its inputs, which it may change in place."""
        inputs = copy.deepcopy(flight.inputs) if copied else flight.inputs
        received = (value for _, values in sorted(flight.received.items()) for value in values)
        seed_generators(flight.seed, self._device)
        outputs = flight.part.module(*inputs, *received)
        return flight.finish(outputs) if flight.finish else outputs

    def _again(self, flight: Flight) -> Value:
        """Compute a forward pass again, from the buffers it was computed from; they stay as they are now."""
        assert flight.before is not None
        now = self.buffers.read(), self.counters.read()
        self.buffers.fill(flight.before[0])
        self.counters.fill(flight.before[1])
        outputs = self._run(flight)
        self.buffers.fill(now[0])
        self.counters.fill(now[1])
        return outputs


def _sent(flight: Flight, outputs: Value) -> dict[int, list[Value]]:
    """The values for each later stage."""
    if flight.finish:
        return {}
    return {target: [outputs[place] for place in places] for target, places in flight.part.sent.items()}


def wanting(values: Sequence[Value]) -> list[Tensor]:
    """The tensors whose gradients are wanted, in order."""
    return [tensor for value in values for tensor in tensors_of(value) if tensor.requires_grad]


def _summed(
    sent: Mapping[int, Sequence[Value]], gradients: Mapping[int, Sequence[Tensor | None]]
) -> list[tuple[Tensor, Tensor]]:
    """Each tensor that was sent and has gradients, with their sum: the latest stage's first, as one backward pass adds.

    Raises: CodecError: they are not of the tensors' number or shapes.
    """
    found: dict[int, tuple[Tensor, Tensor]] = {}
    for target in sorted(sent, reverse=True):
        wanted, given = wanting(sent[target]), gradients.get(target, ())
        if len(wanted) != len(given):
            raise CodecError(f"stage {target} sent {len(given)} gradients where {len(wanted)} are wanted")
        for tensor, gradient in zip(wanted, given, strict=True):
            if gradient is None:
                continue
            if not isinstance(gradient, Tensor) or gradient.shape != tensor.shape or gradient.dtype != tensor.dtype:
                raise CodecError(f"stage {target} sent a gradient of another shape than the value's")
            known = found.get(id(tensor))
            found[id(tensor)] = tensor, known[1] + gradient if known else gradient
    return [*found.values()]


def _joined(weights: Mapping[str, Array], entries: Sequence[Entry], dtype: type[np.generic]) -> npt.NDArray[np.generic]:
    return np.concatenate([np.ravel(weights[one.name]) for one in entries] or [np.empty(0)]).astype(dtype, copy=False)


def _consecutive(sizes: Iterable[int]) -> list[slice]:
    ends = [0, *itertools.accumulate(sizes)]
    return [slice(start, stop) for start, stop in itertools.pairwise(ends)]
