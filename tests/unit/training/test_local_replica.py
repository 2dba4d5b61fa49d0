"""Inner steps are plain training, and what a unit yields depends on nothing but its weights and its number."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch
from torch import nn
from torch.nn import functional

from computeshare.errors import ArtifactError, Interrupted, ShapeError, SpecError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.sampling_plan import Plan
from computeshare.strategies.base import Contributions
from computeshare.strategies.local import LocalStrategy
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.images.classification import ImageClassification, pixel_by_pixel
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.images.models import build
from computeshare.tasks.modules import layout_of, weights_of
from computeshare.tensors.layout import Weights
from computeshare.training import replica as replica_module
from computeshare.training.local_replica import LocalReplica
from computeshare.training.optimizers import ServerOptimizer
from computeshare.training.replica import FlatTensors, Replica
from computeshare.training.work_units import Update
from computeshare.types import Vector

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SHAPE = (1, 16, 16)
TASK = ImageClassification("digits", "mlp", SHAPE)
PLAN = Plan(seed=7, samples=50, micro_batch=8, micro_batches_per_round=6, inner_steps=3)  # units of 3, 3 and 1
MOMENTUM = OptimizerSpec(name="SGD", lr=0.05, momentum=0.9)
ADAMW = OptimizerSpec(name="AdamW", lr=4e-4)


def instance_of(module: nn.Module) -> TaskInstance:
    return TaskInstance(TASK, module, layout_of(module), split())


def split() -> ImageSplit:
    return TASK.noise(PLAN.samples, 0)


def normalised(seed: int = 0) -> nn.Module:
    """A model with everything that could carry something over: batch normalisation and dropout."""
    torch.manual_seed(seed)
    features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(features, nn.Flatten(), nn.Linear(196, 10))


def weights(seed: int = 0) -> Weights:
    module = normalised(seed)
    return weights_of(module, layout_of(module))


def replica(inner: OptimizerSpec = MOMENTUM, kept: bool = False, seed: int = 0) -> LocalReplica:
    module = normalised(seed)
    return LocalReplica(instance_of(module), PLAN, CPU, inner, kept)


def run(r: LocalReplica, unit: int) -> Update:
    return r.compute(unit)


def bits(update: Update) -> str:
    parts = (update.vector, update.buffers, np.float64(update.loss))
    return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()


@pytest.mark.parametrize("inner", [MOMENTUM, ADAMW], ids=lambda inner: inner.name)
def test_inner_steps_are_those_of_a_plain_loop(inner: OptimizerSpec) -> None:
    update = run(replica(inner), 1)
    module, base = normalised().train(), weights()
    optimizer = getattr(torch.optim, inner.name)(module.parameters(), **inner.arguments)
    losses, sizes = [], []
    for number in PLAN.micro_batches(1):
        images, labels = split().batch(PLAN.indices(number))
        torch.manual_seed(PLAN.generator_seed(number))
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(pixel_by_pixel(images)), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
        sizes.append(len(labels))
    expected = weights_of(module, layout_of(module))
    np.testing.assert_allclose(update.vector, base.parameters - expected.parameters, rtol=1e-4, atol=1e-7)
    np.testing.assert_allclose(update.buffers, expected.buffers, rtol=1e-6)
    assert update.loss == pytest.approx(np.average(losses, weights=sizes))
    assert update.vector.dtype == update.buffers.dtype == np.float32


class Partial(nn.Module):
    """A model with an embedding of sparse gradients, and parameters on which the loss does not depend."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 10, sparse=True)
        self.unused = nn.Linear(3, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.embedding((images.flatten(1)[:, :8].abs() * 7).long().clamp(0, 15)).mean(1)
        return found


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_gradients_that_are_sparse_or_missing_are_stepped_as_dense_and_as_zeros(name: str) -> None:
    inner = OptimizerSpec(name=name, lr=0.1, weight_decay=0.1)
    torch.manual_seed(0)
    module, plain = Partial(), Partial()
    plain.load_state_dict(module.state_dict())
    update = LocalReplica(instance_of(module), PLAN, CPU, inner).compute(0)
    base, optimizer = (
        weights_of(plain, layout_of(plain)),
        getattr(torch.optim, name)(plain.parameters(), **inner.arguments),
    )
    for number in PLAN.micro_batches(0):
        images, labels = split().batch(PLAN.indices(number))
        optimizer.zero_grad()
        functional.cross_entropy(plain(pixel_by_pixel(images)), labels).backward()  # type: ignore[no-untyped-call]
        for parameter in plain.parameters():
            grad = parameter.grad
            parameter.grad = torch.zeros_like(parameter) if grad is None else grad.to_dense()
        optimizer.step()
    after = weights_of(plain, layout_of(plain))
    np.testing.assert_allclose(update.vector, base.parameters - after.parameters, rtol=1e-4, atol=1e-6)
    assert np.abs(update.vector[-12:]).min() > 0, "weight decay applies to what the loss does not depend on"


def test_the_loss_is_weighted_by_samples() -> None:
    r = replica(OptimizerSpec(name="SGD", lr=0.0))
    whole, short = (r.walk([m]) for m in (5, 6))  # of eight samples and of two
    both = r.walk([5, 6])
    assert whole and short and both
    assert both.loss == pytest.approx((8 * whole.loss + 2 * short.loss) / 10)


@pytest.mark.parametrize("inner", [MOMENTUM, ADAMW], ids=lambda inner: inner.name)
def test_the_order_of_units_changes_nothing_where_the_inner_state_starts_afresh(inner: OptimizerSpec) -> None:
    units = [0, 1, 2, 4]
    first, second = replica(inner), replica(inner)
    forwards = {unit: bits(run(first, unit)) for unit in units}
    backwards = {unit: bits(run(second, unit)) for unit in reversed(units)}
    assert forwards == backwards
    assert len(set(forwards.values())) == len(units)


def test_an_update_comes_in_buckets_of_which_no_whole_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(replica(ADAMW), 1)
    monkeypatch.setattr("computeshare.tensors.layout.BUCKET", 700)
    found: dict[int, Vector] = {}
    update = replica(ADAMW).compute(1, take=lambda bucket, values: found.update({bucket: values.copy()}))
    assert not update.vector.size and [*found] == [3, 0, 1, 2]
    assert found[3].tobytes() == update.buffers.tobytes()
    assert np.concatenate([found[bucket] for bucket in range(3)]).tobytes() == whole.vector.tobytes()
    assert (update.buffers.tobytes(), update.loss) == (whole.buffers.tobytes(), whole.loss)


PROCESS = """
import torch
from tests.unit.training.test_local_replica import ADAMW, bits, replica, run, weights
torch.set_num_threads(1)
r = replica(ADAMW, seed=1)
run(r, 3)
r.load(weights())
print(bits(run(r, 1)))
"""


@pytest.mark.slow
def test_a_unit_yields_the_same_bits_in_a_fresh_process() -> None:
    expected = bits(run(replica(ADAMW), 1))
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", PROCESS], cwd=root, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == expected


def test_what_others_draw_from_the_generator_changes_nothing() -> None:
    r = replica()
    expected = bits(run(r, 1))
    torch.rand(100)
    assert bits(run(r, 1)) == expected


def test_weights_that_were_put_into_its_room_are_loaded_like_others() -> None:
    apart, inside, given = replica(), replica(), weights(1)
    apart.load(given)
    inside.room[:] = given.parameters
    inside.load(Weights(inside.room, given.buffers, given.counters))
    assert bits(run(inside, 3)) == bits(run(apart, 3)) != bits(run(replica(), 3))


def test_loaded_weights_are_copied_and_an_update_is_not_overwritten() -> None:
    r, loaded = replica(), weights(seed=9)
    r.load(loaded)
    update = run(r, 0)
    expected = bits(update)
    for vector in (loaded.parameters, loaded.buffers, loaded.counters):
        vector.fill(0)
    assert bits(run(r, 0)) == expected
    run(r, 1)
    assert bits(update) == expected


def test_weights_of_another_model_are_refused_and_those_before_stay() -> None:
    module, r = build("mlp", SHAPE, 10, 0), replica()
    expected = bits(run(r, 0))
    with pytest.raises(ShapeError):
        r.load(weights_of(module, layout_of(module)))
    assert bits(run(r, 0)) == expected


def test_arguments_that_torch_refuses_are_an_error_of_the_specification() -> None:
    with pytest.raises(SpecError, match="Adam refuses"):
        replica(OptimizerSpec.model_construct(name="Adam", betas=[0.9]))


def test_a_unit_that_is_called_off_yields_nothing_and_leaves_nothing_behind() -> None:
    r = replica()
    expected = bits(run(r, 1))
    answers = iter([True, True, False])
    with pytest.raises(Interrupted):
        r.compute(0, goes_on=lambda: next(answers))
    assert bits(run(r, 1)) == expected


def test_tensors_with_storage_of_their_own_yield_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = bits(run(replica(), 1))

    def apart(tensors: list[torch.Tensor], dtype: torch.dtype, device: torch.device, apart: bool) -> FlatTensors:
        assert not apart
        return FlatTensors(tensors, dtype, device, apart=True)

    monkeypatch.setattr(replica_module, "FlatTensors", apart)  # as on CUDA and MPS
    r = replica(seed=1)
    run(r, 0)
    r.load(weights())
    assert bits(run(r, 1)) == expected


def test_single_steps_of_plain_sgd_and_their_mean_are_synchronous_sgd() -> None:
    rate, module, base = 0.05, normalised(), weights()
    layout, numbers = layout_of(module), [0, 5, 6]  # the last of two samples
    sizes = [PLAN.size(m) for m in numbers]
    plain, steps = Replica(instance_of(module), PLAN, CPU), replica(OptimizerSpec(name="SGD", lr=rate))
    gradients, ways = [], []
    for m in numbers:
        gradients.append(plain.compute(m).vector)
        update = steps.walk([m])
        assert update is not None
        ways.append(update.vector)
    outer = LocalStrategy(inner_steps=1, outer_lr=1.0, outer_momentum=0.0).outer_optimizer
    synchronous = ServerOptimizer(layout, OptimizerSpec(name="SGD", lr=rate))
    expected = synchronous.step(base.parameters, LocalStrategy().gradient(gradients, Contributions(sizes)))
    got = ServerOptimizer(layout, outer).step(base.parameters, LocalStrategy().gradient(ways, Contributions(sizes)))
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-7)  # weights below 1: a few roundings of 6e-8
    assert np.abs(expected - base.parameters).max() > 1e-3


def chain(first: LocalReplica, second: LocalReplica) -> list[str]:
    """Two units, the second from another version, the first replica's and the second's inner state."""
    updates = [bits(run(first, 0))]
    second.load(weights(seed=3))
    return [*updates, bits(run(second, 3))]


@pytest.mark.parametrize("name", sorted(catalog().optimizers))
def test_a_kept_state_goes_on_and_another_worker_goes_on_from_what_it_is_handed(name: str) -> None:
    inner = OptimizerSpec(name=name)
    alone = replica(inner, kept=True)
    expected = chain(alone, alone)
    first, heir = replica(inner, kept=True), replica(inner, kept=True, seed=5)
    run(first, 0)
    heir.restore(state_of(first))
    heir.load(weights(seed=3))
    assert bits(run(heir, 3)) == expected[1]
    afresh = replica(inner)
    remembers = name not in {"SGD"}  # without momentum it has nothing to keep
    assert (chain(afresh, afresh)[1] != expected[1]) == remembers


def state_of(replica: LocalReplica) -> bytes:
    state = replica.dump()
    assert state is not None
    return b"".join(state)


def test_a_state_that_starts_afresh_is_not_kept() -> None:
    r, kept = replica(), replica(kept=True)
    run(r, 0)
    assert r.dump() is None and kept.dump() is None  # nothing has been computed there yet


def hostile() -> dict[str, tuple[bytes, str]]:
    good = replica(kept=True)
    run(good, 0)
    state = state_of(good)
    tensors = safetensors.numpy.load(state)
    name = next(iter(tensors))
    length = int.from_bytes(state[:8], "little")
    metadata = {"state": json.loads(state[8 : 8 + length])["__metadata__"]["state"]}

    def changed(**values: np.ndarray) -> bytes:
        return safetensors.numpy.save(tensors | values, metadata)

    other = replica(ADAMW, kept=True)
    run(other, 0)
    return {
        "of another shape": (changed(**{name: np.zeros(3, np.float32)}), "of another model"),
        "of another number": (changed(**{name: tensors[name].astype(np.float64)}), "of another model"),
        "with something more": (changed(**{"0.more": np.zeros(3, np.float32)}), "of another model"),
        "not finite": (changed(**{name: np.full_like(tensors[name], np.nan)}), "not finite"),
        "cut": (state[:-5], "damaged"),
        "empty": (b"", "damaged"),
        "of another optimizer": (state_of(other), "that of AdamW"),
    }


HOSTILE = ["of another shape", "of another number", "with something more", "not finite", "cut", "empty"]


@pytest.mark.parametrize("what", [*HOSTILE, "of another optimizer"])
def test_a_state_that_does_not_fit_is_refused_and_the_state_stays_as_it_was(what: str) -> None:
    blob, says = hostile()[what]
    r = replica(kept=True)
    run(r, 0)
    before = state_of(r)
    with pytest.raises(ArtifactError, match=says):
        r.restore(blob)
    assert state_of(r) == before


def test_a_state_that_is_handed_over_brings_no_settings_along() -> None:
    giver, heir = replica(OptimizerSpec(name="SGD", lr=9.0, momentum=0.1), kept=True), replica(kept=True)
    run(giver, 0)
    heir.restore(state_of(giver))
    assert heir._state is not None
    settings = heir._state.param_groups[0]
    assert (settings["lr"], settings["momentum"]) == (0.05, 0.9)
