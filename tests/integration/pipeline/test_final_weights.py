"""Whole jobs of models that are hard to split end with the weights of one process."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.registry import task_of
from tests.support.chain_runs import FIELDS, PIPELINE, Run, apart, digests, final_weights, finish, holders
from tests.support.job_reducer import Job, forked
from tests.support.residual import Residual
from tests.support.stage_seats import Seat, drawn

GPT = {"n_layer": 4, "n_head": 2, "n_embd": 32, "block_size": 16}
MODELS: dict[str, dict[str, Any]] = {
    "residual": {},
    "resnet18": {"model": "resnet18", "input": [3, 16, 16], "rounds": 3, "accumulate": 2, "micro_batches_per_round": 1},
    "gpt": {"dataset": "tinyshakespeare", "model": "gpt", "model_args": GPT},
}
SPLITS: dict[str, list[list[str]]] = {
    "residual": [["layers.2"], ["layers.1", "layers.3"]],
    "resnet18": [["layer3.0"], ["layer2.0", "layer4.0"]],
    "gpt": [[], []],
}
"""For two and for three stages; none: the job chooses."""


def kill(job: Job, version: int, seats: list[Seat], add: Callable[[], None]) -> None:
    """Have two of the workers that hold stages die in mid-run, each after another has come."""
    if version in (1, 2):
        add()
        next(seat for seat in seats if seat.is_alive and seat.worker in holders(job)).die()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", MODELS)
def test_two_and_three_stages_end_with_the_weights_of_one_process(
    name: str,
    start: Callable[..., Job],
    redis_url: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The same bits for two and for three, whose workers die; those of one process too, where no weights are tied
    and no cut separates the uses of a value that has three: their gradients then add up in another order.
    """
    data: Path | None = request.getfixturevalue("shakespeare_dir") if name == "gpt" else None
    build = Residual if name == "residual" else None
    if build:
        monkeypatch.setattr(ImageClassification, "module", drawn(build))
    fields = FIELDS | {"optimizer": None} | MODELS[name]
    alone = start(**fields, strategy={"kind": "sync"})
    task = task_of(alone.spec)
    alone.finish(alone.hand("one", task.instance(alone.spec.seed, "train", data or Path())))
    expected, ends = final_weights(alone), {digests(alone)[-1]} if name != "gpt" else set()
    for stages, split in enumerate(SPLITS[name], 2):
        staged = PIPELINE | {"stages": stages} | ({"split": split} if split else {})
        job = start(**fields, strategy=staged)
        dying = partial(kill, job) if stages == 3 else None
        finish(job, redis_url, stages, dying, 2, data=data, build=build)  # the third may have nothing to speed up
        far = apart(final_weights(job), expected)
        assert max(far.values()) < 1e-5, max(far, key=lambda entry: far[entry])
        ends.add(digests(job)[-1])
    assert len(ends) == 1


@pytest.mark.slow
def test_clipping_across_stages_is_that_of_one_process(start: Callable[..., Job], run: Run) -> None:
    ends = {}
    for clip_norm in (0.0, 0.1):
        fields: dict[str, Any] = FIELDS | {"optimizer": None, "clip_norm": clip_norm}
        alone = start(**fields, strategy={"kind": "sync"})
        ends[clip_norm] = alone.finish(alone.hand("one"))
        assert digests(run(2, **fields))[-1].startswith(ends[clip_norm])
    assert len({*ends.values()}) == 2, "the gradients are longer than 0.1"


@pytest.mark.slow
def test_a_fork_of_a_pipeline_goes_on_as_one_of_another_strategy(
    start: Callable[..., Job], run: Run, redis_url: str
) -> None:
    """With the parent's weights and its optimizer's state, whoever made and whoever takes them."""
    fields: dict[str, Any] = FIELDS | {"optimizer": None}
    parent = run(2, **fields)
    parent.reducer.close()
    forks: list[tuple[dict[str, Any], bool]] = [(PIPELINE, True), ({"kind": "sync"}, True), ({"kind": "sync"}, False)]
    ends = []
    for strategy, with_state in forks:
        job = forked(start, parent, 3, with_state, **fields, strategy=strategy)
        assert job.reducer.advance()
        assert digests(parent)[2].startswith(job.digest())
        if strategy is PIPELINE:
            finish(job, redis_url, workers=2)
        else:
            job.finish(job.hand("one"))
        ends.append(digests(job)[-1])
    assert ends[0] == ends[1] != ends[2]
