"""Scores are those of the whole split, in evaluation mode."""

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, precision_recall_fscore_support
from torch import nn
from torch.nn import functional

from computeshare.errors import ShapeError
from computeshare.tasks import metrics
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.class_counts import count_classes
from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.images.models import build
from computeshare.tasks.images.transforms import Normaliser
from computeshare.tasks.metrics import SplitScore
from computeshare.tasks.modules import layout_of, weights_of
from computeshare.tensors.layout import Weights

SHAPE = (1, 6, 6)


def split(samples: int = 37) -> ImageSplit:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 17, (samples, *SHAPE), dtype=np.uint8)
    return ImageSplit(images, rng.integers(0, 10, samples), Normaliser.build(SHAPE, 16.0, (0.5,), (0.25,)))


def score(module: nn.Module, weights: Weights, batch: int = 256, samples: int = 37) -> SplitScore:
    task = ImageClassification("digits", "mlp", SHAPE)
    return metrics.score(TaskInstance(task, module, layout_of(module), split(samples)), weights, batch)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(), nn.Flatten(), nn.Linear(64, 10), nn.Dropout()
    )


def test_a_score_is_the_mean_over_every_sample_without_dropout() -> None:
    module = model()
    layout = layout_of(module)
    result = score(module, weights_of(module, layout), batch=8)
    images, labels = split().batch(np.arange(37))
    logits = model().eval()(images)
    assert result.samples == 37
    assert result.loss == pytest.approx(functional.cross_entropy(logits, labels).item(), rel=1e-5)
    assert result.metrics["accuracy"] == (logits.argmax(1) == labels).sum().item() / 37


def test_a_batch_of_any_size_gives_the_same_score_up_to_summation_order() -> None:
    module = model()
    weights = weights_of(module, layout_of(module))
    whole, parts = score(module, weights, 0), score(module, weights, 5)
    assert (parts.metrics, parts.samples, parts.classes) == (whole.metrics, whole.samples, whole.classes)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)


def test_the_counts_by_class_are_scikit_learns() -> None:
    module = model()
    result = score(module, weights_of(module, layout_of(module)), batch=8)
    images, labels = split().batch(np.arange(37))
    predicted, counts = model().eval()(images).argmax(1).numpy(), result.classes
    assert counts and counts.names == tuple("0123456789")
    assert counts.confusion == tuple(map(tuple, confusion_matrix(labels, predicted, labels=range(10)).tolist()))
    expected = precision_recall_fscore_support(labels, predicted, labels=range(10), zero_division=np.nan)
    found = [[getattr(one, name) for one in counts.metrics] for name in ("precision", "recall", "f1", "support")]
    np.testing.assert_allclose(np.array(found, float), np.array(expected), rtol=1e-12)
    most = counts.confused[0]
    wrong = np.array(counts.confusion) - np.diag(counts.correct)
    assert most[2] == wrong[most[0], most[1]] == wrong.max() > 0
    assert sum(samples for _, _, samples in counts.confused) == wrong.sum()


def test_many_classes_have_no_matrix_but_their_most_confused_pairs() -> None:
    rng = np.random.default_rng(0)
    classes, predicted = rng.integers(0, 1000, (2, 50_000))
    predicted[:300], classes[:300] = 7, 999
    counts = count_classes(classes, predicted, 1000, None)
    assert counts.confusion is None and len(counts.confused) == 100
    assert counts.confused[0] == (999, 7, np.count_nonzero((classes == 999) & (predicted == 7)))
    assert sum(counts.support) == sum(counts.predicted) == 50_000
    assert sum(counts.correct) == np.count_nonzero(classes == predicted)
    assert len(counts.model_dump_json()) < 20_000


def test_scoring_is_repeatable_and_moves_no_statistics() -> None:
    module = model()
    layout = layout_of(module)
    weights = weights_of(module, layout)
    first = score(module, weights)
    assert score(module, weights) == first
    assert layout.digest(weights_of(module, layout)) == layout.digest(weights)


@pytest.mark.usefixtures("one_thread")
def test_the_number_of_threads_changes_no_bit() -> None:
    module = build("mlp", SHAPE, 10, 0)
    weights = weights_of(module, layout_of(module))
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(score(module, weights, 7, samples=1000))
        assert torch.get_num_threads() == threads
    assert found[0] == found[1] == found[2]


def test_the_given_weights_are_scored_not_the_modules_own(recwarn: pytest.WarningsRecorder) -> None:
    module, other = build("mlp", SHAPE, 10, 0), build("mlp", SHAPE, 10, 1)
    layout = layout_of(module)
    frozen = weights_of(other, layout)
    frozen.parameters.setflags(write=False)
    assert score(module, frozen) == score(other, frozen)
    assert score(module, weights_of(build("mlp", SHAPE, 10, 0), layout)) != score(module, frozen)
    assert not recwarn.list


def test_weights_of_another_model_are_refused() -> None:
    module, other = model(), build("mlp", SHAPE, 10, 0)
    with pytest.raises(ShapeError):
        score(module, weights_of(other, layout_of(other)))
