"""What scores a job's versions: its task in this process, or a recipe in a process of its own."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import recipes
from computeshare.tasks import metrics
from computeshare.tasks.base import Part, TaskInstance
from computeshare.tasks.metrics import SplitScore
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.recipe_process.connection import STEP_LIMIT_S
from computeshare.training.recipe_process.process import Limits, RecipeFiles, RecipeProcess


class Scorer(Protocol):
    """Scores the versions of one job."""

    @property
    def layout(self) -> Layout:
        """Of the weights to score."""

    @property
    def frozen(self) -> str:
        """The digest of the parameters that are not trained; empty: there are none."""

    def score(self, part: Part, weights: Weights, batch: int) -> SplitScore:
        """The score of weights on a part of the data. Raises ShapeError, DatasetError, SpecError.

        Args:
            batch: samples at once; 0: as the task says.
        """

    def sample(self) -> str | None:
        """A short text by the weights that were scored last; None: the job's model does not generate text."""

    def close(self) -> None:
        """Give up what it holds."""


@dataclass
class LocalScorer:
    """Scores in this process, with data sets in `data_dir`; each part of the data is opened when it is needed first."""

    spec: JobSpec
    data_dir: Path
    bundles: BundleStore | None = None
    _parts: dict[Part, TaskInstance] = field(default_factory=dict)
    _scored: TaskInstance | None = None

    @property
    def layout(self) -> Layout:
        return self._instance(self.spec.scored_part).layout

    @cached_property
    def frozen(self) -> str:
        return frozen_digest(self._instance(self.spec.scored_part).module)

    def score(self, part: Part, weights: Weights, batch: int) -> SplitScore:
        self._scored = self._instance(part)
        return metrics.score(self._scored, weights, batch)

    def sample(self) -> str | None:
        one = self._scored
        return one.task.sample(one.module, self.spec.seed) if one else None

    def close(self) -> None:
        self._parts.clear()
        self._scored = None

    def _instance(self, part: Part) -> TaskInstance:
        if part not in self._parts:
            self._parts[part] = task_of(self.spec, self.bundles).instance(self.spec.seed, part, self.data_dir)
        return self._parts[part]


@dataclass(frozen=True)
class RecipeRunner:
    """How this evaluator runs recipes: confined, on the CPU, and only those that the control plane has signed.

    Args:
        bundles: with the jobs' initial states and data.
        control_key: the control plane's public key.
        unconfined: whether the owner lets recipes run where nothing can confine them.
        step_limit_s: the longest time that a recipe may take for a step.
    """

    bundles: BundleStore
    control_key: str
    unconfined: bool = False
    step_limit_s: float = STEP_LIMIT_S

    def scorer(self, redis: Redis, job_id: str, spec: JobSpec) -> RecipeProcess:
        """Start a process that scores the job's versions. Raises RecipeError, BundleError, Unconfined."""
        recipe = recipes.recipe_of(redis, job_id, spec)
        if not recipes.is_signed(redis, job_id, spec, self.control_key):
            raise RecipeError(
                "the recipe is not run, because this control plane has not signed it: the job was changed in the "
                "broker, or the evaluator has another control plane's key"
            )
        assert spec.recipe_facts
        data = self.bundles.open_files(spec.data.bundle) if spec.data else None
        files = RecipeFiles(recipe, self.bundles.open_files(spec.recipe_facts.initial), data)
        one_thread = spec.model_copy(update={"threads": 1})  # training cannot wait, scores can
        process = RecipeProcess(one_thread, files, "cpu", Limits(step_s=self.step_limit_s, unconfined=self.unconfined))
        try:
            return process.open(spec.scored_part)
        except BaseException:
            process.close()
            raise
