"""A folder of JPEGs from end to end: added by the command, fetched by a worker with nothing, trained, predicted."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from computeshare.client import Client
from computeshare.replay.replay import RecipeSource, Replay
from tests.support.control_plane import ControlPlane
from tests.support.own_images import make_images

pytestmark = pytest.mark.e2e
UP = ("--workers", "1", "--queue", "e2e")
JOB: dict[str, Any] = {
    "dataset": "tones",
    "model": "lenet5",
    "queue": "e2e",
    "micro_batch": 8,
    "micro_batches_per_round": 4,
    "epochs": 4,
    "augment": ["crop", "flip"],
    "checkpoint_every": 0,
    "evaluate_every": 0,
}


def run(plane: ControlPlane, *words: str) -> Any:
    """What a command prints as JSON."""
    command = [sys.executable, "-m", "computeshare.cli.main", *words, "--json"]
    done = subprocess.run(command, env=plane.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_folder_of_images_is_added_and_trained_on_by_a_worker_with_an_empty_home(
    plane: ControlPlane, tmp_path: Path
) -> None:
    images = make_images(tmp_path / "tones", ["dunkel", "grau", "wei\u00df"], 60, (48, 40))
    (images / "grau" / "broken.jpg").write_bytes(b"\xff\xd8 no more")
    added = run(plane, "data", "add", "tones", str(images), "--size", "32")
    assert (added["facts"]["train"], added["facts"]["test"]) == (162, 18)
    assert any("grau/broken.jpg" in remark for remark in added["remarks"])

    alone = plane.finish(plane.create(**JOB, workers={"min": 1, "max": 1}))
    empty = tmp_path / "another machine"
    with plane.worker("e2e", home=empty):
        two = plane.finish(plane.create(**JOB, workers={"min": 2, "max": 2}))
    assert two["weights_sha256"] == alone["weights_sha256"]
    assert all(worker["accepted"] for worker in plane.get(f"/v1/jobs/{two['id']}/workers")["items"])
    assert two["accuracy"] > 0.9
    assert list((empty / "bundles").glob("*/files/train/images.npy"))
    assert not list((empty / "bundles").glob("*/files/test/images.npy"))  # which no worker needs

    found = run(plane, "predict", two["id"], str(images / "wei\u00df" / "0000.jpg"), "--top", "1")
    assert found["items"][0]["classes"][0]["name"] == "wei\u00df"
    with Client(plane.url, (plane.home / "token").read_text().strip()) as client:
        replay = Replay(client, two["id"], tmp_path, recipe=RecipeSource(None, tmp_path / "replayed"))
        assert len(list(replay.run())) == two["version"]
        assert replay.verdict().outcome == "matches"
    run(plane, "data", "remove", "tones", "--yes")
    assert run(plane, "data", "list")["items"] == []


def test_a_text_of_ones_own_is_trained_on_and_continued(plane: ControlPlane, tmp_path: Path) -> None:
    poem = tmp_path / "poem.txt"
    poem.write_text("roses are red, violets are blue\n" * 60)
    run(plane, "data", "add", "poem", str(poem), "--tokens", "bytes")
    size = {"n_layer": 1, "n_head": 2, "n_embd": 32, "block_size": 16}
    job = {**JOB, "dataset": "poem", "model": "gpt", "model_args": size, "augment": [], "epochs": 2}
    done = plane.finish(plane.create(**job, optimizer={"name": "AdamW", "lr": 0.01}))
    assert done["test_loss"] < 3  # ln 256 is 5.5
    sample = plane.get(f"/v1/jobs/{done['id']}/samples")["items"][0]["text"]
    assert sample
    text = plane.http.post(f"/v1/jobs/{done['id']}/generate", json={"prompt": "roses", "characters": 10}).json()
    assert text["text"]
    assert run(plane, "generate", done["id"], "--prompt", "roses", "--tokens", "5")["text"]
