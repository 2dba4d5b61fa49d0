"""A small gpt on tinyshakespeare from end to end: the same bits for one worker and for two, scored in nats."""

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from computeshare.client import Client
from computeshare.replay.replay import Replay
from tests.support.control_plane import ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "2", "--queue", "e2e")
GPT: dict[str, Any] = {
    "dataset": "tinyshakespeare",
    "model": "gpt",
    "model_args": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 32, "dropout": 0.1},
    "queue": "e2e",
    "micro_batch": 8,
    "micro_batches_per_round": 4,
    "rounds": 40,
    "checkpoint_every": 0,
    "evaluate_every": 20,
    "optimizer": {"name": "AdamW", "lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.1},
    "schedule": {"name": "cosine", "warmup": 5, "final": 0.1},
    "clip_norm": 1.0,
    "decay": "matrices",
}


@pytest.fixture(scope="module")
def data(plane: ControlPlane, shakespeare_dir: Path) -> Path:
    """The control plane's folder of data sets, with the text in it."""
    folder = plane.home / "data"
    shutil.copytree(shakespeare_dir / "tinyshakespeare", folder / "tinyshakespeare")
    return folder


def test_one_worker_and_two_end_with_the_same_bits_and_the_score_is_in_nats(plane: ControlPlane, data: Path) -> None:
    alone = plane.finish(plane.create(**GPT, workers={"min": 1, "max": 1}))
    two = plane.finish(plane.create(**GPT, workers={"min": 2, "max": 2}))
    assert two["weights_sha256"] == alone["weights_sha256"]
    assert all(worker["accepted"] for worker in plane.get(f"/v1/jobs/{two['id']}/workers")["items"])

    assert (two["metric"], two["accuracy"], two["best_version"]) == ("loss", None, 40)
    assert 2 < two["test_loss"] == two["best_loss"] < 3.5  # ln 65 is 4.17
    assert two["perplexity"] == pytest.approx(math.exp(two["test_loss"]))
    metrics = plane.get(f"/v1/jobs/{two['id']}/metrics")
    assert [point["version"] for point in metrics["perplexity"]] == [20, 40]
    assert metrics["test_loss"][0]["value"] > metrics["test_loss"][1]["value"]

    samples = [plane.get(f"/v1/jobs/{one['id']}/samples")["items"] for one in (alone, two)]
    assert [(sample["version"], len(sample["text"])) for sample in samples[0]] == [(40, 200), (20, 200)]
    assert [sample["text"] for sample in samples[0]] == [sample["text"] for sample in samples[1]]
    text = plane.http.post(f"/v1/jobs/{two['id']}/generate", json={"prompt": "ROMEO:", "characters": 20}).json()
    assert (text["version"], len(text["text"])) == (40, 20)

    page = plane.http.get(f"/jobs/{two['id']}").text
    assert f'<dd data-field="perplexity">{two["perplexity"]:.2f}</dd>' in page
    assert 'data-plot="perplexity"' in page and 'data-plot="accuracy"' not in page
    command = [sys.executable, "-m", "computeshare.cli.main", "jobs", "show", two["id"]]
    shown = subprocess.run(command, env=plane.environment, capture_output=True, text=True, timeout=60, check=True)
    assert f"{two['test_loss']:.4f} nats, perplexity {two['perplexity']:.2f}" in shown.stdout

    with Client(plane.url, (plane.home / "token").read_text().strip()) as client:
        replay = Replay(client, two["id"], data)
        assert [one.version for one in replay.run()] == [*range(1, 41)]
        assert replay.verdict().outcome == "matches"
