"""A model in stages on several machines, trained by a plain script; see docs/guides/pipeline.md.

stages = await connect(first, group="mine", stages=2)  # the script: it holds the first stage
output = await stages(inputs)
criterion(output, labels).backward()
await stages.step()

await serve(second, group="mine", stage=1, stages=2, optimizer=optimizer)  # in another process
"""

import asyncio
import functools
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch
from redis import Redis
from torch import Tensor, nn

from computeshare.codecs.registry import CODECS
from computeshare.errors import RoundError, SettingsError
from computeshare.pipeline import frames
from computeshare.pipeline.chains.mail import Inbox, Letter, Outbox
from computeshare.protocol import keys
from computeshare.torch.group_broker import connect_group
from computeshare.types import Blob

LARGEST_BYTES = 256 << 20
"""Of the tensors in a message."""
FORWARD, BACKWARD, STEP, END = "forward", "backward", "step", "end"


class StageLost(RoundError):
    """A stage does not answer."""


class Line:
    """A process's connection to the other stages of a group."""

    def __init__(self, redis: Redis, group: str, stage: int, stages: int, codec: str) -> None:
        self.stage, self.stages, self._codec = stage, stages, CODECS[codec]
        key_of = functools.partial(keys.group_stage, group)
        self._inbox, self._outbox = Inbox(redis, key_of(str(stage))), Outbox(redis, key_of)
        self._early: dict[tuple[int, int, str], Blob] = {}
        self.run = uuid.uuid4().hex
        """Of the script; the other stages take it from its messages."""
        if stage == 0:  # what an earlier script has left
            redis.unlink(*(key_of(str(one)) for one in range(stages)))

    def send(self, to: int, turn: int, tag: str, *tensors: Tensor | None) -> None:
        """Send tensors to a stage. Raises RedisError."""
        body = frames.encode(tensors, self._codec, turn)
        self._outbox.tell(str(to), Letter(self.run, turn, self.stage, tag, body))

    def next(self, goes_on: Callable[[], bool] = lambda: True) -> Letter | None:
        """The next message; None: `goes_on` was false."""
        return self._inbox.next(goes_on)

    def receive(self, source: int, turn: int, tag: str, timeout_s: float) -> list[Any]:
        """Wait for a stage's tensors. Raises StageLost."""
        deadline, wanted = time.monotonic() + timeout_s, (source, turn, tag)
        while wanted not in self._early:
            letter = self._inbox.next(lambda: time.monotonic() < deadline)
            if letter is None:
                break
            if letter.attempt == self.run and letter.turn >= turn:
                self._early[letter.stage, letter.turn, letter.tag] = letter.body
        if wanted in self._early:
            return self.decoded(self._early.pop(wanted))
        raise StageLost(f"stage {source} has not answered for {timeout_s:g} s: start it again, and this script")

    def decoded(self, body: Blob) -> list[Any]:
        """A message's tensors. Raises CodecError."""
        return frames.decode(body, self._codec, LARGEST_BYTES)

    def close(self) -> None:
        self._inbox.close()


class Stages:
    """A model whose first stage this process holds, and others the rest. Use it from one task."""

    def __init__(self, first: nn.Module, line: Line, timeout_s: float) -> None:
        self.first, self.timeout_s = first, timeout_s
        self._line, self._turn = line, 0

    async def __call__(self, inputs: Tensor) -> Tensor:
        """The model's output, from which `backward` reaches all stages; within `torch.no_grad()`, no stage keeps what a
        backward pass would need. Raises StageLost.
        """
        values = self.first(inputs)
        return await asyncio.to_thread(self._through, values)

    async def step(self) -> None:
        """Have each other stage take its optimizer's step, and clear its gradients. Raises StageLost."""
        await asyncio.to_thread(self._step)

    async def close(self) -> None:
        """End the processes of the other stages."""
        for stage in range(1, self._line.stages):
            await asyncio.to_thread(self._line.send, stage, self._turn, END)
        self._line.close()

    def _through(self, values: Tensor) -> Tensor:
        self._turn += 1
        output: Tensor = _Rest.apply(values, self._line, self._turn, self.timeout_s)
        return output

    def _step(self) -> None:
        self._turn += 1
        for stage in range(1, self._line.stages):
            self._line.send(stage, self._turn, STEP)
        for stage in range(1, self._line.stages):
            self._line.receive(stage, self._turn, STEP, self.timeout_s)


class _Rest(torch.autograd.Function):
    """The other stages as one function."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, line: Line, turn: int, timeout_s: float) -> Tensor:
        ctx.about = line, turn, timeout_s
        line.send(1, turn, FORWARD, values.detach().requires_grad_(ctx.needs_input_grad[0]))
        (output,) = line.receive(line.stages - 1, turn, FORWARD, timeout_s)
        found: Tensor = output.detach()
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        line, turn, timeout_s = ctx.about
        line.send(line.stages - 1, turn, BACKWARD, gradients[0])
        (gradient,) = line.receive(1, turn, BACKWARD, timeout_s)
        return gradient, None, None, None


async def connect(
    first: nn.Module, group: str, stages: int, broker: str = "", codec: str = "float32", timeout_s: float = 60
) -> Stages:
    """Connect to the processes that hold the other stages of a model, which `serve` them.

    Args:
        first: the first stage, trained by your script's own optimizer.
        group: letters, digits, - and _; the same in all processes.
        stages: number of stages, this one included.
        broker: `redis://...`; default: that of the control plane on this machine.
        codec: of values and gradients: `float32`, `float16`, `bfloat16`, `int8` or `int4`.
        timeout_s: how long a stage may take.
    Raises: SettingsError: `group` or `codec` cannot be had, or no broker is known.
    """
    line = await asyncio.to_thread(_line, group, 0, stages, broker, codec)
    return Stages(first, line, timeout_s)


async def serve(
    module: nn.Module,
    group: str,
    stage: int,
    stages: int,
    optimizer: torch.optim.Optimizer,
    broker: str = "",
    codec: str = "float32",
) -> None:
    """Hold a stage (1 and up) until the script closes its connection. The arguments are those of `connect`."""
    line = await asyncio.to_thread(_line, group, stage, stages, broker, codec)
    await asyncio.to_thread(_serve, line, module, optimizer)


def _line(group: str, stage: int, stages: int, broker: str, codec: str) -> Line:
    suited = [name for name, one in CODECS.items() if not one.residual]
    if codec not in suited:
        raise SettingsError(f"codec {codec!r}: choose one of {', '.join(suited)}")
    if not 0 <= stage < stages:
        raise SettingsError(f"stage {stage} of {stages}: stages are numbered from 0")
    return Line(connect_group(group, broker), group, stage, stages, codec)


def _serve(line: Line, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    following = (line.stage + 1) % line.stages
    while (letter := line.next()) and letter.tag != END:
        line.run = letter.attempt
        tensors = line.decoded(letter.body)
        if letter.tag == FORWARD:
            is_trained = tensors[0].requires_grad
            with torch.set_grad_enabled(is_trained):
                output = module(tensors[0])
            if is_trained:
                kept[letter.turn] = tensors[0], output
            line.send(following, letter.turn, FORWARD, output.detach().requires_grad_(is_trained))
        elif letter.tag == BACKWARD and letter.turn in kept:
            values, output = kept.pop(letter.turn)
            output.backward(tensors[0])  # type: ignore[no-untyped-call]
            line.send(line.stage - 1, letter.turn, BACKWARD, values.grad)
        elif letter.tag == STEP:
            optimizer.step()
            optimizer.zero_grad()
            kept.clear()
            line.send(0, letter.turn, STEP)
    line.close()
