"""Chooses and describes the device that a worker computes on. Importing this module does not import torch."""

import contextlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import structlog

from computeshare.errors import SettingsError
from computeshare.training.memory import DeviceMemory, machine_bytes
from computeshare.types import Kind

if TYPE_CHECKING:
    import torch

DRIVER = Path("/proc/driver/nvidia/version")
"""NVIDIA's driver on Linux: its version, and the compiler that its module was built with."""
log = structlog.get_logger()


def guess() -> Literal["cuda", "mps", "cpu"]:
    """The kind of device this machine most likely has, without importing torch (which takes seconds)."""
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return "cuda"
    return "mps" if sys.platform == "darwin" and platform.machine() == "arm64" else "cpu"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A CUDA GPU: its number, its model, its compute capability (9.0), and its memory in bytes."""

    index: int
    model: str
    capability: float
    memory_bytes: int


def of_best_kind(gpus: Sequence[Gpu]) -> list[Gpu]:
    """The GPUs of the newest model, the one with the most memory of several: a worker counts as one machine of one
    kind, and GPUs of several kinds compute different bits.
    """
    best = max(gpus, key=lambda one: (one.capability, one.memory_bytes, -one.index))
    return [one for one in gpus if one.model == best.model]


def choose_all(preference: str | None = None) -> list[str]:
    """The names of the devices to compute on, each with a unit of its own: `cuda`, or no preference on a machine with
    GPUs, means all GPUs of the best kind; `cuda:0,cuda:1` or `cpu,cpu` those named.

    Raises: SettingsError: a device is unknown or missing, or they are of several kinds.
    """
    if preference and "," in preference:
        names = [one.strip() for one in preference.split(",")]
        found = [choose(one) for one in names]
        if len({kind(one)["model"] for one in found}) > 1 or len({one.type for one in found}) > 1:
            raise SettingsError(f"the devices {preference} are of several kinds: start a worker for each kind")
        if len(set(names)) < len(names) and found[0].type != "cpu":
            raise SettingsError(f"the devices {preference} name one twice: name each once")
        return names
    device = choose(preference)
    if device.type != "cuda" or device.index is not None:
        return [preference or device.type]
    gpus = _gpus()
    used = of_best_kind(gpus)
    if len(used) < len(gpus):
        others = ", ".join(sorted({one.model for one in gpus if one not in used}))
        log.warning("GPUs of several kinds: computing on the best kind only", used=used[0].model, unused=others)
    return (
        [f"cuda:{one.index}" for one in used]
        if len(used) > 1
        else [f"cuda:{used[0].index}" if used[0].index else "cuda"]
    )


def _gpus() -> list[Gpu]:
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        found.append(Gpu(index, about.name, about.major + about.minor / 10, int(about.total_memory)))
    return found


def choose(preference: str | None = None) -> "torch.device":
    """The preferred device ('cpu', 'mps', 'cuda', 'cuda:1'; of several, the first); without one CUDA, else MPS, else
    the CPU.

    Raises: SettingsError: the preferred device is unknown or missing.
    """
    import torch

    if preference is None:
        return torch.device(next(kind for kind, count in _counts().items() if count))
    preference = preference.partition(",")[0]
    try:
        device = torch.device(preference)
    except RuntimeError as error:
        raise SettingsError(
            f"unknown device {preference!r}: take cpu, mps, cuda, cuda:N, or several: cuda:0,cuda:1"
        ) from error
    if (device.index or 0) >= _counts().get(device.type, 0):
        there = ", ".join(kind for kind, count in _counts().items() if count)
        raise SettingsError(f"device {preference!r} is not on this machine, which has {there}: choose one, or none")
    return device


def check(preference: str) -> None:
    """Check that the preferred device exists, in a subprocess, which keeps torch out of this process's memory.

    Raises: SettingsError, as `choose`.
    """
    if set(preference.split(",")) == {"cpu"}:
        return
    if not re.fullmatch(r"(cpu|mps|cuda)(:[0-9]{1,3})?(, ?(cpu|mps|cuda)(:[0-9]{1,3})?)*", preference):
        raise SettingsError(f"unknown device {preference!r}: take cpu, mps, cuda, cuda:N, or several: cuda:0,cuda:1")
    command = [sys.executable, "-m", "computeshare.training.devices", preference]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        lines = found.stderr.strip().splitlines() or [f"device {preference!r} cannot be looked at"]
        raise SettingsError(lines[-1])


@dataclass(frozen=True, slots=True)
class Device:
    """A device in the words of `describe`, and the memory that it computes with: a GPU's own with CUDA, else what
    this process may have of the machine's.
    """

    described: str
    memory_bytes: int


def look(device: str) -> Device:
    """A device (`cuda:1`, `mps`, `cpu`), without torch: the driver's `nvidia-smi` tells about a GPU, if it answers."""
    names = device.split(",")
    first = names[0]
    machine = Device(words_of([_words(first, platform.machine())] * len(names)), machine_bytes())
    if not first.startswith("cuda"):
        return machine
    visible = [one.strip() for one in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if one.strip()]
    command = ["nvidia-smi", "--query-gpu=index,uuid,memory.total,compute_cap,name", "--format=csv,noheader,nounits"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        lines = [line.split(", ", 4) for line in found.stdout.strip().splitlines()]
        seen = [next(line for line in lines if one in line[:2]) for one in visible] or lines
        gpus = [Gpu(i, name, float(cap), int(memory) * 2**20) for i, (_, _, memory, cap, name) in enumerate(seen)]
        used = of_best_kind(gpus) if device == "cuda" else [gpus[int(one.partition(":")[2] or 0)] for one in names]
        return Device(words_of([_words(first, one.model) for one in used]), min(one.memory_bytes for one in used))
    except (OSError, subprocess.SubprocessError, ValueError, IndexError, StopIteration):
        return machine


def words_of(described: Sequence[str]) -> str:
    """Several devices of one model in words: 'cuda (2 x NVIDIA H100)'; one as it is described."""
    first = described[0]
    if len(described) == 1:
        return first
    device, _, model = first.partition(" (")
    return _words(device.partition(":")[0], f"{len(described)} x {model.rstrip(')')}")


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


def system() -> dict[str, str]:
    """Other facts that may change a device's results: the system's release (on a Mac with its drivers), the version of
    NVIDIA's driver ("" without one), and the choice of GPUs that this process may use.
    """
    driver = ""
    with contextlib.suppress(OSError):
        driver = DRIVER.read_text()
    release = f"{platform.release()} {platform.version()} {platform.mac_ver()[0]}"
    return {"release": release, "driver": driver, "visible": os.environ.get("CUDA_VISIBLE_DEVICES", "")}


class OnDevice:
    """Describes a computation's `torch_device`. A mixin: it takes no argument and keeps nothing."""

    torch_device: "torch.device"

    @property
    def device(self) -> str:
        """The device in words."""
        return describe(self.torch_device)

    @property
    def kind(self) -> Kind:
        """The machine's kind."""
        return kind(self.torch_device)

    @property
    def memory(self) -> DeviceMemory:
        """The device's memory, and this process's."""
        return DeviceMemory(self.torch_device)


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
        choose_all(sys.argv[1])
    except SettingsError as wrong:
        sys.exit(str(wrong))
