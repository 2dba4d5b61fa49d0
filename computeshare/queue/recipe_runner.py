"""How a process of the control plane runs the recipe of a job."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.errors import RecipeError, RecipeUnfit, SettingsError
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import recipes
from computeshare.settings import Settings
from computeshare.training.recipe_process.connection import STEP_LIMIT_S

if TYPE_CHECKING:
    from computeshare.training.recipe_process.process import Part, RecipeProcess

Process = TypeVar("Process", bound="RecipeProcess")


@dataclass(frozen=True)
class RecipeRunner:
    """How this process runs recipes: confined, on the CPU, and only those that the control plane has signed.

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

    def start(self, kind: type[Process], redis: Redis, job_id: str, spec: JobSpec, part: "Part") -> Process:
        """Start a process with a job's recipe and a part of its data.

        Raises: RecipeError, RecipeUnfit, BundleError, Unconfined.
        """
        from computeshare.training.recipe_process.process import ProcessLimits, RecipeFiles

        try:
            recipe = recipes.recipe_of(redis, job_id, spec)
        except RecipeError as error:  # no fault of the recipe's code
            raise RecipeUnfit(str(error)) from error
        if not recipes.is_signed(redis, job_id, spec, self.control_key):
            raise RecipeUnfit(
                "the recipe is not run, because this control plane has not signed it: the job was changed in the "
                "broker, or this process has another control plane's key"
            )
        assert spec.recipe_facts
        data = self.bundles.open_files(spec.data.bundle) if spec.data else None
        files = RecipeFiles(recipe, self.bundles.open_files(spec.recipe_facts.initial), data)
        one_thread = spec.model_copy(update={"threads": 1})  # training cannot wait, this can
        limits = ProcessLimits(step_s=self.step_limit_s, unconfined=self.unconfined)
        process = kind(one_thread, files, "cpu", limits)
        try:
            return process.open(part)
        except BaseException:
            process.close()
            raise


def runner_of(settings: Settings) -> RecipeRunner | None:
    """How recipes are run here; None: they are not. Raises SettingsError: nothing here could check their signatures."""
    if not settings.recipes:
        return None
    if not (key := settings.resolve_control_key()):
        where = settings.control_key_path
        raise SettingsError(f"no key of the control plane: set COMPUTESHARE_CONTROL_KEY, or let {where} hold it")
    return RecipeRunner(BundleStore(settings.bundles_dir), key, settings.unconfined, settings.step_limit)
