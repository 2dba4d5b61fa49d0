"""How models fall into stages."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bench.split_model import Cut, gpt, task_with
from computeshare.errors import SpecError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.splitter import split
from computeshare.tasks.base import Task
from computeshare.tasks.images.classification import ImageClassification

PLAN = Plan(seed=7, samples=24, micro_batch=8, micro_batches_per_round=2, accumulate=2)


def shares(plan: StagePlan) -> list[float]:
    return [one.parameters / sum(one.parameters for one in plan.stages) for one in plan.stages]


@pytest.mark.parametrize("stages", [2, 3, 4])
@pytest.mark.parametrize(
    "task", [gpt(8), ImageClassification("digits", "resnet18", (3, 32, 32))], ids=["gpt", "resnet18"]
)
@pytest.mark.slow
def test_each_tensor_belongs_to_one_stage_and_no_stage_has_most_of_the_model(task: Task, stages: int) -> None:
    plan, layout = split(task, Cut(stages), PLAN), task.layout()
    assert len(plan.stages) == stages and plan == split(task, Cut(stages), PLAN)
    assert sorted(name for one in plan.stages for name in one.names) == sorted(one.name for one in layout.tensors)
    assert sum(one.parameters for one in plan.stages) == layout.parameters
    assert max(
        one.parameters / layout.parameters + one.cost / sum(s.cost for s in plan.stages) for one in plan.stages
    ) < (2 / stages + 0.35)
    assert all(one.border_bytes > 0 for one in plan.stages[:-1]) and not plan.stages[-1].border_bytes


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (1, 8, 8)),
        ("lenet5", (1, 28, 28)),
        ("simplenet", (1, 28, 28)),
        ("resnet20", (3, 32, 32)),
        ("densenet121", (3, 64, 64)),
        ("mobilenet_v3_small", (3, 64, 64)),
        ("googlenet", (3, 64, 64)),
        ("vit_b_16", (3, 224, 224)),
        ("swin_t", (3, 64, 64)),
        ("regnet_y_400mf", (3, 64, 64)),
    ],
)
def test_the_built_in_models_can_be_split(name: str, shape: tuple[int, int, int]) -> None:
    plan = split(ImageClassification("digits", name, shape), Cut(3), PLAN)
    assert all(one.parameters > 0 for one in plan.stages)
    assert max(shares(plan)) < 0.97


def test_buckets_never_straddle_a_border() -> None:
    task = ImageClassification("digits", "resnet18", (3, 32, 32))
    plan, layout = split(task, Cut(3), PLAN), task.layout()
    cut = plan.cut(layout)
    owners = plan.stage_of_buckets(cut)
    assert len(owners) == len(cut.buckets) and {*owners} == {0, 1, 2}
    for bucket, owner in zip(cut.buckets, owners, strict=True):
        inside = [one for one in layout.tensors if one.kind == "parameter"]
        inside = [one for one in inside if one.start < bucket.stop and bucket.start < one.stop]
        assert {plan.owners[one.name] for one in inside} == {owner}
    assert [sum(cut.bucket_sizes[i] for i, owner in enumerate(owners) if owner == s) for s in range(3)] == [
        one.parameters for one in plan.stages
    ]


def test_a_plan_is_the_same_after_it_was_stored() -> None:
    plan = split(gpt(), Cut(3), PLAN)
    assert StagePlan.parse(plan.dump()) == plan
    with pytest.raises(ValueError):
        StagePlan.parse('{"cuts": 1}')


def test_tied_weights_belong_to_the_first_stage_that_uses_them_and_are_borrowed_by_the_last() -> None:
    plan = split(gpt(), Cut(3), PLAN)
    assert "symbols.weight" in plan.stages[0].names
    assert [one.borrowed for one in plan.stages] == [(), (), ("symbols.weight",)]


def test_named_split_points_are_taken() -> None:
    plan = split(gpt(4), Cut(3, split=("blocks.1", "norm")), PLAN)
    assert plan.cuts == ("blocks.1", "norm")
    assert plan.stages[2].names == ("norm.weight",)
    assert "blocks.0.attention.into.weight" in plan.stages[0].names
    inner = split(gpt(4), Cut(2, split=("blocks.1.perceptron",)), PLAN)
    assert "blocks.1.attention.into.weight" in inner.stages[0].names
    assert "blocks.1.perceptron.into.weight" in inner.stages[1].names


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("blocks.9",), "no submodule blocks.9 where a stage could begin"),
        (("symbols",), "no stage can begin at symbols"),
        (("blocks.2", "blocks.1"), "in the order of the forward pass"),
    ],
)
def test_split_points_that_are_none_are_errors(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        split(gpt(4), Cut(len(names) + 1, split=names), PLAN)


def test_more_stages_than_the_model_has_parts_is_an_error() -> None:
    with pytest.raises(SpecError, match=r"into 3 stages at most: lower strategy.stages"):
        split(ImageClassification("digits", "mlp", (1, 8, 8)), Cut(20), PLAN)


class Undecided(nn.Module):
    """What its forward does next depends on values."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 32), nn.Linear(32, 32), nn.Linear(32, 10)
        self.wild = Wild() if inside else nn.Identity()
        self.inside = inside

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.wild(self.first(inputs.flatten(1)).relu())
        if not self.inside and values.sum().item() > 0:
            values = values * 2
        return self.last(self.second(values))  # type: ignore[no-any-return]


class Wild(nn.Module):
    def forward(self, values: Tensor) -> Tensor:
        return values * 2 if values.mean().item() > 0.1 else values + 1


def test_a_model_whose_way_depends_on_values_is_refused_in_plain_words() -> None:
    with pytest.raises(SpecError, match=r"depends on values .* Name split points .*strategy.split"):
        split(task_with(lambda: Undecided(inside=False)), Cut(2), PLAN)
    with pytest.raises(SpecError, match=r"depends on its values: name split points"):
        split(task_with(lambda: Undecided(inside=True)), Cut(2), PLAN)


def test_named_split_points_serve_where_only_a_submodule_depends_on_values() -> None:
    plan = split(task_with(lambda: Undecided(inside=True)), Cut(2, split=("second",)), PLAN)
    assert [len(one.names) for one in plan.stages] == [2, 4]


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.act(self.first(inputs.flatten(1))))  # type: ignore[no-any-return]


def test_no_stage_begins_with_a_change_in_place() -> None:
    assert split(task_with(InPlace), Cut(2), PLAN).cuts == ("last",)
    with pytest.raises(SpecError, match=r"no stage can begin at act: it changes what came before it in place"):
        split(task_with(InPlace), Cut(2, split=("act",)), PLAN)


class Shared(nn.Module):
    """One batch normalisation, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(64, 32), nn.BatchNorm1d(32), nn.Linear(32, 32)
        self.third, self.last = nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        values = self.norm(self.second(self.norm(self.first(inputs.flatten(1)))))
        return self.last(self.third(values))  # type: ignore[no-any-return]


def test_statistics_stay_with_one_stage() -> None:
    assert split(task_with(Shared), Cut(2), PLAN).cuts in (("norm",), ("third",), ("last",))
    with pytest.raises(SpecError, match="shares statistics"):
        split(task_with(Shared), Cut(2, split=("second",)), PLAN)


class Branches(nn.Module):
    """Its forward looks at shapes, which torch.fx does not know and torch.export does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.last = nn.Linear(64, 10)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> Tensor:
        values = inputs.flatten(1) if inputs.dim() > 2 else inputs
        for layer in self.layers:
            values = layer(values).relu() * scale
        return self.last(values)  # type: ignore[no-any-return]


def test_a_model_that_looks_at_shapes_is_traced_whole() -> None:
    plan = split(task_with(Branches), Cut(2), PLAN)
    assert [sorted({name.partition(".")[0] for name in one.names}) for one in plan.stages] in (
        [["layers"], ["last", "layers"]],
    )


def test_nothing_of_the_model_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of 40 GB is split on a machine that could never hold it."""
    task = task_with(
        lambda: nn.Sequential(nn.Flatten(), *(nn.Linear(64, 64) for _ in range(3)), Large(), nn.Linear(64, 10))
    )
    plan = split(task, Cut(2), PLAN)
    assert sum(one.parameters for one in plan.stages) > 10**10


class Large(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 10**8), nn.Linear(10**8, 64)

    def forward(self, values: Tensor) -> Tensor:
        return self.down(self.up(values))  # type: ignore[no-any-return]


def test_splitting_leaves_torchs_generator_as_it_was() -> None:
    before: Any = torch.get_rng_state()
    split(gpt(), Cut(2), PLAN)
    assert torch.equal(before, torch.get_rng_state())


def test_models_are_traced_in_several_threads_while_others_compute() -> None:
    """torch.fx patches all modules of the process while it traces."""
    module, images = nn.Sequential(nn.Linear(8, 8), nn.ReLU()), torch.ones(2, 8)
    expected, is_over, errors = module(images), threading.Event(), []

    def compute() -> None:
        while not is_over.is_set():
            try:
                assert torch.equal(module(images), expected)
                assert isinstance(module[0].weight, nn.Parameter)
            except BaseException as error:
                errors.append(error)
                return

    with ThreadPoolExecutor() as pool:
        computing = pool.submit(compute)
        plans = [*pool.map(lambda _: split(gpt(), Cut(2), PLAN), range(4))]
        is_over.set()
        computing.result()
    assert errors == [] and all(plan == plans[0] for plan in plans)
