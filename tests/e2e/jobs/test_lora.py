"""LoRA by the example's recipe: the same bits for any workers, and what a plain loop in one process comes to."""

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from computeshare import ComputeShare
from computeshare.jobspec.spec import JobSpec
from tests.support.control_plane import ControlPlane

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "3", "--queue", "e2e")
EXAMPLE = Path(__file__).parents[3] / "examples" / "recipes" / "lora"
ROUNDS, BLOCK, RATE, MOMENTUM = 30, 16, 0.05, 0.9
FIELDS: dict[str, Any] = {
    "queue": "e2e",
    "dataset": "rhymes",
    "rounds": ROUNDS,
    "micro_batch": 4,
    "micro_batches_per_round": 3,
    "optimizer": {"name": "SGD", "lr": RATE, "momentum": MOMENTUM},
    "codec": {"up": "float32", "down": "float32"},
    "threads": 1,
    "checkpoint_every": 0,
    "evaluate_every": 0,
}


def test_adapters_end_with_the_same_bits_and_where_a_plain_loop_ends(plane: ControlPlane, tmp_path: Path) -> None:
    recipe, base, text = tmp_path / "lora", tmp_path / "base", tmp_path / "rhymes"
    shutil.copytree(EXAMPLE, recipe)
    no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = recipe / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | no_dropout))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(recipe)).save_pretrained(base)
    text.mkdir()
    for split in ("train", "test"):
        lines = (f"{number} green bottles hanging on the wall, " for number in range(100, 0, -1))
        (text / f"{split}.txt").write_text("".join(lines))
    session = ComputeShare(plane.url, (plane.home / "token").read_text().strip())
    session.datasets.add("rhymes", text, kind="files")

    ends = []
    for workers in (1, 3):
        made = session.jobs.create(
            FIELDS,
            recipe=str(recipe),
            recipe_args={"rank": 4, "block": BLOCK, "base": str(base)},
            workers={"min": workers, "max": workers},
        )
        ends.append(plane.finish(made.id))
    assert ends[0]["weights_sha256"] == ends[1]["weights_sha256"]
    assert len(plane.get(f"/v1/jobs/{ends[1]['id']}/workers")["items"]) == 3
    trained = session.jobs.get(ends[1]["id"]).load()
    expected = plain_loop(recipe, base, text, JobSpec.model_validate(ends[1]["spec"]))
    assert trained.keys() == expected.keys()
    moved = max(float((trained[name] - expected[name]).abs().max()) for name in expected)
    assert moved < 1e-6


def plain_loop(recipe: Path, base: Path, text: Path, spec: JobSpec) -> dict[str, torch.Tensor]:
    """The adapters after the job's rounds in this process, by the recipe's functions and `torch.optim` alone."""
    loaded: Any = importlib.util.spec_from_file_location("lora_recipe", recipe / "recipe.py")
    functions = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(functions)
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(spec.seed)
        model = functions.model(rank=4)
    functions.pretrained(model, str(base))
    samples = functions.data("train", text, block=BLOCK)
    adapters = {name: tensor for name, tensor in model.named_parameters() if tensor.requires_grad}
    optimizer = torch.optim.SGD(adapters.values(), lr=RATE, momentum=MOMENTUM)
    for version in range(ROUNDS):
        optimizer.zero_grad()
        for unit in (whole := spec.round_from(version)).units:
            inputs, targets = torch.utils.data.default_collate([samples[i] for i in spec.plan.indices(unit)])
            logits = model(input_ids=inputs, use_cache=False).logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss * len(inputs) / whole.samples).backward()
        optimizer.step()
    return {name: tensor.detach() for name, tensor in adapters.items()}
