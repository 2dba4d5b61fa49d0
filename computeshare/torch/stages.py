"""A model in stages on several machines, trained by a plain script; see docs/guides/pipeline.md.

stages = await connect(first, group="mine", stages=2)  # the script: it holds the first stage
output = await stages(inputs)
criterion(output, labels).backward()
await stages.step()

await serve(second, group="mine", stage=1, stages=2, optimizer=optimizer)  # in another process
"""

import asyncio
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import Tensor, nn

from computeshare.errors import SettingsError
from computeshare.pipeline.chains.mail import Letter
from computeshare.torch import stage_line
from computeshare.torch.stage_line import Line, StageLost, line_of
from computeshare.torch.stage_saves import StageSaves, newest_of_all

__all__ = ["StageLost", "Stages", "connect", "serve"]
log = structlog.get_logger()


class Stages:
    """A model whose first stage this process holds, and others the rest. Use it from one task."""

    def __init__(self, first: nn.Module, line: Line, saves: StageSaves, timeout_s: float) -> None:
        self.first, self.timeout_s = first, timeout_s
        self.steps = 0
        """How many optimizer steps the stages have taken."""
        self._line, self._saves, self._turns = line, saves, itertools.count(1)
        self._has_stepped = False
        self._saved = 0
        """The number of steps after which all stages have saved last; 0: none has."""

    async def __call__(self, inputs: Tensor) -> Tensor:
        """The model's output, from which `backward` reaches all stages; within `torch.no_grad()`, no stage keeps what a
        backward pass would need. All stages train or evaluate as the first one does (`train()`, `eval()`). Raises
        StageLost; SettingsError: the first stage returns something else than one tensor.
        """
        values = one_tensor(self.first(inputs), 0)
        return await self._line.in_thread(self._through, values, torch.is_grad_enabled())

    async def clip_norm(self, max_norm: float) -> float:
        """Scale the gradients of all stages down to a total Euclidean norm of `max_norm`, as
        `torch.nn.utils.clip_grad_norm_` does; call it before any optimizer's step. Returns the norm before. Raises
        StageLost.
        """
        return await self._line.in_thread(self._clip, max_norm)

    async def step(self, lr: float | None = None) -> None:
        """Have each other stage take its optimizer's step, and clear its gradients. Raises StageLost.

        Args:
            lr: learning rate of this and later steps, for all parameters; default: as each optimizer has it.
        """
        self._has_stepped = True
        await self._ask(stage_line.STEP, lr)
        self.steps += 1

    async def save(self) -> None:
        """Have each stage save its weights and its optimizer's state in its folder; call it after `step`. Raises
        StageLost; SettingsError: a stage has no folder, cannot write there, or has saves of more steps there; all
        stages go on as they are, and keep the last save that all of them have.
        """
        await asyncio.to_thread(self._saves.save, self.steps, self._saved)
        for (error,) in await self._ask(stage_line.SAVE, self.steps, self._saved):
            if error:
                raise SettingsError(error)
        self._saved = self.steps

    async def resume(self) -> int:
        """Go back, on all stages, to the newest `save` that all of them have, after a `StageLost` or at a script's
        begin. Returns the number of steps taken by then; 0: nothing was saved, and nothing is changed.

        Raises StageLost: a stage's process is still missing, or a stage has no save although others have.
        """
        saved = [self._saves.steps(), *(one[0] for one in await self._ask(stage_line.SAVED, *self._line.terms))]
        newest = newest_of_all(saved)
        if newest is None and (any(saved) or self._has_stepped):
            raise StageLost("there is no save that all stages have: start all processes, and this script, anew")
        if newest is not None:
            await self._ask(stage_line.LOAD, newest)
            await asyncio.to_thread(self._saves.load, newest)
        self.steps = self._saved = newest or 0
        return self.steps

    async def close(self) -> None:
        """End the processes of the other stages."""
        for stage in range(1, self._line.stages):
            await asyncio.to_thread(self._line.send, stage, next(self._turns), stage_line.END)
        self._line.close()

    async def _ask(self, tag: str, *values: Any) -> list[list[Any]]:
        return await self._line.in_thread(self._line.ask, next(self._turns), tag, self.timeout_s, *values)

    def _through(self, values: Tensor, keeps_graph: bool) -> Tensor:
        call = _Call(self._line, next(self._turns), self.timeout_s, keeps_graph, self.first.training)
        if not keeps_graph:
            return call.forward(values)
        output: Tensor = _Rest.apply(values, torch.zeros((), requires_grad=True), call)
        return output

    def _clip(self, max_norm: float) -> float:
        turn, own = next(self._turns), self.first.parameters()
        norms = [norm_of(own), *(one[0] for one in self._line.ask(turn, stage_line.NORM, self.timeout_s))]
        total = math.hypot(*norms)
        factor = max_norm / (total + 1e-6)
        if factor < 1:
            for stage in range(1, self._line.stages):
                self._line.send(stage, turn, stage_line.CLIP, factor)
            scale(self.first.parameters(), factor)
        return total


@dataclass(frozen=True, slots=True)
class _Call:
    """A call of the other stages.

    Attributes:
        keeps_graph: whether they keep what a backward pass needs.
        is_training: their mode.
    """

    line: Line
    turn: int
    timeout_s: float
    keeps_graph: bool
    is_training: bool

    def forward(self, values: Tensor) -> Tensor:
        line, wants_gradient = self.line, self.keeps_graph and values.requires_grad
        sent = values.detach().requires_grad_(wants_gradient)
        line.send(1, self.turn, stage_line.FORWARD, sent, self.keeps_graph, self.is_training)
        output: Tensor = line.receive(line.stages - 1, self.turn, stage_line.FORWARD, self.timeout_s)[0]
        return output

    def backward(self, gradient: Tensor) -> Tensor | None:
        line = self.line
        line.send(line.stages - 1, self.turn, stage_line.BACKWARD, gradient)
        found: Tensor | None = line.receive(1, self.turn, stage_line.BACKWARD, self.timeout_s)[0]
        return found


class _Rest(torch.autograd.Function):
    """The other stages as one function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, anchor: Tensor, call: _Call) -> Tensor:
        """`anchor` requires grad, so that `backward` is called even if `values` needs no gradient (a frozen stage)."""
        ctx.call = call
        output = call.forward(values)
        found = output.detach()
        if not output.requires_grad:  # all stages are frozen
            ctx.mark_non_differentiable(found)
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        return ctx.call.backward(gradients[0]), None, None


async def connect(
    first: nn.Module,
    group: str,
    stages: int,
    broker: str = "",
    codec: str = "float32",
    timeout_s: float = 60,
    optimizer: torch.optim.Optimizer | None = None,
    folder: str | Path | None = None,
) -> Stages:
    """Connect to the processes that hold the other stages of a model, which `serve` them.

    Args:
        first: the first stage, trained by your script's own optimizer.
        group: letters, digits, - and _; the same in all processes.
        stages: number of stages, this one included.
        broker: `redis://...`; default: that of the control plane on this machine.
        codec: of values and gradients: `float32`, `float16`, `bfloat16`, `int8` or `int4`.
        timeout_s: how long a stage may take.
        optimizer: of the first stage, for `save`.
        folder: where `save` keeps the first stage.
    Raises: SettingsError: `group` or `codec` cannot be had, or no broker is known.
    """
    line = await asyncio.to_thread(line_of, group, 0, stages, broker, codec)
    return Stages(first, line, StageSaves(Path(folder) if folder else None, 0, first, optimizer), timeout_s)


async def serve(
    module: nn.Module,
    group: str,
    stage: int,
    stages: int,
    optimizer: torch.optim.Optimizer,
    broker: str = "",
    codec: str = "float32",
    folder: str | Path | None = None,
) -> None:
    """Hold a stage (1 and up) until the script closes its connection. The arguments are those of `connect`.

    A process that was started again takes part from the script's `resume` on; without that, it waits for the next
    script, also after this one has closed its connection.
    """
    line = await asyncio.to_thread(line_of, group, stage, stages, broker, codec)
    saves = StageSaves(Path(folder) if folder else None, stage, module, optimizer)
    await line.in_thread(_Served(line, module, optimizer, saves).run)


class _Served:
    """A stage that does what the script's messages say."""

    def __init__(self, line: Line, module: nn.Module, optimizer: torch.optim.Optimizer, saves: StageSaves) -> None:
        self._line, self._module, self._optimizer, self._saves = line, module, optimizer, saves
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}
        self._first_turn = 0
        """Messages of earlier turns are left over from before the script went back to a save."""

    def run(self) -> None:
        line = self._line
        while (letter := line.next()) and not (letter.tag == stage_line.END and letter.attempt == line.run):
            if letter.tag in (stage_line.BEGIN, stage_line.SAVED):
                if (theirs := line.decoded(letter.body)) != line.terms:
                    log.error("script refused", reason=line.refuse(letter, theirs))
                    continue
                line.run, self._first_turn = letter.attempt, letter.turn
                self._kept.clear()
                self._optimizer.zero_grad()
            if letter.attempt != line.run:
                line.tell_lost(letter)
            elif letter.turn >= self._first_turn:
                self._answer(letter)
        line.close()

    def _answer(self, letter: Letter) -> None:
        line, turn, values = self._line, letter.turn, self._line.decoded(letter.body)
        match letter.tag:
            case stage_line.FORWARD:
                self._forward(turn, *values)
            case stage_line.BACKWARD if turn in self._kept:
                received, output = self._kept.pop(turn)
                if output.requires_grad and values[0] is not None:  # else there is nothing to train up to here
                    output.backward(values[0])  # type: ignore[no-untyped-call]
                line.send(line.stage - 1, turn, stage_line.BACKWARD, received.grad)
            case stage_line.BACKWARD:
                line.send(0, turn, stage_line.FORGOTTEN)
            case stage_line.NORM:
                line.send(0, turn, stage_line.NORM, norm_of(self._module.parameters()))
            case stage_line.CLIP:
                scale(self._module.parameters(), values[0])
            case stage_line.STEP:
                if values[0] is not None:
                    for group in self._optimizer.param_groups:
                        group["lr"] = values[0]
                self._optimizer.step()
                self._optimizer.zero_grad()
                self._kept.clear()
                line.send(0, turn, stage_line.STEP)
            case stage_line.SAVE:
                line.send(0, turn, stage_line.SAVE, self._save(*values))
            case stage_line.SAVED:
                line.send(0, turn, stage_line.SAVED, self._saves.steps())
            case stage_line.LOAD:
                self._saves.load(values[0])
                line.send(0, turn, stage_line.LOAD)

    def _save(self, steps: int, since: int) -> str:
        """Save the stage. Returns why it was not saved, for the script; empty: it was."""
        try:
            self._saves.save(steps, since)
        except SettingsError as error:
            return str(error)
        return ""

    def _forward(self, turn: int, received: Tensor, keeps_graph: bool, is_training: bool) -> None:
        if self._module.training != is_training:
            self._module.train(is_training)
        with torch.set_grad_enabled(keeps_graph):
            # Its first layer may change what it gets in place, which autograd forbids for `received` itself.
            given = received.clone() if keeps_graph and received.requires_grad else received
            output = one_tensor(self._module(given), self._line.stage)
        if keeps_graph:
            self._kept[turn] = received, output
        following = (self._line.stage + 1) % self._line.stages
        sent = output.detach().requires_grad_(output.requires_grad)
        self._line.send(following, turn, stage_line.FORWARD, sent, keeps_graph, is_training)


def one_tensor(output: Any, stage: int) -> Tensor:
    """A stage's output. Raises SettingsError: it is not one tensor."""
    if not isinstance(output, Tensor):
        found = type(output).__name__
        raise SettingsError(f"stage {stage} returns a {found}: one tensor goes from stage to stage; cut elsewhere")
    return output


def norm_of(parameters: Iterable[nn.Parameter]) -> float:
    """The Euclidean norm of all gradients together."""
    gradients = [one.grad for one in parameters if one.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0


def scale(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply all gradients."""
    for one in parameters:
        if one.grad is not None:
            one.grad.mul_(factor)
