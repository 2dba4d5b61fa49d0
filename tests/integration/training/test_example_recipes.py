"""The recipes in examples/ pass their trial, on small data made here."""

import csv
import random
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from computeshare.tasks.recipes import bundle
from computeshare.training.recipe_check import Report, Trial, check

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[3] / "examples" / "recipes"


def tried(name: str, folder: Path, **arguments: object) -> Report:
    return check(bundle.read(EXAMPLES / name), Trial(arguments, folder))


def test_only_the_adapters_of_a_language_model_are_trained(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / f"{split}.txt").write_text("so it goes, and so it went. " * 40)
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(EXAMPLES / "lora"))
    base.save_pretrained(tmp_path / "base")
    report = tried("lora", tmp_path, rank=2, block=16, base=str(tmp_path / "base"))
    assert {tensor.name.split(".")[-3] for tensor in report.facts.tensors} == {"lora_A", "lora_B"}
    linear = (64, 192), (64, 64), (64, 256), (256, 64)  # of a layer, inputs and outputs
    assert report.parameters == 2 * 2 * sum(map(sum, linear)), "two layers, of rank 2"
    assert (report.frozen, report.facts.train) == (120_576, 69)
    assert report.is_deterministic and report.facts.metric == "loss"


def test_a_regression_reads_a_csv_file_and_reports_its_error(tmp_path: Path) -> None:
    draw = random.Random(0)
    with (tmp_path / "houses.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow([*(f"column{i}" for i in range(8)), "price"])
        lines.writerows([draw.random() for _ in range(9)] for _ in range(100))
    report = tried("regression.py", tmp_path, target="price")
    assert (report.facts.train, report.facts.test, report.facts.metrics) == (80, 20, ("absolute_error",))
    assert report.is_deterministic and not report.remarks
