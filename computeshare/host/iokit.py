"""A Mac's notices of sleep from IOKit, which waits up to 30 seconds for an answer.

Written from Apple's Technical Q&A QA1340; not run on a Mac yet.
"""

import ctypes
import ctypes.util
from collections.abc import Callable

CAN_SLEEP, WILL_SLEEP, WILL_NOT_SLEEP, HAS_WOKEN = 0xE0000270, 0xE0000280, 0xE0000290, 0xE0000300
"""kIOMessageCanSystemSleep and related constants of <IOKit/IOMessage.h>."""
_CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p)


def react(message: int, before: Callable[[], None], after: Callable[[], None], allow: Callable[[], None]) -> None:
    """Handle a message of the power manager. A message that asks for permission always gets it, even after an error."""
    if message == WILL_SLEEP:
        try:
            before()
        finally:
            allow()
    elif message == CAN_SLEEP:
        allow()
    elif message in (HAS_WOKEN, WILL_NOT_SLEEP):
        after()


def follow(before: Callable[[], None], after: Callable[[], None], ready: Callable[[], None] = lambda: None) -> None:
    """Call `before` ahead of every sleep, which waits until `before` returns, and `after` when the sleep is over.

    Args:
        ready: called once notices are registered.
    Raises OSError, AttributeError: this is no Mac, or IOKit gives no notice.
    """
    kit, core = _library("IOKit"), _library("CoreFoundation")
    kit.IORegisterForSystemPower.restype = ctypes.c_uint32
    kit.IORegisterForSystemPower.argtypes = [ctypes.c_void_p, ctypes.c_void_p, _CALLBACK, ctypes.c_void_p]
    kit.IOAllowPowerChange.argtypes = [ctypes.c_uint32, ctypes.c_void_p]
    kit.IONotificationPortGetRunLoopSource.restype = ctypes.c_void_p
    kit.IONotificationPortGetRunLoopSource.argtypes = [ctypes.c_void_p]
    core.CFRunLoopGetCurrent.restype = ctypes.c_void_p
    core.CFRunLoopAddSource.argtypes = [ctypes.c_void_p] * 3
    root = 0

    def told(_: int | None, service: int, message: int, argument: int | None) -> None:
        react(message, before, after, lambda: kit.IOAllowPowerChange(root, argument))

    callback = _CALLBACK(told)
    port, notifier = ctypes.c_void_p(), ctypes.c_uint32()
    root = kit.IORegisterForSystemPower(None, ctypes.byref(port), callback, ctypes.byref(notifier))
    if not root:
        raise OSError("IOKit gives no notice of sleep")
    mode = ctypes.c_void_p.in_dll(core, "kCFRunLoopDefaultMode")
    core.CFRunLoopAddSource(core.CFRunLoopGetCurrent(), kit.IONotificationPortGetRunLoopSource(port), mode)
    ready()
    core.CFRunLoopRun()


def _library(name: str) -> ctypes.CDLL:
    path = ctypes.util.find_library(name)
    if not path:
        raise OSError(f"there is no {name} here")
    return ctypes.CDLL(path)
