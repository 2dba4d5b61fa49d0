"""A model card in Markdown: what a version is, where it comes from, and how to load it. Pure.

The front matter is that of Hugging Face, its values as JSON, which is YAML, too.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from computeshare.client.api.models import Checkpoint, EpochLedger, Job, JobWorker
from computeshare.jobspec.tasks.facts import perplexity
from computeshare.jobspec.tasks.stored import is_language_model, subject_of
from computeshare.tasks.usage import Usage
from computeshare.types import plain

LEFT_OUT = ("queue", "priority", "notes", "tags", "requires", "prefers", "recipe_facts")
"""Fields of a job that say nothing of its model, or are as long as the model."""


@dataclass(frozen=True, slots=True)
class Facts:
    """The control plane's record of a job and of one of its versions."""

    job: Job
    checkpoint: Checkpoint
    ledger: Sequence[EpochLedger]
    workers: Sequence[JobWorker]

    def scores(self) -> dict[str, dict[str, float]]:
        """The version's accuracy (a fraction) and loss, where they were computed, by the split of the data; a language
        model has a perplexity, too.
        """
        job: Any = self.job
        found: dict[str, Any] = {"test": self.checkpoint}
        if job["spec"].get("validation"):
            found = {"validation": self.checkpoint, "test": self.checkpoint.get("tested") or {}}
        named = {
            split: {
                name: value
                for name, value in {
                    **{name: score.get(name) for name in ("accuracy", "loss")},
                    **(score.get("own_metrics") or {}),
                }.items()
                if value is not None
            }
            for split, score in found.items()
        }
        if is_language_model(job["spec"]):
            for scores in named.values():
                if (value := perplexity(scores.get("loss"))) is not None:
                    scores["perplexity"] = value
        return {split: scores for split, scores in named.items() if scores}


def model_card(facts: Facts, usage: Usage, parameters: int, file: str) -> str:
    """The card of the version in a file of this name, which ends in `.safetensors`, `.pt` or `.onnx`."""
    job, checkpoint = facts.job, facts.checkpoint
    spec = job["spec"]
    title = plain(job.get("title") or subject_of(spec))
    parts = [
        _front_matter(title, facts, usage),
        f"# {title}",
        f"{_subject(spec)} from {_origin(job)}, with ComputeShare on "
        f"{_machines(facts.workers)}. This is version {checkpoint['version']} of {job['rounds_total']} of job "
        f"`{job['id']}`." + _average(spec),
        _table(_results(facts, parameters)),
        "The sha256 is over the tensors' bytes (little-endian) in the order of the state dict, not over a file. "
        f"`computeshare jobs replay {job['id']}` recomputes every version from the job's log and compares the digests.",
        "## Data",
        _ledger(job, facts.ledger),
        "## How to load it",
        usage.inputs,
        _needs(usage, file),
        _code("python", _loading(usage, file)),
        "With access to the control plane:",
        _code("python", _from_job(job, checkpoint)),
        "## Settings",
        _code("json", json.dumps({name: spec[name] for name in spec if name not in LEFT_OUT}, indent=2)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(title: str, facts: Facts, usage: Usage) -> str:
    spec = facts.job["spec"]
    results = [
        {
            "task": {"type": usage.pipeline},
            "dataset": {"name": _dataset(spec), "type": _dataset(spec), "split": split},
            "metrics": [{"type": name, "value": value} for name, value in scores.items()],
        }
        for split, scores in facts.scores().items()
    ]
    fields: dict[str, Any] = {
        "library_name": "pytorch",
        "pipeline_tag": usage.pipeline,
        "tags": ["computeshare", spec["model"] or "recipe"],
    }
    if spec["dataset"]:
        fields["datasets"] = [spec["dataset"]]
    if results:
        fields["model-index"] = [{"name": title, "results": results}]
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    return "\n".join(["---", *lines, "---"])


def _subject(spec: Mapping[str, Any]) -> str:
    """The model and its data set, as the beginning of a sentence."""
    model = f"The model of recipe `{spec['recipe']}`" if spec.get("recipe") else f"`{spec['model']}`"
    return f"{model} trained on `{spec['dataset']}`" if spec["dataset"] else f"{model} trained on the recipe's data"


def _dataset(spec: Mapping[str, Any]) -> str:
    return spec["dataset"] or "the recipe's"


def _origin(job: Job) -> str:
    """The origin of the job's first weights."""
    origin = job.get("forked_from")
    if origin:
        return f"version {origin['version']} of job `{origin['job_id']}`"
    drawn = "the recipe's weights for" if job["spec"].get("recipe") else "initial weights drawn from"
    return f"{drawn} seed {job['spec']['seed']}"


def _average(spec: Mapping[str, Any]) -> str:
    decay = spec.get("ema")
    return f" Its weights are the moving average of the job's versions, of decay {decay}." if decay else ""


def _machines(workers: Sequence[JobWorker]) -> str:
    """The number of workers whose samples counted, and their devices."""
    counted = [worker for worker in workers if worker["samples"]]
    devices = ", ".join(sorted({plain(worker["device"]) for worker in counted}))
    return f"{len(counted)} {'worker' if len(counted) == 1 else 'workers'} ({devices})" if counted else "no worker"


def _results(facts: Facts, parameters: int) -> Iterator[tuple[str, str]]:
    checkpoint = facts.checkpoint
    for split, scores in facts.scores().items():
        for name, value in scores.items():
            yield f"{name.capitalize()} on the {split} split", f"{value:.2%}" if name == "accuracy" else f"{value:.4f}"
    yield "Parameters", f"{parameters:,}"
    yield "sha256 of the weights", f"`{checkpoint['sha256']}`"
    yield "Started", facts.job["started_at"] or "not yet"
    yield "Finished", facts.job["finished_at"] or "not yet"


def _ledger(job: Job, epochs: Sequence[EpochLedger]) -> str:
    """The job's ledger in a sentence."""
    if not epochs:
        return "The ledger has no epoch yet."
    counts = {
        name: sum(epoch[name] for epoch in epochs)
        for name in ("samples", "counted", "missing", "reassigned", "duplicates_refused")
    }
    return (
        f"The ledger of the job, up to its version {job['version']} in epoch {len(epochs)}: {counts['counted']:,} of "
        f"{counts['samples']:,} samples counted, {counts['missing']:,} missing, {counts['reassigned']:,} reassigned to "
        f"another worker, {counts['duplicates_refused']:,} duplicates refused."
    )


def _needs(usage: Usage, file: str) -> str:
    """The packages that the loading code needs, as a sentence; empty for ONNX, or if only the recipe's author knows."""
    if file.endswith(".onnx") or not usage.is_plain:
        return ""
    packages = ["torch"] + ["torchvision"] * ("import torchvision" in usage.build)
    packages += ["safetensors"] * file.endswith(".safetensors")
    return f"This needs {', '.join(packages[:-1])}{' and ' if packages[1:] else ''}{packages[-1]}, not ComputeShare:"


def _loading(usage: Usage, file: str) -> str:
    """Python code that loads the file; empty where the module cannot be built without the job."""
    name = json.dumps(file)
    if file.endswith(".onnx"):
        return (
            f"import onnxruntime\n\nsession = onnxruntime.InferenceSession({name})\n"
            'outputs = session.run(None, {"input": inputs})[0]  # inputs: a NumPy array'
        )
    if not usage.build:
        return ""
    first, read = ("import torch", "torch.load({}, weights_only=True)")
    if not file.endswith(".pt"):
        first, read = "from safetensors.torch import load_file", "load_file({})"
    loaded = read.format(name) + ("" if usage.is_whole or file.endswith(".pt") else ", strict=False")
    return f"{first}\n{usage.build}\nmodule.load_state_dict({loaded})\nmodule.eval()"


def _from_job(job: Job, checkpoint: Checkpoint) -> str:
    get = f"ComputeShare().jobs.get({json.dumps(job['id'])})"
    recipe = ', recipe="PATH"' if job["spec"].get("recipe") else ""
    return f"from computeshare import ComputeShare\n\nmodule = {get}.module({checkpoint['version']}{recipe})"


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _code(language: str, text: str) -> str:
    """A block of code; nothing without any."""
    return f"```{language}\n{text}\n```" if text else ""
