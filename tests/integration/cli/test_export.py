"""`computeshare export` against a real control plane: every format gives back the model."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torchvision
import yaml
from safetensors.torch import load_file

from computeshare.cli.main import app
from computeshare.client import Job
from computeshare.tasks import exports
from computeshare.tasks import trained as trained_tasks
from computeshare.terminal.command import run

pytestmark = pytest.mark.slow

LENET = {"dataset": "mnist", "model": "lenet5"}
RESNET = {"dataset": "digits", "model": "resnet18", "input": (3, 32, 32)}

GPT = {
    "dataset": "tinyshakespeare",
    "model": "gpt",
    "model_args": {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 16},
}


def exported(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """What the command prints as JSON; it has to succeed."""
    assert run(app, ["export", *arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_safetensors_and_state_dict_fit_a_plain_torchvision_module(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained(**RESNET)
    images = torch.rand(2, 3, 32, 32)
    expected = job.module()(images)
    for form, read in (("safetensors", load_file), ("state_dict", lambda path: torch.load(path, weights_only=True))):
        told = exported(capsys, job.id, "--format", form, "--version", "best")
        plain = torchvision.models.resnet18(num_classes=10)
        plain.load_state_dict(read(told["path"]))
        assert torch.equal(plain.eval()(images), expected)
        assert told["sha256"] == job.checkpoint(1)["sha256"] and told["bytes"] == Path(told["path"]).stat().st_size
    assert sorted(path.name for path in Path().glob("*-v1.*")) == [f"{job.id}-v1.pt", f"{job.id}-v1.safetensors"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("spec", [LENET, RESNET, GPT], ids=lambda spec: spec["model"])
def test_onnx_gives_the_same_outputs_for_batches_of_any_size(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str], spec: dict[str, Any]
) -> None:
    job = trained(**spec)
    session = onnxruntime.InferenceSession(exported(capsys, job.id, "--format", "onnx")["path"])
    module, task = job.module(), trained_tasks.task_of_job(job.spec)
    for count in (1, 2, 5):
        inputs, _ = task.noise(count, seed=count).batch(np.arange(count))
        with torch.inference_mode():
            expected = module(inputs).numpy()
        assert expected.std() > 1e-2  # else any outputs would do
        assert np.abs(session.run(None, {"input": inputs.numpy()})[0] - expected).max() < 1e-4


def test_onnx_without_its_packages_says_what_to_install(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = trained(**LENET)
    monkeypatch.setattr(exports, "ONNX_PACKAGES", ("onnx", "no_such_exporter"))
    assert run(app, ["export", job.id, "--format", "onnx"]) == 1
    assert "error: ONNX needs no_such_exporter: pip install 'computeshare[onnx]'\n" in capsys.readouterr().err
    assert list(Path().glob("*.onnx")) == []


def test_weights_too_large_for_one_onnx_file_lie_beside_it(
    trained: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "SINGLE_FILE_BYTES", 0)
    job = trained(dataset="digits", model="mlp")
    job.export("m.onnx", "onnx")
    assert Path("m.onnx.data").stat().st_size > 60_000 > Path("m.onnx").stat().st_size
    images = torch.rand(3, 1, 8, 8)
    found = onnxruntime.InferenceSession("m.onnx").run(None, {"input": images.numpy()})[0]
    assert np.abs(found - job.module()(images).detach().numpy()).max() < 1e-4


def test_a_card_is_written_where_there_is_none(trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    job = trained(**LENET)
    Path("README.md").write_text("mine")
    assert run(app, ["export", job.id, "--card"]) == 2
    assert "README.md already exists" in capsys.readouterr().err and list(Path().glob("*.safetensors")) == []
    Path("model").mkdir()
    told = exported(capsys, job.id, "--card", "-o", "model")
    card = Path(told["card"]).read_text()
    assert Path("README.md").read_text() == "mine" and told["card"] == "model/README.md"
    assert yaml.safe_load(card.split("---\n")[1])["model-index"][0]["results"][0]["metrics"][0]["value"] == 0.75
    assert job.checkpoint()["sha256"] in card and "| Parameters | 61,706 |" in card
    assert "minus the mean (0.1307), divided by the standard deviation (0.3081)" in card
    assert "This needs torch and safetensors, not ComputeShare:" in card


RUNNER = """
import sys

sys.modules["computeshare"] = None  # importing it fails
import torch

for name in sys.argv[1:]:
    made = {}
    exec(open(f"{name}.py").read(), made)
    with torch.inference_mode():
        torch.save(made["module"](torch.load(f"{name}.in")), f"{name}.out")
"""
"""Runs the code of cards, each on inputs of its own, where there is no ComputeShare."""


def test_the_code_of_a_card_loads_the_weights_without_computeshare(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    expected: dict[str, Any] = {}
    gray = {"dataset": "digits", "model": "resnet18", "input": (1, 32, 32)}
    for spec in (LENET, {"dataset": "digits", "model": "resnet20"}, gray, GPT):
        job, form = trained(**spec), "safetensors" if spec is LENET else "state_dict"
        told = exported(capsys, job.id, "--card", "--format", form, "--force")
        (name, inputs), card = (job.id, sample_of(job)), Path(told["card"]).read_text()
        Path(f"{name}.py").write_text(re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0])
        torch.save(inputs, f"{name}.in")
        with torch.inference_mode():
            expected[name] = job.module()(inputs)
    subprocess.run([sys.executable, "-c", RUNNER, *expected], check=True, timeout=300)
    for name, outputs in expected.items():
        assert torch.equal(torch.load(f"{name}.out"), outputs)


def sample_of(job: Job) -> torch.Tensor:
    inputs, _ = trained_tasks.task_of_job(job.spec).noise(2, seed=1).batch(np.arange(2))
    return inputs


def test_a_file_is_not_replaced_unasked_nor_written_where_nothing_can_be(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained(dataset="digits", model="mlp")
    Path("m.safetensors").write_text("mine")
    assert run(app, ["export", job.id, "-o", "m.safetensors"]) == 2
    assert "already exists" in capsys.readouterr().err and Path("m.safetensors").read_text() == "mine"
    assert run(app, ["export", job.id, "-o", "m.safetensors", "--force"]) == 0
    assert capsys.readouterr().out == "m.safetensors: version 1, 69.5 kB\n"
    assert run(app, ["export", job.id, "-o", "none/m.safetensors"]) == 1
    assert "error: cannot write none/m.safetensors: No such file or directory\n" in capsys.readouterr().err
