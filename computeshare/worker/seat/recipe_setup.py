"""Starts the process in which a seat's recipe computes."""

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks.recipes import requirements
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training.recipe_process.process import Limits, Part, RecipeFiles, RecipeProcess


def open_recipe(
    spec: JobSpec, recipe: Bundle, device: str | None, settings: Settings, part: Part = "train"
) -> RecipeProcess:
    """A recipe's model and a part of its data on a device, in a process of their own; the job's bundles are here
    already.

    Raises: RecipeError; BundleError; SettingsError: there is no such device; Unconfined.
    """
    assert spec.recipe_facts
    requirements.check(spec.recipe_facts.requires)
    store = BundleStore(settings.bundles_dir)
    data = store.open_files(spec.data.bundle) if spec.data else None
    files = RecipeFiles(recipe, store.open_files(spec.recipe_facts.initial), data)
    limits = Limits(allowed_bytes(settings.max_memory), settings.step_limit, unconfined=settings.unconfined)
    process = RecipeProcess(spec, files, device, limits)
    try:
        return process.open(part)
    except BaseException:
        process.close()
        raise
