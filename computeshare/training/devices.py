"""Chooses and describes the device that a worker computes on. Importing this module does not import torch."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from computeshare.errors import SettingsError
from computeshare.types import Kind

if TYPE_CHECKING:
    import torch


def guess() -> Literal["cuda", "mps", "cpu"]:
    """The kind of device this machine most likely has, without importing torch (which takes seconds)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "cuda"
    return "mps" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"


def choose(preference: str | None = None) -> "torch.device":
    """The preferred device ('cpu', 'mps', 'cuda', 'cuda:1'); without a preference CUDA, else MPS, else the CPU.

    Raises: SettingsError: the preferred device is unknown or missing.
    """
    import torch

    if preference is None:
        return torch.device(next(kind for kind, count in _counts().items() if count))
    try:
        device = torch.device(preference)
    except RuntimeError as error:
        raise SettingsError(f"unknown device {preference!r}: take cpu, mps, cuda or cuda:N") from error
    if (device.index or 0) >= _counts().get(device.type, 0):
        there = ", ".join(kind for kind, count in _counts().items() if count)
        raise SettingsError(f"device {preference!r} is not on this machine, which has {there}: choose one, or none")
    return device


def check(preference: str) -> None:
    """Check that the preferred device exists, in a subprocess, which keeps torch out of this process's memory.

    Raises: SettingsError, as `choose`.
    """
    if preference == "cpu":
        return
    if not re.fullmatch(r"(cpu|mps|cuda)(:[0-9]{1,3})?", preference):
        raise SettingsError(f"unknown device {preference!r}: take cpu, mps, cuda or cuda:N")
    command = [sys.executable, "-m", "computeshare.training.devices", preference]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"device {preference!r} cannot be looked at"]
        raise SettingsError(lines[-1])


@dataclass(frozen=True, slots=True)
class Device:
    """A device in the words of `describe`, and the memory that it computes with: a GPU's own with CUDA, else the
    machine's.
    """

    described: str
    memory_bytes: int


def look(device: str) -> Device:
    """A device (`cuda:1`, `mps`, `cpu`), without torch: the driver's `nvidia-smi` tells about a GPU, if it answers."""
    machine = Device(_words(device, platform.machine()), int(psutil.virtual_memory().total))
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return machine
    position, visible = int(index or 0), os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    chosen = visible[position] if position < len(visible) and visible[position] else str(position)
    command = ["nvidia-smi", "--query-gpu=memory.total,name", "--format=csv,noheader,nounits", "-i", chosen]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        memory, name = found.stdout.strip().split(", ", 1)
        return Device(_words(device, name), int(memory) * 2**20)
    except (OSError, subprocess.SubprocessError, ValueError):
        return machine


def describe(device: "torch.device") -> str:
    """A device in words, for people: 'cuda (NVIDIA H200)', 'mps (arm64)', 'cpu (x86_64)'."""
    import torch

    return _words(str(device), torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine())


def _words(device: str, model: str) -> str:
    return f"{device} ({model})"


def kind(device: "torch.device") -> Kind:
    """The machine's kind: machines of equal kind compute the same bits for the same micro-batch.

    `threads` (the current `torch.get_num_threads`) and `instructions` are present only for the CPU.
    """
    import torch

    cuda = device.type == "cuda"
    found: Kind = {
        "device": device.type,
        "model": torch.cuda.get_device_name(device) if cuda else processor(),
        "torch": torch.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if cuda:
        cudnn: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        return found | {"cuda": str(torch.version.cuda), "cudnn": cudnn or 0}
    if device.type == "cpu":
        found |= {"threads": torch.get_num_threads(), "instructions": torch.backends.cpu.get_cpu_capability()}
    return found


def make_deterministic(device: "torch.device") -> None:
    """Make cuDNN use deterministic kernels, for the whole process; call before the first computation.

    The CPU is deterministic for a given number of threads. `torch.use_deterministic_algorithms` would add 4 s of
    imports and refuse models over operations that have no such kernel.
    """
    import torch

    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True


def processor() -> str:
    """The processor's model name, or its architecture if the system does not name the model."""
    name = ""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        if sys.platform == "darwin":
            command = ["sysctl", "-n", "machdep.cpu.brand_string"]
            name = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False).stdout
        else:
            lines = Path("/proc/cpuinfo").read_text().splitlines()
            name = next((line.partition(":")[2] for line in lines if line.startswith("model name")), "")
    return name.strip() or platform.processor() or platform.machine()


def _counts() -> dict[str, int]:
    """The number of devices of each kind, the fastest kind first."""
    import torch

    mps = int(torch.backends.mps.is_available())
    return {"cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0, "mps": mps, "cpu": 1}


if __name__ == "__main__":
    try:
        choose(sys.argv[1])
    except SettingsError as wrong:
        sys.exit(str(wrong))
