"""Tries a recipe: builds it twice, takes two steps, determines its sizes and reports errors."""

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from pydantic import ValidationError

from computeshare.bundles.source import described
from computeshare.confinement import scratch
from computeshare.confinement.process import start
from computeshare.confinement.watch import ended, watch
from computeshare.errors import ComputeShareError, RecipeError
from computeshare.jobspec.part import Part
from computeshare.jobspec.tasks.recipe_facts import FROZEN, INITIAL, RecipeFacts, TensorEntry
from computeshare.tasks.recipes import packages, requirements
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tasks.recipes.requirements import required

if TYPE_CHECKING:
    from torch import nn

    from computeshare.tasks.recipes.task import RecipeTask

NOT_DETERMINISTIC = (
    "the same step gave other bits the second time, with the data read anew: it is not to be trained, since the result "
    "would depend on which machines do, and a replay would not match. Draw from the global generators of torch, NumPy "
    "or random, which are seeded, or give a generator of your own a fixed seed; and iterate over no sets"
)
BATCH = 8
"""Most samples of a step of the trial."""
PATIENCE_S = 600.0
ANSWER = "answer"
"""The file in which the trial's process leaves its result."""
FILES = "files"
"""The folder with the recipe's files."""
STATE = "state"
"""The folder in which it leaves the files of the initial state."""
ANSWER_BYTES, STATE_BYTES = 16 << 20, 1 << 40
TRIAL_BYTES = 8 << 30
"""Most memory of a confined trial."""


class Report(Part):
    """The result of a trial."""

    digest: str
    facts: RecipeFacts
    parameters: int
    """Values that are trained."""
    frozen: int
    """Values of parameters that need no gradient."""
    is_deterministic: bool
    """Whether the same steps, taken twice, gave the same bits."""
    loss: float
    """After the first step, as a mean over the batch."""
    step_s: float
    """Seconds of the second step."""
    remarks: tuple[str, ...]
    """Findings, as sentences."""

    def check_trainable(self) -> None:
        """Raises RecipeError: every worker would refuse to train the recipe."""
        if not self.is_deterministic:
            raise RecipeError(NOT_DETERMINISTIC)


@dataclass(frozen=True, slots=True)
class Trial:
    """Settings of a recipe's trial.

    Args:
        arguments: the job's `recipe_args`.
        folder: with the data that the recipe reads; None: it needs none.
        seed: of the job.
        is_confined: whether the recipe's code reaches nothing but `folder`, or has this user's rights.
    """

    arguments: Mapping[str, Any]
    folder: Path | None = None
    seed: int = 0
    is_confined: bool = False


def check(bundle: Bundle, trial: Trial, state: Path | None = None, patience_s: float = PATIENCE_S) -> Report:
    """Try a recipe in a process of its own.

    Args:
        state: an empty folder that gets the files of the initial state; None: nobody needs them.
    Raises: RecipeError: the recipe cannot train, with the reason; its process died, or took longer than `patience_s`.
        Unconfined: it is to be confined, and nothing here can do that.
    """
    requires = required(bundle)
    requirements.check(requires)
    request = {"files": dict(bundle.files), "arguments": dict(trial.arguments), "seed": trial.seed}
    request["folder"] = str(trial.folder) if trial.folder else None
    with scratch.temporary() as folder:
        process = _started(folder, trial, packages.folder_of(bundle.package) if bundle.package else None)
        watching = watch(process, TRIAL_BYTES, scratch=folder) if trial.is_confined else None
        try:
            process.communicate(json.dumps(request).encode(), patience_s)
        except subprocess.TimeoutExpired as error:
            raise RecipeError(
                f"the trial took more than {patience_s:.0f} s: try a smaller model or less data"
            ) from error
        finally:
            process.kill()
            process.wait()
        why = watching.why() if watching else ended(process.returncode)
        report = _read_report(folder, process.returncode, why)
        release = packages.package_of(bundle.package).release if bundle.package else ""
        facts = report.facts.model_copy(update={"requires": requires, "package": release})
        if state:
            _take(folder / STATE, state)
            facts = facts.model_copy(update={"initial": described(state).digest})
    return report.model_copy(update={"digest": bundle.digest, "facts": facts})


def _started(folder: Path, trial: Trial, package: Path | None) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", __name__, str(folder)]
    if trial.is_confined:
        return start(
            command,
            scratch=folder,
            readable=[path for path in (trial.folder, package) if path],
            environment={"PYTHONPATH": str(package)} if package else {},
            memory_bytes=TRIAL_BYTES,
            stdin=subprocess.PIPE,
            output=subprocess.DEVNULL,
        )
    # what the recipe prints goes to standard error: standard output is for the report
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=2)


def _read_report(folder: Path, code: int, why: str) -> Report:
    """Raises RecipeError."""
    found = b""
    with contextlib.suppress(FileNotFoundError), scratch.open_file(folder, ANSWER, ANSWER_BYTES) as file:
        found = file.read()
    if code or not found:
        raise RecipeError(
            f"the recipe's process {why}: look for a call that ends the process, or for too little memory"
        )
    if found.startswith(_ERROR):
        raise RecipeError(found.removeprefix(_ERROR).decode(errors="replace"))
    try:
        return Report.model_validate_json(found)
    except ValidationError as error:
        raise RecipeError(f"the recipe's process wrote a report that cannot be read: {error}") from error


def _take(source: Path, state: Path) -> None:
    """Copy the files of the initial state. Raises RecipeError, OSError."""
    for name in (INITIAL, FROZEN):
        with contextlib.suppress(FileNotFoundError), scratch.open_file(source, name, STATE_BYTES) as file:
            _copy(file, state / name)


def _copy(file: BinaryIO, path: Path) -> None:
    with path.open("wb") as target:
        shutil.copyfileobj(file, target)


_ERROR = b"error: "


def main() -> None:
    """In the process of the trial: write the report as JSON to the answer, or `error: ` and why there is none."""
    from computeshare.tasks.recipes.functions import told

    folder = Path(sys.argv[1]).resolve()
    request = json.load(sys.stdin.buffer)
    data = Path(request["folder"]) if request["folder"] else None
    trial = Trial(request["arguments"], data, request["seed"])
    try:
        with told(folder / FILES, "the trial"):
            found = _tried(Bundle(request["files"]), trial, folder).model_dump_json().encode()
    except ComputeShareError as error:
        found = _ERROR + str(error).encode()
    (folder / ANSWER).write_bytes(found)


def _tried(bundle: Bundle, trial: Trial, folder: Path) -> Report:
    from computeshare.tasks.modules import frozen_digest
    from computeshare.tasks.recipes import state_files
    from computeshare.tasks.recipes.functions import load
    from computeshare.tasks.recipes.task import RecipeTask

    files, state = folder / FILES, folder / STATE
    bundle.write(files)
    task = RecipeTask(load(files), bundle.digest, trial.arguments, trial.folder)
    task.functions.check(trial.arguments)
    train, test = (len(task.open(split, files)) for split in ("train", "test"))
    first = _Steps(task, trial.seed)
    state.mkdir()
    state_files.write(first.instance.module, state)
    losses, gradients = zip(*first.taken(), strict=True)
    if not all(map(math.isfinite, losses)):
        raise RecipeError(f"the loss was {losses[-1]} after {len(losses)} steps: check inputs, model and loss")
    module, layout = first.instance.module, first.instance.layout
    batch = first.instance.split.batch(first.indices)
    initial, step_s = first.initial, first.step_s
    del first
    task.opened.clear()  # data() is called again: it may return other data each time
    second = _Steps(task, trial.seed)
    if initial != second.initial:
        raise RecipeError(
            "model() gave two different modules from the same seed: draw initial weights from torch's, NumPy's or "
            "Python's global generator, and from no other source"
        )
    is_deterministic = gradients == tuple(gradient for _, gradient in second.taken())
    entries = [TensorEntry(name=t.name, shape=t.shape, kind=t.kind) for t in layout.tensors]
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad)
    facts = RecipeFacts(
        train=train,
        test=test,
        tensors=tuple(entries),
        **task.found_scores(module, batch)._asdict(),
        initial=described(state).digest,
        frozen=frozen_digest(module),
    )
    return Report(
        digest=bundle.digest,
        facts=facts,
        parameters=layout.parameters,
        frozen=frozen,
        is_deterministic=is_deterministic,
        loss=losses[-1],
        step_s=step_s,
        remarks=tuple(_remarks(module, is_deterministic)),
    )


class _Steps:
    """A module of a recipe's, and steps of plain SGD on its first training samples, as a worker computes them."""

    def __init__(self, task: "RecipeTask", seed: int) -> None:
        import numpy as np

        from computeshare.tasks.modules import frozen_digest, weights_of

        self.instance = instance = task.instance(seed, "train", Path())
        task.load_pretrained(instance.module, seed)
        self.indices = np.arange(min(BATCH, len(instance.split)))
        trained = instance.layout.digest(weights_of(instance.module, instance.layout))
        self.initial = trained, frozen_digest(instance.module)
        self.step_s = 0.0

    def taken(self, count: int = 2) -> Iterator[tuple[float, bytes]]:
        """The loss before each step, and the gradient's bytes."""
        import torch

        from computeshare.jobspec.sampling_plan import Plan
        from computeshare.training.replica import Replica

        size = len(self.indices)
        replica = Replica(self.instance, Plan(0, size, size, 1), torch.device("cpu"))
        weights = replica.parameters.read()
        for number in range(count):
            began = time.monotonic()
            update = replica.compute(number)
            self.step_s = time.monotonic() - began
            weights -= 0.01 * update.vector
            replica.parameters.fill(weights)
            yield update.loss, update.vector.tobytes()


def _remarks(module: "nn.Module", is_deterministic: bool) -> Iterator[str]:
    if not is_deterministic:
        yield NOT_DETERMINISTIC
    idle = [n for n, p in module.named_parameters() if p.requires_grad and not bool(p.grad.any())]  # type: ignore[union-attr]
    if idle:
        some = ", ".join(idle[:5]) + (", ..." if len(idle) > 5 else "")
        yield f"{len(idle)} parameters got no gradient ({some}): freeze those that the loss does not depend on."


if __name__ == "__main__":
    main()
