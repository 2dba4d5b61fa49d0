"""The task of a job."""

from computeshare.bundles.store import BundleStore
from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.arrays import ArrayTask
from computeshare.jobspec.tasks.images import ImageTask
from computeshare.jobspec.tasks.language_models import TextTask
from computeshare.jobspec.tasks.recipes import RecipeTask, recipe_title
from computeshare.tasks.base import Task
from computeshare.tasks.images.classification import ImageClassification
from computeshare.tasks.own.arrays import ArrayClassification
from computeshare.tasks.own.files import OwnData
from computeshare.tasks.text.language_model import LanguageModel


def task_of(spec: JobSpec, bundles: BundleStore | None = None) -> Task:
    """The task that a job trains.

    Args:
        bundles: with the files of a data set that a user added; None: only its facts are needed.
    Raises: SpecError: it is a recipe, whose code only a process of its own imports.
    """
    own = OwnData(spec.data, bundles) if spec.data else None
    smoothing, validation = spec.label_smoothing, spec.validation
    match spec.task:
        case TextTask(dataset, _, args):
            return LanguageModel(dataset, args, smoothing, validation, own)
        case ArrayTask(_, model) if own:
            return ArrayClassification(own, model, smoothing, validation)
        case ImageTask(dataset, model, _, hub) as images:
            return ImageClassification(dataset, model, images.shape, smoothing, spec.augment, validation, hub, own)
        case RecipeTask(recipe):
            raise SpecError(f"{recipe_title(recipe)} is code of a user's, which is not run here: choose another job")
        case other:
            raise TypeError(f"no module trains {other}")
