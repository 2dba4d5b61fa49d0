"""A recipe as a task: its module, data, loss and metrics."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from computeshare.errors import RecipeError, SpecError
from computeshare.tasks.metrics import score
from computeshare.tasks.modules import drawn_from, frozen_digest, layout_of, weights_of
from computeshare.tasks.recipes import state_files
from computeshare.tasks.recipes.functions import Functions, load
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.tasks.usage import Guess

INDICES = np.arange(4)


class Points:
    """Points (3,) and the class of each, with noise from every global generator."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index + 0.1 * one for one in noise]), index % 2


def task(**own: Any) -> RecipeTask:
    functions: dict[str, Callable[..., Any]] = {
        "model": lambda width=2: nn.Linear(3, width),
        "data": lambda split, folder: Points(10 if split == "train" else 5),
        **own.pop("functions", {}),
    }
    return RecipeTask(Functions(Path("/recipe"), **functions), "sha256:0", own.pop("arguments", {}), **own)


def test_initial_weights_come_from_the_seed_alone() -> None:
    def model() -> nn.Module:
        module = nn.Linear(3, 2)
        with torch.no_grad():
            module.bias[0], module.bias[1] = random.random(), np.random.rand()
        return module

    mine = task(functions={"model": model})

    def drawn(seed: int) -> str:
        module = mine.module(seed)
        return layout_of(module).digest(weights_of(module, layout_of(module)))

    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    first = drawn(0)
    assert (before[0], before[1]) == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(before[2], torch.get_rng_state())
    random.seed(7)
    assert drawn(0) == first != drawn(1)


def test_a_sample_depends_on_its_seed_and_on_no_other_sample() -> None:
    split = task().open("train", Path())
    seeds = np.array([5, 6, 7, 8], np.uint64)
    inputs, targets = split.batch(INDICES, seeds)
    assert inputs.shape == (4, 3) and targets.tolist() == [0, 1, 0, 1]
    assert torch.equal(split.batch(INDICES[2:], seeds[2:])[0], inputs[2:])
    assert not torch.equal(split.batch(INDICES, seeds + np.uint64(1))[0], inputs)
    scored = split.batch(INDICES)[0]
    assert torch.equal(split.batch(INDICES)[0], scored)


def test_a_classifier_without_functions_of_its_own_has_cross_entropy_and_accuracy() -> None:
    mine = task(label_smoothing=0.1)
    module, batch = mine.module(0), mine.open("test", Path()).batch(INDICES)
    expected = functional.cross_entropy(module(batch[0]), batch[1], label_smoothing=0.1)
    assert torch.equal(mine.loss(module, batch), expected)
    instance = mine.instance(0, "test", Path())
    found = score(instance, weights_of(instance.module, instance.layout), batch=2)
    whole = mine.open("test", Path()).batch(np.arange(5))
    logits = instance.module(whole[0])
    assert found.loss == pytest.approx(functional.cross_entropy(logits, whole[1]).item(), rel=1e-6)
    assert found.metrics == {"accuracy": (logits.argmax(1) == whole[1]).double().mean().item()} and found.samples == 5


def test_a_recipe_with_predict_classifies_files(tmp_path: Path) -> None:
    def predict(module: nn.Module, file: Path) -> Any:
        answers = {"owl": 0.2, "robin": float(file.read_text()), "wren": 0.1}
        return answers if answers["robin"] > 0 else "robin"

    functions = {"model": lambda: nn.Linear(3, 2), "data": lambda *_: [], "predict": predict}
    mine, file = task(functions=functions), tmp_path / "bird"
    file.write_text("0.7")
    assert mine.guess(mine.module(0), file, 2) == [Guess(1, "robin", 0.7), Guess(0, "owl", 0.2)]
    file.write_text("0")
    with pytest.raises(RecipeError, match="must return a dict of probabilities"):
        mine.guess(mine.module(0), file, 2)
    with pytest.raises(SpecError, match=r"define predict\(model, file\)"):
        task().guess(mine.module(0), file, 2)


def test_a_loss_and_metrics_of_its_own_are_means_over_samples_in_the_score() -> None:
    def loss(module: nn.Module, batch: Any) -> torch.Tensor:
        return (module(batch["x"]).squeeze(1) - batch["y"]).square().mean()

    def metrics(module: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
        return {"error": (module(batch["x"]).squeeze(1) - batch["y"]).abs().sum()}

    rows = [{"x": torch.tensor([float(i), 1.0, 0.0]), "y": torch.tensor(2.0 * i)} for i in range(5)]
    functions = {"model": lambda: nn.Linear(3, 1), "data": lambda *_: rows, "loss": loss, "metrics": metrics}
    mine = task(functions=functions, extra=("error",))
    assert not mine.classifies and dict(mine.metrics) == {"error": "higher"}
    instance = mine.instance(0, "test", Path())
    found = score(instance, weights_of(instance.module, instance.layout), batch=2)
    errors = torch.stack([instance.module(row["x"])[0] - row["y"] for row in rows])
    assert found.loss == pytest.approx(errors.square().mean().item(), rel=1e-6)
    assert found.metrics["error"] == pytest.approx(errors.abs().mean().item(), rel=1e-6)


@pytest.mark.parametrize(
    ("functions", "told"),
    [
        ({"model": lambda: "net"}, r"model\(\) returned a str"),
        ({"model": lambda: nn.Linear(3, 2, dtype=torch.float64)}, "only float32"),
        ({"data": lambda split, folder: []}, r"data\('train'\) has no samples"),
        ({"data": lambda split, folder: iter(())}, r"len\(data\('train'\)\) failed: TypeError"),
        ({"data": lambda split, folder: [torch.zeros(i) for i in range(9)]}, "do not make a batch"),
        ({"data": lambda split, folder: ["text"] * 9}, "do not make a batch: a part is a str"),
        ({"data": lambda split, folder: torch.zeros(9, 3)}, "without loss.., a sample is a pair"),
        ({"loss": lambda module, batch: torch.zeros(4)}, r"loss\(\) returned \(4,\)"),
        ({"loss": lambda module, batch: 1 / 0}, r"recipe\.py: loss\(\) failed: ZeroDivisionError"),
    ],
)
def test_a_recipe_that_cannot_train_is_refused_with_the_reason(functions: dict[str, Any], told: str) -> None:
    mine = task(functions=functions)
    with pytest.raises((RecipeError, Exception), match=told):
        instance = mine.instance(0, "train", Path())
        mine.loss(instance.module, instance.split.batch(INDICES))


def test_arguments_go_to_the_functions_that_take_them() -> None:
    asked: list[Any] = []

    def data(split: str, folder: Path | None, *, noise: float = 0.0) -> Points:
        asked.append((split, noise))
        return Points(10)

    mine = task(functions={"data": data}, arguments={"width": 5, "noise": 0.5})
    assert mine.module(0).weight.shape == (5, 3)
    mine.open("test", Path())
    assert asked == [("test", 0.5)]
    with pytest.raises(RecipeError, match="takes an argument wide"):
        task(arguments={"wide": 5}).module(0)


def test_modules_of_a_folder_import_each_other_and_errors_name_their_line(tmp_path: Path) -> None:
    (tmp_path / "recipe.py").write_text("from recipe_nets import net\n\nmodel, data = net, None\n")
    (tmp_path / "recipe_nets.py").write_text("def net(width=2):\n    import recipe_late\n")
    with pytest.raises(RecipeError, match="defines no function data"):
        load(tmp_path)
    (tmp_path / "recipe.py").write_text("from recipe_nets import net as model\n\ndata = list\n")
    (tmp_path / "recipe_late.py").write_text("raise ValueError('no')\n")
    with pytest.raises(RecipeError, match=r"recipe_late\.py, line 1: model\(\) failed: ValueError: no"):
        load(tmp_path).call("model")
    (tmp_path / "recipe.py").write_text("x = = 1\n")
    with pytest.raises(RecipeError, match=r"recipe\.py, line 1: the import failed: SyntaxError: invalid syntax"):
        load(tmp_path)


def test_what_is_frozen_is_as_the_job_began_whatever_the_recipe_builds(tmp_path: Path) -> None:
    def model() -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        module[0].requires_grad_(False)
        return module

    began = task(functions={"model": model}).module(7)
    state_files.write(began, tmp_path)
    built = task(functions={"model": model}, state=tmp_path).module(8)
    assert frozen_digest(built) == frozen_digest(began)
    assert not torch.equal(built[1].weight, began[1].weight)


def test_a_recipe_may_take_an_argument_called_name_and_draw_from_a_seed_itself() -> None:
    def model(name: str) -> nn.Module:
        with drawn_from(3):
            return nn.Linear(3, len(name))

    assert task(functions={"model": model}, arguments={"name": "four"}).module(0).out_features == 4
