"""Stages compute together what one replica computes alone."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from bench.split_model import Cut, MemoryMail, SplitModel, gpt, task_with
from computeshare.codecs.registry import EXACT
from computeshare.errors import CodecError, Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline import frames
from computeshare.pipeline.stage import Stage
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.tasks.base import Task
from computeshare.tasks.images.classification import ImageClassification
from computeshare.types import Vector
from tests.support.residual import Residual

pytestmark = pytest.mark.slow

PLAN = Plan(seed=7, samples=22, micro_batch=8, micro_batches_per_round=2, accumulate=4)
"""Its third micro-batch has 6 samples: its pieces are as large as the others', but one less."""
UNEVEN = Plan(seed=7, samples=13, micro_batch=8, micro_batches_per_round=2, accumulate=2)
"""Its second micro-batch has 5 samples, in pieces of 4 and 1."""


RESIDUAL, RESNET = task_with(Residual), ImageClassification("digits", "resnet18", (3, 16, 16))
SPLITS: dict[str, list[tuple[str, ...]]] = {
    "residual": [("layers.2",), ("layers.1", "layers.3")],
    "resnet18": [("layer3.0",), ("layer2.0", "layer4.0")],
}
TASKS = {"residual": RESIDUAL, "resnet18": RESNET, "gpt": gpt()}


def apart(one: Vector, other: Vector) -> float:
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("name", TASKS)
def test_the_gradient_is_that_of_one_replica(name: str, stages: int) -> None:
    split = SplitModel.of(TASKS[name], PLAN, Cut(stages))
    replicas = split.replicas()
    for unit in (2,) if name == "resnet18" else (0, 2, 4):
        found, expected = split.compute(unit, replicas=replicas), split.whole(unit)
        assert apart(found.vector, expected.vector) < 1e-5
        assert found.loss == pytest.approx(expected.loss, rel=1e-6)
        assert np.array_equal(found.buffers, expected.buffers)


@pytest.mark.parametrize("name", ["residual", "resnet18"])
def test_without_tied_weights_the_gradient_is_the_same_bits_for_any_number_of_stages(name: str) -> None:
    """Where no cut separates the uses of a value that has three: their gradients would add up in another order."""
    for names in SPLITS[name]:
        split = SplitModel.of(TASKS[name], PLAN, Cut(len(names) + 1, split=names))
        expected = split.whole(0)
        assert split.compute(0).bits == (expected.vector.tobytes(), expected.buffers.tobytes(), expected.loss)


def test_with_tied_weights_the_gradient_is_the_same_bits_for_two_and_three_stages() -> None:
    """One replica adds the two uses' gradients piece by piece, stages add them up apart."""
    found = [SplitModel.of(TASKS["gpt"], PLAN, Cut(stages)).compute(1) for stages in (2, 3)]
    assert found[0].bits == found[1].bits


@pytest.mark.parametrize("name", ["residual", "gpt"])
def test_the_bits_depend_on_neither_schedule_nor_recomputing_nor_who_holds_what(name: str) -> None:
    bits = set()
    for staging in (Cut(3), Cut(3, "gpipe"), Cut(3, recompute=True), Cut(3, "gpipe", recompute=True)):
        split = SplitModel.of(TASKS[name], PLAN, staging)
        for counts in ((1, 1, 1), (2, 1), (1, 2), (3,)) if staging == Cut(3) else ((1, 1, 1),):
            bits.add(split.compute(2, *counts).bits)
    assert len(bits) == 1


@pytest.mark.parametrize("codec", ["bfloat16", "int8"])
def test_with_a_lossy_codec_too_the_bits_do_not_depend_on_who_holds_what(codec: Any) -> None:
    split = SplitModel.of(TASKS["gpt"], PLAN, Cut(3, activations=codec))
    bits = {split.compute(1, *counts).bits for counts in ((1, 1, 1), (2, 1), (1, 2), (3,))}
    assert len(bits) == 1
    exact = split.whole(1).vector
    assert 0 < apart(split.compute(1).vector, exact) < (0.02 if codec == "bfloat16" else 0.2)


@pytest.mark.parametrize("unit", [0, 1])
def test_a_short_micro_batch_is_weighted_by_samples(unit: int) -> None:
    split = SplitModel.of(gpt(), UNEVEN, Cut(3))
    found, expected = split.compute(unit), split.whole(unit)
    assert apart(found.vector, expected.vector) < 1e-5 and found.loss == pytest.approx(expected.loss, rel=1e-6)


class Alone:
    """Stages of several workers in one process take turns: torch's generators are the process's."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        turn = threading.Lock()
        run = Stage._run

        def locked(stage: Stage, flight: Any, copied: bool = False) -> Any:
            with turn:
                return run(stage, flight, copied)

        monkeypatch.setattr(Stage, "_run", locked)


@pytest.mark.parametrize("task", [task_with(lambda: Residual(0.4)), gpt(dropout=0.3)], ids=["residual", "gpt"])
def test_dropout_depends_on_the_unit_the_piece_and_the_stage_alone(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    Alone(monkeypatch)
    split = SplitModel.of(task, PLAN, Cut(3))
    bits = {split.compute(1, *counts).bits for counts in ((1, 1, 1), (2, 1), (3,))}
    again = SplitModel.of(task, PLAN, Cut(3, "gpipe", recompute=True))
    bits.add(again.compute(1).bits)
    replicas = split.replicas()
    split.compute(0, replicas=replicas)
    torch.rand(3)
    bits.add(split.compute(1, replicas=replicas).bits)
    assert len(bits) == 1
    assert split.compute(0).bits not in bits


def test_dropout_differs_between_pieces() -> None:
    plan = Plan(seed=7, samples=8, micro_batch=8, micro_batches_per_round=1, accumulate=2)
    seeds = {plan.stage_seed(unit, piece, stage) for unit in range(3) for piece in range(4) for stage in range(3)}
    assert len(seeds) == 36


class Shifted(Residual):
    """Changes its input in place."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs.sub_(0.5))


def test_an_input_that_a_model_changes_in_place_is_computed_again_as_it_was() -> None:
    task = task_with(Shifted)
    bits = [SplitModel.of(task, PLAN, Cut(2, recompute=recompute)).compute(0).bits for recompute in (False, True)]
    assert bits[0] == bits[1]


@pytest.mark.parametrize("recompute", [False, True])
def test_normalisation_counts_each_piece_once(recompute: bool) -> None:
    split = SplitModel.of(RESIDUAL, PLAN, Cut(2, recompute=recompute))
    replicas = split.replicas()
    for unit in (0, 1):
        assert np.array_equal(split.compute(unit, replicas=replicas).buffers, split.whole(unit).buffers)
    counts = [stage.counters.read() for replica in replicas for stage in replica.stages.values()]
    assert np.array_equal(np.concatenate(counts), np.full(4, 4))


def test_gradients_that_add_up_over_pieces_before_they_are_sent_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A known bug of others: the inputs' gradients of earlier pieces are kept, and sent again with each later piece."""
    split = SplitModel.of(gpt(), PLAN, Cut(2))
    expected = split.whole(0).vector
    assert apart(split.compute(0).vector, expected) < 1e-5
    backward = Stage.backward
    kept: dict[tuple[int, int, int], Tensor] = {}

    def accumulating(stage: Stage, piece: int, gradients: Any) -> dict[int, list[Tensor | None]]:
        found = backward(stage, piece, gradients)
        for source, values in found.items():
            for place, value in enumerate(values):
                if value is not None:
                    before = kept.get((stage.number, source, place), torch.zeros(()))
                    values[place] = kept[stage.number, source, place] = value + before
        return found

    monkeypatch.setattr(Stage, "backward", accumulating)
    assert apart(split.compute(0).vector, expected) > 0.1


def test_each_piece_sends_its_own_gradient_once() -> None:
    """What a stage sends back for a piece is the gradient for this piece alone."""
    mail = SplitModel.of(gpt(), PLAN, Cut(2)).compute(0).mail
    tags = sorted(tag for _, tag in mail.log)
    assert tags == sorted([*(f"f0.{p}" for p in range(4)), *(f"b1.{p}" for p in range(4)), "t1"])
    single = SplitModel.of(gpt(), replace(PLAN, micro_batch=2, accumulate=1), Cut(2))  # a piece is a unit
    for piece in range(4):
        found, alone = (
            decoded(one, 0, tag) for one, tag in ((mail, f"b1.{piece}"), (single.compute(piece).mail, "b1.0"))
        )
        assert torch.allclose(found[0], alone[0] / 4, rtol=1e-5, atol=1e-9)


def decoded(mail: MemoryMail, stage: int, tag: str) -> list[Any]:
    return frames.decode(mail.log[stage, tag], EXACT, 1 << 20)


def prepared(mail: MemoryMail, stage: int) -> MemoryMail:
    """A mailbox with what was sent to a stage."""
    found = MemoryMail()
    for (target, tag), message in mail.log.items():
        if target == stage:
            found.send(target, tag, message)
    return found


def test_a_value_goes_straight_to_the_stage_that_uses_it() -> None:
    split = SplitModel.of(RESIDUAL, PLAN, Cut(3, split=("layers.1", "layers.3")))
    tags = {(stage, tag) for stage, tag in split.compute(0).mail.log if tag.endswith(".0")}
    assert tags == {(1, "f0.0"), (2, "f0.0"), (2, "f1.0"), (1, "b2.0"), (0, "b2.0"), (0, "b1.0")}


@pytest.mark.parametrize(("schedule", "most"), [("gpipe", [4, 4, 4]), ("1f1b", [3, 2, 1])])
def test_1f1b_keeps_fewer_activations_than_gpipe(schedule: Any, most: list[int]) -> None:
    split = SplitModel.of(gpt(), PLAN, Cut(3, schedule))
    found = split.compute(0)
    assert [one.most_in_flight for one in found.updates] == most


class Kept:
    """Bytes that forward passes keep for backward passes, at most."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def compute(self, replica: StageReplica, mail: MemoryMail) -> None:
        meter = self

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                self.tensor = tensor.detach()  # autograd's own would keep itself alive
                meter.now += tensor.nbytes
                meter.most = max(meter.most, meter.now)

            def __del__(self) -> None:
                meter.now -= self.tensor.nbytes

        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            replica.compute(0, mail)


def test_1f1b_and_recomputing_need_less_memory() -> None:
    """Measured on the first stage of three, by what autograd keeps."""
    bytes_of = {}
    for staging in (Cut(3, "gpipe"), Cut(3, "1f1b"), Cut(3, "gpipe", recompute=True)):
        split = SplitModel.of(gpt(), PLAN, staging)
        mail, kept = prepared(split.compute(0).mail, 0), Kept()
        kept.compute(split.replica(range(1)), mail)
        assert not kept.now
        bytes_of[staging] = kept.most
    gpipe, one_by_one, again = bytes_of.values()
    assert one_by_one == pytest.approx(gpipe * 3 / 4, rel=0.02)
    assert again == pytest.approx(gpipe / 4, rel=0.02)


def test_a_worker_holds_the_weights_of_its_stages_only() -> None:
    split = SplitModel.of(RESNET, PLAN, Cut(2))
    for number in range(2):
        replica = split.replica(range(number, number + 1))
        (stage,) = replica.stages.values()
        facts = split.stage_plan.stages[number]
        _, parts = next(iter(replica._parts.values()))
        trained = sum(one.numel() for one in parts[number].module.parameters())
        assert trained == facts.parameters == stage.parameters.view().size == stage.gradient.size
        assert facts.parameters < 0.9 * split.layout.parameters
        assert not any(one.is_meta for one in parts[number].module.parameters())


def test_buckets_are_passed_on_as_they_become_ready() -> None:
    """Those of the last layers come first; a stage that others borrow from passes its own on at the end."""
    split = SplitModel.of(RESIDUAL, PLAN, Cut(2))
    taken: list[int] = []
    split.replica(range(2)).compute(0, MemoryMail(), take=lambda bucket, _: taken.append(bucket))
    assert sorted(taken) == [*range(len(split.layout.buckets))]
    assert taken[0] == len(split.layout.buckets) - 1


def test_units_that_were_called_off_leave_nothing_behind() -> None:
    split = SplitModel.of(RESIDUAL, PLAN, Cut(2))
    (replica,) = split.replicas(2)
    expected = split.compute(1, replicas=[replica]).bits
    asked = iter([True] * 5 + [False])
    with pytest.raises(Interrupted):
        replica.compute(0, MemoryMail(), lambda: next(asked))
    assert split.compute(1, replicas=[replica]).bits == expected


def test_loading_other_weights_changes_what_is_computed() -> None:
    split = SplitModel.of(RESNET, PLAN, Cut(2))
    replicas = split.replicas()
    before = split.compute(0, replicas=replicas).bits
    for replica in replicas:
        shapes = {one.name: one for one in split.layout.tensors}
        replica.load({name: np.full(shapes[name].shape, 0.01) for name in replica.names})
    changed = split.compute(0, replicas=replicas)
    assert changed.bits != before and np.isfinite(changed.vector).all()


Change = Callable[[list[Any]], list[Any]]


@pytest.mark.parametrize(
    "change",
    [
        lambda values: [values[0][:, :3]],
        lambda values: [values[0].double()],
        lambda values: [],
        lambda values: [None],
        lambda values: [*values, *values],
        lambda values: ["text"],
    ],
)
@pytest.mark.parametrize("tag", ["f0.1", "b1.1"])
def test_values_that_cannot_be_are_refused(change: Change, tag: str) -> None:
    split = SplitModel.of(gpt(), PLAN, Cut(2))
    honest = split.compute(0).mail
    target = 1 if tag[0] == "f" else 0
    mail = prepared(honest, target)
    values = change(decoded(honest, target, tag))
    mail._waiting[target, tag] = frames.encode(values, EXACT)
    if tag[0] == "b" and values == [None]:  # a value that the loss does not depend on
        split.replica(range(1)).compute(0, mail)
        return
    with pytest.raises(CodecError):
        split.replica(range(target, target + 1)).compute(0, mail)


def test_a_message_larger_than_the_values_between_the_stages_is_refused() -> None:
    split = SplitModel.of(gpt(), PLAN, Cut(2))
    mail = prepared(split.compute(0).mail, 1)
    mail._waiting[1, "f0.0"] = frames.encode([torch.zeros(10**5)], EXACT)
    with pytest.raises(CodecError, match="too large"):
        split.replica(range(1, 2)).compute(0, mail)


class Many(nn.Module):
    """Numbers, tuples and dicts cross its stages' borders, and the model's input is used at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = Parts(), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        count = inputs.shape[0]
        parts = self.one(inputs.flatten(1))
        values = self.two(parts["sum"].reshape(count, -1))
        left, right = parts["pair"]
        return self.last(values + left * right) + inputs.reshape(count, -1)[:, :10]  # type: ignore[no-any-return]


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, values: Tensor) -> dict[str, Any]:
        found = self.linear(values)
        return {"sum": found * 2, "pair": (found, torch.arange(32)), "nothing": None}


def test_values_of_all_kinds_cross_borders() -> None:
    split = SplitModel.of(task_with(Many), PLAN, Cut(3, split=("two", "last")))
    assert apart(split.compute(2).vector, split.whole(2).vector) < 1e-6


class Looking(nn.Module):
    """Traced whole, by torch.export, for each size of a piece."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(3))
        self.last = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        values = inputs.flatten(1) if inputs.dim() > 2 else inputs
        for layer in self.layers:
            values = layer(values).relu() + torch.arange(64, device=values.device)
        return self.last(values)  # type: ignore[no-any-return]


def test_a_model_traced_whole_computes_the_same_for_each_size_of_piece() -> None:
    plan = Plan(seed=7, samples=14, micro_batch=8, micro_batches_per_round=2, accumulate=2)
    split = SplitModel.of(task_with(Looking), plan, Cut(2))
    replicas = split.replicas()
    for unit in (0, 1, 2):
        found, expected = split.compute(unit, replicas=replicas), split.whole(unit)
        assert apart(found.vector, expected.vector) < 1e-5
        assert np.allclose(found.buffers, expected.buffers, rtol=1e-6)


def test_updates_say_how_long_each_stage_computed() -> None:
    split = SplitModel.of(gpt(), PLAN, Cut(2))
    found = split.compute(0)
    assert all(one.busy_s == one.forward_s + one.backward_s > 0 for one in found.updates)
    assert [one.loss is None for one in found.updates] == [True, False]
    sent: Sequence[int] = [sum(len(m) for (target, _), m in found.mail.log.items() if target != s) for s in (0, 1)]
    assert [one.sent_bytes for one in found.updates] == sent


@pytest.mark.parametrize("name", TASKS)
def test_tensors_with_storage_of_their_own_yield_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA and MPS."""
    split = SplitModel.of(TASKS[name], PLAN, Cut(2))
    expected = split.compute(2).bits
    monkeypatch.setattr(Stage, "_apart", True)
    assert split.compute(2).bits == expected
