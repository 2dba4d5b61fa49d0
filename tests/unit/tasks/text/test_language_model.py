"""A language model as a task: windows of a text, and a loss for each symbol."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import layout_of, weights_of
from computeshare.tasks.text.language_model import LanguageModel
from computeshare.tasks.text.texts import TextSplit, vocabulary_of

ARGS = GptArgs(n_layer=1, n_head=2, n_embd=8, block_size=5)
TASK = LanguageModel("tinyshakespeare", ARGS)


def test_windows_lie_end_to_end_and_their_targets_one_symbol_later() -> None:
    split = TextSplit(np.arange(20, dtype=np.uint8), 5)
    assert len(split) == 3  # the fourth window's last target would lie beyond the end
    symbols, targets = split.batch(np.array([2, 0]))
    assert symbols.tolist() == [[10, 11, 12, 13, 14], [0, 1, 2, 3, 4]]
    assert targets.tolist() == [[11, 12, 13, 14, 15], [1, 2, 3, 4, 5]]
    assert symbols.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize(("characters", "windows"), [(0, 0), (5, 0), (6, 1), (10, 1), (11, 2)])
def test_a_window_needs_the_symbol_after_it(characters: int, windows: int) -> None:
    assert len(TextSplit(np.zeros(characters, np.uint8), 5)) == windows


def test_a_score_is_the_mean_loss_of_every_symbol_in_batches_of_any_size() -> None:
    instance = TASK.on_noise(37)
    weights = weights_of(instance.module, instance.layout)
    found = [score(instance, weights, batch) for batch in (0, 8, 37)]
    symbols, targets = instance.split.batch(np.arange(37))
    expected = functional.cross_entropy(instance.module(symbols).flatten(0, 1), targets.flatten()).item()
    assert [one.loss for one in found] == pytest.approx([expected] * 3, rel=1e-6)
    assert all(one.metrics == {} and one.samples == 37 for one in found)


def test_smoothed_labels_change_the_training_loss_alone() -> None:
    instance = TASK.on_noise(4)
    smooth = LanguageModel("tinyshakespeare", ARGS, label_smoothing=0.2)
    for parameter in instance.module.parameters():
        nn.init.normal_(parameter)
    batch = instance.split.batch(np.arange(4))
    assert TASK.loss(instance.module, batch).item() != pytest.approx(smooth.loss(instance.module, batch).item())
    assert smooth.sums(instance.module, batch)["loss"].item() / 4 == pytest.approx(
        TASK.loss(instance.module, batch).item(), rel=1e-6
    )


def test_the_layout_is_known_without_the_weights() -> None:
    assert TASK.layout() == layout_of(TASK.module(0))


def test_the_seed_decides_the_initial_weights() -> None:
    first, again, other = (TASK.module(seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["symbols.weight"], other["symbols.weight"])


def test_long_contexts_are_scored_in_small_batches() -> None:
    assert LanguageModel("tinyshakespeare", GptArgs(block_size=64)).scored_at_once == 256
    assert LanguageModel("tinyshakespeare", GptArgs(block_size=8192)).scored_at_once == 2


def test_unknown_characters_have_no_symbol() -> None:
    assert vocabulary_of("tinyshakespeare", None).encode("\nA\u00e9z").tolist() == [0, 13, 64]


def test_the_code_that_is_told_to_users_builds_the_same_module() -> None:
    made: dict[str, nn.Module] = {}
    exec(TASK.usage.build, made)
    assert layout_of(made["module"]) == layout_of(TASK.module(0))
