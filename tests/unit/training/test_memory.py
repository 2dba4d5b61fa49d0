"""What a process says of its own memory."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from computeshare.training.memory import machine_bytes, peak_resident_bytes

TOLD = "from computeshare.training.memory import peak_resident_bytes; print(peak_resident_bytes())"


@pytest.mark.slow
def test_the_peak_is_that_of_the_process_whatever_its_parent_holds() -> None:
    ballast = b"x" * 2_000_000_000
    found = int(subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True).stdout)
    assert 5_000_000 < found < len(ballast) / 2
    assert peak_resident_bytes() >= len(ballast)


@pytest.mark.parametrize(
    ("groups", "limits"),
    [
        ("0::/slice/job", {"slice/job/memory.max": "1000000", "slice/memory.max": "max"}),
        ("0::/slice/job", {"slice/job/memory.max": "max", "slice/memory.max": "1000000"}),
        ("0::/", {"memory.max": "1000000"}),
        ("5:cpu:/x\n4:memory:/docker/1\n0::/", {"memory/memory.limit_in_bytes": "1000000"}),
        ("4:memory:/job\n0::/", {"memory/job/memory.limit_in_bytes": "1000000", "memory.max": "max"}),
    ],
    ids=["own", "around", "container", "container, version 1", "version 1"],
)
def test_a_cgroup_limits_what_a_process_may_have(tmp_path: Path, groups: str, limits: dict[str, str]) -> None:
    for path, content in {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{k}": v for k, v in limits.items()}}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"{content}\n")
    assert machine_bytes(tmp_path) == 1_000_000
    assert machine_bytes(tmp_path / "no Linux") == psutil.virtual_memory().total


def test_ulimit_limits_what_a_process_may_have() -> None:
    told = "from computeshare.training.memory import machine_bytes; print(machine_bytes())"
    command = ["sh", "-c", f"ulimit -d 1000000; exec {sys.executable} -c '{told}'"]
    assert int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) == 1_024_000_000
