"""The seat's side of the conversation with a recipe's process, which is not trusted."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from computeshare.errors import ComputeShareError, RecipeError, RecipeUnfit
from computeshare.training.recipe_process.channel import Closed, SocketChannel
from computeshare.training.recipe_process.messages import (
    MOST_HEAD,
    Bucket,
    Done,
    Failed,
    Head,
    Posted,
    Step,
    Wanted,
    reply_in,
)
from computeshare.types import Blob

STEP_LIMIT_S = 600.0
"""The longest time that a recipe's process may take for a step."""
Answer = TypeVar("Answer", bound=Head)
Mail = Callable[[Posted | Wanted, bytes], tuple[Head, Sequence[Blob]] | None]
"""Is given a message to another stage, or a request for one, and returns what the process is to be sent in return."""


class Ending(Protocol):
    """The end of the other process."""

    def end(self) -> None:
        """End it now."""

    def error(self) -> RecipeError:
        """Says why it ended; called once it has closed its end."""


class ProcessConnection:
    """Asks a recipe's process for one thing at a time, and waits for each step of it for `limit_s` at most."""

    def __init__(self, channel: SocketChannel, ending: Ending, limit_s: float = STEP_LIMIT_S) -> None:
        self._channel, self._ending, self._limit_s = channel, ending, limit_s
        self._owed = 0
        """Requests sent by `tell` whose answers are still to be read."""
        self._over: RecipeError | None = None

    def tell(self, request: Head) -> None:
        """Send a request without waiting for its answer: an error is raised by the next call. Raises RecipeError."""
        self._send(request)
        self._owed += 1

    def ask(
        self,
        request: Head,
        wanted: type[Answer],
        *,
        body: Sequence[Blob] = (),
        most_body: int = 0,
        steps: int = 1,
        tick: Callable[[], object] = lambda: None,
        take: Callable[[int], None] | None = None,
        mail: Mail | None = None,
        limit_s: float = 0.0,
    ) -> tuple[Answer, bytes]:
        """Send a request, and return the answer with its body.

        Args:
            most_body: the most bytes of the answer's body.
            steps: how many steps it may take: each may last for the limit.
            tick: called while there is no answer.
            take: called with the number of each bucket that is ready; None: there are none.
            mail: called with each message between stages; None: there are none.
            limit_s: the limit for this request; 0: the connection's.
        Raises: RecipeError: the recipe's code failed, the process ended, took too long, or answered wrongly; further
            ComputeShareErrors of the process.
        """
        self._send(request, body, tick)
        try:
            while self._owed:
                self._answer(Done, tick=tick)
                self._owed -= 1
        except ComputeShareError as error:  # the answer to this request will not be read
            raise self._broken(error) from error
        return self._answer(wanted, most_body, steps, tick, take, mail, limit_s)

    def _answer(
        self,
        wanted: type[Answer],
        most_body: int = 0,
        steps: int = 1,
        tick: Callable[[], object] = lambda: None,
        take: Callable[[int], None] | None = None,
        mail: Mail | None = None,
        limit_s: float = 0.0,
    ) -> tuple[Answer, bytes]:
        done = 0
        while True:
            reply, body = self._receive(most_body, tick, limit_s or self._limit_s)
            match reply:
                case Step(number=number) if done < number < steps:
                    done = number
                case Bucket(number=number) if take:
                    with self._passing_on():
                        take(number)
                case Posted() | Wanted() if mail:
                    with self._passing_on():
                        found = mail(reply, body)
                    if found:
                        self._send(*found, tick)
                case Failed():
                    raise reply.error
                case _ if isinstance(reply, wanted):
                    return reply, body
                case _:
                    name = type(reply).__name__.lower()
                    raise self._broken(RecipeError(f"the recipe's process answered {name!r} out of turn: it is broken"))

    @contextmanager
    def _passing_on(self) -> Iterator[None]:
        """Pass a part of an answer on within the block; if that fails, the rest would be taken for the next one's."""
        try:
            yield
        except BaseException as error:
            self._broken(error)
            raise

    def _send(self, request: Head, body: Sequence[Blob] = (), tick: Callable[[], object] = lambda: None) -> None:
        if self._over:
            raise self._over
        with self._guarded():
            self._channel.send(request.dumps(), body, _until(self._limit_s, tick))

    def _receive(self, most_body: int, tick: Callable[[], object], limit_s: float) -> tuple[Head, bytes]:
        with self._guarded():
            head, body = self._channel.receive(MOST_HEAD, most_body, _until(limit_s, tick))
            return reply_in(head), body

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """End the process where the conversation within the block fails."""
        try:
            yield
        except Closed as error:
            raise self._broken(self._ending.error()) from error
        except RecipeError as error:
            raise self._broken(error) from error

    def _broken(self, why: BaseException) -> RecipeError:
        """End the process; the error is raised by this call and all further ones."""
        self._ending.end()
        self._over = type(why)(str(why)) if isinstance(why, RecipeUnfit) else RecipeError(str(why))
        return self._over


def _until(limit_s: float, tick: Callable[[], object]) -> Callable[[], None]:
    """Calls `tick`, and raises RecipeError once the time is over."""
    deadline = time.monotonic() + limit_s

    def wait() -> None:
        tick()
        if time.monotonic() > deadline:
            raise RecipeError(
                f"a step of the recipe took more than {limit_s:.0f} s and was ended: the machine's owner can allow "
                "more by COMPUTESHARE_STEP_LIMIT"
            )

    return wait
