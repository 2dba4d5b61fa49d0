"""How a gateway refuses a command: by the error of a command that no broker knows, with the reason as its argument."""

import math
import re

from redis.exceptions import OutOfMemoryError

REFUSED = "REFUSED"
"""The command in the place of a refused one: its error comes in order, and fails a transaction as a whole."""
_FOR_NOW = re.compile(r"unknown command '?`?REFUSED.*?beginning with: ['`](.*: try again in ([0-9]{1,5}) s)")


class RefusedForNow(OutOfMemoryError):
    """The gateway refuses a command that it will admit in `wait_s` seconds or later. It has changed nothing."""

    def __init__(self, reason: str, wait_s: float) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


def for_now(why: str, wait_s: float) -> str:
    """The reason of a refusal that ends by itself, in words that `refused_for_now` reads."""
    return f"{why}: try again in {max(1, math.ceil(wait_s))} s"


def is_for_now(reason: str) -> bool:
    """Whether a reason was made by `for_now`."""
    return ": try again in " in reason


def refused_for_now(error: Exception) -> RefusedForNow | None:
    """The refusal that a broker's error stands for; None: it is another error."""
    found = _FOR_NOW.search(str(error))
    return RefusedForNow(found[1], float(found[2])) if found else None
