"""The model card: its front matter is YAML, and it says what the control plane knows."""

from typing import Any, cast

import yaml

from computeshare.client.api.models import Checkpoint, EpochLedger, JobWorker, OnTestSet
from computeshare.client.model_card import Facts, model_card
from computeshare.tasks.usage import Usage
from tests.support.http_answers import job
from tests.support.recipe_jobs import RECIPE, recipe_spec

USAGE = Usage("image-classification", "Inputs are images.", "module = build()", is_plain=True)
EPOCH: EpochLedger = {
    "epoch": 0, "samples": 1437, "counted": 1437, "missing": 0, "reassigned": 32, "duplicates_refused": 2,
}  # fmt: skip
SPEC = {"dataset": "digits", "model": "mlp", "seed": 7}


def card(
    usage: Usage = USAGE,
    file: str = "m.safetensors",
    accuracy: float | None = 0.9722,
    loss: float | None = 0.125,
    tested: OnTestSet | None = None,
    **changes: Any,
) -> str:
    scores: dict[str, Any] = {"accuracy": accuracy, "loss": loss, "tested": tested}
    checkpoint = cast(Checkpoint, {"version": 25, "sha256": "ab" * 32, "bytes": 4, "best": True, **scores})
    workers = [{"device": name, "samples": count} for name, count in (("cuda (H100)", 9), ("cpu", 9), ("mps", 0))]
    facts = Facts(job(**{"spec": SPEC, **changes}), checkpoint, [EPOCH, EPOCH], cast(list[JobWorker], workers))
    return model_card(facts, usage, 12_345, file)


def front_matter(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_the_front_matter_is_what_hugging_face_reads() -> None:
    told = front_matter(card(title='a "title": ü'))
    assert told["pipeline_tag"] == "image-classification" and told["datasets"] == ["digits"]
    (model,) = told["model-index"]
    assert model["name"] == 'a "title": ü'
    (result,) = model["results"]
    assert result["dataset"] == {"name": "digits", "type": "digits", "split": "test"}
    assert result["metrics"] == [{"type": "accuracy", "value": 0.9722}, {"type": "loss", "value": 0.125}]


def test_a_version_that_was_not_scored_claims_no_accuracy() -> None:
    text = card(accuracy=None, loss=None)
    assert "model-index" not in front_matter(text)
    assert "Accuracy" not in text and "Loss" not in text


def test_scores_are_those_of_the_split_that_they_were_computed_on() -> None:
    tested: OnTestSet = {"version": 25, "accuracy": 0.5, "loss": 1.5, "samples": 360}
    text = card(spec={**SPEC, "validation": 0.1}, tested=tested)
    assert "| Accuracy on the validation split | 97.22% |" in text and "| Accuracy on the test split | 50.00% |" in text
    assert [one["dataset"]["split"] for one in front_matter(text)["model-index"][0]["results"]] == [
        "validation",
        "test",
    ]
    assert "test split" not in card(spec={**SPEC, "validation": 0.1})


def test_a_language_model_has_loss_and_perplexity_and_no_accuracy() -> None:
    text = card(spec={**SPEC, "model": "gpt"}, accuracy=None, loss=1.5)
    assert "| Loss on the test split | 1.5000 |\n| Perplexity on the test split | 4.4817 |" in text
    assert "Accuracy" not in text and "perplexity" not in card().lower()


def test_a_recipes_card_names_the_recipe_and_no_data_set() -> None:
    spec = recipe_spec(recipe_args={"width": 4}).model_dump(mode="json")
    text = card(spec=spec, title="", accuracy=None, loss=1.5)
    assert "# recipe a1a1a1a1\n" in text and f"The model of recipe `{RECIPE}` trained on the recipe's data from" in text
    assert "perplexity" not in text.lower() and "datasets" not in front_matter(text)


def test_a_moving_average_is_told() -> None:
    assert "moving average of the job's versions, of decay 0.99" in card(spec={**SPEC, "ema": 0.99})
    assert "moving average" not in card()


def test_the_card_tells_version_digest_ledger_and_machines() -> None:
    text = card()
    assert "version 25 of 100 of job `ab12cd34`" in text
    assert f"`{'ab' * 32}`" in text and "| Parameters | 12,345 |" in text
    assert "2,874 of 2,874 samples counted, 0 missing, 64 reassigned to another worker, 4 duplicates refused" in text
    assert "on 2 workers (cpu, cuda (H100))" in text and "initial weights drawn from seed 7" in text


def test_what_concerns_the_owner_alone_is_left_out() -> None:
    text = card(spec={**SPEC, "notes": "for my boss", "queue": "cellar", "epochs": 3})
    assert "boss" not in text and "cellar" not in text and '"epochs": 3' in text


def test_a_fork_names_its_origin() -> None:
    origin = {"job_id": "old", "version": 3, "sha256": "", "optimizer": "kept"}
    text = card(forked_from=origin)
    assert "from version 3 of job `old`" in text and "seed 7" not in text.split("## Settings")[0]


def test_each_format_is_loaded_in_its_own_way() -> None:
    assert 'module.load_state_dict(load_file("m.safetensors"))' in card()
    assert 'module.load_state_dict(torch.load("m.pt", weights_only=True))' in card(file="m.pt")
    assert 'onnxruntime.InferenceSession("m.onnx")' in card(file="m.onnx")
    assert "This needs torch and safetensors, not ComputeShare:\n" in card()
    assert "This needs torch, not ComputeShare:\n" in card(file="m.pt") and "This needs" not in card(file="m.onnx")
    vision = Usage("image-classification", "", "import torchvision\n\nmodule = build()", is_plain=True)
    assert "This needs torch, torchvision and safetensors, not ComputeShare:\n" in card(vision)
    without = card(Usage("other", ""))
    assert "This needs" not in without
    assert "load_file" not in without and '.jobs.get("ab12cd34").module(25)' in without


def test_a_title_stays_one_line() -> None:
    assert "\n# a\N{REPLACEMENT CHARACTER}## b\n" in card(title="a\n## b")
