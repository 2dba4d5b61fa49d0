"""`computeshare generate` against a real control plane."""

import json
from collections.abc import Callable

import pytest
import torch

from computeshare.cli.main import app
from computeshare.client import Job
from computeshare.tasks.text.texts import DEFINITIONS, vocabulary_of
from computeshare.terminal.command import run

NAME = "tinyshakespeare"
SMALL = {"n_layer": 1, "n_head": 2, "n_embd": 16, "block_size": 8}


def test_a_text_is_continued_and_the_seed_decides_how(
    trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]
) -> None:
    job = trained(dataset=NAME, model="gpt", model_args=SMALL)

    def text(*options: str, prompt: str = "ROMEO: what is") -> str:
        assert run(app, ["generate", job.id, "--prompt", prompt, "--tokens", "12", "--json", *options]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["id"], told["version"], told["prompt"]) == (job.id, 1, prompt)
        assert len(told["text"]) == 12
        return str(told["text"])

    first = text("--seed", "1")
    assert text("--seed", "1") == first != text("--seed", "2")

    known = vocabulary_of(NAME, None).encode("ROMEO: what is").tolist()
    for _ in range(12):
        known.append(int(job.module()(torch.tensor([known[-8:]]))[0, -1].argmax()))
    expected = "".join(DEFINITIONS[NAME].alphabet[symbol] for symbol in known[-12:])
    assert text("--temperature", "0") == expected
    assert run(app, ["generate", job.id, "--prompt", "ROMEO: what is", "--tokens", "12", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == f"ROMEO: what is{expected}\n"


def test_what_cannot_be_continued_is_told(trained: Callable[..., Job], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["generate", trained(dataset=NAME, model="gpt", model_args=SMALL).id, "--prompt", "\u00e9"]) != 0
    assert f"the prompt has no character of {NAME}" in capsys.readouterr().err
    assert run(app, ["generate", trained(dataset="digits", model="mlp").id]) != 0
    assert "mlp does not generate text" in capsys.readouterr().err
