"""A delay line: pairs of TAP devices; frames into one device of a pair leave the other some milliseconds later.

    python -m bench.delay MILLISECONDS OUTER:INNER ...

For kernels without netem. Does not limit rates. Prints `ready`, and ends when its standard input closes.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TAP, _NO_PACKET_INFO = 0x400454CA, 0x0002, 0x1000
_FRAME = 1 << 16


def open_tap(name: str) -> int:
    """Make a TAP device of this name; it disappears when the returned descriptor is closed."""
    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", name.encode(), _TAP | _NO_PACKET_INFO))
    return tap


def carry(pairs: list[tuple[int, int]], delay_s: float, end: int) -> None:
    """Carry frames both ways between the descriptors of each pair until `end` is readable."""
    other = {a: b for pair in pairs for a, b in (pair, pair[::-1])}
    due: deque[tuple[float, int, bytes]] = deque()  # one delay for all frames, so the queue stays in order
    while True:
        patience = max(0.0, due[0][0] - time.monotonic()) if due else None
        readable, _, _ = select.select([end, *other], [], [], patience)
        if end in readable:
            return
        at = time.monotonic() + delay_s
        due.extend((at, other[tap], frame) for tap in readable for frame in _frames(tap))
        while due and due[0][0] <= time.monotonic():
            _, tap, frame = due.popleft()
            _write(tap, frame)


def _frames(tap: int) -> list[bytes]:
    """The frames that wait in a device, at most 64."""
    found: list[bytes] = []
    with contextlib.suppress(OSError):  # nothing more, or the device is down
        while len(found) < 64:
            found.append(os.read(tap, _FRAME))
    return found


def _write(tap: int, frame: bytes) -> None:
    with contextlib.suppress(OSError):  # down or full: lost, as on any link
        os.write(tap, frame)


def main() -> None:
    names = [each.split(":") for each in sys.argv[2:]]
    pairs = [(open_tap(outer), open_tap(inner)) for outer, inner in names]
    with contextlib.suppress(OSError):  # real-time priority: load must not slow the link down
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    print("ready", flush=True)
    carry(pairs, float(sys.argv[1]) / 1000, sys.stdin.fileno())


if __name__ == "__main__":
    main()
