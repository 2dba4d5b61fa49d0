"""What scores a job's versions: the task in this process."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks import metrics
from computeshare.tasks.base import Part, TaskInstance
from computeshare.tasks.metrics import SplitScore
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout, Weights


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
            self._parts[part] = task_of(self.spec).instance(self.spec.seed, part, self.data_dir)
        return self._parts[part]
