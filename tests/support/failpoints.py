"""An act in a process of its own that kills itself at a named point."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

import torch

from computeshare.runtime import failpoints
from computeshare.runtime.failpoints import VARIABLE

torch.ones(1, requires_grad=True).backward()
"""Lets forked processes compute gradients: if its first call comes after an export, torch forbids that to them."""


def apart(act: Callable[[], object], armed: str) -> int:
    """Run `act` in a process of its own with these failpoints armed; how it ended, as subprocess has it. An exception
    is printed, and ends it with 70.
    """
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            os.environ[VARIABLE] = armed
            failpoints._points.cache_clear()
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    deadline = time.monotonic() + 60
    while not (ended := os.waitpid(pid, os.WNOHANG | os.WUNTRACED))[0]:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    if os.WIFSTOPPED(ended[1]):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -signal.SIGSTOP
    return os.waitstatus_to_exitcode(ended[1])
