"""Data sets of Hugging Face's library, made here: folders that `save_to_disk` wrote, and its cache."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Image, load_dataset
from starlette.testclient import TestClient

from computeshare.errors import DatasetError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.jobspec.tasks.images import ImageTask
from computeshare.tasks.images.datasets import hugging_face
from computeshare.tasks.registry import task_of
from tests.support.hugging_face_sets import NAMES, digits, divided

pytestmark = pytest.mark.slow

SPEC: dict[str, Any] = {"dataset": "hf:lab/digits", "model": "mlp", "queue": "nobody", "epochs": 3}


def saved(data: Dataset | DatasetDict, data_dir: Path) -> Path:
    """The data set as the folder that takes the place of `hf:lab/digits`."""
    folder = hugging_face.folder("hf:lab/digits", data_dir)
    shutil.rmtree(folder, ignore_errors=True)
    data.save_to_disk(folder)
    return folder


def spec_of(data_dir: Path, **args: Any) -> JobSpec:
    """The specification that a control plane with this data folder stores."""
    found = hugging_face.completed("hf:lab/digits", HubArgs(**args), data_dir)
    return JobSpec.model_validate(SPEC | {"dataset_args": found.model_dump(mode="json")})


def test_a_folder_is_trained_on_as_it_was_saved(tmp_path: Path) -> None:
    data = divided()
    saved(data, tmp_path)
    spec = spec_of(tmp_path)
    assert isinstance(spec.task, ImageTask)
    assert (spec.facts.train, spec.facts.test, spec.task.shape, spec.task.images.classes) == (300, 60, (1, 8, 8), 10)
    for part in ("train", "test"):
        instance = task_of(spec).instance(0, part, tmp_path)
        images, labels = instance.split.batch(np.arange(len(data[part])))
        pixels = np.stack([np.asarray(one) for one in data[part]["picture"]])
        assert np.allclose(images[:, 0].numpy() * 0.25 + 0.5, pixels / 255, atol=1e-6)
        assert labels.tolist() == data[part]["digit"]


def test_a_classifier_learns_from_it_and_names_its_classes(tmp_path: Path) -> None:
    data = divided()
    saved(data, tmp_path)
    spec = spec_of(tmp_path)
    instance = task_of(spec).instance(0, "train", tmp_path)
    optimizer = torch.optim.Adam(instance.module.parameters(), lr=0.003)
    for _ in range(60):
        loss = instance.task.loss(instance.module, instance.split.batch(np.arange(300)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    data["test"][0]["picture"].save(tmp_path / "one.png")
    guess = instance.task.guess(instance.module.eval(), tmp_path / "one.png", 1)[0]
    assert guess.name == NAMES[data["test"][0]["digit"]]


def test_an_undivided_set_gives_a_tenth_to_the_test(tmp_path: Path) -> None:
    saved(digits(0, 200), tmp_path)
    spec = spec_of(tmp_path)
    assert (spec.facts.train, spec.facts.test) == (180, 20)
    parts = [task_of(spec).instance(0, part, tmp_path).split for part in ("train", "test")]
    seen = [split.batch(np.arange(len(split)))[1].tolist() for split in parts]
    assert sorted(seen[0] + seen[1]) == sorted(digits(0, 200)["digit"])


def test_images_are_resized_to_the_jobs_input(tmp_path: Path) -> None:
    saved(divided(), tmp_path)
    spec = JobSpec.model_validate(
        {**spec_of(tmp_path).model_dump(mode="json"), "model": "lenet5", "input": [1, 28, 28]}
    )
    images, _ = task_of(spec).instance(0, "test", tmp_path).split.batch(np.arange(3))
    assert images.shape == (3, 1, 28, 28)


@pytest.mark.parametrize(
    ("more", "args", "message"),
    [
        ({"thumb": Image()}, {}, "several columns of images: set dataset_args.image to one of picture, thumb"),
        ({"kind": ClassLabel(names=NAMES)}, {}, "set dataset_args.label to one of digit, kind"),
        ({}, {"image": "photo"}, "photo is no column of images: set dataset_args.image to one of picture"),
        ({}, {"train_split": "training"}, "no split training: set dataset_args.train_split to one of train, test"),
        ({}, {"test_split": "train"}, "train cannot be both splits"),
    ],
)
def test_what_is_ambiguous_or_missing_is_named(tmp_path: Path, more: Any, args: Any, message: str) -> None:
    saved(DatasetDict(train=digits(0, 20, **more), test=digits(20, 5, **more)), tmp_path)
    with pytest.raises(DatasetError, match=message):
        spec_of(tmp_path, **args)


def test_columns_and_splits_may_be_chosen(tmp_path: Path) -> None:
    more = {"thumb": Image()}
    saved(DatasetDict(first=digits(0, 30, **more), second=digits(30, 20, **more)), tmp_path)
    spec = spec_of(tmp_path, image="thumb", train_split="second", test_split="first")
    assert (spec.facts.train, spec.facts.test) == (20, 30)


def test_texts_and_unlabelled_samples_are_refused(tmp_path: Path) -> None:
    saved(Dataset.from_dict({"text": ["a", "b"]}), tmp_path)
    with pytest.raises(DatasetError, match="no column of images: its columns are text"):
        spec_of(tmp_path)
    hidden = digits(0, 10).map(lambda row: {"digit": -1})
    saved(DatasetDict(train=digits(0, 20), test=hidden), tmp_path)
    with pytest.raises(DatasetError, match="split test has samples without a class"):
        spec_of(tmp_path)


def test_a_worker_with_other_data_does_not_train(tmp_path: Path) -> None:
    saved(divided(), tmp_path / "control")
    task = task_of(spec_of(tmp_path / "control"))
    with pytest.raises(DatasetError, match="is missing: copy that folder"):
        task.prepare(tmp_path / "worker")
    changed = divided()
    rows = changed["train"].to_list()
    rows[7]["digit"] = (rows[7]["digit"] + 1) % 10
    changed["train"] = Dataset.from_list(rows, changed["train"].features)
    saved(changed, tmp_path / "worker")
    with pytest.raises(DatasetError, match="other data than the job's: digest is"):
        task.prepare(tmp_path / "worker")
    assert not list(tmp_path.glob("worker/prepared/*.npy"))
    saved(divided().filter(lambda row: True), tmp_path / "worker")  # written in another way, with other files
    task.prepare(tmp_path / "worker")
    assert len(list(tmp_path.glob("worker/prepared/*.npy"))) == 4


def test_the_control_plane_finds_the_facts_out(client: TestClient, tmp_path: Path) -> None:
    saved(divided(), tmp_path / "data")
    answer = client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "one"})
    assert answer.status_code == 201, answer.text
    job = answer.json()
    assert job["rounds_total"] == 3 * 3
    args = job["spec"]["dataset_args"]
    assert (args["image"], args["label"]) == ("picture", "digit")
    assert (args["train_split"], args["test_split"]) == ("train", "test")
    assert args["facts"]["classes"] == NAMES
    saved(digits(0, 50), tmp_path / "data")
    assert client.post("/v1/jobs", json=SPEC, headers={"Idempotency-Key": "one"}).json()["id"] == job["id"]
    copied = client.post("/v1/jobs", json=job["spec"]).json()
    assert copied["spec"]["dataset_args"] == args  # the same data, not what is there now


def test_the_control_plane_says_what_is_wrong(client: TestClient, tmp_path: Path) -> None:
    saved(divided(), tmp_path / "data")
    for change, field in (
        ({"dataset_args": {"image": "photo"}}, "dataset"),
        ({"model": "lenet5"}, ""),  # too small for it
        ({"workers": {"min": 9, "max": 9}}, "workers.min"),  # known with the facts alone
        ({"dataset": "digits", "dataset_args": {}}, "dataset_args"),
        ({"dataset": "hf:../secrets"}, "dataset"),
    ):
        answer = client.post("/v1/jobs", json=SPEC | change)
        assert answer.status_code == 422, answer.text
        assert any(field in error["field"] for error in answer.json()["errors"]), answer.text


def test_the_form_copies_such_a_job_and_says_what_is_wrong(client: TestClient, tmp_path: Path) -> None:
    saved(divided(), tmp_path / "data")
    job = client.post("/v1/jobs", json=SPEC).json()
    assert "<option selected>hf:lab/digits</option>" in client.get("/new", params={"from": job["id"]}).text
    answer = client.post("/new", data={"model": "mlp", "more": '{"dataset": "hf:lab/other"}'}, follow_redirects=False)
    assert answer.status_code == 422
    assert "hf:lab/other cannot be found" in answer.text


def run_offline(home: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code where the Hub's library has `home` as its cache and no network."""
    environment = os.environ | {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)


COMPLETE = """
import json, sys
from pathlib import Path
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.tasks.images.datasets import hugging_face
from computeshare.errors import DatasetError
try:
    args = hugging_face.completed("hf:lab/digits", HubArgs(), Path("data"))
    assert "torch" not in sys.modules
    print(args.model_dump_json())
except DatasetError as error:
    print(error)
"""


def test_without_a_network_the_error_says_what_to_do(tmp_path: Path) -> None:
    told = run_offline(tmp_path, COMPLETE).stdout
    assert "hf:lab/digits cannot be found" in told
    assert "HF_HOME" in told and f"copy a folder that save_to_disk wrote to {Path('data/hf/lab/digits')}" in told


def cached(home: Path, tmp_path: Path, revision: str) -> None:
    """Put the data set into the Hub library's cache, as if it had been loaded from the Hub in this revision."""
    files = {}
    for split, rows in divided().items():
        files[split] = str(tmp_path / f"{split}.parquet")
        rows.to_parquet(files[split])
    load_dataset("parquet", data_files=files, cache_dir=str(tmp_path / "cache"))
    source = next((tmp_path / "cache").rglob("dataset_info.json")).parent
    target = home / "datasets" / "lab___digits" / "default" / "0.0.0" / revision
    target.mkdir(parents=True)
    for path in source.iterdir():
        shutil.copy(path, target / path.name.replace("parquet-", "digits-"))
    about = json.loads((target / "dataset_info.json").read_text())
    about |= {"dataset_name": "digits", "config_name": "default"}
    (target / "dataset_info.json").write_text(json.dumps(about))


def test_the_librarys_cache_serves_without_a_network(tmp_path: Path) -> None:
    home, revision = tmp_path / "hf", "5" * 40
    cached(home, tmp_path, revision)
    found = run_offline(home, COMPLETE)
    assert found.stdout.startswith("{"), found.stdout + found.stderr
    args = json.loads(found.stdout)
    assert (args["facts"]["revision"], args["facts"]["train"], args["facts"]["shape"]) == (revision, 300, [1, 8, 8])
    spec = JobSpec.model_validate(SPEC | {"dataset_args": args})
    for wanted, told in ((spec, "60"), (_with_revision(spec, "6" * 40), "the job's is " + "6" * 40)):
        code = (
            "from pathlib import Path\nfrom computeshare.jobspec.spec import JobSpec\n"
            "from computeshare.tasks.registry import task_of\n"
            f"spec = JobSpec.model_validate_json({wanted.model_dump_json()!r})\n"
            f"print(len(task_of(spec).instance(0, 'test', Path({str(tmp_path)!r})).split))"
        )
        done = run_offline(home, code)
        assert told in done.stdout + done.stderr, done.stdout + done.stderr


def _with_revision(spec: JobSpec, revision: str) -> JobSpec:
    document = spec.model_dump(mode="json")
    document["dataset_args"]["facts"]["revision"] = revision
    return JobSpec.model_validate(document)
