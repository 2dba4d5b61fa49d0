"""`computeshare predict` against a real control plane."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from computeshare.cli.main import app
from computeshare.client import Job
from computeshare.terminal.command import run


def test_the_classes_are_those_of_the_model_on_the_prepared_image(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained(dataset="fashion-mnist", model="lenet5", input=(1, 32, 32))
    pixels = np.random.default_rng(0).integers(0, 256, (28, 28), np.uint8)
    Image.fromarray(pixels).save("boot.png")
    inputs = torch.nn.functional.pad(torch.from_numpy(pixels)[None, None] / 255, (2, 2, 2, 2))
    expected = job.module()((inputs - 0.2860) / 0.3530).softmax(dim=1)[0].sort(descending=True)
    assert run(app, ["predict", job.id, "boot.png", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (item,) = told["items"]
    assert (told["id"], told["version"], item["file"]) == (job.id, 1, "boot.png")
    assert [one["class"] for one in item["classes"]] == expected.indices[:3].tolist()
    assert [one["probability"] for one in item["classes"]] == pytest.approx(expected.values[:3].tolist(), abs=1e-6)
    assert {one["name"] for one in item["classes"]} <= {
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    }  # fmt: skip
    assert run(app, ["predict", job.id, "boot.png", "--top", "1", "--version", "1"]) == 0
    first = item["classes"][0]
    assert capsys.readouterr().out == f"boot.png: {first['name']} {100 * first['probability']:.2f} %\n"


def test_wrong_files_are_told_and_the_others_are_classified(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained(dataset="digits", model="mlp")
    Image.new("RGB", (300, 200)).save("good.jpg")
    Path("text.png").write_text("no image")
    Path("cut.jpg").write_bytes(Path("good.jpg").read_bytes()[:700])
    Path("folder").mkdir()
    files = ["text.png", "good.jpg", "cut.jpg", "missing.png", "folder"]
    assert run(app, ["predict", job.id, *files, "--json"]) == 1
    captured = capsys.readouterr()
    items = {item["file"]: item for item in json.loads(captured.out)["items"]}
    assert len(items["good.jpg"]["classes"]) == 3 and list(items) == files
    assert "error: text.png: it is not an image in a format that Pillow reads\n" in captured.err
    assert "error: missing.png: it cannot be read: No such file or directory\n" in captured.err
    assert "error: cut.jpg: it cannot be read: image file is truncated" in captured.err
    assert items["folder"]["error"] == "it cannot be read: Is a directory"
