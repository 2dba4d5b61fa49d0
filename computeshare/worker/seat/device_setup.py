"""Opens a job on the worker's devices: the first in the seat's process, each other in one of its own, as a recipe's
first.
"""

import contextlib
from typing import TYPE_CHECKING

from computeshare.bundles.store import BundleStore
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks.recipes import requirements
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.training import devices
from computeshare.training.device_group.group import GroupComputation
from computeshare.training.recipe_process.process import Part, ProcessLimits, RecipeFiles, RecipeProcess

if TYPE_CHECKING:
    from computeshare.training.computation import LocalComputation
    from computeshare.training.device_group.device_process import DeviceProcess


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
    limits = ProcessLimits(allowed_bytes(settings.max_memory), settings.step_limit, unconfined=settings.unconfined)
    process = RecipeProcess(spec, files, device, limits)
    try:
        return process.open(part)
    except BaseException:
        process.close()
        raise


def open_all(spec: JobSpec, recipe: Bundle | None, preference: str | None, settings: Settings) -> GroupComputation:
    """The job's model and training data on each device that the preference means, as `devices.choose_all`.

    Raises: SettingsError: there is no such device; as `open_recipe`.
    """
    from computeshare.training.computation import open_here

    names = devices.choose_all(preference)
    spec = _with_threads(spec, names)
    with contextlib.ExitStack() as closing:
        if recipe:
            opened = (open_recipe(spec, recipe, name, settings) for name in names)
            recipes = [closing.enter_context(contextlib.closing(one)) for one in opened]
            group = GroupComputation(recipes[0], recipes[1:], names)
        else:
            first = open_here(spec, names[0], settings.data_dir, BundleStore(settings.bundles_dir))
            further = (_further(spec, name, settings, first) for name in names[1:])
            others = [closing.enter_context(contextlib.closing(one)) for one in further]
            group = GroupComputation(first, others, names)
        closing.pop_all()
    return group


def _further(spec: JobSpec, name: str, settings: Settings, first: "LocalComputation") -> "DeviceProcess":
    from computeshare.training.device_group.device_process import DeviceProcess

    return DeviceProcess(spec, name, settings.data_dir, settings.bundles_dir, first)


def _with_threads(spec: JobSpec, names: list[str]) -> JobSpec:
    """The job for each of several CPU devices, which divide the processors where it does not say how many it needs."""
    if spec.threads or len(names) == 1 or not names[0].startswith("cpu"):
        return spec
    import torch

    return spec.model_copy(update={"threads": max(1, torch.get_num_threads() // len(names))})
