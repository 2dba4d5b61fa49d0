"""A reducer's steps, which write over the version before where they may, give what a replay's give."""

import numpy as np
import pytest

from computeshare.jobspec.spec import JobSpec
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.server_step import Held, Steps

LAYOUT = Layout.build(iter([("w", (40, 30), "parameter"), ("b", (5,), "buffer"), ("n", (), "counter")]))
RNG = np.random.default_rng(0)
START = RNG.standard_normal(1200).astype(np.float32)
UPDATES = [RNG.standard_normal(1200).astype(np.float32) for _ in range(4)]
BUFFERS = np.ones(5, np.float32)


def steps(down: str) -> Steps:
    spec = {"dataset": "digits", "model": "mlp", "optimizer": {"name": "SGD", "lr": 0.1, "momentum": 0.9}}
    return Steps(JobSpec.model_validate({**spec, "codec": {"up": "float32", "down": down}}), LAYOUT)


def begun(some: Steps, read_only: bool = False) -> Held:
    parameters = START.copy()
    parameters.setflags(write=not read_only)
    return some.load(Weights(parameters, BUFFERS, np.zeros(1, np.int64)), b"")


@pytest.mark.parametrize("down", ["float32", "float16", "int8", "topk"])
def test_moving_gives_the_weights_that_stepping_gives(down: str) -> None:
    reducer, replay = steps(down), steps(down)
    held, expected = begun(reducer), begun(replay)
    for version, update in enumerate(UPDATES, 1):
        expected = replay.step(version, expected, [(update, BUFFERS)], [8])
        master = reducer.move(held, reducer.combine(lambda _, one=update: [one], [8]))
        full = Weights(master, *reducer.others(BUFFERS, held.weights))
        parts, held = reducer.publish(full, held.weights, version)
        assert [*parts]
        assert LAYOUT.digest(held.weights) == LAYOUT.digest(expected.weights)
        assert np.array_equal(held.master, expected.master)


@pytest.mark.parametrize(("down", "writes_over"), [("float32", True), ("float16", True), ("int8", False)])
def test_what_the_next_difference_is_from_is_not_written_over(down: str, writes_over: bool) -> None:
    some = steps(down)
    held = begun(some)
    master = some.move(held, UPDATES[0])
    assert np.shares_memory(master, held.master) == writes_over
    assert np.array_equal(held.weights.parameters, START) == (not writes_over)


def test_parameters_that_lie_in_a_message_are_copied() -> None:
    some = steps("float32")
    held = begun(some, read_only=True)
    master = some.move(held, UPDATES[0])
    assert np.array_equal(held.master, START) and not np.array_equal(master, START)
