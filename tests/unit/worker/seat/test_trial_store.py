"""A self-test is done once for each model and each kind of machine."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from computeshare.tasks.images.classification import ImageClassification
from computeshare.training import selftest
from computeshare.training.computation import LocalComputation
from computeshare.training.work_units import Trial
from computeshare.worker.seat.trial_store import FOLDER, checked

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def subject(name: str = "lenet5") -> LocalComputation:
    return LocalComputation(ImageClassification("digits", name, (1, 28, 28)).on_noise(selftest.SAMPLES), CPU)


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


def test_a_trial_that_was_not_passed_is_done_again_and_a_damaged_record_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(selftest, "run", lambda *_: Trial(0.5, 0.0, 1, "wrong"))
        assert checked(subject(), tmp_path).trouble
    assert not checked(subject(), tmp_path).trouble
    (record,) = (tmp_path / FOLDER).iterdir()
    record.write_text('{"error": 0.5}')
    assert checked(subject(), tmp_path).error == 0


def test_a_home_that_cannot_be_written_to_costs_only_a_test_at_each_start(tmp_path: Path) -> None:
    (tmp_path / FOLDER).write_text("in the way")
    assert not checked(subject(), tmp_path).trouble
