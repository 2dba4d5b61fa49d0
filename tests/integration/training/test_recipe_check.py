"""A trial of a recipe, in a process of its own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from computeshare.bundles.source import described
from computeshare.cli.main import app
from computeshare.errors import RecipeError
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tasks.recipes.state_files import read_initial
from computeshare.training.recipe_check import Report, Trial, check

pytestmark = pytest.mark.slow

GOOD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

def model(width=8):
    return nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 2))

def data(split, folder, count=20):
    draw = torch.Generator().manual_seed(len(split))
    inputs = torch.randn(count if split == "train" else 6, 3, generator=draw)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())
"""


def tried(text: str, **arguments: Any) -> Report:
    return check(Bundle({"recipe.py": text}), Trial(arguments))


def test_a_good_recipe_is_reported_with_its_facts() -> None:
    report = tried(GOOD, width=4, count=30)
    assert (report.parameters, report.frozen, report.facts.train, report.facts.test) == (26, 0, 30, 6)
    assert report.is_deterministic and report.remarks == () and report.facts.metric == "accuracy"
    assert [(t.name, t.shape) for t in report.facts.tensors][:2] == [("0.weight", (4, 3)), ("0.bias", (4,))]


def test_randomness_with_a_source_of_its_own_and_idle_parameters_are_remarked_upon() -> None:
    noisy = (
        GOOD.replace("import torch\n", "import os\nimport torch\n", 1)
        + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(3, 2), nn.Linear(3, 2)
        self.frozen = nn.Parameter(torch.zeros(5), requires_grad=False)

    def forward(self, x):
        return self.used(x) * (1 + os.urandom(1)[0])

model = Net
"""
    )
    report = tried(noisy)
    assert not report.is_deterministic and report.frozen == 5
    assert ["other bits" in report.remarks[0], "idle.weight, idle.bias" in report.remarks[1]] == [True, True]


def test_data_that_differ_from_call_to_call_are_remarked_upon() -> None:
    drawn = GOOD.replace("manual_seed(len(split))", "manual_seed(__import__('secrets').randbelow(2**40))")
    report = tried(drawn)
    assert not report.is_deterministic and "the data read anew" in report.remarks[0]
    with pytest.raises(RecipeError, match="other bits"):
        report.check_trainable()


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("addition", "told"),
    [
        ("def data(split, folder): return sorted(folder.glob('*'))", r"has no attribute 'glob' \(folder is None: give"),
        ("import nothing_of_this_name", r"recipe\.py, line 13: the import failed: ModuleNotFoundError"),
        ("import os; os._exit(7)", "process ended with exit code 7"),
        ("raise SystemExit(3)", "the import failed: SystemExit: 3"),
        (
            "import secrets, torch\ndef model(): return nn.Linear(3, 2 + secrets.randbelow(1000))",
            "two different modules",
        ),
        ("def model(): return nn.Linear(4, 2)", r"^recipe\.py: the trial failed: RuntimeError: .*shapes cannot be"),
        ("def loss(model, batch): return model(batch[0]).sum() * float('nan')", "the loss was nan"),
        ("def pretrained(model): model[0].requires_grad_(False)", r"pretrained\(\) changed which parameters"),
    ],
)
def test_a_recipe_that_cannot_train_ends_with_the_reason(addition: str, told: str) -> None:
    with pytest.raises(RecipeError, match=told):
        tried(GOOD + addition + "\n")


def test_an_argument_that_no_function_takes_is_told_before_anything_else_goes_wrong() -> None:
    with pytest.raises(RecipeError, match=r"none of model\(\), data\(\) takes an argument depth"):
        tried(GOOD + "def data(split, folder): return folder.glob('*')\n", depth=3)


def test_a_model_of_thousands_of_tensors_is_reported_whole() -> None:
    layers = "nn.Sequential(*(nn.Linear(3, 3) for _ in range(1500)), nn.Linear(3, 2))"
    report = tried(GOOD + f"\ndef model(): return {layers}\n")
    assert len(report.facts.tensors) == 3002 and len(report.model_dump_json()) > 2**17


def test_a_trial_that_hangs_is_ended() -> None:
    with pytest.raises(RecipeError, match="took more than 1 s"):
        check(Bundle({"recipe.py": "import time\ntime.sleep(600)\n"}), Trial({}), patience_s=1)


def test_what_a_recipe_requires_is_looked_for_before_it_is_imported() -> None:
    with pytest.raises(RecipeError, match=r"requires nothing-of-this-name \(not installed\)"):
        tried("# requires: nothing-of-this-name\nimport nothing_of_this_name\n")
    assert tried("# requires: torch>=2\n" + GOOD).facts.requires == ("torch>=2",)


def test_a_confined_trial_reads_the_data_and_nothing_of_its_users(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for path in (tmp_path / "data" / "numbers.txt", tmp_path / "secret.txt"):
        path.write_text("20")
    reading = GOOD.replace("count=20):", "path='numbers.txt'):\n    count = int((folder / path).read_text())")
    trial = Trial({}, tmp_path / "data", is_confined=True)
    (tmp_path / "state").mkdir()
    report = check(Bundle({"recipe.py": reading}), trial, tmp_path / "state")
    assert report.facts.train == 20 and report.facts.initial == described(tmp_path / "state").digest
    with pytest.raises(RecipeError, match=r"data\(\) failed: (PermissionError|FileNotFoundError)"):
        check(Bundle({"recipe.py": reading}), Trial({"path": "../secret.txt"}, tmp_path / "data", is_confined=True))


def test_a_link_in_the_place_of_the_initial_state_is_not_followed(tmp_path: Path) -> None:
    linking = """
import atexit, os
from pathlib import Path

def linked():
    file = Path(HOME_OF_TRIAL, "state", "initial.safetensors")
    file.unlink()
    os.symlink(SECRET, file)
atexit.register(linked)
"""
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "state").mkdir()
    text = linking.replace("SECRET", repr(str(tmp_path / "secret"))).replace("HOME_OF_TRIAL", "os.environ['HOME']")
    with pytest.raises(RecipeError, match="something that cannot be read"):
        check(Bundle({"recipe.py": GOOD + text}), Trial({}, is_confined=True), tmp_path / "state")


def test_the_command_prints_what_was_found(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(GOOD)
    run = CliRunner().invoke(app, ["recipes", "check", str(tmp_path / "net.py"), "--arg", "width=4", "--json"])
    assert run.exit_code == 0 and json.loads(run.stdout)["parameters"] == 26
    run = CliRunner().invoke(app, ["recipes", "check", str(tmp_path / "net.py")])
    assert "20 to train, 6 to test" in run.stdout and "Same bits twice  yes" in run.stdout


PRETRAINED = """
def pretrained(model, weights):
    model.load_state_dict(torch.load(weights, weights_only=True))
"""
SHAPES = {"0.weight": (4, 3), "0.bias": (4,), "3.weight": (2, 4), "3.bias": (2,)}


def test_the_initial_state_is_that_of_the_seed_and_of_what_pretrained_loaded(tmp_path: Path) -> None:
    states = []
    for seed in (0, 1, 1):
        folder = tmp_path / str(len(states))
        folder.mkdir()
        report = check(Bundle({"recipe.py": GOOD}), Trial({"width": 4}, seed=seed), folder)
        states.append((report.facts.initial, read_initial(folder, report.facts.layout).parameters.tobytes()))
        assert report.facts.initial == described(folder).digest and report.facts.frozen == ""
    assert states[0] != states[1] == states[2]
    torch.save({name: torch.full(shape, 0.5) for name, shape in SHAPES.items()}, tmp_path / "w.pt")
    arguments = {"width": 4, "weights": str(tmp_path / "w.pt")}
    (tmp_path / "loaded").mkdir()
    report = check(Bundle({"recipe.py": GOOD + PRETRAINED}), Trial(arguments), tmp_path / "loaded")
    assert set(read_initial(tmp_path / "loaded", report.facts.layout).parameters) == {0.5}


def test_the_command_runs_with_the_users_rights_unless_told_to_confine(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "net.py").write_text(f"open({str(tmp_path / 'secret')!r}).read()\n" + GOOD)
    command = ["recipes", "check", str(tmp_path / "net.py"), "--json"]
    assert CliRunner().invoke(app, command).exit_code == 0
    confined = CliRunner().invoke(app, [*command, "--confined"])
    assert confined.exit_code != 0 and "the import failed" in str(confined.exception)
