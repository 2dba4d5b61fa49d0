"""Recomputes a job from its ledger: every update again, combined and applied as recorded, and every version's sha256
compared with the recorded digest.

The result depends on the micro-batches of each version, not on the workers that computed them. Bits are equal only
between machines of the same kind (`training.devices.kind`); so a mismatch proves nothing where a participant's recorded
kind differs from this machine's.
"""

import struct
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import ValidationError

from computeshare.bundles.store import BundleStore
from computeshare.client import Client
from computeshare.client.api.models import Job, Version
from computeshare.client.bundles.downloads import download
from computeshare.client.recipes import Chosen, job_recipe
from computeshare.codecs.messages import decode_update, encode_update
from computeshare.codecs.registry import CODECS
from computeshare.errors import ArtifactError, ReplayError, SettingsError, ShapeError, SpecError, Unconfined
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.own_data import TRAINING_FILES
from computeshare.runtime.processes import using_threads
from computeshare.tensors.layout import Weights
from computeshare.training.work_units import kind_with
from computeshare.types import ENDED, Kind, Vector

if TYPE_CHECKING:
    import torch

    from computeshare.training.server_step import ServerModel
    from computeshare.training.work_units import Computation

Outcome = Literal["matches", "mismatch", "other kind"]
MOST_THREADS = 256
REDUCING: Kind = {"device": "cpu"}
"""The device of every reducer's steps."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A version's recorded digest (None: the record was lost), its recomputed digest, and its workers."""

    version: int
    recorded: str | None
    computed: str
    workers: frozenset[str]

    @property
    def differs(self) -> bool:
        return self.recorded is not None and self.recorded != self.computed


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of a replay. `matched` and `unrecorded` count versions; `differences` are the lines in which this
    machine's kind differs from the kinds of the job's machines.
    """

    outcome: Outcome
    matched: int
    unrecorded: int
    mismatches: tuple[Checked, ...]
    differences: tuple[str, ...]

    @property
    def first_mismatch(self) -> int | None:
        return self.mismatches[0].version if self.mismatches else None


@dataclass(frozen=True, slots=True)
class Kinds:
    """The recorded kinds of a job's machines: of its workers, by id, and of its reducer."""

    workers: Mapping[str, Sequence[Kind]]
    reducer: Kind | None

    @property
    def all(self) -> list[Kind]:
        return [kind for kinds in self.workers.values() for kind in kinds]

    def of(self, workers: frozenset[str]) -> list[Kind]:
        """The kinds of the given workers."""
        return [kind for worker in sorted(workers) for kind in self.workers.get(worker, ())]


def judge(checked: Sequence[Checked], kinds: Kinds, here: Kind, reducing: Kind) -> Verdict:
    """The verdict on the checked versions: all match; a mismatch; or `other kind`, a mismatch that proves nothing.

    It is `other kind` if the reducer, or a worker that contributed between the last match and the first mismatch, was
    of another kind than this machine.

    Args:
        here: this machine's kind when it computes gradients.
        reducing: this machine's kind when it steps as a reducer.
    """
    mismatches = tuple(one for one in checked if one.differs)
    matched = sum(one.recorded == one.computed for one in checked)
    unrecorded = sum(one.recorded is None for one in checked)
    if not mismatches:
        return Verdict("matches", matched, unrecorded, (), ())
    suspects: frozenset[str] = frozenset()
    for one in checked:
        suspects = frozenset() if one.recorded == one.computed else suspects | one.workers
        if one.differs:
            break
    found = {line: None for kind in kinds.of(suspects) for line in kind_differences(here, kind)}
    if kinds.reducer:
        found |= dict.fromkeys(f"reducer's {line}" for line in kind_differences(reducing, kinds.reducer))
    return Verdict("other kind" if found else "mismatch", matched, unrecorded, mismatches, tuple(found))


def kind_differences(here: Kind, there: Kind) -> list[str]:
    """The properties in which two kinds differ, as a line of text each."""
    names = sorted(here.keys() | there.keys())
    return [
        f"{n}: {here.get(n, 'none')} here, {there.get(n, 'none')} there" for n in names if here.get(n) != there.get(n)
    ]


@dataclass(frozen=True)
class RecipeSource:
    """Where a recipe to recompute comes from.

    Args:
        chosen: its file or folder, or `stored`; None: the user allowed none to run.
        cache: folder for the files of initial states, and of data sets that users added.
        unconfined: whether the recipe may run where nothing can confine it, with the user's rights.
    """

    chosen: Chosen
    cache: Path
    unconfined: bool = False

    @property
    def store(self) -> BundleStore:
        return BundleStore(self.cache)

    def open(self, client: Client, spec: JobSpec, device: "torch.device", threads: int) -> "Computation":
        """Start the recipe's process. Raises SpecError, RecipeError, BundleError, Unconfined."""
        from computeshare.pipeline.recipes.process import StageProcess
        from computeshare.training.recipe_process.process import ProcessLimits, RecipeFiles, RecipeProcess

        found = job_recipe(client, self.store, spec, self.chosen)
        data = download(client.bundles, spec.data.bundle, self.store) if spec.data else None
        files = RecipeFiles(found.bundle, found.state, data)
        limits, kind = (
            ProcessLimits(unconfined=self.unconfined),
            StageProcess if spec.strategy.staging else RecipeProcess,
        )
        try:
            process = kind(spec.model_copy(update={"threads": threads}), files, str(device), limits)
        except Unconfined as error:
            raise Unconfined(
                f"Nothing can confine the recipe here. {error} Or add --unconfined to run it nevertheless, if you know "
                "who wrote it."
            ) from error
        try:
            process.open()
            if isinstance(process, StageProcess):
                process.cut(process.split())
            return process
        except BaseException:
            process.close()
            raise


class Replay:
    """The recomputation of a job from version `first` to version `last`, on this machine."""

    def __init__(
        self,
        client: Client,
        job_id: str,
        data_dir: Path,
        first: int = 0,
        last: int | None = None,
        recipe: "RecipeSource | None" = None,
    ) -> None:
        """Reads the job. Raises SpecError: the job, or this range of versions, cannot be replayed; ReplayError: this
        release cannot read its specification.

        Args:
            recipe: for a job that trains one, which then runs here, confined.
        """
        self._client, self._data_dir, self._recipe = client, data_dir, recipe or RecipeSource(None, data_dir)
        self.job = client.show(job_id)
        self.first, self.last = bounds(self.job, first, last)
        self.spec = _spec(self.job)
        if remembered := _remembered(self.spec):
            raise SpecError(
                f"job {job_id} cannot be recomputed: its updates depend on {remembered}, which no log holds"
            )
        workers = {worker["id"]: worker.get("kinds") or [] for worker in client.workers(job_id)}
        reducer = self.job.get("reducer")
        self.kinds = Kinds(workers, reducer.get("kind") if reducer else None)
        self._device, self._threads = _device(self.kinds.all), _threads(self.spec, self.kinds.all)
        self.here, self.reducing = _kind(self._device, self._threads), _kind(_device([REDUCING]), 1)
        self.checked: list[Checked] = []

    def run(self) -> Iterator[Checked]:
        """Recompute the versions in order and yield each after its check.

        Raises SpecError: version `first` has no checkpoint. ReplayError: the ledger has a gap, or the checkpoint is
        damaged.
        """
        with using_threads(self._threads), closing(self._computation()) as computation:
            machine = _Machine(self.spec, computation)
            self.here = machine.kind
            model = machine.start(self._initial()) if self._from_seed else self._from_checkpoint(machine)
            for version in self._client.versions(self.job["id"], self.first + 1, self.last):
                model = machine.step(version["version"], model, _parts(version), version.get("staleness", ()))
                digest = machine.layout.digest(model.published)
                workers = frozenset(worker for _, worker, _ in version["counted"])
                self.checked.append(Checked(version["version"], version["sha256"], digest, workers))
                yield self.checked[-1]

    def verdict(self) -> Verdict:
        """The verdict on the versions checked so far. Raises ReplayError: none of them has a recorded digest."""
        if not any(one.recorded for one in self.checked):
            raise ReplayError(
                f"no digests are recorded for versions {self.first + 1} to {self.last}: choose a later end"
            )
        return judge(self.checked, self.kinds, self.here, self.reducing)

    def _computation(self) -> "Computation":
        """The job's model and data: in this process, or a recipe's in one of its own."""
        from computeshare.pipeline.chains.whole_replica import whole_computation
        from computeshare.tasks.registry import task_of
        from computeshare.training import devices
        from computeshare.training.computation import LocalComputation

        if self.spec.recipe:
            return self._recipe.open(self._client, self.spec, self._device, self._threads)
        devices.make_deterministic(self._device)
        store = self._recipe.store
        if self.spec.data:
            download(self._client.bundles, self.spec.data.bundle, store, (TRAINING_FILES,))
        instance = task_of(self.spec, store).instance(self.spec.seed, "train", self._data_dir)
        if self.spec.strategy.staging:
            return whole_computation(self.spec, instance, self._device)
        return LocalComputation(instance, self._device)

    def _initial(self) -> Weights:
        """Version 0, as the job begins."""
        from computeshare.tasks.initial_state import initial_state_of

        return initial_state_of(self.spec, self._recipe.store).weights()

    @property
    def _from_seed(self) -> bool:
        return self.first == 0 and not self.job.get("forked_from")

    def _from_checkpoint(self, machine: "_Machine") -> "ServerModel":
        """The version `first`, from its checkpoint. Raises SpecError: it has none; ReplayError: the checkpoint is
        damaged.
        """
        from safetensors.numpy import load_file

        job_id, kept = self.job["id"], sorted(c["version"] for c in self._client.checkpoints(self.job["id"]))
        if self.first not in kept:
            there = ", ".join(map(str, sorted({*kept, *([] if self.job.get("forked_from") else [0])})))
            raise SpecError(f"version {self.first} is not stored: a replay can start from {there}")
        try:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "weights.safetensors"
                if self.spec.strategy.lag and 0 < self.first < self.spec.rounds_total:
                    self._client.download(job_id, self.first, path, kind="before")
                    machine.start_after(machine.layout.gather(load_file(path)))
                self._client.download(job_id, self.first, path, kind="raw")
                weights = machine.layout.gather(load_file(path))
            return machine.start(weights, self._client.state(job_id, self.first))
        except (ArtifactError, ShapeError, struct.error) as error:
            raise ReplayError(
                f"the checkpoint of version {self.first} is damaged ({error}): start from another"
            ) from error


class _Machine:
    """A worker and a reducer in one: the model, the data, the upload codec, the server's step."""

    def __init__(self, spec: JobSpec, computation: "Computation") -> None:
        from computeshare.training.server_step import ServerStep

        self.layout = computation.layout
        self._replica = computation.replica(spec)
        self.kind = kind_with(computation.kind, self._replica)
        self._up, self._plan = CODECS[spec.codecs.up], spec.plan
        self._strategy = spec.strategy
        self._before: deque[Weights] = deque(maxlen=spec.strategy.recent)
        self._loaded: Weights | None = None
        self.server_step = ServerStep(spec, self.layout)

    def start(self, weights: Weights, state: bytes = b"") -> "ServerModel":
        """The version at which the replay begins, from weights and the reducer's state (empty: a fresh optimizer).
        Raises as `ServerStep.load`.
        """
        return self.server_step.publish_whole(self.server_step.load(weights, state))[1]

    def start_after(self, weights: Weights) -> None:
        """Take the published weights of the version before that at which the replay begins."""
        self._before.append(weights)

    def step(
        self, version: int, base: "ServerModel", parts: Sequence[tuple[int, int]], staleness: Sequence[int] = ()
    ) -> "ServerModel":
        """The version `version`, made from `base` by the updates of `parts`. Raises ReplayError: a base is missing.

        Args:
            parts: pairs (unit, samples), ascending.
            staleness: for each part, how many versions before `base` its update was computed on; empty: all on `base`.
        """
        self._before.append(base.published)
        late = staleness or [0] * len(parts)
        if max(late) >= len(self._before):
            raise ReplayError(
                f"version {version} counts an update computed on version {version - 1 - max(late)}, from before the "
                f"replay's beginning: start from an earlier checkpoint, or from 0"
            )
        samples = [count for _, count in parts]
        updates = [self._update(unit, behind) for (unit, _), behind in zip(parts, late, strict=True)]
        with using_threads(1):  # a thread, as in every reducer
            return self.server_step.step(version, base, updates, samples, staleness)

    def _update(self, unit: int, behind: int) -> tuple[Vector, Vector]:
        """A unit's update and buffers as a reducer receives them: encoded and decoded by the upload codec."""
        weights = self._before[-1 - behind]
        if weights is not self._loaded:
            self._replica.load(weights)
            self._loaded = weights
        update = self._replica.compute(unit)
        seed = self._plan.generator_seed(unit)
        sent = encode_update(self._up, update.vector, update.buffers, self.layout, seed)
        return decode_update(self._up, sent, self.layout)


def bounds(job: Job, first: int, last: int | None) -> tuple[int, int]:
    """The range of versions to replay. By default it ends at the newest durable version, or at the last version of an
    ended job. Raises SpecError: the range is not valid.
    """
    newest = job["version"] if job["status"] in ENDED else job["durable_version"]
    last = newest if last is None else last
    if newest == 0:
        raise SpecError(f"job {job['id']} has no durable version yet: there is nothing to replay")
    if not 0 <= first < last <= newest:
        raise SpecError(
            f"a replay runs from a version to a later version, at most {newest}: {first} to {last} is not possible"
        )
    return first, last


def _spec(job: Job) -> JobSpec:
    try:
        return JobSpec.model_validate(job["spec"])
    except ValidationError as error:
        raise ReplayError(f"this release cannot read the job's specification: {error}") from error


def _remembered(spec: JobSpec) -> str | None:
    """The state of workers that the job's updates depend on and that no log holds, in words; None: there is none."""
    if CODECS[spec.codecs.up].residual:
        return f"what each worker still owed of those before (codec {spec.codecs.up})"
    if spec.strategy.keeps_inner:
        return "the inner states that workers kept"
    if spec.privacy:
        return "the noise of its workers (privacy)"
    return None


def _parts(version: Version) -> list[tuple[int, int]]:
    """A version's micro-batches, ascending, as (micro-batch, samples). Raises ReplayError: the ledger has none."""
    parts = sorted((micro_batch, samples) for micro_batch, _, samples in version["counted"])
    if not parts or sum(samples for _, samples in parts) <= 0:
        number = version["version"]
        raise ReplayError(f"the ledger has no micro-batches of version {number}: start from a later checkpoint")
    return parts


def _device(kinds: Sequence[Kind]) -> "torch.device":
    """A device of the type that all the job's workers had, if this machine has it; else this machine's best device."""
    from computeshare.training import devices

    types = {str(kind.get("device")) for kind in kinds}
    try:
        return devices.choose(types.pop() if len(types) == 1 else None)
    except SettingsError:
        return devices.choose()


def _kind(device: "torch.device", threads: int) -> Kind:
    """This machine's kind, with `threads` CPU threads."""
    from computeshare.training import devices

    with using_threads(threads):
        return devices.kind(device)


def _threads(spec: JobSpec, kinds: Sequence[Kind]) -> int:
    """The number of CPU threads that the job's workers had; this machine's own choice where they differed."""
    import torch

    recorded = {int(kind["threads"]) for kind in kinds if isinstance(kind.get("threads"), int)}
    common = recorded.pop() if len(recorded) == 1 else torch.get_num_threads()
    return spec.threads or min(max(1, common), MOST_THREADS)
