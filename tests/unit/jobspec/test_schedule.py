"""The learning rate over the training."""

import math

import pytest
from pydantic import ValidationError

from computeshare.jobspec.schedule import Schedule, StepRules
from computeshare.jobspec.spec import JobSpec


def factors(rounds: int, **fields: object) -> list[float]:
    schedule = Schedule.model_validate(fields)
    return [schedule.factor(position, rounds) for position in range(rounds + 1)]


def test_a_constant_rate_is_the_optimizers_own() -> None:
    assert factors(5) == [1.0] * 6


def test_linear_and_cosine_fall_from_the_whole_rate_to_the_final_fraction() -> None:
    assert factors(4, name="linear", final=0.2) == pytest.approx([1, 0.8, 0.6, 0.4, 0.2])
    assert factors(4, name="cosine", final=0.2) == pytest.approx(
        [0.2 + 0.4 * (1 + math.cos(math.pi * x / 4)) for x in range(5)]
    )


def test_a_warm_up_rises_to_the_whole_rate_and_leaves_the_rest_to_the_schedule() -> None:
    assert factors(8, name="linear", warmup=4) == pytest.approx([0.2, 0.4, 0.6, 0.8, 1, 0.75, 0.5, 0.25, 0])


def test_steps_drop_by_equal_factors_and_end_at_the_final_fraction() -> None:
    found = factors(8, name="step", final=0.01)
    assert found == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01, 0.01])


def test_inner_steps_move_within_a_round() -> None:
    rules = StepRules(Schedule(name="linear"), rounds=10)
    assert rules.rate_factor(2.5) == pytest.approx(0.75)


def test_training_beyond_its_length_stays_at_the_final_fraction() -> None:
    assert Schedule(name="cosine", final=0.1).factor(20, 10) == pytest.approx(0.1)


def test_a_warm_up_as_long_as_the_training_never_falls() -> None:
    assert factors(3, name="cosine", warmup=3) == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"name": "step"}, "needs final above 0"),
        ({"name": "step", "final": 0.1, "at": [0.75, 0.5]}, "ascending fractions"),
        ({"name": "step", "final": 0.1, "at": [0.5, 1.0]}, "ascending fractions"),
        ({"name": "exponential"}, "constant"),
        ({"final": 1.5}, "less than or equal to 1"),
        ({"warmup": -1}, "greater than or equal to 0"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused(fields: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        JobSpec.model_validate({"dataset": "digits", "model": "mlp", "schedule": fields})


def test_decay_on_matrices_needs_an_optimizer_that_decays() -> None:
    with pytest.raises(ValidationError, match="Rprop has no weight_decay"):
        JobSpec.model_validate(
            {"dataset": "digits", "model": "mlp", "decay": "matrices", "optimizer": {"name": "Rprop"}}
        )


def test_inner_steps_take_the_rules_over_from_the_server() -> None:
    strategy = {"kind": "local", "inner_steps": 2, "replicas": 2}
    fields = {"dataset": "digits", "model": "mlp", "clip_norm": 1.0, "decay": "matrices", "strategy": strategy}
    local = JobSpec.model_validate(fields)
    assert local.server_rules == StepRules()
    assert (local.inner_rules.clip_norm, local.inner_rules.decay) == (1.0, "matrices")
    sync = JobSpec.model_validate({**fields, "strategy": {"kind": "sync"}, "lr_scaling": "linear"})
    assert (sync.server_rules.clip_norm, sync.server_rules.lr_factor) == (1.0, 4)
