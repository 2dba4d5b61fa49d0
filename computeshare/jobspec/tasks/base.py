"""The part of a JobSpec that says what is trained: each kind of task answers for itself. Pure."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import ClassVar

from computeshare.jobspec.part import error_at
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.tasks.facts import TaskFacts


class TaskSpec(ABC):
    """A model with its data, by their names and arguments."""

    sized_by: ClassVar[str]
    """The field that changes the model's number of parameters."""

    @property
    @abstractmethod
    def excluded(self) -> Mapping[str, str]:
        """The JobSpec's fields that mean nothing to this task, each with the message of an error."""

    @property
    @abstractmethod
    def title(self) -> str:
        """A job's title where its user gives it no name."""

    @property
    def needs_facts(self) -> bool:
        """Whether facts of the data are still to be found out, which is done when the job is created."""
        return False

    @property
    @abstractmethod
    def facts(self) -> TaskFacts:
        """The sizes that follow from model and data. Raises ValueError: they are still to be found out."""

    @property
    def train(self) -> int:
        """The number of training samples, known even for a model that this release does not know. Raises as `facts`."""
        return self.facts.train

    @property
    def has_buffers(self) -> bool:
        """Whether the model has averages that are trained without gradients, as batch normalisation has."""
        return False

    @property
    def bundles(self) -> tuple[str, ...]:
        """The digests of the files that workers need. Raises as `facts`."""
        return ()

    @abstractmethod
    def check_names(self) -> None:
        """Raises ValidationError: model and data do not belong together."""

    @abstractmethod
    def check_sizes(self, plan: Plan) -> None:
        """Raises ValueError: the data does not suit the model, or a micro-batch of the plan does not."""

    @abstractmethod
    def misfit(self, parent: "TaskSpec") -> tuple[str, str] | None:
        """The field because of which `parent`'s weights do not fit this task, and a message; None: they fit."""

    def check(self, given: Collection[str]) -> None:
        """Raises ValidationError: a field of `given` means nothing to this kind of task, or as `check_names`."""
        self.check_names()
        for name, message in self.excluded.items():
            if name in given:
                raise error_at("JobSpec", name, message)
