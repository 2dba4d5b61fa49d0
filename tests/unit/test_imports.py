"""What must start fast starts fast."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "module", ["api", "api.main", "computeshare.cli.main", "computeshare.worker.process", "computeshare.queue"]
)
@pytest.mark.slow
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


TRAINING = """
import sys
from pathlib import Path

import torch

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.schedule import EVERY_STEP_ALIKE
from computeshare.jobspec.spec import JobSpec, OptimizerSpec
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.optimizers import try_out
from computeshare.training.computation import replica_of

for kind in ("sync", "local"):
    spec = JobSpec.model_validate({"dataset": "digits", "model": "mlp", "rounds": 2, "strategy": {"kind": kind}})
    instance = task_of(spec).instance(spec.seed, "train", Path())
    weights = weights_of(instance.module, instance.layout)
    replica = replica_of(spec, instance, torch.device("cpu"))
    replica.load(weights)
    replica.compute(0)
    score(task_of(spec).instance(spec.seed, "test", Path()), weights)
for name in catalog().optimizers:
    try_out(OptimizerSpec(name=name), EVERY_STEP_ALIKE)
sys.exit(", ".join({"torch._dynamo", "torchvision"} & sys.modules.keys()) or 0)
"""


@pytest.mark.slow
def test_training_a_small_model_imports_neither_torch_dynamo_nor_torchvision() -> None:
    """Each would add seconds to the start of every seat."""
    done = subprocess.run([sys.executable, "-c", TRAINING], check=False, timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_seat_loads_what_recipes_need_only_for_a_recipe() -> None:
    program = (
        "import sys, computeshare.worker.seat.seat; sys.exit(', '.join(n for n in sys.modules if n in UNUSED) or 0)"
    )
    unused = {"torch", "computeshare.confinement", "computeshare.training.recipe_process", "computeshare.queue.recipes"}
    program = program.replace("UNUSED", repr(unused))
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0


def test_every_module_is_in_a_layer() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    outer, inner = (contract["layers"] for contract in contracts if contract["type"] == "layers")
    assert outside(outer, {"computeshare", "api"}) <= {"computeshare", "computeshare.__main__", "computeshare.jobspec"}
    folders = {f"api.{path.parent.name}" for path in (ROOT / "api").glob("*/__init__.py")}
    assert outside(inner, {"api"}) == {"api", *folders - rooms(inner)}


def rooms(layers: list[str]) -> set[str]:
    return {room.strip() for layer in layers for room in re.split("[|:]", layer)}


def outside(layers: list[str], packages: set[str]) -> set[str]:
    """Modules of these packages that are in none of the layers."""
    paths = (path for package in packages for path in (ROOT / package).rglob("*.py"))
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in paths}
    return {module for module in modules if not any(f"{module}.".startswith(f"{room}.") for room in rooms(layers))}


def test_nothing_but_what_every_room_needs_stands_at_the_top() -> None:
    modules = {path.stem for path in (ROOT / "computeshare").glob("*.py")}
    assert modules <= {"__init__", "__main__", "errors", "settings", "types"}


def test_a_folder_holds_a_dozen_modules_at_most() -> None:
    folders = [path for package in ("computeshare", "api") for path in (ROOT / package).rglob("__init__.py")]
    counts = {str(path.parent): len(list(path.parent.glob("*.py"))) - 1 for path in folders}
    assert {name: count for name, count in counts.items() if count > 12} == {}
