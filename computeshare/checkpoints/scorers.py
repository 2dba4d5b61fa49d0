"""Scorers of a job's checkpoints: the same for the evaluator and for a worker with a scoring seat."""

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

import structlog
import torch

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.part_score import PartScore, ScoredPart
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.runtime.processes import using_threads
from computeshare.tasks import metrics
from computeshare.tasks.base import TaskInstance
from computeshare.tasks.metrics import SplitScore
from computeshare.tasks.modules import frozen_digest
from computeshare.tasks.registry import task_of
from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Token

log = structlog.get_logger()


class Scorer(Protocol):
    """Scores weights of one job: its task in this process, or its recipe in a process of its own."""

    @property
    def layout(self) -> Layout:
        """Of the weights to score."""

    @property
    def frozen(self) -> str:
        """The digest of the parameters that are not trained; empty: there are none."""

    def score(self, part: ScoredPart, weights: Weights, batch: int) -> SplitScore:
        """The score of weights on a part of the data. Raises ShapeError, DatasetError, SpecError.

        Args:
            batch: samples at once; 0: as the task says.
        """

    def sample(self) -> str | None:
        """A short text by the weights that were scored last; None: the job's model does not generate text."""

    def close(self) -> None:
        """Give up what it holds."""


@dataclass(frozen=True)
class CheckpointScorer:
    """Scores the checkpoints of one job on this machine."""

    spec: JobSpec
    scorer: Scorer

    def score(self, artifacts: Artifacts, token: Token, part: ScoredPart) -> PartScore:
        """The score of a checkpoint's moving average, or else of its weights, on a part of the data.

        Raises: ArtifactError, ShapeError: it is damaged; DatasetError, SpecError, RecipeError.
        """
        tensors = artifacts.tensors(token, averaged=True)
        if self.scorer.frozen != artifacts.manifest(token).frozen:
            raise SpecError(
                "the parameters that are not trained are built by every machine, and this one builds others than the "
                "job's: install the same version of torch as where the job began, and the same files"
            )
        found = self.scorer.score(part, self.scorer.layout.gather(tensors), self.spec.eval_batch)
        sample = self._sample(token) if part == self.spec.scored_part else None
        return PartScore(
            loss=found.loss, metrics=dict(found.metrics), samples=found.samples, classes=found.classes, sample=sample
        )

    def _sample(self, token: Token) -> str | None:
        try:
            return self.scorer.sample()
        except Exception as error:  # weights that are not finite, for example: the score stands all the same
            log.warning("no sample", version=token.version, error=str(error))
            return None

    def close(self) -> None:
        """Give up what it holds."""
        self.scorer.close()


@dataclass
class LocalScorer:
    """Scores in this process, with data sets in `data_dir`; each part of the data is opened when it is needed first."""

    spec: JobSpec
    data_dir: Path
    bundles: BundleStore | None = None
    device: torch.device | None = None
    """None: the CPU."""
    _parts: dict[ScoredPart, TaskInstance] = field(default_factory=dict)
    _scored: TaskInstance | None = None

    @property
    def layout(self) -> Layout:
        return self._instance(self.spec.scored_part).layout

    @cached_property
    def frozen(self) -> str:
        return frozen_digest(self._instance(self.spec.scored_part).module)

    def score(self, part: ScoredPart, weights: Weights, batch: int) -> SplitScore:
        self._scored = self._instance(part)
        if self.device:
            self._scored.module.to(self.device)
        return metrics.score(self._scored, weights, batch)

    def sample(self) -> str | None:
        with using_threads(1):  # as a score
            return one.task.sample(one.module.cpu(), self.spec.seed) if (one := self._scored) else None

    def close(self) -> None:
        self._parts.clear()
        self._scored = None

    def _instance(self, part: ScoredPart) -> TaskInstance:
        if part not in self._parts:
            self._parts[part] = task_of(self.spec, self.bundles).instance(self.spec.seed, part, self.data_dir)
        return self._parts[part]
