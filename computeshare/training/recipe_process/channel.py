"""Messages between a seat and a recipe's process: a head of JSON and bytes, over a socket; nothing is pickled."""

import socket
import struct
from collections.abc import Callable, Sequence

from computeshare.errors import RecipeError
from computeshare.types import Blob

TICK_S = 0.05
"""How often a waiting side looks whether to go on waiting."""
_SIZES = struct.Struct("<IQ")
Tick = Callable[[], object]


class Closed(RecipeError):
    """The other side is gone."""


class SocketChannel:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket, tick_s: float | None = TICK_S) -> None:
        self._end = end
        end.settimeout(tick_s)

    def send(self, head: bytes, body: Sequence[Blob] = (), tick: Tick = lambda: None) -> None:
        """Send a message; `tick` is called while the other side does not read. Raises Closed; what `tick` raises."""
        parts = [memoryview(part).cast("B") for part in body]
        first = _SIZES.pack(len(head), sum(map(len, parts))) + head
        for part in (memoryview(first), *parts):
            rest = part
            while rest:
                try:
                    rest = rest[self._end.send(rest) :]
                except TimeoutError:
                    tick()
                except OSError as error:
                    raise Closed("the recipe's process ended") from error

    def receive(self, most_head: int, most_body: int, tick: Tick = lambda: None) -> tuple[bytes, bytes]:
        """The next message's head and body; `tick` is called while there is none.

        Raises: Closed; RecipeError: the head or the body is larger than allowed; what `tick` raises.
        """
        head_size, body_size = _SIZES.unpack(self._read(_SIZES.size, tick))
        if head_size > most_head or body_size > most_body:
            raise RecipeError(
                f"the recipe's process sent a message of {head_size:,} + {body_size:,} bytes: it is broken"
            )
        return self._read(head_size, tick), self._read(body_size, tick)

    def _read(self, size: int, tick: Tick) -> bytes:
        parts = []
        while size:
            try:
                part = self._end.recv(min(size, 1 << 20))
            except TimeoutError:
                tick()
                continue
            except OSError as error:
                raise Closed("the recipe's process ended") from error
            if not part:
                raise Closed("the recipe's process ended")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def close(self) -> None:
        self._end.close()
