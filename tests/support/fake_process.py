"""A recipe's process in tests: a function in a thread, which says what it likes."""

import contextlib
import json
import socket
import struct
from collections.abc import Callable

from computeshare.errors import RecipeError

Child = Callable[[socket.socket], object]


class Killed:
    """Stands for the process: closes its end of the socket."""

    def __init__(self, end: socket.socket) -> None:
        self._end, self.times = end, 0

    def end(self) -> None:
        self.times += 1
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def error(self) -> RecipeError:
        return RecipeError("the recipe's process ended with exit code 1")


def framed(head: bytes, body: bytes = b"", sizes: tuple[int, int] | None = None) -> bytes:
    return struct.pack("<IQ", *(sizes or (len(head), len(body)))) + head + body


def said(**values: object) -> bytes:
    return framed(json.dumps(values).encode())
