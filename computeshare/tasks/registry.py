"""The task of a job."""

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.base import Task
from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.text.language_model import LanguageModel


def task_of(spec: JobSpec) -> Task:
    """The task that a job trains."""
    if spec.model_args:
        return LanguageModel(spec.dataset, spec.model_args, spec.label_smoothing, spec.validation)
    return ImageClassification(
        spec.dataset, spec.model, spec.shape, spec.label_smoothing, spec.augment, spec.validation, spec.dataset_args
    )
