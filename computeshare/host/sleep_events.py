"""Notices of this machine's sleep, from IOKit or logind."""

import sys
import threading
from collections.abc import Callable

import structlog

log = structlog.get_logger()


def watch_sleep(before: Callable[[], None], after: Callable[[], None]) -> threading.Thread:
    """Call `before` ahead of every sleep and `after` when it is over, in a thread that ends if there are no notices.

    `availability.Naps` detects a sleep without a notice.
    """

    def follow() -> None:
        try:
            if sys.platform == "darwin":
                from computeshare.host import iokit as system
            else:
                from computeshare.host import logind as system
            system.follow(before, after)
        except Exception as error:  # no bus, no logind, no permission: the clocks tell of a sleep once it is over
            log.debug("sleep is noticed afterwards only", error=f"{type(error).__name__}: {error}")
            after()  # in case a sleep was announced and its end will not be

    thread = threading.Thread(target=follow, name="sleep", daemon=True)
    thread.start()
    return thread
