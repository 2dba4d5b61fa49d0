"""The facts of a job's recipe: checked, or found by a trial in a confined process."""

import tempfile
import threading
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from pydantic import ValidationError

from api.errors import InvalidFields, NotFound
from api.recipes.service import Recipes
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, RecipeError, Unconfined
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts
from computeshare.training import recipe_check
from computeshare.training.recipe_check import Trial

PATIENCE_S = 120.0


class RecipeTrials:
    """Completes the specifications of recipes' jobs; the initial states are kept in `store`.

    Args:
        allowed: whether this machine runs recipes.
    """

    def __init__(self, recipes: Recipes, store: BundleStore, allowed: bool) -> None:
        self._recipes, self._store, self._allowed = recipes, store, allowed
        self._one = threading.Lock()
        """Held by the one trial that runs."""

    def completed(self, spec: JobSpec) -> JobSpec:
        """The specification with its recipe's facts. Raises InvalidFields: the recipe or its initial state is not here,
        or it cannot train.
        """
        if spec.recipe is None:
            return spec
        try:
            bundle = self._recipes.bundle(spec.recipe)
            if spec.recipe_facts:
                self._check(spec.recipe_facts)
                return spec
            if not self._allowed:
                raise RecipeError(
                    "the recipe has not been tried with these arguments: create the job by `computeshare jobs create "
                    "--recipe`, which tries it first"
                )
            data = self._store.open_files(spec.data.bundle) if spec.data else None
            trial = Trial(spec.recipe_args or {}, data, spec.seed, is_confined=True)
            with self._one, tempfile.TemporaryDirectory(prefix="state-") as state:
                report = recipe_check.check(bundle, trial, Path(state), PATIENCE_S)
                report.check_trainable()
                self._store.add(Path(state))
            document = spec.model_dump(mode="json", exclude=set(spec.strategy.implied))
            return JobSpec.model_validate(document | {"recipe_facts": report.facts.model_dump(mode="json")})
        except (NotFound, RecipeError, Unconfined, BundleError) as error:
            raise InvalidFields.at(str(error), "recipe") from error
        except ValidationError as error:
            raise InvalidFields.of(error) from error

    def _check(self, facts: RecipeFacts) -> None:
        """Raises InvalidFields: a requirement names no package, or the initial state is not here."""
        for number, text in enumerate(facts.requires):
            try:
                Requirement(text)
            except InvalidRequirement as error:
                message = f"{text!r} names no package: write for example numpy>=2"
                raise InvalidFields.at(message, "recipe_facts", "requires", str(number)) from error
        if not self._store.has(facts.initial):
            message = f"the files {facts.initial} are not here, or not all: send them by POST /v1/bundles first"
            raise InvalidFields.at(message, "recipe_facts", "initial")
