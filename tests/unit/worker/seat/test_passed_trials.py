"""A self-test is done once for each model, device and state of the machine's software."""

import platform
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from computeshare.tasks.images.classification import ImageClassification
from computeshare.training import devices, selftest
from computeshare.training.computation import LocalComputation
from computeshare.training.work_units import SelfTestResult
from computeshare.worker.seat.seat_setup import FOLDER, checked

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def subject(name: str = "lenet5", device: torch.device = CPU) -> LocalComputation:
    return LocalComputation(ImageClassification("digits", name, (1, 28, 28)).on_noise(selftest.SAMPLES), device)


def test_a_trial_that_was_passed_is_done_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checked(subject(), tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(selftest, "run", lambda *_: pytest.fail("tested again"))
        assert checked(subject(), tmp_path) == first
    ran: list[str] = []
    run = selftest.run
    monkeypatch.setattr(selftest, "run", lambda its, device: ran.append(its.task.name) or run(its, device))
    checked(subject("simplenet"), tmp_path)
    torch.set_num_threads(2)  # another kind of machine: other bits
    checked(subject(), tmp_path)
    assert ran == ["simplenet", "lenet5"]


@pytest.mark.parametrize("updated", ["system", "macOS", "driver", "visible", "device"])
def test_an_update_of_the_system_or_the_driver_and_another_device_are_tested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, updated: str
) -> None:
    driver, home = tmp_path / "version", tmp_path / "home"
    driver.write_text("550.54")
    monkeypatch.setattr(devices, "DRIVER", driver)
    ran: list[str] = []
    monkeypatch.setattr(selftest, "run", lambda _, device: ran.append(str(device)) or SelfTestResult(0.0, 0.0, 1, ""))
    for _ in range(2):
        checked(subject(), home)
    assert ran == ["cpu"]
    kind, device = subject().kind, CPU
    match updated:
        case "system":
            monkeypatch.setattr(platform, "release", lambda: "99.0")
        case "macOS":
            monkeypatch.setattr(platform, "mac_ver", lambda: ("26.1", ("", "", ""), "arm64"))
        case "driver":
            driver.write_text("560.28")
        case "visible":
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        case _:
            device = torch.device("cpu:1")
    for _ in range(2):
        checked(subject(device=device), home)
    assert ran == ["cpu", str(device)]
    assert subject(device=device).kind == kind  # other machines' bits are compared with this one's as before


def test_a_trial_that_was_not_passed_is_done_again_and_a_damaged_record_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(selftest, "run", lambda *_: SelfTestResult(0.5, 0.0, 1, "wrong"))
        assert checked(subject(), tmp_path).trouble
    assert not checked(subject(), tmp_path).trouble
    (record,) = (tmp_path / FOLDER).iterdir()
    record.write_text('{"error": 0.5}')
    assert checked(subject(), tmp_path).error == 0


def test_a_home_that_cannot_be_written_to_costs_only_a_test_at_each_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    assert not checked(subject(), tmp_path).trouble
