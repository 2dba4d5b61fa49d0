"""What a micro-batch yields depends on the weights and its number, and on nothing else."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from computeshare.errors import ShapeError
from computeshare.jobspec.sampling_plan import Plan, Seeds
from computeshare.tasks.base import Indices, TaskInstance
from computeshare.tasks.images.classification import ImageClassification, pixel_by_pixel
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.images.models import build
from computeshare.tasks.modules import layout_of, weights_of
from computeshare.tasks.recipes.functions import Functions
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.tensors.layout import Weights
from computeshare.training import replica as replica_module
from computeshare.training.execution import Execution
from computeshare.training.replica import FlatTensors, Replica
from computeshare.training.work_units import Update
from computeshare.types import Vector

CPU = torch.device("cpu")
SHAPE = (1, 16, 16)
TASK = ImageClassification("digits", "mlp", SHAPE)
PLAN = Plan(seed=7, samples=50, micro_batch=8, micro_batches_per_round=3)


def instance_of(module: nn.Module) -> TaskInstance:
    return TaskInstance(TASK, module, layout_of(module), split())


def split() -> ImageSplit:
    return TASK.noise(PLAN.samples, 0)


def normalised(seed: int = 0) -> nn.Module:
    """A model with everything that could carry something over: batch normalisation and dropout."""
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(196, 10))


def replica(seed: int = 0) -> Replica:
    module = normalised(seed)
    return Replica(instance_of(module), PLAN, CPU)


def weights(seed: int = 0) -> Weights:
    module = normalised(seed)
    return weights_of(module, layout_of(module))


def bits(update: Update) -> tuple[bytes, bytes, float]:
    return update.vector.tobytes(), update.buffers.tobytes(), update.loss


def test_a_micro_batch_yields_the_same_bits_every_time() -> None:
    r = replica()
    assert bits(r.compute(3)) == bits(r.compute(3))


def test_weights_that_were_put_into_its_room_are_loaded_like_others() -> None:
    apart, inside, given = replica(1), replica(1), weights(2)
    apart.load(given)
    assert inside.room is not None
    inside.room[:] = given.parameters
    inside.load(Weights(inside.room, given.buffers, given.counters))
    assert bits(inside.compute(3)) == bits(apart.compute(3)) != bits(replica(1).compute(3))


def test_the_order_of_micro_batches_changes_nothing() -> None:
    numbers = [0, 4, 6, 7, 13]
    first, second = replica(), replica()
    forwards = {m: bits(first.compute(m)) for m in numbers}
    backwards = {m: bits(second.compute(m)) for m in reversed(numbers)}
    assert forwards == backwards
    assert len(set(forwards.values())) == len(numbers)


def test_another_replica_with_the_same_weights_yields_the_same_bits() -> None:
    r, other = replica(seed=0), replica(seed=1)
    other.compute(2)  # on weights of its own
    other.load(weights(seed=0))
    assert bits(other.compute(5)) == bits(r.compute(5))


@dataclass(frozen=True)
class Displaced:
    """Samples whose memory begins so many bytes after an address that is aligned."""

    offset: int

    def __len__(self) -> int:
        return 64

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = np.random.default_rng(0).standard_normal((64, 64), np.float32)[indices]
        memory = torch.zeros(inputs.size + 16)[self.offset // 4 :][: inputs.size].view(inputs.shape)
        return memory.copy_(torch.from_numpy(inputs)), torch.from_numpy(indices % 10)


def test_where_a_batch_lies_in_memory_changes_nothing() -> None:
    task = RecipeTask(Functions(Path(), nn.Linear, Displaced), "sha256:0", {})
    plan = Plan(seed=0, samples=64, micro_batch=32, micro_batches_per_round=1)
    found = set()
    for offset in (0, 4, 8, 16, 60):
        torch.manual_seed(0)
        module = nn.Linear(64, 10)
        instance = TaskInstance(task, module, layout_of(module), Displaced(offset))
        found.add(bits(Replica(instance, plan, CPU).compute(0)))
    assert len(found) == 1


def test_what_others_draw_from_the_generator_changes_nothing() -> None:
    r = replica()
    expected = bits(r.compute(1))
    torch.rand(100)
    assert bits(r.compute(1)) == expected


def test_a_batch_fetched_ahead_changes_nothing() -> None:
    r = replica()
    expected = bits(r.compute(4))
    r.prefetch([3, 4])
    r.load(weights())
    assert bits(r.compute(4)) == expected
    r.prefetch([6])
    assert bits(r.compute(4)) == expected  # not the one that was fetched


def test_loading_weights_changes_what_is_computed_and_loading_them_back_restores_it() -> None:
    r = replica()
    expected = bits(r.compute(2))
    r.load(weights(seed=9))
    assert bits(r.compute(2)) != expected
    r.load(weights())
    assert bits(r.compute(2)) == expected


def test_loaded_weights_are_copied() -> None:
    r, loaded = replica(), weights(seed=9)
    r.load(loaded)
    expected = bits(r.compute(2))
    for vector in (loaded.parameters, loaded.buffers, loaded.counters):
        vector.fill(0)
    assert bits(r.compute(2)) == expected


def test_read_only_weights_can_be_loaded(recwarn: pytest.WarningsRecorder) -> None:
    w = weights(seed=9)
    r = replica()
    for vector in (w.parameters, w.buffers, w.counters):
        vector.setflags(write=False)
    r.load(w)
    other = replica(seed=9)
    assert bits(r.compute(0)) == bits(other.compute(0))
    assert not recwarn.list


def test_weights_of_another_model_are_refused() -> None:
    module = build("mlp", SHAPE, 10, 0)
    with pytest.raises(ShapeError):
        replica().load(weights_of(module, layout_of(module)))


def test_an_update_is_the_gradient_of_the_mean_loss_and_the_moved_buffers() -> None:
    number = 6  # the epoch's last micro-batch, of two samples
    update = replica().compute(number)
    module = normalised().train()
    images, labels = split().batch(PLAN.indices(number))
    assert len(labels) == 2
    torch.manual_seed(PLAN.generator_seed(number))
    loss = functional.cross_entropy(module(pixel_by_pixel(images)), labels)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    np.testing.assert_allclose(update.vector, expected.numpy(), rtol=1e-6, atol=1e-7)
    moved = weights_of(module, layout_of(module))
    np.testing.assert_allclose(update.buffers, moved.buffers, rtol=1e-6)
    assert not np.allclose(update.buffers, weights().buffers)
    assert update.loss == pytest.approx(loss.item())
    assert update.vector.dtype == update.buffers.dtype == np.float32


@pytest.mark.parametrize("accumulate", [2, 4, 8])
@pytest.mark.parametrize("number", [0, 6])
def test_pieces_of_a_micro_batch_have_the_gradient_of_the_whole(accumulate: int, number: int) -> None:
    plan = Plan(seed=7, samples=55, micro_batch=8, micro_batches_per_round=3)  # number 6 has seven samples
    module = build("mlp", SHAPE, 10, 0)
    instance = replace(instance_of(module), split=TASK.noise(plan.samples, 0))
    whole = Replica(copy.deepcopy(instance), plan, CPU).compute(number)
    update = Replica(instance, replace(plan, accumulate=accumulate), CPU).compute(number)
    np.testing.assert_allclose(update.vector, whole.vector, rtol=0, atol=1e-7)
    assert update.loss == pytest.approx(whole.loss, rel=1e-6)


def test_batch_normalisation_sees_one_piece_after_the_other() -> None:
    module = normalised()
    update = Replica(instance_of(copy.deepcopy(module)), replace(PLAN, accumulate=2), CPU).compute(0)
    images, labels = split().batch(PLAN.indices(0))
    torch.manual_seed(PLAN.generator_seed(0))
    for piece in (slice(4), slice(4, None)):
        loss = functional.cross_entropy(module(pixel_by_pixel(images[piece])), labels[piece])
        (loss / 2).backward()  # type: ignore[no-untyped-call]
    expected = torch.cat([p.grad.reshape(-1) for p in module.parameters() if p.grad is not None])
    np.testing.assert_allclose(update.vector, expected.numpy(), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(update.buffers, weights_of(module, layout_of(module)).buffers, rtol=1e-6)


def test_an_update_is_not_overwritten_by_the_next() -> None:
    r = replica()
    update = r.compute(0)
    before = bits(update)
    r.compute(1)
    assert bits(update) == before


def test_a_parameter_the_loss_does_not_touch_has_a_gradient_of_zero() -> None:
    module = normalised()
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    layout = layout_of(module)
    r = Replica(instance_of(module), PLAN, CPU)
    entry = next(t for t in layout.tensors if t.name == "unused")
    assert np.array_equal(r.compute(0).vector[entry.start : entry.stop], np.zeros(3))


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors keep storage of their own, as on CUDA and MPS."""

    def flat(tensors: list[torch.Tensor], dtype: torch.dtype, device: torch.device, apart: bool) -> FlatTensors:
        assert not apart
        return FlatTensors(tensors, dtype, device, apart=True)

    monkeypatch.setattr(replica_module, "FlatTensors", flat)


def test_tensors_with_storage_of_their_own_yield_the_same_bits(request: pytest.FixtureRequest) -> None:
    expected = [bits(replica().compute(m)) for m in (0, 5)]
    request.getfixturevalue("apart")
    r = replica(seed=1)
    r.compute(5)
    r.load(weights())
    assert [bits(r.compute(m)) for m in (0, 5)] == expected


def test_a_model_without_buffers_has_empty_buffers() -> None:
    module = build("mlp", SHAPE, 10, 0)
    assert Replica(instance_of(module), PLAN, CPU).compute(0).buffers.shape == (0,)


@pytest.fixture
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets so small that the model of these tests has five of them, whose ends lie within its tensors."""
    monkeypatch.setattr("computeshare.tensors.layout.BUCKET", 450)


def taken(r: Replica, micro_batch: int) -> tuple[list[int], bytes, Update]:
    """The numbers of the parts in the order in which they were taken, the buckets' values in order, and the rest."""
    order, values = list[int](), dict[int, bytes]()

    def take(bucket: int, part: Vector) -> None:
        order.append(bucket)
        values[bucket] = part.tobytes()

    update = r.compute(micro_batch, take=take)
    if r.buffers.are_views:
        assert values.pop(len(r._layout.buckets)) == update.buffers.tobytes()
    return order, b"".join(values[bucket] for bucket in sorted(values)), update


@pytest.mark.usefixtures("small_buckets")
def test_buffers_are_taken_after_the_forward_pass_and_buckets_as_the_backward_pass_fills_them() -> None:
    whole, r = replica().compute(3), replica()
    for _ in range(2):
        order, values, update = taken(r, 3)
        assert order == [5, 1, 2, 3, 4, 0]  # the last layer ends in bucket 0, where the first ones lie
        assert (values, update.buffers.tobytes(), update.loss) == bits(whole)
        assert update.vector.size == 0
    assert bits(r.compute(3)) == bits(whole)  # whole again


@pytest.mark.usefixtures("small_buckets")
def test_buffers_and_buckets_are_taken_in_the_passes_of_the_last_piece() -> None:
    plan = replace(PLAN, accumulate=2)
    r, whole = (Replica(instance_of(normalised()), plan, CPU) for _ in range(2))
    order, values, update = taken(r, 3)
    assert order == [5, 1, 2, 3, 4, 0]
    assert (values, update.buffers.tobytes(), update.loss) == bits(whole.compute(3))


@pytest.mark.usefixtures("small_buckets")
def test_a_bucket_is_taken_before_those_of_earlier_layers_are_filled() -> None:
    r, seen = replica(), list[bytes]()
    r.compute(3, take=lambda bucket, part: seen.append(r._gradient.read()[:10].tobytes()))
    assert seen[:2] == [bytes(40)] * 2 and seen[-1] != bytes(40)


@pytest.mark.usefixtures("small_buckets")
def test_buckets_of_parameters_that_the_loss_does_not_touch_are_taken_too() -> None:
    module = normalised()
    module.register_parameter("unused", nn.Parameter(torch.ones(1000)))
    r = Replica(instance_of(module), PLAN, CPU)
    order, values, _ = taken(r, 0)
    assert sorted(order) == list(range(len(layout_of(module).buckets) + 1))
    assert values == r.compute(0).vector.tobytes()


@pytest.mark.usefixtures("small_buckets", "apart")
def test_buckets_of_tensors_with_storage_of_their_own_are_taken_after_the_pass() -> None:
    order, values, _ = taken(replica(), 3)
    assert sorted(order) == [0, 1, 2, 3, 4] and values == replica().compute(3).vector.tobytes()


def test_channels_last_changes_the_order_in_memory_alone() -> None:
    def two() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(1152, 10))

    module, seen = two(), list[tuple[int, ...]]()
    module[0].register_forward_hook(lambda _, __, outputs: seen.append(outputs.stride()))  # type: ignore[index]
    r, plain = (
        Replica(instance_of(module), PLAN, CPU, execution=Execution(channels_last=True)),
        Replica(instance_of(two()), PLAN, CPU),
    )
    weights = weights_of(two(), layout_of(two()))
    weights.parameters[:] *= 1.5
    for one in (r, plain):
        one.load(weights)
    assert module[2].weight.stride() == module[2].weight.grad.stride() == (36, 1, 12, 4)  # type: ignore[index,union-attr]
    assert np.array_equal(r.parameters.read(), weights.parameters)
    np.testing.assert_allclose(r.compute(1).vector, plain.compute(1).vector, rtol=0, atol=1e-6)
    assert seen == [(784, 1, 56, 4)]
    assert bits(r.compute(1)) == bits(r.compute(1))


def test_a_convolution_of_many_weights_takes_images_in_torchs_order_and_yields_the_same() -> None:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 64, 9, stride=7), nn.Conv2d(64, 256, 3, padding=1)  # 147,456 weights; 2 x 2 pixels
    module = nn.Sequential(first, nn.ReLU(), second, nn.Flatten(), nn.Linear(1024, 10))
    plain = copy.deepcopy(module)
    r, seen = Replica(instance_of(module), PLAN, CPU), list[tuple[int, ...]]()
    for convolution in (first, second):
        convolution.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].stride()))
    update = r.compute(0)
    assert seen == [(256, 1, 16, 1), (256, 4, 2, 1)]
    images, labels = split().batch(PLAN.indices(0))
    functional.cross_entropy(plain(images), labels).backward()  # type: ignore[no-untyped-call]
    expected = np.concatenate([p.grad.numpy().ravel() for p in plain.parameters() if p.grad is not None])
    assert np.abs(update.vector - expected).max() < 1e-6
