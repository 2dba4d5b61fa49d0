"""Pipeline: which jobs may have it, and how many workers it can use."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from api.scheduler.seat_writer import seats_wanted
from computeshare.jobspec.memory_estimate import seat_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.base import LEAST_VECTORS, MAIL_BYTES, STAGE_VECTORS, Contributions
from computeshare.strategies.pipeline import PipelineStrategy


def job(strategy: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    base: dict[str, Any] = {"dataset": "digits", "model": "mlp", "accumulate": 4, "micro_batches_per_round": 2}
    return JobSpec.model_validate(base | {"strategy": {"kind": "pipeline", **(strategy or {})}} | changes)


def test_a_round_has_work_for_a_chain_of_workers_per_micro_batch() -> None:
    assert seats_wanted(job()) == 4
    assert seats_wanted(job({"stages": 3}, workers={"max": 5})) == 5
    assert job(workers={"min": 4}).workers.min == 4
    with pytest.raises(ValidationError, match="at most 4"):
        job(workers={"min": 5})


def test_updates_are_combined_as_in_sync() -> None:
    vectors = [np.full(3, value, np.float32) for value in (1, 4)]
    assert PipelineStrategy().gradient(vectors, Contributions([3, 1])).tolist() == [1.75] * 3


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": {"up": "topk", "down": "float32"}},
        {"codec": {"up": "float32", "down": "int8"}},
        {"codec": "auto"},
        {"precision": "bfloat16"},
        {"precision": "auto"},
        {"compile": True},
        {"channels_last": True},
        {"audit": 0.1},
        {"privacy": {"clip": 1.0, "noise": 1.0, "delta": 1e-5}},
    ],
    ids=str,
)
def test_what_stages_cannot_do_is_refused_with_advice(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        job(**changes)
    (error,) = caught.value.errors()
    assert error["loc"][:1] == (next(iter(changes)),)
    assert any(word in error["msg"] for word in ("set", "leave", "choose"))


@pytest.mark.parametrize("codec", ["topk", "lowrank4", "no such codec"])
def test_values_between_stages_travel_in_a_codec_that_can_be_read_by_itself(codec: str) -> None:
    assert job({"activations": "int4"}).strategy.staging
    with pytest.raises(ValidationError, match="choose one of float32, float16, bfloat16, int8, int4"):
        job({"activations": codec})


def test_the_split_names_one_submodule_for_each_later_stage() -> None:
    assert job({"stages": 3, "split": ["2", "4"]}).strategy.staging
    for names in (["2"], ["2", "2"], ["1", "2", "3"]):
        with pytest.raises(ValidationError, match="split must name 2 different submodules"):
            job({"stages": 3, "split": names})


def test_a_seat_needs_memory_for_a_stage_and_the_broker_for_what_travels() -> None:
    whole = job({"kind": "sync"})
    own = seat_bytes(whole, "cuda")
    assert seat_bytes(job({"stages": 4}), "cuda") == pytest.approx(STAGE_VECTORS / LEAST_VECTORS * own / 4, abs=1)
    assert job().broker_bytes == whole.broker_bytes + 2 * MAIL_BYTES
    assert (
        job(workers={"max": 2}).broker_bytes
        == job(workers={"max": 2}, strategy={"kind": "sync"}).broker_bytes + MAIL_BYTES
    )
