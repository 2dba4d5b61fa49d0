"""Stages of a recipe's model in confined processes: the bits of the same stages in this process."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.split_model import MemoryMail
from computeshare.errors import Interrupted, RecipeError
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.recipes.process import StageProcess
from computeshare.pipeline.splitter import split
from computeshare.pipeline.stage_replica import HeldStages, StageReplica, StageUpdate
from computeshare.tasks import modules
from computeshare.tasks.modules import weights_of
from computeshare.tasks.recipes.bundle import MAIN, Bundle
from computeshare.tensors.layout import Layout
from computeshare.types import Vector
from tests.support.recipes import NOISE, RecipeJob, recipe_job

SKIPS = (
    NOISE
    + """
class Skips(nn.Module):
    def __init__(self, maps):
        super().__init__()
        self.first = nn.Conv2d(1, maps, 3)
        self.layers = nn.ModuleList(nn.Linear(maps, maps) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm1d(maps) for _ in range(3))
        self.dropout, self.last = nn.Dropout(0.2), nn.Linear(maps, 10)
        self.register_buffer("scale", torch.empty(1).fill_(0.5), persistent=False)

    def forward(self, inputs):
        start = self.first(inputs).mean((2, 3))
        values = start
        for layer, norm in zip(self.layers, self.norms):
            values = self.dropout(norm(layer(values)).relu()) + values
        return self.last(values + start) * self.scale

def model(maps=8):
    return Skips(maps)
"""
)
"""A model with skips over stages, batch normalisation, dropout, and a value that is in no version."""
TIED = SKIPS.replace(
    "return Skips(maps)",
    "built = Skips(maps)\n    built.layers[2].weight = built.layers[0].weight\n    return built",
)
"""The same model; split at `APART`, its second stage uses a weight of its first."""
APART = {"split": ["layers.1", "last"]}
FIELDS: dict[str, Any] = {"micro_batch": 16, "accumulate": 4, "rounds": 3, "threads": 1, "seed": 3}
PIPELINE = {"kind": "pipeline", "stages": 3}

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@contextlib.contextmanager
def opened(job: RecipeJob) -> Iterator[StageProcess]:
    with contextlib.closing(StageProcess(job.spec, job.files, "cpu")) as process:
        yield process.open()


def plan_of(job: RecipeJob) -> StagePlan:
    assert job.spec.strategy.staging
    return split(job.task, job.spec.strategy.staging, job.spec.plan)


def here(job: RecipeJob, plan: StagePlan, layout: Layout, held: range) -> StageReplica:
    staging = job.spec.strategy.staging
    assert staging
    samples = job.task.samples("train", Path())
    return StageReplica(job.task, samples, layout, job.spec.plan, staging, plan, held, torch.device("cpu"))


def computed(
    job: RecipeJob, plan: StagePlan, layout: Layout, runs: dict[range, HeldStages], unit: int
) -> tuple[dict[int, bytes], dict[str, bytes], list[float]]:
    """Buckets, buffers and losses of a unit that these runs of stages compute together, from version 0."""
    module = job.task.module(3)
    views = layout.views(weights_of(module, job.task.layout()))
    mail, found, buckets = MemoryMail(), dict[int, StageUpdate](), dict[int, bytes]()

    def take(bucket: int, values: Vector) -> None:
        assert bucket not in buckets
        buckets[bucket] = values.tobytes()

    def compute(held: range, stages: HeldStages) -> None:
        names = [name for one in held for name in (*plan.stages[one].names, *plan.stages[one].borrowed)]
        stages.load({name: views[name] for name in names})
        for update in stages.compute(unit, mail, lambda: True, take):
            found[update.stage] = update

    threads = [threading.Thread(target=compute, args=one) for one in runs.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [0, 1, 2] and len(buckets) == len(layout.buckets)
    buffers = {name: values.tobytes() for one in found.values() for name, values in one.buffers.items()}
    return buckets, buffers, [one.loss for one in found.values() if one.loss is not None]


@pytest.mark.parametrize(
    ("source", "changes"),
    [(SKIPS, {}), (SKIPS, {"schedule": "gpipe", "recompute": True, "activations": "int8"}), (TIED, APART)],
    ids=["1f1b", "gpipe", "tied"],
)
def test_stages_in_processes_have_the_bits_of_stages_here(source: str, changes: dict[str, Any], tmp_path: Path) -> None:
    job = recipe_job(source, tmp_path, **FIELDS, strategy=PIPELINE | changes)
    plan = plan_of(job)
    layout = plan.cut(job.task.layout())
    assert any(one.borrowed for one in plan.stages) == (source is TIED)
    with opened(job) as first, opened(job) as last:
        assert first.split() == plan
        runs = {range(2): first, range(2, 3): last}
        held = {run: process.hold(StageParts(layout, plan, run)) for run, process in runs.items()}
        whole: dict[range, HeldStages] = {range(3): here(job, plan, layout, range(3))}
        for unit in (0, 6):  # the last has 4 samples, in pieces of one
            assert computed(job, plan, layout, held, unit) == computed(job, plan, layout, whole, unit)
        assert first.memory.peak_bytes() > 0


def test_the_model_is_outlined_without_memory_unless_it_needs_values_that_no_version_has(tmp_path: Path) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    outline = job.task.outline()  # its scale would be empty on the meta device
    assert not any(one.is_meta for one in (*outline.parameters(), *outline.buffers()))
    plain = SKIPS.replace("torch.empty(1).fill_(0.5)", "torch.full((1,), 0.5)")
    other = recipe_job(plain, tmp_path / "plain", **FIELDS, strategy=PIPELINE)
    outline = other.task.outline()
    assert all(one.is_meta for one in outline.parameters()) and not any(one.is_meta for one in outline.buffers())
    assert modules.layout_of(outline) == job.task.layout()


def test_what_no_version_has_is_drawn_from_the_jobs_seed(tmp_path: Path) -> None:
    text = SKIPS.replace("torch.empty(1).fill_(0.5)", "torch.randn(1)")
    job = recipe_job(text, tmp_path, **FIELDS, strategy=PIPELINE)
    assert not any(one.is_meta for one in job.task.outline().parameters())
    plan = plan_of(job)
    last = here(job, plan, plan.cut(job.task.layout()), range(2, 3))
    (scale,) = {float(one) for part in last.modules for name, one in part.named_buffers() if name == "scale"}
    assert scale == float(job.task.module(FIELDS["seed"]).scale) != float(job.task.module(0).scale)  # type: ignore[arg-type]


NOISY = {
    "a buffer that divides": ("values + start) * self.scale", "values + start) / self.std"),
    "a border that noise is not in": (
        "return self.last(values + start)",
        "return self.last((values**2).log() + start)",
    ),
}


@pytest.mark.parametrize(("old", "new"), NOISY.values(), ids=NOISY)
def test_a_device_is_tested_with_stages_but_not_with_what_noise_cannot_pass(old: str, new: str, tmp_path: Path) -> None:
    assert old in SKIPS
    std = 'self.register_buffer("std", torch.full((1,), 2.0))\n        self.register_buffer("scale"'
    text = SKIPS.replace(old, new).replace('self.register_buffer("scale"', std)
    job = recipe_job(text, tmp_path, **FIELDS, strategy=PIPELINE | {"split": ["layers.1", "layers.2"]})
    with opened(job) as process:
        plan = plan_of(job)
        assert process.test_stages(plan, 1 << 40).trouble == ""


def test_a_worker_that_stands_by_measures_a_stage(tmp_path: Path) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    with opened(job) as process:
        plan = process.split()
        assert process.rate(plan, 1, lambda: True) > 0
        assert process.rate(plan, 1, lambda: False) == 0


class Broken(MemoryMail):
    """Fails at the first message that is sent, or wanted."""

    def __init__(self, at: str, error: Exception) -> None:
        super().__init__()
        self._at, self._error = at, error

    def send(self, stage: int, tag: str, message: Any) -> None:
        if self._at == "send":
            raise self._error

    def receive(self, stage: int, tag: str) -> Any:
        raise self._error


@pytest.mark.parametrize("at", ["send", "receive"])
@pytest.mark.parametrize("error", [Interrupted("recalled"), MemoryError("the broker is full")], ids=["off", "full"])
def test_an_error_of_the_mail_calls_a_unit_off_and_the_next_is_computed(
    at: str, error: Exception, tmp_path: Path
) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    plan = plan_of(job)
    layout = plan.cut(job.task.layout())
    with opened(job) as process, opened(job) as other:
        stages = process.hold(StageParts(layout, plan, range(1)))
        views = layout.views(weights_of(job.task.module(3), job.task.layout()))
        stages.load({name: views[name] for name in plan.stages[0].names})
        with pytest.raises(type(error), match=str(error)):
            stages.compute(0, Broken(at, error))
        runs: dict[range, HeldStages] = {range(1): stages}
        runs[range(1, 3)] = other.hold(StageParts(layout, plan, range(1, 3)))
        whole: dict[range, HeldStages] = {range(3): here(job, plan, layout, range(3))}
        assert computed(job, plan, layout, runs, 0) == computed(job, plan, layout, whole, 0)


def with_text(job: RecipeJob, text: str, folder: Path) -> RecipeJob:
    """The job with another text of its recipe, whose facts are the same; nothing of it is run here."""
    bundle = Bundle({MAIN: text})
    bundle.write(folder / "recipe")
    spec = job.spec.model_copy(update={"recipe": bundle.digest})
    return RecipeJob(spec, replace(job.files, bundle=bundle), job.task)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda text: text.replace("for layer, norm in", "print(float(inputs.sum()))\n        for layer, norm in"),
            "split",
        ),
        (
            lambda text: text.replace(
                "def forward(self, inputs):", "def forward(self, inputs):\n        import os; os._exit(3)"
            ),
            "ended",
        ),
    ],
    ids=["cannot be traced", "ends its process"],
)
def test_a_model_that_cannot_be_split_says_so(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    changed = change(SKIPS)
    assert changed != SKIPS
    files = with_text(job, changed, tmp_path / "changed")
    with contextlib.closing(StageProcess(files.spec, files.files, "cpu")) as process:
        process.open()
        with pytest.raises(RecipeError, match=said):
            process.split()


def test_facts_of_another_model_are_told_when_it_is_opened(tmp_path: Path) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    facts = job.spec.recipe_facts
    assert facts
    shorter = facts.model_copy(update={"tensors": facts.tensors[:-1]})
    spec = job.spec.model_copy(update={"recipe_facts": shorter})
    other = RecipeJob(spec, job.files, job.task)
    with pytest.raises(RecipeError, match="builds other parameters here"), opened(other):
        pass


def test_a_plan_must_be_a_split_of_the_layout(tmp_path: Path) -> None:
    job = recipe_job(SKIPS, tmp_path, **FIELDS, strategy=PIPELINE)
    plan, layout = plan_of(job), job.task.layout()
    plan.check(layout, 3)
    first, *rest = plan.stages
    wrong = [
        (plan, 2),
        (StagePlan(plan.cuts[1:], tuple(rest)), 2),
        (StagePlan(plan.cuts, (first, first, rest[1])), 3),
        (StagePlan(plan.cuts, (replace(first, parameters=1), *rest)), 3),
        (StagePlan(plan.cuts, (replace(first, borrowed=rest[0].names[:1]), *rest)), 3),
    ]
    for one, stages in wrong:
        with pytest.raises(ValueError, match="the plan"):
            one.check(layout, stages)
