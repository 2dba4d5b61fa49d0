"""Users' data sets: added by the client, listed, shown, trained on by jobs, removed."""

import io
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from computeshare import ComputeShare
from computeshare.bundles.store import BundleStore
from computeshare.client.api.models import Problem
from computeshare.errors import DatasetError
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks.images.datasets.splits import ImageSplit
from computeshare.tasks.registry import task_of
from tests.support.own_images import make_images
from tests.support.served_api import serving

JOB = {"model": "mlp", "rounds": 2, "micro_batch": 4}


@pytest.fixture
def session(settings: Settings) -> Iterator[ComputeShare]:
    with serving(settings) as (url, _), ComputeShare(url, "secret") as cs:
        yield cs


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return make_images(tmp_path / "in", ["dark", "light"], 20)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "poem.txt"
    path.write_text("one two three\n" * 50)
    return path


def test_images_are_added_and_a_job_gets_their_facts(session: ComputeShare, settings: Settings, images: Path) -> None:
    added = session.datasets.add("birds", images, size=16)
    facts = added.dataset["facts"]
    assert (facts["train"], facts["test"], facts["shape"], facts["classes"]) == (36, 4, [3, 16, 16], ["dark", "light"])
    assert [one["name"] for one in session.datasets.list()] == ["birds"]
    job = session.jobs.create(dataset="birds", augment=["flip", "crop"], **JOB)
    assert job.spec["data"] == {**facts, "kind": "images", "bundle": added.dataset["bundle"]}
    assert session.datasets.show("birds")["jobs"] == [job.id]
    task = task_of(JobSpec.model_validate(job.spec), BundleStore(settings.bundles_dir))
    split = task.open("train", Path())
    assert isinstance(split, ImageSplit)
    batch, labels = split.batch(np.arange(36), np.arange(36, dtype=np.uint64))
    assert batch.shape == (36, 3, 16, 16)
    assert sorted(labels.tolist()) == [0] * 18 + [1] * 18
    assert isinstance(split.images.base, np.memmap)  # not in memory


def test_the_same_data_may_be_added_again_but_no_other_by_its_name(session: ComputeShare, images: Path) -> None:
    first = session.datasets.add("birds", images, size=8).dataset
    assert session.datasets.add("birds", images, size=8).dataset == first
    with pytest.raises(Problem, match="already a data set birds, with other data"):
        session.datasets.add("birds", images, size=12)
    with pytest.raises(DatasetError, match="knows already"):
        session.datasets.add("MNIST", images)


def test_a_data_set_that_a_job_uses_is_not_removed(session: ComputeShare, settings: Settings, images: Path) -> None:
    added = session.datasets.add("birds", images, size=8).dataset
    job = session.jobs.create(dataset="birds", name="my job", **JOB)
    with pytest.raises(Problem, match=rf"my job \({job.id}\)") as refused:
        session.datasets.remove("birds")
    assert refused.value.status == 409
    job.cancel()
    session.datasets.remove("birds")
    assert session.datasets.list() == []
    assert BundleStore(settings.bundles_dir).has(added["bundle"])  # the cancelled job can be forked
    with pytest.raises(Problem, match=r"unknown dataset 'birds'; allowed: .*mnist.*; your own: none"):
        session.jobs.create(dataset="birds", **JOB)


def test_files_that_no_job_names_are_removed_with_the_data_set(
    session: ComputeShare, settings: Settings, images: Path
) -> None:
    added = session.datasets.add("birds", images, size=8).dataset
    session.datasets.add("again", images, size=8)
    session.datasets.remove("birds")
    assert BundleStore(settings.bundles_dir).has(added["bundle"])
    session.datasets.remove("again")
    assert not BundleStore(settings.bundles_dir).has(added["bundle"])


def test_a_job_keeps_its_data_whatever_the_name_means_later(session: ComputeShare, images: Path) -> None:
    session.datasets.add("birds", images, size=8)
    job = session.jobs.create(dataset="birds", **JOB)
    job.cancel()
    session.datasets.remove("birds")
    session.datasets.add("birds", images, size=12)
    assert session.jobs.get(job.id).spec["data"]["shape"] == [3, 8, 8]
    again = session.jobs.create(dataset="birds", **JOB)
    assert again.spec["data"]["shape"] == [3, 12, 12]


def test_text_and_arrays_are_added(session: ComputeShare, text: Path, tmp_path: Path) -> None:
    poem = session.datasets.add("poem", text).dataset["facts"]
    assert (poem["tokens"], poem["symbols"], poem["train"] + poem["test"]) == ("characters", 9, 700)
    job = session.jobs.create(dataset="poem", model="gpt", rounds=1, model_args={"block_size": 8})
    assert job.spec["model_args"]["block_size"] == 8
    np.savez(tmp_path / "table.npz", x=np.random.default_rng(0).normal(size=(40, 5)), y=np.arange(40) % 2)
    assert session.datasets.add("table", tmp_path / "table.npz").dataset["facts"]["shape"] == [5]
    session.jobs.create(dataset="table", **JOB)
    with pytest.raises(Problem, match="takes images, but table has arrays"):
        session.jobs.create(dataset="table", model="lenet5", rounds=1)


def test_a_data_set_needs_its_files_and_fitting_facts(client: TestClient) -> None:
    body = {"name": "birds", "kind": "files", "bundle": "sha256:" + "0" * 64, "facts": {"train": 1, "test": 0}}
    answer = client.post("/v1/datasets", json=body)
    assert answer.status_code == 422
    assert "not complete here" in answer.text
    answer = client.post("/v1/datasets", json={**body, "kind": "images"})
    assert answer.status_code == 422
    assert "images need a shape" in answer.text
    assert client.post("/v1/datasets", json={**body, "name": "mnist"}).status_code == 422
    assert client.get("/v1/datasets/none").status_code == 404
    assert client.delete("/v1/datasets/none").status_code == 404


def test_samples_are_shown(session: ComputeShare, images: Path, text: Path) -> None:
    session.datasets.add("birds", images, size=16)
    session.datasets.add("poem", text)
    picture = Image.open(io.BytesIO(session.client.datasets.picture("birds", "train", 20)))
    assert (picture.format, picture.size) == ("PNG", (16, 16))
    assert np.asarray(picture).mean() > 150
    for name, split, index in (("birds", "test", 4), ("birds", "other", 0), ("poem", "train", 0)):
        with pytest.raises(Problem):
            session.client.datasets.picture(name, split, index)


def test_pages_show_data_sets_and_the_form_offers_them(client: TestClient, settings: Settings, images: Path) -> None:
    assert "No data sets yet" in client.get("/datasets").text
    with serving(settings) as (url, _), ComputeShare(url, "secret") as cs:
        cs.datasets.add("birds", images, size=16)
        cs.datasets.add("notes", images, kind="files")
    page = client.get("/datasets").text
    assert "/v1/datasets/birds/samples/train/0" in page
    assert "dark/0000.jpg" in page
    form = client.get("/new?dataset=birds").text
    assert "<option selected>birds</option>" in form
    assert "parameters." in form
    checked = client.post("/new/check", data={"dataset": "notes", "model": "mlp", "strategy.kind": "sync"})
    assert "for recipes alone" in checked.text


def test_a_deleted_data_set_is_named_in_the_form(client: TestClient) -> None:
    checked = client.post("/new/check", data={"dataset": "gone", "model": "mlp", "strategy.kind": "sync"})
    assert "unknown dataset &#39;gone&#39;" in checked.text
