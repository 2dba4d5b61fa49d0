"""The kind of task that a JobSpec's fields name. Pure."""

from collections.abc import Mapping
from typing import Any

from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import Metric
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.jobspec.tasks.images import ImageTask
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs, TextTask


def task_spec_of(
    dataset: str,
    model: str,
    input: tuple[int, int, int] | None,
    model_args: GptArgs | None,
    dataset_args: HubArgs | None,
) -> TaskSpec:
    """The task of a JobSpec with these fields."""
    if model in LANGUAGE_MODELS or (model_args and model not in catalog().models):  # of another release
        return TextTask(dataset, model, model_args or GptArgs())
    return ImageTask(dataset, model, input, dataset_args)


def metric_of(document: Mapping[str, Any]) -> Metric:
    """The metric by which versions of a job are compared, from its JobSpec as stored by any release."""
    return "loss" if document.get("model") in LANGUAGE_MODELS else "accuracy"
