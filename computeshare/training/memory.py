"""How much memory this process takes, of what its device computes with."""

import resource
import sys

import psutil
import torch


def resident_bytes() -> int:
    """What this process has resident now."""
    return int(psutil.Process().memory_info().rss)


def peak_resident_bytes() -> int:
    """The most that this process has had resident."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has taken so far of what its device computes with.

    That is resident memory for the CPU, and what torch has allocated on a CUDA device. Metal tells no peak: there it is
    what the driver has allocated now, which torch hardly ever gives back.
    """
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return peak_resident_bytes()


def room_bytes(device: torch.device) -> int:
    """What the machine has of it in all."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return int(psutil.virtual_memory().total)


def used_bytes(device: torch.device) -> int:
    """What this process takes now: on a CUDA device or by Metal, and resident beside it; what grows if it leaks."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device)) + resident_bytes()
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory()) + resident_bytes()
    return resident_bytes()
