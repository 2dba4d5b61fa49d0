"""The server's optimizer: torch's own steps on flat vectors, and a state that survives as bytes."""

import inspect
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from computeshare.errors import ArtifactError, ShapeError, SpecError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.optimizer_spec import BY_VALUE, OptimizerSpec
from computeshare.jobspec.schedule import EVERY_STEP_ALIKE, StepRules
from computeshare.tasks.modules import layout_of, weights_of
from computeshare.tensors.layout import Layout
from computeshare.training.optimizers import FUSED, ServerOptimizer, build_optimizer
from computeshare.types import Vector

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in sorted(catalog().optimizers)),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-3, "maximize": True}),
    ("Adam", {"amsgrad": True, "betas": [0.8, 0.99], "weight_decay": 0.1}),
    ("AdamW", {"lr": 1, "amsgrad": True}),
    ("RMSprop", {"momentum": 0.9, "centered": True}),
    ("Adafactor", {"eps": [None, 0.01], "d": 2.0}),
    ("Adafactor", {"eps": [1e-12, 0.01]}),
    ("Adagrad", {"initial_accumulator_value": 0.25, "lr_decay": 0.1}),
    ("ASGD", {"t0": 2.0}),
    ("Rprop", {"etas": [0.4, 1.3], "step_sizes": [1e-5, 0.2]}),
]
every_variant = pytest.mark.parametrize(("name", "arguments"), VARIANTS, ids=str)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))


def gradients(layout: Layout, count: int) -> list[Vector]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(layout.parameters, dtype=np.float32) for _ in range(count)]


def run(optimizer: ServerOptimizer, parameters: Vector, steps: list[Vector]) -> Vector:
    for gradient in steps:
        parameters = optimizer.step(parameters, gradient)
    return parameters


def dumped(optimizer: ServerOptimizer) -> bytes:
    return b"".join(optimizer.dump())


@every_variant
def test_steps_are_those_of_torch_on_the_module(name: str, arguments: dict[str, Any]) -> None:
    module = model()
    layout = layout_of(module)
    start, steps = weights_of(module, layout).parameters, gradients(layout, 5)
    ours = run(ServerOptimizer(layout, OptimizerSpec(name=name, **arguments)), start, steps)

    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    optimizer = getattr(torch.optim, name)(module.parameters(), **plain)
    sizes = [p.numel() for p in module.parameters()]
    for gradient in steps:
        for parameter, part in zip(module.parameters(), torch.split(torch.from_numpy(gradient), sizes), strict=True):
            parameter.grad = part.reshape(parameter.shape)
        optimizer.step()
    assert ours.tobytes() == weights_of(module, layout).parameters.tobytes()
    assert not np.array_equal(ours, start)


@every_variant
@pytest.mark.parametrize("before", [0, 1, 4])
def test_a_fresh_optimizer_goes_on_from_the_dumped_state_to_the_bit(
    name: str, arguments: dict[str, Any], before: int
) -> None:
    module = model()
    layout, spec = layout_of(module), OptimizerSpec(name=name, **arguments)
    start, steps = weights_of(module, layout).parameters, gradients(layout, before + 3)
    through, resumed = ServerOptimizer(layout, spec), ServerOptimizer(layout, spec)
    middle = run(through, start, steps[:before])
    resumed.load(dumped(through))
    assert dumped(resumed) == dumped(through)
    expected = run(through, middle, steps[before:])
    assert run(resumed, middle, steps[before:]).tobytes() == expected.tobytes()
    assert dumped(resumed) == dumped(through)


@pytest.mark.parametrize(("name", "arguments"), [one for one in VARIANTS if one[0] in BY_VALUE], ids=str)
@pytest.mark.parametrize(("before", "after"), [((), (17, 90)), ((17, 90), ()), ((17, 90), (40, 50, 100))], ids=str)
def test_a_state_goes_on_where_buckets_begin_at_other_places(
    name: str, arguments: dict[str, Any], before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    """As a job goes on that is forked from one whose model was split elsewhere, or not at all."""
    module = model()
    layout, spec = layout_of(module), OptimizerSpec(name=name, **arguments)
    start, steps = weights_of(module, layout).parameters, gradients(layout, 4)
    one, other = (ServerOptimizer(replace(layout, cuts=cuts), spec) for cuts in (before, after))
    middle = run(one, start, steps[:2])
    other.load(dumped(one))
    assert run(other, middle, steps[2:]).tobytes() == run(one, middle, steps[2:]).tobytes()


def test_a_state_that_was_loaded_stays_in_the_memory_that_it_was_given_in() -> None:
    """A copy of half a gigabyte holds the interpreter for so long that a reducer loses its claims."""
    layout, spec = layout_of(model()), OptimizerSpec(name="SGD", momentum=0.9)
    start, steps = np.zeros(layout.parameters, np.float32), gradients(layout, 2)
    stepped, resumed = ServerOptimizer(layout, spec), ServerOptimizer(layout, spec)
    middle = run(stepped, start, steps[:1])
    state = bytearray(dumped(stepped))
    resumed.load(state)
    run(resumed, middle, steps[1:])
    assert state != dumped(stepped)  # the step has written the next momentum there
    run(stepped, middle, steps[1:])
    assert state == dumped(stepped) == dumped(resumed)


def test_loading_replaces_what_was_there() -> None:
    module = model()
    layout, spec = layout_of(module), OptimizerSpec(name="Adam")
    start, steps = weights_of(module, layout).parameters, gradients(layout, 2)
    used, fresh = ServerOptimizer(layout, spec), ServerOptimizer(layout, spec)
    initial = dumped(used)
    first = run(used, start, steps)
    used.load(initial)
    assert run(used, start, steps).tobytes() == first.tobytes() == run(fresh, start, steps).tobytes()


def test_the_arguments_of_a_step_are_left_alone_and_its_result_is_new() -> None:
    module = model()
    layout = layout_of(module)
    start, (gradient, other) = weights_of(module, layout).parameters, gradients(layout, 2)
    copies = start.copy(), gradient.copy()
    start.setflags(write=False)
    gradient.setflags(write=False)
    optimizer = ServerOptimizer(layout, OptimizerSpec(name="SGD", lr=0.5))
    following = optimizer.step(start, gradient)
    kept = following.copy()
    optimizer.step(following, other)
    assert np.array_equal(start, copies[0])
    assert np.array_equal(gradient, copies[1])
    assert np.array_equal(following, kept)
    np.testing.assert_allclose(following, start - 0.5 * gradient, rtol=1e-6, atol=1e-6)


def test_a_step_in_place_clips_in_the_gradients_own_memory() -> None:
    module = model()
    layout = layout_of(module)
    start, (gradient,) = weights_of(module, layout).parameters, gradients(layout, 1)
    rules, spec, given = StepRules(clip_norm=0.5), OptimizerSpec(name="SGD", lr=0.5), gradient.copy()
    expected = ServerOptimizer(layout, spec, rules).step(start, gradient)
    assert np.array_equal(gradient, given) and np.linalg.norm(given) > 1
    found = ServerOptimizer(layout, spec, rules).step(start, gradient, in_place=True)
    assert found is start and found.tobytes() == expected.tobytes()
    assert np.linalg.norm(gradient) == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adafactor"])
def test_a_large_step_tells_of_its_parameters_in_order_once_they_are_done(name: str) -> None:
    layout = layout_of(nn.Linear(1024, 2100))  # three buckets
    start, steps = np.ones(layout.parameters, np.float32), gradients(layout, 3)
    optimizer, other = (ServerOptimizer(layout, OptimizerSpec(name=name)) for _ in range(2))
    vector = start.copy()
    for gradient in steps:
        told: list[Vector] = []
        vector = optimizer.step(
            vector, gradient, in_place=True, ready=lambda values, told=told: told.append(values.copy())
        )
        start = other.step(start, gradient)
        assert np.concatenate(told).tobytes() == vector.tobytes() == start.tobytes()
        assert len(told) == (1 if name == "Adafactor" else len(layout.buckets))
    assert dumped(optimizer) == dumped(other)


@pytest.mark.parametrize("arguments", [{}, {"lr": 0.25}])
def test_the_rate_is_scaled_whether_given_or_default(arguments: dict[str, Any]) -> None:
    module = model()
    layout = layout_of(module)
    start, (gradient,) = weights_of(module, layout).parameters, gradients(layout, 1)
    once = ServerOptimizer(layout, OptimizerSpec(name="SGD", **arguments)).step(start, gradient)
    four = ServerOptimizer(layout, OptimizerSpec(name="SGD", **arguments), StepRules(lr_factor=4)).step(start, gradient)
    np.testing.assert_allclose(four - start, 4 * (once - start), rtol=1e-3, atol=1e-6)


def test_arguments_that_torch_refuses_together_are_an_error_of_the_specification() -> None:
    spec = OptimizerSpec(name="ASGD", lr=1e8, lambd=1e8, alpha=1e8)
    with pytest.raises(SpecError, match="ASGD refuses its arguments"):
        ServerOptimizer(layout_of(model()), spec)


def test_an_optimizer_over_nothing_can_be_made_to_have_its_imports_done() -> None:
    empty = np.zeros(0, np.float32)
    assert ServerOptimizer(Layout(()), OptimizerSpec()).step(empty, empty).shape == (0,)


def test_vectors_of_another_length_are_refused() -> None:
    layout = layout_of(model())
    good, short = np.zeros(layout.parameters, np.float32), np.zeros(layout.parameters - 1, np.float32)
    optimizer = ServerOptimizer(layout, OptimizerSpec())
    for parameters, gradient in ((good, short), (short, good), (short, short)):
        with pytest.raises(ShapeError):
            optimizer.step(parameters, gradient)


def test_a_damaged_state_is_refused_and_changes_nothing() -> None:
    layout = layout_of(model())
    optimizer = ServerOptimizer(layout, OptimizerSpec(name="Adam"))
    run(optimizer, np.zeros(layout.parameters, np.float32), gradients(layout, 2))
    blob = dumped(optimizer)
    for damaged in (b"", blob[:7], blob[:100], blob[:-1], b"\xff" * 8 + blob[8:], blob.replace(b"scalars", b"skalars")):
        with pytest.raises(ArtifactError, match="earlier checkpoint"):
            optimizer.load(damaged)
    assert dumped(optimizer) == blob


@pytest.mark.parametrize(
    ("name", "module"), [("SGD", model()), ("Adam", nn.Linear(2, 2))], ids=["other optimizer", "other model"]
)
def test_the_state_of_something_else_is_refused(name: str, module: nn.Module) -> None:
    layout = layout_of(model())
    stepped = ServerOptimizer(layout, OptimizerSpec(name="Adam"))
    run(stepped, np.zeros(layout.parameters, np.float32), gradients(layout, 1))
    other = ServerOptimizer(layout_of(module), OptimizerSpec(name=name))
    before = dumped(other)
    with pytest.raises(ArtifactError, match=r"state is that of (Adam|another model)"):
        other.load(dumped(stepped))
    assert dumped(other) == before


def test_the_state_of_an_optimizer_that_works_tensor_by_tensor_is_refused_by_another_number_of_them() -> None:
    blob = dumped(ServerOptimizer(layout_of(model()), OptimizerSpec(name="Adafactor")))
    with pytest.raises(ArtifactError, match="state is that of Adafactor over"):
        ServerOptimizer(layout_of(nn.Linear(2, 2)), OptimizerSpec(name="Adafactor")).load(blob)


def test_the_state_holds_no_pickle() -> None:
    layout = layout_of(model())
    optimizer = ServerOptimizer(layout, OptimizerSpec(name="SGD", momentum=0.9))
    run(optimizer, np.zeros(layout.parameters, np.float32), gradients(layout, 1))
    blob = dumped(optimizer)
    length = int.from_bytes(blob[:8], "little")
    assert blob[8:9] == b"{"  # a JSON header, then nothing but the momentum
    assert len(blob) == 8 + length + 4 * layout.parameters


def test_steps_are_fused_where_that_is_wanted_and_torch_has_a_kernel_for_the_cpu() -> None:
    parameter = nn.Parameter(torch.ones(3))
    for name in catalog().optimizers:
        known = "fused" in inspect.signature(getattr(torch.optim, name).__init__).parameters
        assert known == (name in FUSED)
        for fused in (True, False):
            made = build_optimizer(OptimizerSpec(name=name, lr=0.1), EVERY_STEP_ALIKE, [parameter], [True], fused)
            assert bool(made.param_groups[0].get("fused")) == (fused and known)


@pytest.mark.parametrize(("name", "arguments"), [one for one in VARIANTS if one[0] in FUSED], ids=str)
def test_fused_steps_are_those_of_torchs_plain_optimizer_but_for_their_last_bits(
    name: str, arguments: dict[str, Any]
) -> None:
    spec, rules = OptimizerSpec(name=name, **arguments), StepRules(decay="matrices")
    ends = []
    for fused in (False, True):
        parameters = [*model().parameters()]
        optimizer = build_optimizer(spec, rules, parameters, [rules.decays(p.shape) for p in parameters], fused)
        torch.manual_seed(1)
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        ends.append(parameters)
    for plain, found, start in zip(*ends, model().parameters(), strict=True):
        torch.testing.assert_close(found, plain, rtol=1e-5, atol=1e-6)
        assert not torch.equal(found, start)
