"""A stage is measured alone, by a worker to which nobody sends anything."""

import pytest

from bench.split_model import Cut, SplitModel, gpt
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.chains.speed_trial import TrialMail, measured_rate, smallest
from computeshare.tasks.images.classification import ImageClassification

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
