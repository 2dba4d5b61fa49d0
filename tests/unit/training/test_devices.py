"""Which device a worker computes on."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from computeshare.errors import SettingsError
from computeshare.training import devices
from computeshare.training.memory import machine_bytes


def test_the_device_asked_for_is_chosen() -> None:
    assert devices.choose("cpu") == torch.device("cpu")


def test_without_a_preference_the_best_device_is_chosen() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    assert devices.choose().type == best


@pytest.mark.parametrize("name", ["cuda:99", "cpu:1", "meta"])
def test_a_device_that_is_not_there_is_an_error_that_names_those_that_are(name: str) -> None:
    with pytest.raises(SettingsError, match=r"not on this machine, which has .*cpu"):
        devices.choose(name)


@pytest.mark.parametrize("name", ["gpu", "", "cuda:x"])
def test_a_device_that_does_not_exist_is_an_error_that_names_the_kinds(name: str) -> None:
    with pytest.raises(SettingsError, match="unknown device"):
        devices.choose(name)


def test_a_description_begins_with_the_kind() -> None:
    assert devices.describe(torch.device("cpu")).startswith("cpu (")


def test_guessing_imports_no_torch() -> None:
    code = (
        "import sys\n"
        "import computeshare.training\n"
        "from computeshare.tasks.images.datasets import cifar, idx\n"
        "from computeshare.training import devices\n"
        "assert devices.guess() in ('cuda', 'mps', 'cpu')\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_guess_is_what_would_be_chosen_where_drivers_are_whole() -> None:
    if devices.guess() == "cpu":
        assert devices.choose().type == "cpu"
    else:
        assert devices.choose().type in (devices.guess(), "cpu")


def test_a_kind_tells_threads_and_versions_apart() -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = devices.kind(torch.device("cpu"))
        torch.set_num_threads(3)
        three = devices.kind(torch.device("cpu"))
    finally:
        torch.set_num_threads(before)
    assert three == {**one, "threads": 3}
    assert (one["device"], one["threads"], one["torch"]) == ("cpu", 1, torch.__version__)
    assert all(one[name] for name in ("model", "platform", "instructions"))


def test_memory_is_the_gpus_own_with_cuda_and_else_the_machines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidia-smi"
    lines = ["0, GPU-a, 16384, 7.5, Tesla T4", "1, GPU-b, 81559, 9.0, NVIDIA H100", "2, GPU-c, 81559, 9.0, NVIDIA H100"]
    driver.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert devices.look("cuda:1") == devices.Device("cuda:1 (NVIDIA H100)", 81_559 * 2**20)
    assert devices.look("cuda") == devices.Device("cuda (2 x NVIDIA H100)", 81_559 * 2**20)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-c,0")
    assert devices.look("cuda:1") == devices.Device("cuda:1 (Tesla T4)", 16_384 * 2**20)
    driver.write_text("#!/bin/sh\nexit 6\n")
    assert devices.look("cuda").memory_bytes == devices.look("cpu").memory_bytes == machine_bytes()


def test_devices_named_together_are_each_there() -> None:
    assert devices.choose_all("cpu,cpu") == ["cpu", "cpu"] and devices.choose_all("cpu") == ["cpu"]
    with pytest.raises(SettingsError, match="not on this machine"):
        devices.choose_all("cpu,cuda:99")


def test_a_device_is_called_the_same_with_torch_and_without() -> None:
    assert devices.look("cpu").described == devices.describe(torch.device("cpu"))
