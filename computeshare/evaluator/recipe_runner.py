"""How an evaluator runs the recipe of a job that it scores."""

from dataclasses import dataclass

from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.errors import RecipeError, RecipeUnfit
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import recipes
from computeshare.training.recipe_process.connection import STEP_LIMIT_S
from computeshare.training.recipe_process.process import ProcessLimits, RecipeFiles, RecipeProcess


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
        """Start a process that scores the job's versions. Raises RecipeError, RecipeUnfit, BundleError, Unconfined."""
        try:
            recipe = recipes.recipe_of(redis, job_id, spec)
        except RecipeError as error:  # no fault of the recipe's code
            raise RecipeUnfit(str(error)) from error
        if not recipes.is_signed(redis, job_id, spec, self.control_key):
            raise RecipeUnfit(
                "the recipe is not run, because this control plane has not signed it: the job was changed in the "
                "broker, or the evaluator has another control plane's key"
            )
        assert spec.recipe_facts
        data = self.bundles.open_files(spec.data.bundle) if spec.data else None
        files = RecipeFiles(recipe, self.bundles.open_files(spec.recipe_facts.initial), data)
        one_thread = spec.model_copy(update={"threads": 1})  # training cannot wait, scores can
        process = RecipeProcess(
            one_thread, files, "cpu", ProcessLimits(step_s=self.step_limit_s, unconfined=self.unconfined)
        )
        try:
            return process.open(spec.scored_part)
        except BaseException:
            process.close()
            raise
