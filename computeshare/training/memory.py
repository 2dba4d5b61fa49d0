"""Memory use of this process: resident memory, and the device's memory. Importing this module does not import torch."""

import contextlib
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch


def resident_bytes() -> int:
    """Current resident set size of this process."""
    return int(psutil.Process().memory_info().rss)


def private_bytes() -> int:
    """The resident memory that this process shares with no other; all of it where the system does not tell."""
    found = psutil.Process().memory_info()
    return int(found.rss - getattr(found, "shared", 0))


def peak_resident_bytes() -> int:
    """Peak resident set size of this process."""
    if (peak := _counted_peak()) > _INHERITED:
        return peak
    status = Path("/proc/self/status").read_text()  # takes 30 times as long
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _counted_peak() -> int:
    """The peak as `getrusage` tells it: on Linux it begins with the parent's, up to exec."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


_INHERITED = 0 if sys.platform == "darwin" else _counted_peak()
"""At the import of this module; the parent's, unless this process had used more by then."""


def peak_bytes(device: "torch.device") -> int:
    """Peak use of the memory that the device computes with.

    CPU: peak resident memory. CUDA: torch's peak allocation on the device. MPS reports no peak: the driver's current
    allocation, which torch hardly ever returns.
    """
    import torch

    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return peak_resident_bytes()


def machine_bytes(root: Path = Path("/")) -> int:
    """Bytes of the machine's memory that this process may use: all of them, unless `ulimit -d` or a cgroup, such as a
    container's, sets a limit.

    Args:
        root: has `proc` and `sys`.
    """
    own, _ = resource.getrlimit(resource.RLIMIT_DATA)
    limits = [] if own == resource.RLIM_INFINITY else [own]
    with contextlib.suppress(OSError):  # no Linux
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers in ("", "memory"):
                top = root / "sys/fs/cgroup" / controllers
                limits += _cgroup_limits(top, path, "memory.limit_in_bytes" if controllers else "memory.max")
    return min([int(psutil.virtual_memory().total), *limits])


def _cgroup_limits(top: Path, path: str, name: str) -> list[int]:
    """The limits of a cgroup and of those around it. In a container its own folder may be `top`, whatever the path."""
    group = top / path.lstrip("/")
    folders = [one for one in (group, *group.parents) if one.is_relative_to(top)]
    texts = [(one / name).read_text().strip() for one in folders if (one / name).is_file()]
    return [int(text) for text in texts if text.isdecimal()]  # else "max"


def room_bytes(device: "torch.device") -> int:
    """Total memory that the device computes with: the GPU's with CUDA, else what this process may have here."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return machine_bytes()


def used_bytes(device: "torch.device") -> int:
    """Current use: resident memory, plus the device's allocation with CUDA or MPS. A leak makes it grow."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device)) + resident_bytes()
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory()) + resident_bytes()
    return resident_bytes()


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """The memory of a device, and of this process, which computes with it."""

    device: "torch.device"

    @property
    def device_type(self) -> str:
        return self.device.type

    def resident_bytes(self) -> int:
        return resident_bytes()

    def peak_bytes(self) -> int:
        return peak_bytes(self.device)

    def room_bytes(self) -> int:
        return room_bytes(self.device)
