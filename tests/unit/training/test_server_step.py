"""A reducer's steps, which write over the version before where they may, give what a replay's give."""

import numpy as np
import pytest

from computeshare.jobspec.spec import JobSpec
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.server_step import ServerModel, ServerStep

LAYOUT = Layout.build(iter([("w", (40, 30), "parameter"), ("b", (5,), "buffer"), ("n", (), "counter")]))
RNG = np.random.default_rng(0)
START = RNG.standard_normal(1200).astype(np.float32)
UPDATES = [RNG.standard_normal(1200).astype(np.float32) for _ in range(4)]
BUFFERS = np.ones(5, np.float32)


def server_step(down: str, ema: float = 0) -> ServerStep:
    spec = {"ema": ema, "dataset": "digits", "model": "mlp", "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9}}
    return ServerStep(JobSpec.model_validate({**spec, "codec": {"up": "float32", "down": down}}), LAYOUT)


def begun(some: ServerStep, read_only: bool = False) -> ServerModel:
    parameters = START.copy()
    parameters.setflags(write=not read_only)
    return some.load(Weights(parameters, BUFFERS, np.zeros(1, np.int64)), b"")


@pytest.mark.parametrize("down", ["float32", "float16", "int8", "int4", "topk", "lowrank4"])
def test_moving_gives_the_weights_that_stepping_gives(down: str) -> None:
    reducer, replay = server_step(down), server_step(down)
    model, expected = begun(reducer), begun(replay)
    for version, update in enumerate(UPDATES, 1):
        expected = replay.step(version, expected, [(update, BUFFERS)], [8])
        master = reducer.next_parameters(version, model, reducer.combine(lambda _, one=update: [one], [8]))
        full = Weights(master, *reducer.next_buffers(BUFFERS, model.published))
        parts, model = reducer.publish(full, model.published, version)
        assert [*parts]
        assert LAYOUT.digest(model.published) == LAYOUT.digest(expected.published)
        assert np.array_equal(model.master, expected.master)


@pytest.mark.parametrize("down", ["float32", "int8"])
def test_the_moving_average_is_part_of_the_state(down: str) -> None:
    reducer, replay = server_step(down, ema=0.75), server_step(down, ema=0.75)
    model, expected = begun(reducer), begun(replay)
    average = START.copy()
    for version, update in enumerate(UPDATES, 1):
        expected = replay.step(version, expected, [(update, BUFFERS)], [8])
        average += np.float32(0.25) * (expected.master - average)
        state = b"".join(bytes(part) for part in reducer.dump(model.master))
        reducer = server_step(down, ema=0.75)  # another takes over
        loaded = reducer.load(model.published, state if version % 2 else memoryview(bytearray(state)))
        master = reducer.next_parameters(version, loaded, reducer.combine(lambda _, one=update: [one], [8]))
        _, model = reducer.publish(Weights(master, BUFFERS, model.published.counters), model.published, version)
        one, other = reducer.averaged(model.published), replay.averaged(expected.published)
        assert one and other and LAYOUT.digest(one) == LAYOUT.digest(other)
        np.testing.assert_allclose(one.parameters, average, rtol=0, atol=1e-6)
    assert server_step(down).averaged(model.published) is None


@pytest.mark.parametrize(("down", "writes_over"), [("float32", True), ("float16", True), ("int8", False)])
def test_what_the_next_difference_is_from_is_not_written_over(down: str, writes_over: bool) -> None:
    some = server_step(down)
    model = begun(some)
    master = some.next_parameters(1, model, UPDATES[0])
    assert np.shares_memory(master, model.master) == writes_over
    assert np.array_equal(model.published.parameters, START) == (not writes_over)


def test_parameters_that_lie_in_a_message_are_copied() -> None:
    some = server_step("float32")
    model = begun(some, read_only=True)
    master = some.next_parameters(1, model, UPDATES[0])
    assert np.array_equal(model.master, START) and not np.array_equal(master, START)
