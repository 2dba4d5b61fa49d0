"""A recipe as a task."""

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import default_collate

from computeshare.errors import RecipeError, SpecError
from computeshare.jobspec.sampling_plan import Seeds
from computeshare.jobspec.tasks.facts import Metric
from computeshare.tasks import modules
from computeshare.tasks.base import CLASSES, PREDICTED, Batch, Better, Indices, SplitName, Task, tensors
from computeshare.tasks.recipes import state_files
from computeshare.tasks.recipes.functions import Functions, told
from computeshare.tasks.usage import Guess


class ScoreFacts(NamedTuple):
    """As the fields of `RecipeFacts`."""

    metric: Metric
    metrics: tuple[str, ...]
    classes: int


@dataclass(frozen=True, slots=True)
class RecipeTask(Task):
    """The model, the data and the loss that a recipe's functions define.

    Without a `loss` the recipe is a classifier: a batch is `(inputs, targets)`, with cross-entropy and, unless it has
    `metrics`, accuracy.

    Args:
        digest: of the recipe's bundle.
        arguments: the job's `recipe_args`.
        folder: with the files of the job's data set; None: the job names none.
        state: with the files of the job's initial state (`state_files`), from which modules get what is frozen; None:
            it stays as `model` builds it.
        extra: names of the metrics that the recipe's `metrics` returns.
        classes: the number of a classifier's classes; 0: not known, and scores are not counted by class.
        label_smoothing, validation: as of the other tasks; the first applies to the default loss alone.
    """

    functions: Functions
    digest: str
    arguments: Mapping[str, Any]
    folder: Path | None = None
    state: Path | None = None
    extra: tuple[str, ...] = ()
    classes: int = 0
    label_smoothing: float = 0.0
    validation: float = 0.0
    opened: dict[str, "RecipeSplit"] = field(default_factory=dict, repr=False)
    """The splits read so far: a recipe may load all of its data at once."""

    @property
    def metrics(self) -> Mapping[str, Better]:
        return dict.fromkeys(("accuracy",) if self.classifies else self.extra, "higher")

    @property
    def name(self) -> str:
        return f"recipe {self.digest[:19]}"

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"recipe": self.digest, "args": dict(self.arguments)}

    @property
    def classifies(self) -> bool:
        """Whether versions are compared by accuracy."""
        return self.functions.loss is None and self.functions.metrics is None

    def module(self, seed: int) -> nn.Module:
        module = self._built(seed)
        if self.state:
            state_files.load_frozen(module, self.state)
        return module

    def _built(self, seed: int) -> nn.Module:
        self.functions.check(self.arguments)
        with _drawn_from(seed):
            module = self.functions.call("model", **self.functions.taken("model", self.arguments))
        if not isinstance(module, nn.Module):
            raise RecipeError(f"model() returned a {type(module).__name__}: return a torch.nn.Module")
        return module

    def load_pretrained(self, module: nn.Module, seed: int) -> None:
        """Let the recipe load weights into its module, where the job is created. Raises RecipeError."""
        if self.functions.pretrained is None:
            return
        before = modules.layout_of(module)
        with _drawn_from(seed), torch.no_grad():
            self.functions.call("pretrained", module, **self.functions.taken("pretrained", self.arguments))
        if modules.layout_of(module) != before:
            raise RecipeError("pretrained() changed which parameters are trained, or their shapes: do that in model()")

    def outline(self) -> nn.Module:
        """As `Task.outline`; with memory for its parameters if the recipe's code needs them, or if it draws or leaves
        open what no version has.
        """
        with contextlib.suppress(RecipeError, RuntimeError), modules.ParametersOnMeta():
            module, others = self._built(0), modules.outside_state(self._built(1))
            values = modules.outside_state(module)
            if not any(one.is_meta for one in (*values, *others)) and all(map(torch.equal, values, others)):
                return module
        return self.module(0)

    def prepare(self, data_dir: Path) -> None:
        """Do nothing: the recipe reads its data itself."""

    def open(self, split: SplitName, data_dir: Path) -> "RecipeSplit":
        del data_dir
        if split not in self.opened:
            self.opened[split] = self._open(split)
        return self.opened[split]

    def _open(self, split: SplitName) -> "RecipeSplit":
        functions = self.functions
        try:
            with _drawn_from(0):
                dataset = functions.call("data", split, self.folder, **functions.taken("data", self.arguments))
        except RecipeError as error:
            if self.folder is None and "NoneType" in str(error):
                hint = "folder is None: give the recipe its files by --folder, or the job a data set"
                raise type(error)(f"{error} ({hint})") from error
            raise
        with told(functions.folder, f"len(data({split!r}))"):
            count = len(dataset)
        if count < 1:
            raise RecipeError(f"data({split!r}) has no samples: look at the folder that it reads")
        return RecipeSplit(functions.folder, dataset, count)

    def noise(self, samples: int, seed: int) -> "RecipeSplit":
        """The first training samples, over and over: only the recipe knows their form."""
        del seed
        whole = self.open("train", Path())
        return RecipeSplit(whole.folder, _Repeated(whole.dataset, whole.count), samples)

    def guess(self, module: nn.Module, file: Path, most: int) -> list[Guess]:
        if self.functions.predict is None:
            raise SpecError(
                f"{self.name} does not say how to read a file: use its model in Python (`job.module(recipe=...)`), or "
                "define predict(model, file), which returns a dict of probabilities by class, before you create a job"
            )
        with torch.inference_mode():
            found = self.functions.call("predict", module, file)
        if not isinstance(found, dict) or not all(isinstance(value, float | int) for value in found.values()):
            raise RecipeError("predict() must return a dict of probabilities by class, such as {'robin': 0.9}")
        guesses = [Guess(index, str(name), float(value)) for index, (name, value) in enumerate(found.items())]
        return sorted(guesses, key=lambda one: -one.probability)[:most]

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        if self.functions.loss is None:
            inputs, targets = self._pair(batch)
            return functional.cross_entropy(module(inputs), targets, label_smoothing=self.label_smoothing)
        loss = self.functions.call("loss", module, batch)
        if not isinstance(loss, Tensor) or loss.ndim:
            form = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise RecipeError(f"loss() returned {form}: return the mean over the batch, a tensor without dimensions")
        return loss

    def sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        count = len(next(tensors(batch)))
        if self.functions.loss is None:
            inputs, targets = self._pair(batch)
            logits = module(inputs)
            sums = {"loss": functional.cross_entropy(logits, targets, reduction="sum")}
            if self.classifies:
                predicted = logits.argmax(dim=1)
                sums |= {"accuracy": (predicted == targets).sum()}
                if self.classes:
                    sums |= {CLASSES: targets, PREDICTED: predicted}
        else:
            sums = {"loss": self.loss(module, batch) * count}
        return sums | self._own_sums(module, batch)

    def found_scores(self, module: nn.Module, batch: Batch) -> ScoreFacts:
        """The metrics and classes by which the recipe's versions are scored, found by scoring a batch."""
        was_training = module.training
        module.eval()
        try:
            with torch.inference_mode():
                own = tuple(self._own_sums(module, batch))
                classes = int(module(self._pair(batch)[0]).shape[1]) if self.classifies else 0
        finally:
            module.train(was_training)
        return ScoreFacts("accuracy" if self.classifies or "accuracy" in own else "loss", own, classes)

    def _own_sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        if self.functions.metrics is None:
            return {}
        found = self.functions.call("metrics", module, batch)
        if not isinstance(found, dict) or not all(isinstance(v, Tensor) and not v.ndim for v in found.values()):
            raise RecipeError("metrics() must return a dict of tensors without dimensions: sums over the batch")
        if "loss" in found:
            raise RecipeError("metrics() must not return loss, which is a score of every recipe: name it otherwise")
        return found

    def _pair(self, batch: Batch) -> Sequence[Tensor]:
        if not isinstance(batch, list | tuple) or len(batch) != 2:
            form = f"{len(batch)} parts" if isinstance(batch, list | tuple) else f"a {type(batch).__name__}"
            raise RecipeError(
                f"without loss(), a sample is a pair (input, class), but data() gives {form}: "
                "return pairs, or define loss(model, batch)"
            )
        return batch


@dataclass(frozen=True, slots=True)
class RecipeSplit:
    """A data set of a recipe's: samples are fetched one by one, each with random numbers of its own."""

    folder: Path
    dataset: Any
    count: int

    def __len__(self) -> int:
        return self.count

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> Batch:
        """As `Split.batch`; random numbers of `random`, NumPy and torch come from a sample's seed, or from its index.

        Raises RecipeError: the recipe fails, or its samples do not make a batch.
        """
        numbers = indices if seeds is None else seeds
        samples = []
        with _drawn_from(0), told(self.folder, "reading a sample"):
            for index, number in zip(indices.tolist(), numbers.tolist(), strict=True):
                _seed(number)
                samples.append(self.dataset[index])
        try:
            batch = default_collate(samples)
            _check(batch)
        except (TypeError, RuntimeError, ValueError) as error:
            raise RecipeError(f"samples {indices[:3].tolist()} do not make a batch: {error}. {_SAMPLES}") from error
        return batch


_SAMPLES = "A sample is a tensor or a number, or a tuple or dict of them, of the same shapes in all samples"


def _check(batch: Batch) -> None:
    """Raises TypeError: a part is no tensor."""
    if isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            _check(part)
    elif not isinstance(batch, Tensor):
        raise TypeError(f"a part is a {type(batch).__name__}")


@dataclass(frozen=True, slots=True)
class _Repeated:
    dataset: Any
    count: int

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index % self.count]


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """Draw from `seed` on the CPU within the block; the global generators of `random`, NumPy and torch stay as they
    were.
    """
    before = random.getstate(), np.random.get_state()
    with modules.drawn_from(seed):
        _seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _seed(number: int) -> None:
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)
