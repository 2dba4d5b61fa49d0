"""A worker's copy of the model: weights in, one update per micro-batch out."""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from computeshare.errors import Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.tasks.base import Batch, TaskInstance, channels_last
from computeshare.tasks.modules import entries
from computeshare.tensors.layout import Weights
from computeshare.training.execution import PLAIN, Execution, compile_module, compiler, undo
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Precision, Vector

LARGEST_APART: Mapping[Precision, float] = {"float32": 0.05, "bfloat16": 0.9}
"""Largest relative L2 distance between gradients with and without the compiler. A deep network with batch normalisation
magnifies rounding a thousandfold, in bfloat16 to 0.4; a gradient of zeros is 1.0 away, an unrelated one more."""
FEW = 8
"""Ratio of a convolution's weights to its input's values above which rearranging the weights costs more."""


class Replica:
    """Computes micro-batches of `plan` with the weights loaded last (initially the module's own).

    On one kind of machine, an update depends only on the weights and the micro-batch's number, not on earlier
    computations; for this, torch's global generators are seeded. The replica takes over the module of `instance`,
    which must not be used elsewhere.
    """

    kept: None = None
    """No state carries over from one micro-batch to the next."""

    def __init__(
        self,
        instance: TaskInstance,
        plan: Plan,
        device: torch.device,
        sent: Callable[[Vector], Vector] = lambda values: values,
        execution: Execution = PLAIN,
        flat_gradient: bool = True,
    ) -> None:
        """`sent`: turns a gradient, or a bucket of it, into the values to send. `flat_gradient`: keep the gradient as
        one vector, which `compute` needs; else each `backward` leaves new tensors in `grad`.
        """
        module, layout = instance.module, instance.layout
        self._task, self._split = instance.task, instance.split
        self._layout, self._plan, self._device, self._sent = layout, plan, device, sent
        self._execution = execution
        self._module = module.to(device).train()
        if execution.channels_last:
            module.to(memory_format=torch.channels_last)
        order = torch.preserve_format if execution.channels_last else torch.contiguous_format
        parameters = _of_kind(module, "parameter")
        gradients = [torch.zeros_like(p, memory_format=order) for p in parameters if flat_gradient]
        flat = functools.partial(FlatTensors, device=device, apart=device.type != "cpu" or execution.channels_last)
        self.parameters = flat(parameters, torch.float32)
        self._gradient = flat(gradients, torch.float32)
        self.buffers = flat(_of_kind(module, "buffer"), torch.float32)
        self.counters = flat(_of_kind(module, "counter"), torch.int64)
        for parameter, gradient in zip(parameters, gradients, strict=flat_gradient):
            parameter.grad = gradient
        self._parameters, self._loose = parameters, () if flat_gradient else parameters
        """All, and those whose gradients are tensors of their own."""
        self._loaded_buffers, self._loaded_counters = self.buffers.read(), self.counters.read()
        self._ahead: dict[int, list[Batch]] = {}
        self._is_clean = True  # the gradient is zero
        if device.type == "cpu" and not execution.channels_last:
            for convolution in filter(lambda one: isinstance(one, nn.Conv2d), module.modules()):
                convolution.register_forward_pre_hook(row_by_row)
        places = [slice(one.start, one.stop) for one in layout.tensors if one.kind == "parameter"]
        self._buckets = Buckets(layout.buckets, places, parameters, self._gradient) if flat_gradient else None
        self.compilation = self._compile() if execution.compiled else Compilation()

    @property
    def room(self) -> Vector | None:
        """The model's parameters as one vector (d,); weights decoded into it are loaded without a copy. None on an
        accelerator.
        """
        return self.parameters.view() if self.parameters.are_views else None

    def load(self, weights: Weights) -> None:
        """Start the following micro-batches from `weights`, which are copied. Raises ShapeError."""
        self._layout.check(weights)
        self.parameters.fill(weights.parameters)
        self._loaded_buffers, self._loaded_counters = weights.buffers.copy(), weights.counters.copy()

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Prepare to compute these micro-batches while waiting for weights: assemble their batches, and drop other
        batches assembled earlier. Does not affect results.
        """
        self._ahead = {m: self._ahead[m] if m in self._ahead else self._pieces(m) for m in micro_batches}
        for m in self._ahead:
            self._plan.generator_seed(m)  # fills its cache
        self._clean()

    def compute(self, micro_batch: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """Forward and backward over the micro-batch with this number.

        Args:
            take: is given the buffers and each bucket of the gradient as soon as they are ready, in mid-pass on the
                CPU.
        Raises Interrupted: `goes_on`, which is asked before, was false.
        """
        if not goes_on():
            raise Interrupted("the work was called off")
        assert self._buckets, "made with `flat_gradient` false"
        self.rewind()
        if take is None:
            loss = self.backward(micro_batch)
            return Update(self._sent(self._gradient.read()), self.buffers.read(), loss.item())
        passes = len(self._plan.pieces(micro_batch))
        with self._buckets.given_to(lambda bucket, values: take(bucket, self._sent(values)), passes):
            loss = self.backward(micro_batch, take)
        return Update(np.empty(0, np.float32), self.buffers.read(), loss.item())

    def walk(self, micro_batches: Sequence[int]) -> Update:
        """Compute each micro-batch, at least one; returns the update of the last."""
        for micro_batch in micro_batches[:-1]:
            self.compute(micro_batch)
        return self.compute(micro_batches[-1])

    def rewind(self) -> None:
        """Reset buffers and counters to the loaded values."""
        self.buffers.fill(self._loaded_buffers)
        self.counters.fill(self._loaded_counters)

    def backward(self, micro_batch: int, take: Take | None = None) -> Tensor:
        """Forward and backward passes, one for each piece: leaves the gradient in the parameters' `grad`, returns the
        mean loss, a scalar on the device.

        Uses the current parameters, buffers and counters; the forward pass updates buffers and counters.

        Args:
            take: is given the buffers before the last backward pass; on an accelerator it is not, since fetching them
                would delay that pass.
        """
        batches = self._ahead.pop(micro_batch) if micro_batch in self._ahead else self._pieces(micro_batch)
        size, losses = self._plan.size(micro_batch), []
        self._clean()
        self._is_clean = False
        seed_generators(self._plan.generator_seed(micro_batch), self._device)
        for piece, batch in zip(self._plan.pieces(micro_batch), batches, strict=True):
            with self._execution.forward(self._device):
                loss = self._task.loss(self._module, batch)
            if len(batches) > 1:
                loss = loss / (size / (piece.stop - piece.start))
            if take and piece.stop == size and self.buffers.are_views:
                take(len(self._layout.buckets), self.buffers.read())
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach())
        for parameter in self._loose:
            parameter.grad = _dense(parameter)
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _compile(self) -> Compilation:
        """Compile the module, and compute a micro-batch of each size: if that fails, or gives other gradients than
        without the compiler, the module stays as it was.
        """
        plain = self._trial_gradient(0)
        try:
            compile_module(self._module)
            apart = float(np.linalg.norm(self._trial_gradient(0) - plain)) / (float(np.linalg.norm(plain)) or 1.0)
            self._trial_gradient(self._plan.micro_batches_per_epoch - 1)
            trouble = (
                ""
                if apart <= LARGEST_APART[self._execution.precision]
                else f"its gradients are {100 * apart:.2g} % from those without it"
            )
            if not trouble:
                return Compilation(compiler(self._device))
        except Exception as error:  # no compiler, or one that cannot do with this model
            trouble = f"{type(error).__name__}: {error}".partition("\n")[0]
        undo(self._module)
        return Compilation(trouble=trouble)

    def _trial_gradient(self, micro_batch: int) -> Vector:
        self.rewind()
        self.backward(micro_batch)
        vector: Vector = torch.cat([_dense(one).reshape(-1) for one in self._parameters]).cpu().numpy()
        return vector

    def _clean(self) -> None:
        if not self._is_clean:
            self._gradient.zero()
            for parameter in self._loose:
                parameter.grad = None
        self._is_clean = True

    def _pieces(self, micro_batch: int) -> list[Batch]:
        """The samples of the micro-batch with this number, piece by piece, on the device."""
        samples, seeds = self._plan.indices(micro_batch), self._plan.sample_seeds(micro_batch)
        batches = (self._split.batch(samples[piece], seeds[piece]) for piece in self._plan.pieces(micro_batch))
        placed = [self._task.place(batch, self._device) for batch in batches]
        return [channels_last(batch) for batch in placed] if self._execution.channels_last else placed


def row_by_row(convolution: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A convolution's input, in torch's default order if the convolution has many more weights than input values.

    Otherwise each pass, forward and backward, would reorder the weights to match the input: a ResNet-18 on small images
    takes 6 % longer.
    """
    (images,) = inputs
    weights = convolution.get_parameter("weight").numel()
    return (images.clone(memory_format=torch.contiguous_format),) if weights > FEW * images.numel() else inputs


class FlatTensors:
    """Tensors that are written and read as one flat vector on the host.

    On the CPU they become views into that vector, so that writing and reading is one copy, and the backward pass writes
    gradients into it (gathering them with `torch.cat` takes a ResNet-18 20 ms more, mostly page faults). With `apart`
    they keep their own storage, aligned for an accelerator's kernels; writing and reading is one copy and one transfer.
    """

    def __init__(self, tensors: Sequence[Tensor], dtype: torch.dtype, device: torch.device, apart: bool) -> None:
        self._sizes, self._device = [t.numel() for t in tensors], device
        self._host = torch.zeros(sum(self._sizes), dtype=dtype)
        self._vector: npt.NDArray[Any] = self._host.numpy()
        self._apart = [t.detach() for t in tensors] if apart else []
        if not apart:
            for tensor, part in zip(tensors, torch.split(self._host, self._sizes), strict=True):
                part.copy_(tensor.detach().reshape(-1))
                tensor.data = part.view(tensor.shape)

    def fill(self, vector: npt.NDArray[Any]) -> None:
        """Set all tensors from a vector, which is copied, unless it is their own."""
        if vector is not self._vector:
            np.copyto(self._vector, vector)
        self._upload()

    def fill_joined(self, parts: Sequence[npt.NDArray[Any]]) -> None:
        """Set all tensors from arrays, which are copied one after another."""
        if parts:
            np.concatenate([np.ravel(part) for part in parts], out=self._vector)
        self._upload()

    def _upload(self) -> None:
        if self._apart:
            parts = torch.split(self._host.to(self._device), self._sizes)
            torch._foreach_copy_(self._apart, [p.view_as(t) for p, t in zip(parts, self._apart, strict=True)])

    def zero(self) -> None:
        if self._apart:
            torch._foreach_zero_(self._apart)
        else:
            self._host.zero_()

    @property
    def are_views(self) -> bool:
        """Whether the tensors are views into one vector."""
        return not self._apart

    def view(self) -> npt.NDArray[Any]:
        """All tensors as a vector, which changes with them if they are views."""
        return self.read() if self._apart else self._vector

    def read(self) -> npt.NDArray[Any]:
        """All tensors as a new vector."""
        if self._apart:
            return torch.cat([t.reshape(-1) for t in self._apart]).to("cpu", copy=True).numpy()
        return self._vector.copy()


class Buckets:
    """Passes on the buckets of a gradient as a backward pass fills them, the last layers' first.

    On an accelerator the buckets are passed on after the backward pass, because fetching a bucket would delay the rest.
    """

    def __init__(
        self, where: Sequence[slice], places: Sequence[slice], parameters: Sequence[Tensor], gradient: FlatTensors
    ) -> None:
        """`where`: each bucket's place in the gradient; `places`: each parameter's."""
        self._where, self._gradient = where, gradient
        self._counts = [0] * len(self._where)
        self._missing: list[int] = []
        self._take: Take | None = None
        for parameter, place in zip(parameters, places, strict=True):
            touched = [
                i for i, where in enumerate(self._where) if place.start < where.stop and where.start < place.stop
            ]
            for bucket in touched:
                self._counts[bucket] += 1
            if gradient.are_views and len(self._where) > 1:
                filled = functools.partial(self._filled, touched)
                parameter.register_post_accumulate_grad_hook(filled)  # type: ignore[no-untyped-call]

    @contextmanager
    def given_to(self, take: Take, passes: int = 1, late: Collection[int] = ()) -> Iterator[None]:
        """Call `take` once with each bucket of the gradient that this many backward passes in this block add up; with
        the `late` ones, to which more is added, at the end of the block.
        """
        self._take = take
        self._missing = [count * passes + (bucket in late) for bucket, count in enumerate(self._counts)]
        try:
            yield
        finally:
            self._take = None
        vector = self._gradient.view()
        for bucket, missing in enumerate(self._missing):
            if missing or not self._counts[bucket]:  # a tensor that the loss does not depend on is never filled
                take(bucket, vector[self._where[bucket]])

    def _filled(self, buckets: Sequence[int], _: Tensor) -> None:
        for bucket in buckets if self._take else ():
            self._missing[bucket] -= 1
            if not self._missing[bucket] and self._take:
                self._take(bucket, self._gradient.view()[self._where[bucket]])


def _of_kind(module: nn.Module, kind: str) -> list[Tensor]:
    return [tensor for _, tensor, k in entries(module) if k == kind]


def _dense(parameter: Tensor) -> Tensor:
    """The parameter's gradient as a dense tensor; zeros where the loss does not depend on it."""
    found = parameter.grad
    if found is None:
        return torch.zeros_like(parameter)
    return found if found.layout == torch.strided else found.to_dense()


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and `device`; 100 times faster than `torch.manual_seed`, which seeds them all."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)
