"""A job's model and metric, from its JobSpec as stored by any release. Pure."""

from collections.abc import Mapping
from typing import Any

from computeshare.jobspec.tasks.facts import Metric
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS
from computeshare.jobspec.tasks.recipes import recipe_title


def subject_of(document: Mapping[str, Any]) -> str:
    """A job's model or recipe and its data set, in a few words."""
    recipe, dataset = document.get("recipe"), document.get("dataset")
    model = recipe_title(recipe) if recipe else document.get("model")
    return f"{model} on {dataset}" if dataset else str(model)


def metric_of(document: Mapping[str, Any]) -> Metric:
    """The metric by which versions of a job are compared."""
    if facts := document.get("recipe_facts"):
        return "loss" if facts.get("metric") == "loss" else "accuracy"
    return "loss" if is_language_model(document) else "accuracy"


def is_language_model(document: Mapping[str, Any]) -> bool:
    """Whether a job trains a language model that generates text."""
    return document.get("model") in LANGUAGE_MODELS
