"""A recipe's process computes the bits that the same module gives in this process."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from computeshare.errors import ArtifactError
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tensors.layout import Weights
from computeshare.training.computation import LocalComputation
from computeshare.training.memory import private_bytes
from computeshare.training.recipe_process.process import RecipeProcess
from computeshare.training.work_units import AnyReplica, Update
from computeshare.types import Vector
from tests.support.recipes import CONVOLUTIONS, RecipeJob, recipe_job

CPU = torch.device("cpu")


@contextmanager
def opened(job: RecipeJob) -> Iterator[RecipeProcess]:
    process = RecipeProcess(job.spec, job.files, "cpu")
    try:
        yield process.open()
    finally:
        process.close()


def here(job: RecipeJob) -> LocalComputation:
    return LocalComputation(job.task.instance(job.spec.seed, "train", Path()), CPU)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bits(update: Update) -> tuple[bytes, bytes, float]:
    return update.vector.tobytes(), update.buffers.tobytes(), update.loss


def nudged(weights: Weights, seed: int) -> Weights:
    source = np.random.Generator(np.random.PCG64(seed))
    moved = weights.parameters + 0.1 * source.standard_normal(len(weights.parameters), np.float32)
    return Weights(moved, weights.buffers + np.float32(0.5), weights.counters + 1)


def buckets(replica: AnyReplica, unit: int) -> tuple[dict[int, bytes], bytes, float]:
    found: dict[int, bytes] = {}

    def take(bucket: int, values: Vector) -> None:
        assert bucket not in found
        found[bucket] = values.tobytes()

    update = replica.compute(unit, take=take)
    return found, update.buffers.tobytes(), update.loss


SPECS: dict[str, dict[str, Any]] = {
    "sync": {"rounds": 3},
    "local": {"rounds": 3, "strategy": {"kind": "local", "inner_steps": 3}},
    "signs": {"rounds": 3, "strategy": {"kind": "signsgd"}},
    "options": {"rounds": 3, "accumulate": 2, "precision": "bfloat16", "label_smoothing": 0.1, "validation": 0.2},
    "several buckets": {"rounds": 3, "recipe_args": {"maps": 4500}, "micro_batch": 4},
}


@pytest.mark.parametrize("fields", SPECS.values(), ids=SPECS)
@pytest.mark.slow
def test_units_have_the_bits_of_this_process(fields: dict[str, Any], tmp_path: Path) -> None:
    job = recipe_job(CONVOLUTIONS, tmp_path, threads=1, seed=5, **{"micro_batch": 16, **fields})
    local = here(job)
    with opened(job) as process:
        assert (process.layout, process.identity, process.frozen) == (local.layout, local.identity, local.frozen)
        assert process.kind == local.kind
        initial = weights_of(local.instance.module, local.layout)
        mine, theirs = local.replica(job.spec), process.replica(job.spec)
        for replica in (mine, theirs):
            replica.load(initial)
        first = bits(mine.compute(1))
        assert bits(theirs.compute(1)) == first
        moved = nudged(initial, 1)
        mine.load(moved)
        room = theirs.room
        room[:] = moved.parameters
        theirs.load(Weights(room, moved.buffers, moved.counters))
        theirs.prefetch([2])
        found = buckets(theirs, 2)
        assert found == buckets(mine, 2) and set(found[0]) == set(range(len(local.layout.buckets) + 1))
        theirs.load(initial)
        assert bits(theirs.compute(1)) == first


KEPT: dict[str, Any] = {
    "kind": "local",
    "inner_steps": 2,
    "inner_optimizer": {"name": "AdamW", "lr": 0.01},
    "inner_state": "kept",
}


@pytest.mark.slow
def test_an_inner_state_goes_on_in_another_process(tmp_path: Path) -> None:
    job = recipe_job(CONVOLUTIONS, tmp_path, threads=1, micro_batch=16, rounds=3, strategy=KEPT)
    local = here(job)
    initial, mine = weights_of(local.instance.module, local.layout), local.replica(job.spec)
    mine.load(initial)
    first, second = bits(mine.compute(0)), bits(mine.compute(1))
    parts = [bits(mine.steps(2, part)) for part in (slice(0, 1), slice(1, 2))]
    with opened(job) as process:
        replica = process.replica(job.spec)
        assert replica.kept and replica.kept.dump() is None
        replica.load(initial)
        assert bits(replica.compute(0)) == first
        state = b"".join(bytes(part) for part in replica.kept.dump() or ())
    with opened(job) as process:
        replica = process.replica(job.spec)
        replica.load(initial)
        assert replica.kept
        with pytest.raises(ArtifactError):
            replica.kept.restore(state[:-1])
        replica.kept.restore(state)
        assert bits(replica.compute(1)) == second
        assert [bits(replica.kept.steps(2, part, lambda: True)) for part in (slice(0, 1), slice(1, 2))] == parts


def test_a_device_is_tested_and_precisions_are_tried_before_the_replica_is_built(tmp_path: Path) -> None:
    job = recipe_job(CONVOLUTIONS, tmp_path, threads=1, micro_batch=16, rounds=3)
    local = here(job)
    with opened(job) as process:
        trial, expected = process.test(), local.test()
        assert (trial.error, trial.saved_bytes, trial.trouble) == (0.0, expected.saved_bytes, "")
        assert process.saved_bytes_in_bfloat16() == local.saved_bytes_in_bfloat16()
        for precision in ("float32", "bfloat16"):
            mine, theirs = local.trial(job.spec, precision), process.trial(job.spec, precision)
            assert [one.tobytes() for one in mine([0, 1])] == [one.tobytes() for one in theirs([0, 1])]
        memory = process.memory
        assert memory.device_type == "cpu"
        assert 0 < memory.room_bytes() <= local.memory.room_bytes(), "its confinement may limit its memory"
        assert memory.resident_bytes() > private_bytes() + 100_000_000


@pytest.mark.parametrize("part", ["validation", "test"])
@pytest.mark.slow
def test_versions_have_the_score_of_this_process(part: Literal["validation", "test"], tmp_path: Path) -> None:
    job = recipe_job(CONVOLUTIONS, tmp_path, threads=1, validation=0.3, rounds=3)
    instance = job.task.instance(job.spec.seed, part, tmp_path)
    weights = nudged(weights_of(instance.module, instance.layout), 2)
    with closing(RecipeProcess(job.spec, job.files, "cpu")) as process:
        found = process.score(part, weights, 7)
    expected = score(instance, weights, 7)
    assert found == expected
    assert found.classes and len(found.classes.support) == 10 and found.samples == (30 if part == "validation" else 100)
