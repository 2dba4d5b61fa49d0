"""Forks: a new job that starts from a version of another."""

import contextlib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from api.errors import InvalidFields, NotFound
from api.jobs.history import History
from api.jobs.service import Jobs, Origin, fingerprint_of, new_id
from api.schemas import ForkRequest, JobPublic
from api.tables import CheckpointRow
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import ArtifactError, SpecError
from computeshare.jobspec.spec import LONGEST_NAME, JobSpec
from computeshare.strategies.registry import implied_by
from computeshare.types import Token


class Forks:
    """Creates jobs from checkpoints of other jobs."""

    def __init__(self, jobs: Jobs, history: History, artifacts_dir: Path) -> None:
        self._jobs, self._history, self._artifacts_dir = jobs, history, artifacts_dir

    def fork(self, job_id: str, request: ForkRequest, key: str | None = None) -> JobPublic:
        """Store a job that starts from a version of job `job_id`, once per idempotency key.

        The checkpoint's files are in place before the job is stored, so that a reducer always finds them.
        Raises: NotFound, InvalidFields, SpecError, ArtifactError; and as `Jobs.create`.
        """
        fingerprint = fingerprint_of({"fork": job_id, **request.model_dump(mode="json")})
        if key and (known := self._jobs.repeated(key, fingerprint)):
            return known
        parent = self._jobs.show(job_id)
        weights, checkpoint = self._history.checkpoint(job_id, str(request.version))
        spec = self._jobs.completed(_spec(parent, request, checkpoint.version))
        _check_fit(_read(parent), spec)
        _check_seed(parent, spec, Artifacts(self._artifacts_dir, job_id), checkpoint)
        kept = _keeps_optimizer(parent, spec, request)
        artifacts = Artifacts(self._artifacts_dir, new_id())
        try:
            origin = _adopted(artifacts, weights.parent, checkpoint, kept, fingerprint)
            job = self._jobs.create(spec, key, origin)
        except BaseException:
            artifacts.delete()
            raise
        if job.id != origin.job_id:  # a concurrent request with the same key created the job first
            artifacts.delete()
        return job


def changed(document: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """A specification's document with `changes` applied; fields of nested objects change one by one.

    A change that names an optimizer or a strategy kind replaces the whole object, so that its defaults apply. Fields
    implied by the old strategy are dropped, as are fields implied by the new strategy unless `changes` gives them.
    `rounds` replaces `epochs`, and the reverse; another data set has none of the old one's `dataset_args`; the facts of
    another data set or recipe, or of other arguments, are to be found out anew.
    """
    left = implied_by(document.get("strategy", {})) if "strategy" in changes else {}
    merged = {name: value for name, value in document.items() if name not in left}
    for name, value in changes.items():
        old, anew = document.get(name), {"optimizer": "name", "strategy": "kind"}.get(name, "")
        inner = isinstance(old, dict) and isinstance(value, dict) and anew not in value
        merged[name] = {**(old or {}), **value} if inner else value
    if "strategy" in changes:
        for name in implied_by(merged["strategy"]).keys() - changes.keys():
            merged.pop(name, None)
    for name, other in _SUPERSEDED:
        if name in changes and other not in changes:
            merged[other] = None
    return merged


_SUPERSEDED = (
    ("rounds", "epochs"),
    ("epochs", "rounds"),
    ("dataset", "dataset_args"),
    ("dataset", "data"),
    ("dataset", "recipe_facts"),
    ("recipe", "recipe_facts"),
    ("recipe_args", "recipe_facts"),
)
"""Fields whose change makes another field void."""


def misfit(parent: JobSpec, spec: JobSpec) -> tuple[str, str] | None:
    """The field because of which a job of `spec` cannot start from weights of `parent`, and a message; None: it can."""
    if spec.model != parent.model:
        field, kept = ("model", f"model, {parent.model}") if parent.model else ("recipe", "recipe's model")
        return field, f"a fork keeps its parent's {kept}: leave {field} out, or create a new job"
    if spec.dataset == parent.dataset and spec.validation > parent.validation:
        return (
            "validation",
            f"the weights were trained on samples that this would hold out, so that scores would be too good: leave "
            f"validation at {parent.validation:g} or less, or create a new job",
        )
    return spec.task.misfit(parent.task)


def fits_optimizer(parent: JobSpec, spec: JobSpec) -> bool:
    """Whether `parent`'s optimizer state can continue under `spec`: only the rate, the weight decay and the decay of a
    moving average may differ.
    """
    before, after = (
        (one.optimizer.name, {**one.optimizer.arguments, "lr": None, "weight_decay": None}, one.server_rules.decay)
        for one in (parent, spec)
    )
    return before == after and bool(parent.ema) == bool(spec.ema)


def _spec(parent: JobPublic, request: ForkRequest, version: int) -> JobSpec:
    """The new job's specification. Raises InvalidFields."""
    name = f"{parent.title} from version {version}"[:LONGEST_NAME]
    try:
        spec = JobSpec.model_validate(changed({**parent.spec, "name": name}, request.spec))
    except ValidationError as error:
        raise InvalidFields.of(error, "spec") from error
    return spec


def _check_fit(parent: JobSpec, spec: JobSpec) -> None:
    """Raises InvalidFields: the weights of `parent` do not fit `spec`."""
    if found := misfit(parent, spec):
        field, message = found
        raise InvalidFields.at(message, "spec", field)


def _check_seed(parent: JobPublic, spec: JobSpec, artifacts: Artifacts, checkpoint: CheckpointRow) -> None:
    """Raises InvalidFields: another seed would build other untrained parameters than the weights belong to."""
    with contextlib.suppress(ArtifactError):  # damaged, or just removed: its files say so when they are adopted
        if (
            spec.recipe is None
            and spec.seed != parent.spec["seed"]
            and artifacts.manifest(Token.parse(checkpoint.token)).frozen
        ):
            message = "the model has parameters that are not trained, and are built from the seed: leave seed out"
            raise InvalidFields.at(message, "spec", "seed")


def _keeps_optimizer(parent: JobPublic, spec: JobSpec, request: ForkRequest) -> bool:
    """Whether the new job continues with the optimizer's state. Raises InvalidFields: the request wants the state, and
    it does not fit.
    """
    fits = fits_optimizer(_read(parent), spec)
    if request.optimizer == "kept" and not fits:
        message = (
            "the optimizer's state fits only the same optimizer: change nothing but lr and weight_decay, "
            'add or remove no ema, or request "fresh"'
        )
        raise InvalidFields.at(message, "optimizer")
    return fits and request.optimizer != "fresh"


def _read(parent: JobPublic) -> JobSpec:
    try:
        return JobSpec.model_validate(parent.spec)
    except ValidationError as error:
        raise SpecError(f"this release cannot read the specification of job {parent.id}: create a new job") from error


def _adopted(artifacts: Artifacts, folder: Path, checkpoint: CheckpointRow, kept: bool, fingerprint: str) -> Origin:
    """Link or copy the parent's files into the new job's folder. Raises NotFound: they have just been removed;
    ArtifactError.
    """
    try:
        token = artifacts.adopt(folder, checkpoint.sha256, kept)
    except FileNotFoundError as error:
        raise NotFound(
            f"version {checkpoint.version} of job {checkpoint.job_id} has just been removed: fork another version"
        ) from error
    except OSError as error:
        raise ArtifactError(f"the checkpoint cannot be linked or copied: {error}") from error
    about = {"job_id": checkpoint.job_id, "version": checkpoint.version, "sha256": checkpoint.sha256}
    forked_from = about | {"optimizer": "kept" if kept else "fresh", "token": str(token)}
    files = {"token": str(token), "sha256": checkpoint.sha256, "bytes": checkpoint.bytes}
    return Origin(artifacts.folder.name, fingerprint, forked_from, files)
