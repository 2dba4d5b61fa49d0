"""The task of a job."""

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import Task
from computeshare.tasks.images.classification import ImageClassification


def task_of(spec: JobSpec) -> Task:
    """The task that a job trains."""
    return ImageClassification(
        spec.dataset, spec.model, spec.shape, spec.label_smoothing, spec.augment, spec.validation
    )
