"""Messages between the processes that hold a script's stages, in order, through the broker."""

import asyncio
import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, TypeVar

from redis import Redis

from computeshare.codecs.registry import CODECS, WITHOUT_RESIDUAL
from computeshare.errors import RoundError, SettingsError
from computeshare.pipeline import frames
from computeshare.pipeline.chains.mail import Letter, LetterInbox, LetterOutbox
from computeshare.protocol import keys
from computeshare.torch.group_broker import connect_group
from computeshare.types import Blob

LARGEST_BYTES = 256 << 20
"""Of the tensors in a message."""
BEGIN, FORWARD, BACKWARD, STEP, END = "begin", "forward", "backward", "step", "end"
NORM, CLIP, SAVE, SAVED, LOAD = "norm", "clip", "save", "saved", "load"
LOST, FORGOTTEN, REFUSED = "lost", "forgotten", "refused"
"""The tags of messages. `BEGIN` and `SAVED` carry the script's `terms`. `LOST`: of a process that has not heard how its
script's run began; `FORGOTTEN`: of a stage that does not keep what a backward pass needs; `REFUSED`: of a process that
has other terms.
"""


Found = TypeVar("Found")


class StageLost(RoundError):
    """A stage does not answer, or its process was started again and has lost its weights."""


class Line:
    """A process's connection to the other stages of a group."""

    def __init__(self, redis: Redis, group: str, stage: int, stages: int, codec: str) -> None:
        self.stage, self.stages, self._codec = stage, stages, CODECS[codec]
        self.terms = [stages, codec]
        """The arguments that have to be the same in all processes."""
        key_of = functools.partial(keys.group_stage, group)
        self._inbox, self._outbox = LetterInbox(redis, key_of(str(stage))), LetterOutbox(redis, key_of)
        self._early: dict[tuple[int, int, str], Blob] = {}
        self._is_cancelled = threading.Event()
        self.run = uuid.uuid4().hex if stage == 0 else ""
        """Of the script; the other stages take it from its first message, and know none before."""
        if stage == 0:  # what an earlier script has left
            redis.unlink(*(key_of(str(one)) for one in range(stages)))
            for one in range(1, stages):
                self.send(one, 0, BEGIN, *self.terms)

    def send(self, to: int, turn: int, tag: str, *values: frames.Value) -> None:
        """Send tensors, or numbers, to a stage. Raises RedisError."""
        body = frames.encode(values, self._codec, turn)
        self._outbox.tell(str(to), Letter(self.run, turn, self.stage, tag, body))

    async def in_thread(self, do: Callable[..., Found], *arguments: Any) -> Found:
        """Call a function in a thread. Cancelled, as by Ctrl-C, it ends that thread's wait for a message, if there is
        one, and returns after the thread.
        """
        work = asyncio.ensure_future(asyncio.to_thread(do, *arguments))
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            self._is_cancelled.set()
            await asyncio.gather(work, return_exceptions=True)
            self._is_cancelled.clear()
            raise

    def next(self) -> Letter | None:
        """The next message; None: the wait was cancelled."""
        return self._inbox.next(lambda: not self._is_cancelled.is_set())

    def receive(self, source: int, turn: int, tag: str, timeout_s: float) -> list[Any]:
        """Wait for what a stage sends.

        Raises: StageLost; SettingsError: a stage has other terms; RuntimeError: the stages cannot compute this backward
        pass; CancelledError: the wait was cancelled, as by Ctrl-C.
        """
        deadline, wanted = time.monotonic() + timeout_s, (source, turn, tag)

        def goes_on() -> bool:
            return time.monotonic() < deadline and not self._is_called_off()

        while wanted not in self._early:
            letter = self._inbox.next(goes_on)
            if letter is None and self._is_called_off():
                raise asyncio.CancelledError
            if letter is None:
                raise StageLost(
                    f"stage {source} has not answered for {timeout_s:g} s: it is slow (timeout_s), or the process of a "
                    "stage has ended: start that again, then go back with `await stages.resume()`"
                )
            if letter.attempt == self.run and letter.tag == REFUSED:
                raise SettingsError(self.decoded(letter.body)[0])
            if letter.attempt == self.run and letter.turn >= turn:
                if letter.tag == LOST:
                    raise StageLost(
                        f"the process of stage {letter.stage} was started again, without its weights: go back to the "
                        "last `save` of all stages with `await stages.resume()`"
                    )
                if letter.tag == FORGOTTEN and letter.turn == turn:
                    raise RuntimeError(
                        "the stages do not keep what this backward pass needs: call backward() once for each output, "
                        "and before step()"
                    )
                self._early[letter.stage, letter.turn, letter.tag] = letter.body
        return self.decoded(self._early.pop(wanted))

    def _is_called_off(self) -> bool:
        """Whether a wait was cancelled: that of a thread, or one inside `loss.backward()`, which holds up the event
        loop, so that its task hears of no cancellation.
        """
        task = None
        with contextlib.suppress(RuntimeError):  # no event loop in this thread
            task = asyncio.current_task()
        return self._is_cancelled.is_set() or bool(task and task.cancelling())

    def tell_lost(self, letter: Letter) -> None:
        """Answer the message of a run whose begin this process has not heard."""
        self._outbox.tell("0", Letter(letter.attempt, letter.turn, self.stage, LOST, b""))

    def refuse(self, letter: Letter, theirs: list[Any]) -> str:
        """Answer the begin of a run whose terms are not this process's; returns the reason."""
        mine, other = (" and codec ".join(map(str, terms)) for terms in (self.terms, theirs))
        reason = f"stage {self.stage} was started with stages={mine}, the script with stages={other}: they must agree"
        body = frames.encode([reason], self._codec)
        self._outbox.tell("0", Letter(letter.attempt, letter.turn, self.stage, REFUSED, body))
        return reason

    def ask(self, turn: int, tag: str, timeout_s: float, *values: frames.Value) -> list[list[Any]]:
        """Send something to all other stages; what each answers, in their order. Raises StageLost."""
        self._early.clear()  # of earlier turns: nobody waits for it any more
        for stage in range(1, self.stages):
            self.send(stage, turn, tag, *values)
        return [self.receive(stage, turn, tag, timeout_s) for stage in range(1, self.stages)]

    def decoded(self, body: Blob) -> list[Any]:
        """A message's values. Raises CodecError."""
        return frames.decode(body, self._codec, LARGEST_BYTES)

    def close(self) -> None:
        self._inbox.close()


def line_of(group: str, stage: int, stages: int, broker: str, codec: str) -> Line:
    """Connect a stage. Raises SettingsError: an argument cannot be had, or no broker is known."""
    if codec not in WITHOUT_RESIDUAL:
        raise SettingsError(f"codec {codec!r}: choose one of {', '.join(WITHOUT_RESIDUAL)}")
    if not 0 <= stage < stages:
        raise SettingsError(f"stage {stage} of {stages}: stages are numbered from 0")
    return Line(connect_group(group, broker), group, stage, stages, codec)
