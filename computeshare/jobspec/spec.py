"""JobSpec: the specification of a job, validated completely before the job is stored.

Imports no torch: names of models and optimizers, arguments and parameter counts come from the committed `catalog`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from computeshare.codecs.base import Codec
from computeshare.codecs.registry import CODECS, PAIRS, WITHOUT_RESIDUAL, CodecName
from computeshare.errors import SettingsError
from computeshare.jobspec.catalog import catalog, dataset_names, normalized_name
from computeshare.jobspec.controls import DATA, MACHINES, MORE, OPTIMIZER, ROUND, Control
from computeshare.jobspec.early_stop import Stop
from computeshare.jobspec.machine_needs import Needs
from computeshare.jobspec.optimizer_spec import BY_VALUE, OptimizerSpec, changing
from computeshare.jobspec.part import Part, error_at, missing
from computeshare.jobspec.privacy import Privacy
from computeshare.jobspec.sampling_plan import Plan, Round, held_out
from computeshare.jobspec.schedule import CONSTANT, EVERY_STEP_ALIKE, Decay, Schedule, StepRules
from computeshare.jobspec.tasks import hugging_face, own_data
from computeshare.jobspec.tasks.arrays import ArrayTask
from computeshare.jobspec.tasks.base import TaskSpec
from computeshare.jobspec.tasks.facts import TaskFacts
from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.jobspec.tasks.images import LARGEST_SIDE, ImageTask
from computeshare.jobspec.tasks.language_models import LANGUAGE_MODELS, GptArgs, TextTask
from computeshare.jobspec.tasks.own_data import DatasetFacts
from computeshare.jobspec.tasks.recipe_facts import RECIPE_PATTERN, RecipeFacts
from computeshare.jobspec.tasks.recipes import RecipeArgs, RecipeTask
from computeshare.strategies import registry
from computeshare.strategies.base import LARGEST_LOCAL_ROUND, LARGEST_ROUND, MAIL_BYTES, Staging
from computeshare.types import Precision

QUEUE_PATTERN = r"^[A-Za-z0-9_-]{1,64}$"
LARGEST_BYTES = 4_000_000_000
"""The most bytes, as float32, of a model's weights or its optimizer state: reducer and broker hold them in memory."""
LARGEST_PRIORITY = 100
AUDITED = 0.02
"""The share of units that are audited in a job that invited machines may serve."""
SGD: dict[str, Any] = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
"""The default optimizer."""
Count = Annotated[int, Field(ge=0, le=10_000_000)]


def checked_name(name: str) -> str:
    """A job's name without spaces around it. Raises ValueError: it contains control characters."""
    if re.search(r"[\x00-\x1f\x7f]", name):
        raise ValueError("name must not contain control characters")
    return name.strip()


def check_queue(name: str) -> None:
    """Raises SettingsError: a queue cannot have this name."""
    if not re.fullmatch(QUEUE_PATTERN, name):
        raise SettingsError(f"queue {name!r}: letters, digits, - and _ are allowed, 64 at most")


LONGEST_NAME = 100
Tag = Annotated[str, Field(pattern=r"^[\w.+-]{1,30}$")]
JobName = Annotated[str, Field(max_length=LONGEST_NAME), AfterValidator(checked_name)]


class CodecSpec(Part):
    """The codecs for vectors between workers and the reducer: `up` for updates, `down` for weights."""

    up: Annotated[CodecName, Control(MACHINES)] = Field("float16", title="Update codec (up)")
    down: Annotated[CodecName, Control(MACHINES)] = Field("float32", title="Weight codec (down)")


def parse_codec(value: Any) -> Any:
    """The value of the field `codec`: "auto" or a CodecSpec. Raises ValueError, ValidationError."""
    if value == "auto" or isinstance(value, CodecSpec):
        return value
    if not isinstance(value, dict):
        raise ValueError('codec must be "auto" or an object with up and down')
    return CodecSpec.model_validate(value)


class WorkerRange(Part):
    """The number of workers that a job waits for before it starts, and the most that it uses."""

    min: Annotated[int, Control(MACHINES, "--min-workers")] = Field(
        1, ge=1, le=1024, title="Minimum workers", description="the job waits for this many before it starts"
    )
    max: Annotated[int, Control(MACHINES, "--max-workers")] = Field(8, ge=1, le=1024, title="Maximum workers")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise ValueError(f"min ({self.min}) must not be greater than max ({self.max})")
        return self


class KeepPolicy(Part):
    """The checkpoints to keep: the newest, the best, one every so many versions. The last version's always stays."""

    last: Annotated[Count, Control(MORE)] = Field(
        5, title="Newest checkpoints to keep", description="at least 2 while the job runs; the final one always stays"
    )
    best: Annotated[Count, Control(MORE)] = Field(
        1,
        title="Best checkpoints to keep",
        description="by accuracy (language models: loss) on the test set or the validation split",
    )
    every: Annotated[Count, Control(MORE)] = Field(
        0,
        title="Versions between permanent checkpoints",
        description="checkpoints of versions divisible by this are never removed, where checkpoint_every or "
        "evaluate_every has one written; 0: none",
    )


OF_TASKS = ("model", "model_args", "dataset_args", "data", "input", "augment", "recipe_args")
"""Fields that mean nothing to some kinds of task."""
RECORD_BYTES = 4_000_000
"""The broker's memory, in bytes, for 6,000 events of a job (then submissions are folded into counts) and for 4,096
answers to submissions."""


class JobSpec(Part):
    """The specification of one training job: a data set with a model, or a recipe. Unknown fields are errors. Give
    `rounds` or `epochs`, not both.
    """

    dataset: Annotated[str | None, Control(DATA)] = Field(
        None,
        title="Data set",
        description="such as digits, mnist or cifar10; docs/datasets.md has all; hf:NAME for one of Hugging Face; the "
        "name of one of your own; a recipe needs none",
    )
    model: Annotated[str | None, Control(DATA)] = Field(
        None,
        title="Model",
        description="mlp, lenet5, simplenet, resnet20, resnet32, resnet56, resnet110 or a torchvision classifier; "
        "for text: gpt; leave it out with a recipe",
    )
    recipe: Annotated[str | None, Control(DATA, None)] = Field(
        None,
        pattern=RECIPE_PATTERN,
        title="Recipe",
        description="digest of a recipe that the control plane has, sha256:..., or package:NAME, of a package that its "
        "workers have; in place of a model",
    )
    recipe_args: RecipeArgs | None = Field(None, description="arguments of the recipe, by name")
    recipe_facts: RecipeFacts | None = Field(
        None,
        description="found out when the job is created, for its recipe, arguments, data set and seed: leave it out",
    )
    model_args: GptArgs | None = Field(None, description="the size of model gpt; other models have none")
    dataset_args: HubArgs | None = Field(None, description="of a data set hf:NAME; others have none")
    data: DatasetFacts | None = Field(
        None, description="of a data set of your own, found when the job is created: leave it out"
    )
    input: tuple[int, int, int] | None = Field(
        None, strict=False, description="[channels, height, width]; default: the data set's shape"
    )
    name: Annotated[JobName, Control(DATA, change="always")] = Field(
        "", title="Name", description="shown on the pages; default: model or recipe, and data set"
    )
    queue: Annotated[str, Control(DATA)] = Field(
        "default", pattern=QUEUE_PATTERN, title="Queue", description="only workers of this queue run the job"
    )
    epochs: Annotated[int | None, Control(DATA)] = Field(
        None, ge=1, le=1_000_000, title="Epochs", description="passes over the training set; default: 1"
    )
    rounds: Annotated[int | None, Control(DATA)] = Field(
        None, ge=1, le=100_000_000, title="Rounds", description="length in rounds; give rounds or epochs, not both"
    )
    validation: Annotated[float, Control(DATA)] = Field(
        0,
        ge=0,
        le=0.5,
        title="Validation split",
        description="fraction of the training set to hold out, the same samples whatever the seed: versions are scored "
        "on it, the best and the last version also on the test set; 0: every version is scored on the test set",
    )
    strategy: registry.Named = registry.DEFAULT
    micro_batch: Annotated[int, Control(ROUND)] = Field(32, ge=1, le=65_536, title="Samples per micro-batch")
    micro_batches_per_round: Annotated[int, Control(ROUND)] = Field(
        4,
        ge=1,
        le=LARGEST_LOCAL_ROUND,
        title="Micro-batches per round",
        description="global batch = micro-batches per round x samples per micro-batch",
    )
    accumulate: Annotated[int, Control(ROUND)] = Field(
        1,
        ge=1,
        le=65_536,
        title="Gradient accumulation steps",
        description="computes a micro-batch in this many pieces, one after the other, to save memory: the same "
        "gradient, but batch normalisation sees one piece at a time; with strategy pipeline, workers compute different "
        "pieces at the same time: at least 4 for 2 stages",
    )
    optimizer: Annotated[OptimizerSpec, changing(SGD)] = Field(
        default_factory=lambda: OptimizerSpec(**SGD),
        description="the server's optimizer; some strategies set it themselves",
    )
    lr_scaling: Literal["none", "linear"] = Field(
        "none", description="linear: multiply the learning rate by the micro-batches per round"
    )
    schedule: Schedule = CONSTANT
    clip_norm: Annotated[float, Control(OPTIMIZER)] = Field(
        0,
        ge=0,
        le=1_000_000_000,
        title="Largest gradient norm",
        description="larger gradients are scaled down; 0: no limit",
    )
    decay: Annotated[Decay, Control(OPTIMIZER, "--decay")] = Field(
        "all", title="Weight decay on", description="matrices: not on biases and other one-dimensional parameters"
    )
    ema: Annotated[float, Control(OPTIMIZER, "--ema")] = Field(
        0,
        ge=0,
        lt=1,
        title="Moving average (EMA)",
        description="decay per version of an exponential moving average of the weights, which is scored and downloaded "
        "instead of the weights themselves; for example 0.999; 0: none",
    )
    privacy: Privacy | None = Field(
        None,
        description="differential privacy of the training samples: workers clip and blur their gradients; null: none",
    )
    label_smoothing: Annotated[float, Control(OPTIMIZER)] = Field(
        0, ge=0, lt=1, title="Label smoothing", description="share of each label spread evenly over all classes"
    )
    augment: Annotated[tuple[Literal["crop", "flip", "randaugment"], ...], Control(DATA)] = Field(
        (),
        strict=False,
        max_length=3,
        title="Augmentation",
        description="random transformations of training images, in this order: crop (shifted by up to an eighth of "
        "each side), flip (left to right), randaugment (two operations of RandAugment, magnitude 9)",
    )
    codec: Annotated[CodecSpec | Literal["auto"], BeforeValidator(parse_codec), Control(MACHINES)] = Field(
        CodecSpec(),
        title="Compression",
        description="auto: choose codecs (and, of strategy local, inner steps and a delay with an outer step that "
        "suits it, or an overlap if inner_state is kept) from the first workers' measurements",
    )
    precision: Annotated[Precision | Literal["auto"], Control(MACHINES)] = Field(
        "float32",
        title="Precision",
        description="bfloat16: workers compute with torch.autocast, weights and gradients stay float32; auto: bfloat16 "
        "if the first workers measure that it is at least 5 % faster, or float32 does not fit their memory",
    )
    compile: bool = Field(
        False,
        description="workers compile the model by torch.compile, which takes a minute or two before they join; without "
        "a C++ compiler (on a GPU: Triton) they train it as it is",
    )
    channels_last: bool = Field(
        False,
        description="workers hold weights and images in the order of torch.channels_last: often faster for "
        "convolutions on a GPU; without effect on a CPU",
    )
    workers: WorkerRange = WorkerRange()
    audit: Annotated[float | None, Control(MACHINES)] = Field(
        None,
        ge=0,
        le=1,
        title="Audits",
        description="share of the units that a second machine of the same kind computes as well, so that machines that "
        "send wrong updates are found and banned; with strategy local also units whose update is unlike the others "
        "of their round; 0: none; default: 0.02 if invited machines serve the queue when the "
        "job is created and machines of one kind send the same bits, else 0",
    )
    requires: Annotated[Needs | None, Control(MACHINES, change="active")] = Field(
        None,
        title="Required of a worker",
        description="only workers with all of this get a seat: memory=8GB, device=cuda, or a label such as room=attic",
    )
    prefers: Annotated[Needs | None, Control(MACHINES, change="active")] = Field(
        None,
        title="Preferred in a worker",
        description="of the free workers, those with most of this get the seats; written like requires",
    )
    checkpoint_every: Annotated[Count, Control(MORE)] = Field(
        100, title="Versions between checkpoints", description="0: only at the end"
    )
    evaluate_every: Annotated[Count, Control(MORE)] = Field(
        100, title="Versions between evaluations", description="0: only at the end"
    )
    eval_batch: Annotated[int, Control(MORE)] = Field(
        0,
        ge=0,
        le=65_536,
        title="Samples per batch of scoring",
        description="computed together when a version is scored; lower it to save memory; 0: 256 images, or windows of "
        "16,384 characters in all",
    )
    stop: Stop | None = Field(None, description="early stopping, by the scores of versions; null: none")
    keep: KeepPolicy = KeepPolicy()
    tags: Annotated[tuple[Tag, ...], Control(MORE, change="always")] = Field(
        (),
        strict=False,
        max_length=20,
        title="Tags",
        description="words to find the job by, such as baseline; they do not affect training",
    )
    notes: Annotated[str, Control(MORE, change="always", lines=4)] = Field(
        "", max_length=2000, title="Notes", description="free text; does not affect training"
    )
    priority: Annotated[int, Control(MORE, change="active")] = Field(
        0,
        ge=-LARGEST_PRIORITY,
        le=LARGEST_PRIORITY,
        title="Priority",
        description="-100 to 100; higher-priority jobs get workers first",
    )
    seed: Annotated[int, Control(MORE)] = Field(
        0, ge=0, lt=2**63, title="Seed", description="for the initial weights, sample order, dropout and augmentation"
    )
    threads: Annotated[int, Control(MORE)] = Field(
        0, ge=0, le=256, title="CPU threads per worker", description="0: each worker's own default"
    )

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: Any) -> Any:
        """Fill in omitted fields that the strategy or the model determines."""
        if not isinstance(data, dict):
            return data
        if data.get("model") in LANGUAGE_MODELS and data.get("model_args") is None:
            data = {**data, "model_args": {}}
        if str(data.get("dataset")).startswith(hugging_face.PREFIX) and data.get("dataset_args") is None:
            data = {**data, "dataset_args": {}}
        return {**registry.implied_by(data.get("strategy", {})), **data}

    @field_validator("dataset", "model")
    @classmethod
    def _known(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is None:
            return None
        found = catalog()
        known = {*found.datasets, *found.texts} if info.field_name == "dataset" else {*found.models, *LANGUAGE_MODELS}
        if info.field_name == "dataset":
            if hugging_face.is_hub_name(value):
                return value
            if own_data.is_own_name(value):
                return value
            value = dataset_names().get(normalized_name(value), value)
        if value not in known:
            if why := catalog().not_offered.get(normalized_name(value)):
                raise ValueError(f"{value} cannot be trained on: {why}")
            raise ValueError(f"unknown {info.field_name} {value!r}; allowed: {', '.join(sorted(known))}")
        return value

    @field_validator("recipe", mode="before")
    @classmethod
    def _named_recipe(cls, value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(RECIPE_PATTERN, value):
            raise ValueError(
                "must be sha256: and 64 hex digits (`computeshare recipes list` shows those that are here), or "
                "package:NAME; at the command line --recipe also takes a file or a folder"
            )
        return value

    @field_validator("input")
    @classmethod
    def _bounded(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value and (value[0] not in (1, 3) or not all(1 <= side <= LARGEST_SIDE for side in value[1:])):
            limits = f"1 or 3 channels, sides 1 to {LARGEST_SIDE}"
            raise ValueError(f"input must be [channels, height, width], {limits}, not {value}")
        return value

    @field_validator("augment")
    @classmethod
    def _once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(value)) < len(value):
            raise ValueError(f"augment must name each transformation once, not {list(value)}")
        return value

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.rounds is not None and self.epochs is not None:
            raise ValueError("give rounds or epochs, not both")
        self._named()
        task = self.task
        task.check([name for name in OF_TASKS if getattr(self, name)])
        self._suits_strategy()
        if task.needs_facts:
            return self
        self._consistent()
        self._check_updates()
        self._shared_out()
        self.strategy.check(self.plan, self.workers.min)
        largest, heaviest = max((self._state_vectors(one), one.name) for one in self._sent_optimizers)
        if 4 * self.parameters * largest > LARGEST_BYTES:
            limit = LARGEST_BYTES // 4 // largest
            raise ValueError(
                f"{_called(self)} has {self.parameters:,} parameters; the limit with {heaviest} is {limit:,}: "
                f"choose a smaller model or {task.sized_by}"
            )
        task.check_sizes(self.plan)
        return self

    def _suits_strategy(self) -> None:
        """Raises ValidationError: a field has a value that the strategy excludes."""
        for name, (value, why) in self.strategy.unfit.items():
            if getattr(self, name) != value:
                raise error_at("JobSpec", name, f"does not suit strategy {self.strategy.kind}: {why}")

    def _named(self) -> None:
        """Raises ValidationError: the job names neither a recipe nor both a model and a data set, or it gives a
        recipe's fields without one.
        """
        if self.recipe is None:
            for name in ("recipe_args", "recipe_facts"):
                if getattr(self, name):
                    raise error_at("JobSpec", name, "belongs to a recipe: set recipe, or leave it out")
            absent = [name for name in ("dataset", "model") if getattr(self, name) is None]
            if absent:
                raise missing("JobSpec", *absent)

    def _consistent(self) -> None:
        """Raises ValidationError: a field contradicts the strategy or another field."""
        strategy = self.strategy
        for name, value in strategy.implied.items():
            if getattr(self, name) != value:
                message = f"strategy {strategy.kind} sets {name} itself: leave {name} out; {strategy.instead[name]}"
                raise error_at("JobSpec", name, message)
        trained = strategy.inner or self.optimizer
        if self.decay != "all" and "weight_decay" not in catalog().optimizers[trained.name].arguments:
            raise error_at("JobSpec", "decay", f"{trained.name} has no weight_decay: leave decay out")
        if self.validation and not held_out(self.facts.train, self.validation):
            raise error_at(
                "JobSpec", "validation", "is too small to hold out a sample of this data set: raise it, or leave it out"
            )
        if self.stop and not self.evaluate_every:
            raise error_at("JobSpec", "stop", "needs evaluations during training: set evaluate_every above 0")
        if self.stop and self.stop.metric == "accuracy" and self.facts.metric != "accuracy":
            raise error_at("JobSpec", ("stop", "metric"), f"{_called(self)} has no accuracy: set metric to loss")
        if self.stop and self.stop.patience and not self.keep.best:
            raise error_at(
                "JobSpec", ("stop", "patience"), "needs the best version's checkpoint: set keep.best above 0"
            )
        if self.privacy and not strategy.may_be_private:
            raise error_at("JobSpec", "privacy", "needs a strategy whose workers send gradients: choose sync or async")
        if self.privacy and self.task.has_buffers:
            message = "covers gradients only, and batch normalisation has averages besides: choose a model without it"
            raise error_at("JobSpec", "privacy", message)
        if self.micro_batch % self.accumulate:
            message = (
                f"must divide micro_batch ({self.micro_batch}), so that all pieces have the same number of samples"
            )
            raise error_at("JobSpec", "accumulate", message)
        if self.plan.units_per_round > LARGEST_ROUND:
            raise error_at("JobSpec", "micro_batches_per_round", f"must be at most {LARGEST_ROUND}")

    def _check_updates(self) -> None:
        """Raises ValidationError: the updates that workers send cannot be audited, make no peers' weights, or cannot be
        sent stage by stage.
        """
        if self.audit and (why := self._not_repeatable()):
            raise error_at(
                "JobSpec", "audit", f"cannot compare two machines' updates, because {why}, or set audit to 0"
            )
        if self.strategy.averaging and not self._suits_peers():
            raise error_at(
                "JobSpec",
                "codec",
                f"strategy {self.strategy.kind} publishes weights as differences from a version: set codec.down "
                f"to float32, and codec.up to one of {', '.join(WITHOUT_RESIDUAL)}",
            )
        if self.strategy.staging:
            self._check_stages(self.strategy.staging)

    def _check_stages(self, staging: Staging) -> None:
        """Raises ValidationError: a codec does not suit a model in stages."""
        if staging.activations not in WITHOUT_RESIDUAL:
            raise error_at("JobSpec", ("strategy", "activations"), f"choose one of {', '.join(WITHOUT_RESIDUAL)}")
        if not self._suits_stages():
            raise error_at(
                "JobSpec",
                "codec",
                f"strategy {self.strategy.kind} sends each stage by itself: set codec.up to one of "
                f"{', '.join(WITHOUT_RESIDUAL)}, and codec.down to float32, float16 or bfloat16",
            )

    def _suits_stages(self) -> bool:
        """Whether a stage's part of a message can be had without the rest, and from one version alone."""
        return self.codec != "auto" and not (CODECS[self.codec.down].differences or CODECS[self.codec.up].residual)

    def _suits_peers(self) -> bool:
        """Whether peers' weights can be had from a version and a message: the version is exact, and no codec's residual
        is to be added.
        """
        return self.codec != "auto" and CODECS[self.codec.down].exact and not CODECS[self.codec.up].residual

    def with_audits(self, is_open: bool) -> "JobSpec":
        """This specification as a new job has it: with audits if it leaves them open, invited machines serve its queue
        (`is_open`) and machines of one kind send the same bits.
        """
        if self.audit is not None or not is_open or self._not_repeatable():
            return self
        return self.model_copy(update={"audit": AUDITED})

    def _not_repeatable(self) -> str | None:
        """Why two machines of one kind may send different updates for a unit, and the remedy; None: they do not."""
        if self.strategy.averaging or self.strategy.staging:
            how = "each worker has weights of its own" if self.strategy.averaging else "several workers compute a unit"
            return f"{how}: choose another strategy"
        if self.strategy.keeps_inner:
            remedy = " and strategy.overlap to 0" if self.strategy.early_steps else ""
            return f"each worker keeps an inner optimizer's state: set strategy.inner_state to restart{remedy}"
        if self.strategy.takes_any:
            return f"strategy {self.strategy.kind} computes units on different versions: choose another strategy"
        if self.privacy:
            return "privacy adds new noise each time: leave privacy out"
        if self.codec == "auto" or CODECS[self.codec.up].residual:
            return "error feedback differs by worker (codecs topk and lowrank; auto may choose one): set another codec"
        return None

    def _shared_out(self) -> None:
        """Raises ValidationError: the job would wait for more workers than a round has work for."""
        strategy, plan, remedy = self.strategy, self.plan, f"raise {self.strategy.units_from}"
        whole, units = "a round", strategy.most_workers(plan)
        if not strategy.steps_may_grow and plan.units_per_epoch < plan.units_per_round:
            whole, remedy = "an epoch", "lower micro_batch"
            units = units // plan.units_per_round * plan.units_per_epoch
        if self.workers.min > units:
            told = plan.units_per_round if whole == "a round" else plan.units_per_epoch
            cause = f"{whole} has {told:,} {strategy.units}, {strategy.per_unit} for each"
            message = f"must be at most {units:,}, because {cause}: lower workers.min, or {remedy}"
            raise error_at("JobSpec", ("workers", "min"), message)

    @property
    def codecs(self) -> CodecSpec:
        """The codecs of updates and weights. Raises ValueError: `codec` is "auto", and none have been chosen yet."""
        if isinstance(self.codec, CodecSpec):
            return self.codec
        raise ValueError("the job's codecs have not been chosen yet")

    @property
    def is_open(self) -> bool:
        """Whether codecs or precision are still to be chosen from the first workers' measurements."""
        return self.codec == "auto" or self.precision == "auto"

    def chosen(
        self,
        codec: CodecSpec,
        inner_steps: int | None = None,
        precision: Precision | None = None,
        delay: int = 0,
    ) -> "JobSpec":
        """This specification with the chosen codecs, inner steps, precision and delay. Raises ValidationError: the
        result is invalid.
        """
        follows = set(self.strategy.implied)
        strategy = self.strategy.chosen(inner_steps, delay).model_dump(mode="json")
        document = self.model_dump(mode="json", exclude=follows)
        in_precision = {"precision": precision} if precision else {}
        return JobSpec.model_validate(document | {"codec": codec.model_dump(), "strategy": strategy} | in_precision)

    @property
    def largest_strategy(self) -> registry.Named:
        """The strategy that needs the most memory: with a delay or overlap, if `codec: auto` may choose one."""
        may_get_a_delay = self.codec == "auto" and self.strategy.steps_may_grow
        return self.strategy.chosen(None, delay=1) if may_get_a_delay else self.strategy

    @property
    def inner_rules(self) -> StepRules:
        """Schedule, clipping and decay of the optimizer that trains on micro-batches."""
        return StepRules(self.schedule, self.rounds_total, 1, self.clip_norm, self.decay)

    @property
    def server_rules(self) -> StepRules:
        """Schedule, clipping and decay of the server's optimizer; with inner steps, they apply to those instead."""
        if self.strategy.inner:
            return EVERY_STEP_ALIKE
        factor = self.micro_batches_per_round if self.lr_scaling == "linear" else 1
        return replace(self.inner_rules, lr_factor=factor)

    @property
    def has_drafts(self) -> bool:
        """Whether buckets of a version may be made, and read by workers, before its round is complete."""
        by_value = self.optimizer.name in BY_VALUE and not self.server_rules.clip_norm
        return self.strategy.combines_early and by_value

    @property
    def sharers(self) -> int:
        """The fewest workers that must share a round, so that `combine` tolerates bad workers; 0: no minimum."""
        return self.strategy.sharers(self.workers.min)

    def quorum_of(self, version: int) -> float:
        """The quorum (0.5 to 1) of the round that starts from `version`; 1 for an epoch's or the job's last round."""
        return self.strategy.quorum_of(self.plan.ends_epoch(version) or version + 1 == self.rounds_total)

    def round_from(self, version: int, carried: Sequence[int] = ()) -> Round:
        """The round that starts from `version`, with the units `carried` over from the previous round."""
        planned = self.strategy.round(self.plan, version, carried)
        if not self.strategy.lag or version + 1 >= self.rounds_total:
            return planned
        return replace(planned, ahead=self.strategy.round(self.plan, version + 1, ()).count)

    @property
    def title(self) -> str:
        return self.name or self.task.title

    @property
    def staging(self) -> Staging:
        """How the strategy splits the model, of a job whose strategy does."""
        staging = self.strategy.staging
        assert staging, "the job's strategy splits the model"
        return staging

    @property
    def task(self) -> TaskSpec:
        """The job's task: its model or recipe, with its data set."""
        if self.recipe is not None:
            return RecipeTask(self.recipe, self.recipe_args or {}, self.recipe_facts, self.dataset, self.data)
        dataset, model = self.dataset, self.model
        assert dataset is not None and model is not None, "checked when the specification was read"
        if model in LANGUAGE_MODELS or (self.model_args and model not in catalog().models):  # of another release
            return TextTask(dataset, model, self.model_args or GptArgs(), self.data)
        if self.data and self.data.kind == "arrays":
            return ArrayTask(dataset, model, self.data)
        return ImageTask(dataset, model, self.input, self.dataset_args, self.data)

    @property
    def bundles(self) -> tuple[str, ...]:
        """The digests of all files that workers need, beside built-in data sets. Raises ValueError, as `facts`."""
        return self.task.bundles

    @property
    def facts(self) -> TaskFacts:
        """Sizes that follow from model and data set, such as the numbers of samples and parameters. Raises ValueError:
        they are still to be found out.
        """
        return self.task.facts

    @property
    def parameters(self) -> int:
        """The largest number of parameters that the model can have."""
        return self.facts.parameters

    @property
    def _sent_optimizers(self) -> list[OptimizerSpec]:
        """The optimizers whose state is sent between processes."""
        inner = self.strategy.inner if self.strategy.hands_over_inner else None
        return [self.optimizer, inner] if inner else [self.optimizer]

    def _state_vectors(self, optimizer: OptimizerSpec) -> int:
        """The size of the optimizer's state, at least of the weights, in vectors of the model's size."""
        lossy = self.codec == "auto" or not CODECS[self.codec.down].exact
        average = optimizer is self.optimizer and self.ema > 0
        return (1 if optimizer.name == "SGD" else 3) + lossy + average

    @property
    def broker_bytes(self) -> int:
        """The most memory, in bytes, that the job can use in the broker.

        The sum of: weights and optimizer state of three versions (current, previous, next); the updates of two rounds
        (the previous round's are kept until its state is stored, or those of several that are not larger), with a delay
        or an overlap of three; the inner state that each unit's worker may hand over; events and answers
        (`RECORD_BYTES`).
        """
        pairs = PAIRS if self.codec == "auto" else [(self.codec.up, self.codec.down)]
        up = max(CODECS[codec].bytes_per_value for codec, _ in pairs)
        down = max(_bytes_down(CODECS[codec]) for _, codec in pairs)
        units, rounds = self.plan.units_per_round, 2 + self.largest_strategy.lag
        outer, *inner = (4 * self._state_vectors(one) for one in self._sent_optimizers)
        mail = self._chains * MAIL_BYTES
        by_parameter = down + 3 * outer + rounds * units * up + units * sum(inner)
        return 1_000_000 + RECORD_BYTES + mail + self.parameters * by_parameter

    @property
    def _chains(self) -> int:
        """The most chains of workers that compute micro-batches at once; 0: each worker computes by itself."""
        staging = self.strategy.staging
        return min(self.plan.units_per_round, max(1, self.workers.max // staging.stages)) if staging else 0

    @property
    def plan(self) -> Plan:
        """The division of the job's samples into micro-batches, units and rounds."""
        whole = self.task.train
        samples = whole - held_out(whole, self.validation)
        sizes = (self.micro_batch, self.micro_batches_per_round, self.strategy.steps)
        return Plan(self.seed, samples, *sizes, self.accumulate)

    @property
    def rounds_total(self) -> int:
        if self.rounds is not None:
            return self.rounds
        return (self.epochs or 1) * self.plan.rounds_per_epoch

    @property
    def scored_part(self) -> Literal["validation", "test"]:
        """The part of the data that versions are scored on and compared by."""
        return "validation" if self.validation else "test"

    def wants_checkpoint(self, version: int) -> bool:
        """Whether this version gets a checkpoint, however recent the previous one is."""
        return self.wants_score(version) or _is_multiple(version, self.checkpoint_every)

    def wants_score(self, version: int) -> bool:
        """Whether this version is to be scored."""
        return version == self.rounds_total or _is_multiple(version, self.evaluate_every)


def _called(spec: JobSpec) -> str:
    """The job's model in a message."""
    return "the recipe's model" if spec.recipe else f"model {spec.model}"


def _bytes_down(codec: Codec) -> int:
    """Bytes per parameter of all the versions that the broker holds, with this codec down."""
    if codec.differences:
        return 3 * 4 + 2 * 4  # three snapshots, one of them staged, and differences as large as two
    return 3 * codec.bytes_per_value


def _is_multiple(version: int, every: int) -> bool:
    return every > 0 and version > 0 and version % every == 0


def fields_beside(path: Sequence[object], model: type[BaseModel] = JobSpec) -> list[str]:
    """The names of all fields of the object that contains the field at `path`, within a document of `model`."""
    for part in path[:-1]:
        field = model.model_fields.get(str(part))
        kinds = (field.annotation, *get_args(field.annotation)) if field else ()
        inner = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
        if inner is None:
            break
        model = inner
    return sorted(model.model_fields)
