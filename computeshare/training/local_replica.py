"""A replica of local SGD: takes inner optimizer steps from a version's weights, and returns the pseudo-gradient."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from computeshare.errors import ArtifactError, Interrupted
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.schedule import EVERY_STEP_ALIKE, StepRules
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.modules import entries
from computeshare.tensors.layout import Weights
from computeshare.training.execution import PLAIN, Execution
from computeshare.training.optimizers import build_optimizer, clip, dump_state, load_state, set_rate, try_out
from computeshare.training.replica import Replica
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Blob, Vector


class LocalReplica:
    """Takes inner steps through micro-batches of `plan`, from the weights loaded last.

    With `kept` false the inner optimizer starts afresh with every unit; then a unit's update depends only on the
    weights and its micro-batches, on one kind of machine. With `kept` true the optimizer's state carries over from unit
    to unit, and can be handed to another worker. The replica takes over the module of `instance`, which must not be
    used elsewhere.
    """

    def __init__(
        self,
        instance: TaskInstance,
        plan: Plan,
        device: torch.device,
        inner: OptimizerSpec,
        kept: bool = False,
        rules: StepRules = EVERY_STEP_ALIKE,
        execution: Execution = PLAIN,
    ) -> None:
        """Raises SpecError where torch refuses the arguments of `inner`."""
        self._fused = device.type == "cpu" and not execution.channels_last  # the kernels know no memory order
        try_out(inner, rules, self._fused)
        self._replica = Replica(instance, plan, device, execution=execution, flat_gradient=False)
        self._parameters = [one for _, one, _ in entries(instance.module) if isinstance(one, nn.Parameter)]
        self._rules, self._decayed = rules, [rules.decays(p.shape) for p in self._parameters]
        self._base: Vector = self._replica.parameters.read()
        self._plan, self._buckets, self._inner, self._keep = plan, instance.layout.buckets, inner, kept
        self._state: torch.optim.Optimizer | None = None

    @property
    def compilation(self) -> Compilation:
        """As `Replica.compilation`."""
        return self._replica.compilation

    @property
    def kept(self) -> "LocalReplica | None":
        """The replica itself if it keeps the inner state from unit to unit; else None."""
        return self if self._keep else None

    @property
    def room(self) -> Vector:
        """As `Replica.room`."""
        return self._base

    def load(self, weights: Weights) -> None:
        """Start the following units from `weights`, which are copied. Raises ShapeError."""
        self._replica.load(weights)
        if weights.parameters is not self._base:
            np.copyto(self._base, weights.parameters)

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Do nothing: the batches of whole units would take too much memory."""

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """The steps of the unit with this number, as `walk`.

        Args:
            take: is given the buffers as by `Replica.backward` of the last step, and each bucket of the update.
        """
        if take is None:
            return self.walk(self._plan.micro_batches(unit), goes_on)
        loss, stepped = self._steps(self._plan.micro_batches(unit), goes_on, take), self._replica.parameters.view()
        for bucket, where in enumerate(self._buckets):
            take(bucket, self._base[where] - stepped[where])
        return Update(np.empty(0, np.float32), self._replica.buffers.read(), loss)

    def steps(self, unit: int, part: slice, goes_on: Callable[[], bool] = lambda: True) -> Update:
        """A part of the steps of the unit with this number, at least one, as `walk`."""
        return self.walk(self._plan.micro_batches(unit)[part], goes_on)

    def walk(self, micro_batches: Sequence[int], goes_on: Callable[[], bool] = lambda: True) -> Update:
        """Take one inner step on each micro-batch, in the given order.

        Args:
            micro_batches: a unit's (`Plan.micro_batches`) or the first of them; at least one.
            goes_on: checked before every step.
        Returns: the loaded parameters minus the parameters after the last step; the buffers after the last step; the
            mean over samples of the losses at each step.
        Raises: Interrupted: `goes_on` returned false; a kept inner state includes the steps taken so far.
        """
        loss = self._steps(micro_batches, goes_on)
        vector = self._replica.parameters.read()
        np.subtract(self._base, vector, out=vector)
        return Update(vector, self._replica.buffers.read(), loss)

    def _steps(self, micro_batches: Sequence[int], goes_on: Callable[[], bool], take: Take | None = None) -> float:
        """Take the steps of `walk`; `take` is given the buffers. Returns the mean loss."""
        replica, optimizer, losses = self._replica, self._optimizer(), list[torch.Tensor]()
        replica.parameters.fill(self._base)
        replica.rewind()
        for micro_batch in micro_batches:
            if not goes_on():
                raise Interrupted("the work was called off")
            losses.append(replica.backward(micro_batch, take if len(losses) == len(micro_batches) - 1 else None))
            clip((p.grad for p in self._parameters if p.grad is not None), self._rules.clip_norm)
            set_rate(optimizer, self._rules, self._plan.position(micro_batch))
            optimizer.step()
        sizes = [self._plan.size(m) for m in micro_batches]
        return float(np.average(torch.stack(losses).tolist(), weights=sizes))

    def dump(self) -> list[Blob] | None:
        """The inner state in safetensors format, for another worker to continue from; None if no state is kept."""
        return None if self._state is None else dump_state(self._inner.name, self._state, self._parameters)

    def restore(self, state: Blob) -> None:
        """Continue from another worker's `dump`, with this job's hyperparameters.

        Raises: ArtifactError: the state is of another optimizer or model, or not finite; the inner state is unchanged.
        """
        optimizer = self._fresh()
        load_state(self._inner.name, optimizer, self._parameters, state)
        self._check(optimizer)
        self._state = optimizer

    def _check(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare the state's form with the state after a step on copies of the parameters. Raises ArtifactError."""
        copies = [nn.Parameter(p.detach().clone()) for p in self._parameters]
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        stepped = build_optimizer(self._inner, self._rules, copies, self._decayed, self._fused)
        stepped.step()
        for parameter, copy in zip(self._parameters, copies, strict=True):
            state = optimizer.state.get(parameter, {})
            if optimizer.state and _forms(state) != _forms(stepped.state.get(copy, {})):
                raise ArtifactError("the inner state is of another model: start this replica's afresh")
            if not all(bool(torch.isfinite(v).all()) for v in state.values() if isinstance(v, torch.Tensor)):
                raise ArtifactError("the inner state is not finite: start this replica's afresh")

    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._state or self._fresh()
        if self._keep:
            self._state = optimizer
        return optimizer

    def _fresh(self) -> torch.optim.Optimizer:
        # built anew, not cleared: some optimizers create state in their constructor
        return build_optimizer(self._inner, self._rules, self._parameters, self._decayed, self._fused)


def _forms(state: dict[str, Any]) -> dict[str, object]:
    """Each tensor's shape and dtype; the type of every other value."""
    return {k: (v.shape, v.dtype) if isinstance(v, torch.Tensor) else type(v) for k, v in state.items()}
