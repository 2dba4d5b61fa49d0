from pathlib import Path

import numpy as np
import pytest
import torch

from computeshare.bundles.store import BundleStore
from computeshare.datasets import arrays
from computeshare.datasets.prepared import quiet
from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.own_data import DatasetFacts
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import ALIGNMENT, weights_of
from computeshare.tasks.own.arrays import ArrayClassification
from computeshare.tasks.own.files import OwnData


@pytest.fixture
def own(tmp_path: Path) -> OwnData:
    source = np.random.default_rng(0)
    np.savez(tmp_path / "in.npz", x=source.normal(7, 3, (60, 2, 3)), y=np.arange(60) % 3)
    made = arrays.prepare(tmp_path / "in.npz", tmp_path / "out", 0, quiet)
    store = BundleStore(tmp_path / "bundles")
    about = {"kind": "arrays", "bundle": store.add(made.folder).digest}
    return OwnData(DatasetFacts.model_validate(made.sizes.model_dump(mode="json") | about), store)


def test_batches_are_standardised_and_a_model_is_scored_by_class(own: OwnData) -> None:
    instance = ArrayClassification(own, "mlp").instance(0, "train", Path())
    inputs, targets = instance.split.batch(np.arange(54))
    assert inputs.shape == (54, 2, 3) and inputs.dtype == torch.float32 and targets.dtype == torch.int64
    assert abs(float(inputs.mean())) < 1e-4 and float(inputs.std()) == pytest.approx(1, rel=0.01)
    tested = ArrayClassification(own, "mlp").instance(0, "test", Path())
    found = score(tested, weights_of(instance.module, instance.layout))
    assert found.samples == 6 and found.classes and found.classes.support == (2, 2, 2)


def test_batches_lie_in_memory_as_torchs_own(own: OwnData) -> None:
    split = ArrayClassification(own, "mlp").open("train", Path())
    inputs = [split.batch(np.arange(count))[0] for count in range(1, 50)]  # all are kept, each at its own place
    assert {one.data_ptr() % ALIGNMENT for one in inputs} == {0}


def test_noise_has_the_form_of_the_data(own: OwnData) -> None:
    inputs, targets = ArrayClassification(own, "mlp").noise(5, 0).batch(np.arange(5))
    assert inputs.shape == (5, 2, 3) and targets.max() < 3


def test_only_the_facts_are_needed_to_build_the_model(own: OwnData) -> None:
    task = ArrayClassification(OwnData(own.facts), "mlp")
    assert task.layout().parameters == 6 * 128 + 128 + 128 * 64 + 64 + 64 * 3 + 3
    with pytest.raises(DatasetError, match="are not at hand here"):
        task.open("train", Path())


def test_files_of_another_form_than_the_facts_are_refused(own: OwnData) -> None:
    other = own.facts.model_copy(update={"classes": ("0", "1")})
    with pytest.raises(DatasetError, match="add the data set again"):
        ArrayClassification(OwnData(other, own.bundles), "mlp").open("train", Path())
    fewer = own.facts.model_copy(update={"train": 50})
    with pytest.raises(DatasetError, match="has 54 samples, not 50"):
        ArrayClassification(OwnData(fewer, own.bundles), "mlp").open("train", Path())
