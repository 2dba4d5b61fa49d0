"""A stage is measured and tested alone, by a worker to which nobody sends anything."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from bench.split_model import Cut, SplitModel, gpt
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.chains.stage_trial import ModelStages, TrialMail, measured_rate, smallest
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.tasks.images.classification import ImageClassification
from computeshare.training.selftest import CPU, Compute, TrialBatch
from computeshare.types import Vector

PLAN = Plan(seed=7, samples=22, micro_batch=8, micro_batches_per_round=2, accumulate=4)
TASKS = {"gpt": gpt(), "resnet18": ImageClassification("digits", "resnet18", (3, 16, 16))}


@pytest.mark.parametrize("codec", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_each_stage_has_a_rate_of_its_work_per_second_of_computing(name: str, codec: str) -> None:
    """The GPT's stages share weights: the last borrows those of the first."""
    split = SplitModel.of(TASKS[name], PLAN, Cut(3, activations=codec))
    for number in range(3):
        replica = split.replica(range(number, number + 1))
        mail = TrialMail(replica, split.stage_plan, PLAN, CODECS[codec])
        rate = measured_rate(replica, split.layout, mail, [StageDemand(1, 6.0)] * 3)
        timing = replica.stages[number].timing
        assert timing.pieces == 4
        assert rate == pytest.approx(6 / (timing.forward_s + timing.backward_s))


def test_a_trial_that_is_called_off_tells_nothing() -> None:
    split = SplitModel.of(gpt(), PLAN, Cut(2))
    replica = split.replica(range(1, 2))
    asked = iter([True] * 3 + [False] * 9)
    mail = TrialMail(replica, split.stage_plan, PLAN, CODECS["float32"])
    assert measured_rate(replica, split.layout, mail, [StageDemand(1, 6.0)] * 2, lambda: next(asked)) == 0


def test_the_stage_that_takes_the_least_memory_is_tried() -> None:
    assert smallest([StageDemand(3, 1.0), StageDemand(1, 9.0), StageDemand(2, 1.0)]) == 1


OTHER = torch.device("mps")
"""Stands for an accelerator, which computes on the CPU here."""


def subject_of(name: str, stages: int, device: torch.device = OTHER) -> ModelStages:
    split = SplitModel.of(TASKS[name], PLAN, Cut(stages))
    about = split.task.noise(PLAN.samples, 0), split.layout, PLAN, Cut(stages), split.stage_plan
    return ModelStages(split.task, *about, device)


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int, int, Vector], Vector], int], None]:
    """Has the accelerator do a fault to a stage's n-th gradient, of weights that differ by rounding if nudged."""
    right = ModelStages._gradient

    def use(fault: Callable[[int, int, Vector], Vector], nudge: int = 0) -> None:
        def gradient(self: ModelStages, number: int, device: torch.device, batch: TrialBatch) -> Compute:
            calls = 0
            compute = right(self, number, CPU, TrialBatch(batch.number, nudge) if device == OTHER else batch)

            def wrong() -> Vector:
                nonlocal calls
                calls += 1
                return fault(number, calls, compute()) if device == OTHER else compute()

            return wrong

        monkeypatch.setattr(ModelStages, "_gradient", gradient)

    return use


def the_same(number: int, call: int, gradient: Vector) -> Vector:
    return gradient


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_a_device_is_tested_with_gradients_of_every_stage(name: str, other: Any) -> None:
    subject, sizes = subject_of(name, 3), dict[int, float]()

    def note(number: int, call: int, gradient: Vector) -> Vector:
        sizes[number] = float(np.linalg.norm(gradient))
        return gradient

    other(note)
    found = subject.test(1 << 40)
    assert (found.trouble, found.error) == ("", 0) and found.seconds > 0
    assert sorted(sizes) == [0, 1, 2] and all(np.isfinite(one) and one > 1e-3 for one in sizes.values())
    assert subject_of(name, 3, CPU).test(1 << 40).trouble == ""


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_a_device_that_rounds_otherwise_is_right(name: str, other: Any) -> None:
    other(the_same, 101)
    assert subject_of(name, 3).test(1 << 40).trouble == ""


def test_a_stage_that_a_device_computes_wrongly_is_named(other: Any) -> None:
    other(lambda number, call, gradient: gradient * 1.01 if (number, call) == (1, 2) else gradient)
    trouble = subject_of("gpt", 3).test(1 << 40).trouble
    assert "computes stage 2 of gpt" in trouble and "gradient 2 is 1 % from the CPU's, most in" in trouble


def test_stages_that_do_not_fit_are_not_tested(other: Any) -> None:
    other(lambda number, call, gradient: gradient * 2)
    assert subject_of("gpt", 2).test(0).trouble == ""


def test_a_stage_that_was_tried_takes_no_memory_afterwards(monkeypatch: pytest.MonkeyPatch) -> None:
    made, replica = [], ModelStages.replica

    def noted(self: ModelStages, held: range) -> StageReplica:
        built = replica(self, held)
        made.extend(weakref.ref(part) for part in built.modules)
        return built

    monkeypatch.setattr(ModelStages, "replica", noted)
    subject = subject_of("gpt", 2, CPU)
    gc.disable()  # what nobody collects stays
    try:
        for trial in (lambda: subject.rate(0, lambda: True), lambda: subject.test(1 << 40)):
            assert trial() and made
            assert [one() for one in made if one() is not None] == []
        made.clear()
        subject.replica(range(1))
        assert [one() for one in made if one() is not None], "a circle"
        kept = subject.replica(range(1, 2))
        assert {id(one()) for one in made if one() is not None} == {id(part) for part in kept.modules}
    finally:
        gc.enable()
