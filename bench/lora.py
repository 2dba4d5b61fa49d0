"""Compares LoRA with full fine-tuning of a language model: bytes that travel, and the loss after equal samples.

    python -m bench.lora --pretrain 1000 --rounds 80 --base /tmp/base

Pre-trains a GPT of 10.7 M parameters (bytes of the source code of Python's library) with a plain loop into the folder
`--base`, unless it is there. Then jobs fine-tune it on torch's source code with two workers: all weights by `sync`, the
adapters of examples/recipes/lora by `sync` and by `local`. The last part measures in one process how much it costs
`local` to average the factors A and B of an adapter apart instead of their product.
"""

import argparse
import copy
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.support import ours
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from bench.support.results import ROOT
from computeshare.settings import Settings

RECIPE = ROOT / "examples" / "recipes" / "lora"
BLOCK, BATCH, ROUND = 64, 8, 2
CONFIG = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 256,
    "n_positions": BLOCK,
    "n_embd": 384,
    "n_layer": 6,
    "n_head": 6,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": None,
    "eos_token_id": None,
}
FULL = """
from transformers import AutoConfig, AutoModelForCausalLM
from adapters import HERE, data, loss


def model():
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(HERE))


def pretrained(model, base):
    model.load_state_dict(AutoModelForCausalLM.from_pretrained(base).state_dict())
"""
"""A recipe that trains all weights, on the same data."""
PRETRAIN_BYTES, TEXT_BYTES, TEST_BYTES = 8_000_000, 1_000_000, 60_000
REPLICAS, STEPS = 4, 25
ALPHA = 4
"""`alpha` of an adapter, for each of its ranks."""
LOCAL_RATE = 0.25
"""The rate of local steps, of that with `sync`: replicas whose factors drift apart further lose more by their means."""
JOB_STEPS = 10
"""Inner steps of the job, so that it has several rounds."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of the pre-trained model")
    parser.add_argument("--pretrain", type=int, default=1000, help="steps, of 16 windows each")
    parser.add_argument("--rounds", type=int, default=80, help=f"of {ROUND} micro-batches of {BATCH} windows")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=4e-3, help="of the adapters; with local, a quarter of it")
    parser.add_argument("--full-lr", type=float, default=5e-4, help="of full fine-tuning")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    options = parser.parse_args()
    end_cleanly_when_asked()
    if not (options.base / "config.json").exists():
        pretrain(options.base, options.pretrain)
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(Path(folder), options.base)
        rows = jobs(scene, options)
        gap = averaging_gap(scene, options.rank, LOCAL_RATE * options.lr)
    part = Part([table(rows), gap])
    print(markdown(part))
    if options.json:
        part.save(options.json)


def pretrain(base: Path, steps: int) -> None:
    """Train the base model with a plain loop, and save it with `save_pretrained`."""
    import transformers

    library: Any = transformers
    torch.manual_seed(0)
    ids = torch.tensor(list(source_code(Path(sysconfig.get_path("stdlib")), PRETRAIN_BYTES)))
    model = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(**CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=steps, pct_start=0.1)
    for step in range(steps):
        starts = torch.randint(len(ids) - BLOCK - 1, (16,))
        windows = torch.stack([ids[start : start + BLOCK + 1] for start in starts])
        loss = nats(model, windows)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
        if step % 50 == 49:
            print(f"pre-training: step {step + 1} of {steps}, loss {loss.item():.3f}", file=sys.stderr)
    model.save_pretrained(base)


def nats(model: nn.Module, windows: Tensor) -> Tensor:
    """The mean cross-entropy of windows (n, block + 1)."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    loss: Tensor = functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    return loss


class Scene:
    """The files of a comparison: two recipes, and a text to fine-tune on."""

    def __init__(self, folder: Path, base: Path) -> None:
        self.base, self.text = base.resolve(), folder / "text"
        self.recipes = {"lora": folder / "lora", "full": folder / "full"}
        for recipe in self.recipes.values():
            shutil.copytree(RECIPE, recipe)
            shutil.copy(base / "config.json", recipe)
        (self.recipes["full"] / "recipe.py").rename(self.recipes["full"] / "adapters.py")
        (self.recipes["full"] / "recipe.py").write_text(FULL)
        self.text.mkdir()
        content = source_code(Path(torch.__file__).parent, TEXT_BYTES + TEST_BYTES)
        (self.text / "train.txt").write_bytes(content[:TEXT_BYTES])
        (self.text / "test.txt").write_bytes(content[-TEST_BYTES:])

    def ids(self, split: str) -> Tensor:
        return torch.tensor(list((self.text / f"{split}.txt").read_bytes()))


def source_code(folder: Path, most: int) -> bytes:
    """The first `most` bytes of a package's Python files without tests, in ASCII."""
    left_out = {"site-packages", "test", "tests"}
    content = bytearray()
    for path in sorted(folder.rglob("*.py")):
        if not left_out & {*path.relative_to(folder).parts}:
            content += bytes(byte for byte in path.read_bytes() if byte < 128)
        if len(content) >= most:
            break
    return bytes(content[:most])


def jobs(scene: Scene, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train the jobs, one after the other; what REST says of each."""
    adam = {"name": "AdamW", "betas": [0.9, 0.99], "weight_decay": 0.0}
    inner = {"inner_steps": JOB_STEPS, "inner_optimizer": {**adam, "lr": LOCAL_RATE * options.lr}}
    local = {"strategy": {"kind": "local", "replicas": REPLICAS, **inner}}

    def sync(lr: float) -> dict[str, Any]:
        return {"optimizer": {**adam, "lr": lr}, "schedule": {"name": "linear"}}  # as is usual for fine-tuning

    lora = {"base": str(scene.base), "rank": options.rank, "alpha": ALPHA * options.rank}
    plans: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        ("all weights, sync", "full", {"base": str(scene.base)}, sync(options.full_lr)),
        ("adapters, sync", "lora", lora, sync(options.lr)),
        ("adapters, local", "lora", lora, {**local, "micro_batches_per_round": REPLICAS * JOB_STEPS}),
    ]
    found = []
    with ours.plane(2, Settings().data_dir) as plane:
        _computeshare(plane, "data", "add", "source", str(scene.text), "--kind", "files")
        for name, recipe, arguments, fields in plans:
            rounds = max(1, options.rounds * ROUND // fields.get("micro_batches_per_round", ROUND))
            whole = {
                "name": name,
                "queue": ours.QUEUE,
                "dataset": "source",
                "micro_batch": BATCH,
                "micro_batches_per_round": ROUND,
                "rounds": rounds,
                "checkpoint_every": 0,
                "evaluate_every": 0,
                **fields,
            }
            spec = scene.base.parent / f"lora-{recipe}.json"
            spec.write_text(json.dumps(whole))
            given = [part for key, value in arguments.items() for part in ("--arg", f"{key}={json.dumps(value)}")]
            command = ("jobs", "create", "--recipe", str(scene.recipes[recipe]), "--spec", str(spec), *given)
            job = json.loads(_computeshare(plane, *command, "--json"))
            found.append(ours.ended(plane.client, job["id"], None))
    return found


def _computeshare(plane: ours.Plane, *arguments: str) -> str:
    settings = plane.stack.settings
    environment = {**os.environ, **settings.child_environment()}
    command = [sys.executable, "-m", "computeshare.cli.main", *arguments]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout


def table(rows: list[dict[str, Any]]) -> Table:
    whole = rows[0]
    cells: list[list[Cell]] = [
        [
            row["name"],
            row["parameters"],
            round(row["bytes_up"] / 1e6, 2),
            round(row["bytes_down"] / 1e6, 2),
            round(100 * (row["bytes_up"] + row["bytes_down"]) / (whole["bytes_up"] + whole["bytes_down"]), 2),
            round(row["loss"], 4),
            round(100 * (row["loss"] / whole["loss"] - 1), 2),
        ]
        for row in rows
    ]
    columns = ["job", "trained parameters", "MB up", "MB down", "% of all weights' bytes", "test loss", "% above"]
    return Table("Fine-tuning a GPT of 10.7 M parameters on another text, two workers", columns, cells)


def averaging_gap(scene: Scene, rank: int, rate: float, rounds: int = 3) -> Table:
    """The test loss after each of a few rounds of local steps, with A and B averaged apart and with the mean of the
    products in their place; training goes on from the former.
    """
    sys.path.insert(0, str(scene.recipes["lora"]))
    import recipe  # type: ignore[import-not-found]

    torch.manual_seed(0)
    model = recipe.model(rank=rank, alpha=ALPHA * rank)
    recipe.pretrained(model, scene.base)
    ids, test = scene.ids("train"), windows_of(scene.ids("test"))
    rows: list[list[Cell]] = []
    for number in range(1, rounds + 1):
        ends = [stepped(copy.deepcopy(model), ids, rate, seed=REPLICAS * number + place) for place in range(REPLICAS)]
        with torch.no_grad():
            products = {name: sum(product(end, name) for end in ends) / REPLICAS for name in adapters(model)}
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    parameter.copy_(sum(dict(end.named_parameters())[name] for end in ends) / REPLICAS)
            apart = score(model, test)
            exact = copy.deepcopy(model)
            for name, mean in products.items():
                layer = exact.get_submodule(name)
                layer.base_layer.weight += (mean - product(exact, name)).T
            joined = score(exact, test)
        rows.append([number, round(joined, 4), round(apart, 4), round(100 * (apart / joined - 1), 3)])
    title = f"Averaging A and B apart, {REPLICAS} replicas of {STEPS} steps"
    return Table(title, ["round", "loss, products averaged", "loss, factors averaged", "% above"], rows)


def windows_of(ids: Tensor) -> Tensor:
    count = (len(ids) - 1) // BLOCK
    return torch.stack([ids[i * BLOCK : i * BLOCK + BLOCK + 1] for i in range(count)])


def stepped(model: nn.Module, ids: Tensor, rate: float, seed: int) -> nn.Module:
    """The model after `STEPS` steps of AdamW on windows drawn from `seed`."""
    draw = torch.Generator().manual_seed(seed)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    for _ in range(STEPS):
        starts = torch.randint(len(ids) - BLOCK - 1, (BATCH,), generator=draw)
        loss = nats(model, torch.stack([ids[start : start + BLOCK + 1] for start in starts]))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return model


def adapters(model: nn.Module) -> list[str]:
    """The names of the layers that have adapters."""
    return [name for name, module in model.named_modules() if hasattr(module, "lora_A")]


def product(model: nn.Module, name: str) -> Tensor:
    """The matrix that a layer's adapter adds to its weight (out, in)."""
    layer: Any = model.get_submodule(name)
    found: Tensor = layer.scaling["default"] * layer.lora_B["default"].weight @ layer.lora_A["default"].weight
    return found


@torch.inference_mode()
def score(model: nn.Module, windows: Tensor) -> float:
    parts = torch.split(windows, 64)
    return float(sum(nats(model, part).item() * len(part) for part in parts)) / len(windows)


if __name__ == "__main__":
    began = time.monotonic()
    main()
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
