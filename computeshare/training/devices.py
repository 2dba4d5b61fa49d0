"""Which device a worker computes on. Importing this module imports no torch."""

import contextlib
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

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
    """The device asked for ('cpu', 'mps', 'cuda', 'cuda:1'), else CUDA, else MPS, else the CPU.

    Raises: SettingsError: the device asked for is unknown or not there.
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
    """Find out whether the device asked for is there, in a process of its own: torch would stay in this one's memory.

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


def describe(device: "torch.device") -> str:
    """A device in words, for people: 'cuda (NVIDIA H200)', 'mps (arm64)', 'cpu (x86_64)'."""
    import torch

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    return f"{device.type} ({name})"


def kind(device: "torch.device") -> Kind:
    """What decides a micro-batch's bits beside the job itself: machines for which this is equal give the same ones.

    `threads` and `instructions` stand for the CPU only, as `torch.set_num_threads` has left them.
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
    """Have cuDNN choose the same, deterministic kernels every time; process-wide, before the first computation.

    The CPU, at a given number of threads, needs no telling. `torch.use_deterministic_algorithms` would add 4 s of
    imports and refuse models over operations that have no such kernel.
    """
    import torch

    if device.type == "cuda":
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True


def processor() -> str:
    """The processor's model, as far as the system tells it."""
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
    """How many devices of each kind are there, the best kind first."""
    import torch

    mps = int(torch.backends.mps.is_available())
    return {"cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0, "mps": mps, "cpu": 1}


if __name__ == "__main__":
    try:
        choose(sys.argv[1])
    except SettingsError as wrong:
        sys.exit(str(wrong))
