"""The interface of strategies: everything that the rest of the code asks about a job's kind.

Free of torch: a strategy describes the workers' part as data (`inner`) and NumPy code (`sent`), which
`computeshare.training` runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self

from pydantic import Field

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.part import Part
from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.strategies.averages import Average, Mean
from computeshare.types import Vector

LARGEST_ROUND = 4096
"""Largest number of updates combined in a version."""
LARGEST_LOCAL_ROUND = 100_000
"""Largest number of micro-batches in a round of local SGD."""

MOST_STAGES = 64
"""Largest number of stages of a model."""
LEAST_VECTORS = 4
"""Vectors of the model's size in a worker's memory: weights, the next ones, the gradient, an update on its way."""
STAGE_VECTORS = 5
"""Vectors of a stage's size in its worker's memory: the next weights are there twice while they are decoded."""
MAIL_BYTES = 128_000_000
"""The most bytes of a micro-batch's activations and gradients that may wait in the broker between stages."""


Delay = Annotated[
    int,
    Control(ROUND, None),
    Field(
        ge=0,
        le=1,
        title="Delay",
        description="1: an update computed on version v enters version v + 2, so that workers compute while updates "
        "and weights are on their way; 0: v + 1",
    ),
]
"""A field of strategies whose rounds may overlap."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """Facts about the updates that are combined into a version; sequences are in the order of units.

    Args:
        samples: number of samples of each update.
        staleness: staleness of each update in versions; empty: all are fresh.
        workers: smallest number of workers that share the round; fewer than half of them may be bad.
        norms: Euclidean norm of each whole update if buckets are combined and `needs_norms` holds; else empty.
    """

    samples: Sequence[int]
    staleness: Sequence[int] = ()
    workers: int = 1
    norms: Sequence[float] = ()


class Averaging(Protocol):
    """How a peer averages its weights with another peer's, see `gossip`."""

    @property
    def fetch_probability(self) -> float:
        """The probability of an exchange after a unit."""

    @property
    def timeout_ms(self) -> int:
        """After how long the other's weights are no longer waited for, in milliseconds."""

    @property
    def recent(self) -> int:
        """The number of recent versions of which a peer's weights may be a difference."""

    @property
    def matching(self) -> Literal["random", "pairs"]:
        """How peers find each other."""

    @property
    def outer_lr(self) -> float:
        """The rate of the outer step on what a unit has changed; 1: all of it."""

    @property
    def outer_momentum(self) -> float:
        """Nesterov momentum of these steps."""

    def share(self, own: tuple[int, float], other: tuple[int, float]) -> float:
        """The share of the other's weights, 0 to 1, given units and loss of both peers."""

    def towards(self, own: Vector, other: Vector, share: float) -> Vector:
        """One's own weights (d,), moved by `share` of the way to the other's."""


class Staging(Protocol):
    """How a model is split into stages, which several workers hold; see `pipeline`."""

    @property
    def stages(self) -> int:
        """The number of stages."""

    @property
    def schedule(self) -> Literal["gpipe", "1f1b"]:
        """In which order a stage computes the pieces of a micro-batch."""

    @property
    def recompute(self) -> bool:
        """Whether each piece's forward pass is computed again before its backward pass."""

    @property
    def activations(self) -> str:
        """The codec of activations and their gradients."""

    @property
    def split(self) -> Sequence[str]:
        """The submodules with which the second and each later stage begins; empty: to be chosen."""


class Strategy(Part):
    """How a round's updates become the next version. Each kind is a subclass with its own fields, listed in `registry`.

    The defaults describe a strategy whose units are micro-batches, sent as gradients, and whose rounds wait for all
    units; a kind overrides the differences. All methods are pure.
    """

    kind: Annotated[str, Control(ROUND, "--strategy")] = Field(title="Strategy")
    backup: bool = Field(True, description="when no micro-batch is free, give a slow one to a second worker too")

    # The JobSpec

    suits: ClassVar[str]
    """The use case, in a few words, for the user interfaces."""
    instead: ClassVar[Mapping[str, str]] = {}
    """For each `implied` field of the JobSpec: advice on the field to set instead."""
    units_from: ClassVar[str] = "micro_batches_per_round"
    """The field with the number of units in a round, which is the most workers that can share the round."""
    rate_field: ClassVar[str] = "optimizer.lr"
    """The learning rate that users tune."""
    unit: ClassVar[str] = "micro-batch"
    """Name of a unit, for users."""
    units: ClassVar[str] = "micro-batches"
    per_unit: ClassVar[str] = "a worker"
    """Name of the workers that compute a unit, for users."""
    lease: ClassVar[str] = "micro-batch"
    """Name of a worker's lease, for users."""
    remedy: ClassVar[str] = (
        "choose strategy sync, async or local, at least 3 minimum workers (workers.min) and combine huber"
    )
    """How a job of this kind comes to tolerate a minority of bad machines, for users."""

    @property
    def implied(self) -> dict[str, Any]:
        """Fields of the JobSpec that the strategy determines, with their values."""
        return {}

    def check(self, plan: Plan, fewest: int) -> None:
        """Check that the strategy suits the job.

        Args:
            fewest: the number of workers that the job waits for (`workers.min`).
        Raises: ValidationError, ValueError: it does not.
        """

    def most_workers(self, plan: Plan) -> int:
        """The most workers that can share a round."""
        return plan.units_per_round

    unfit: ClassVar[Mapping[str, tuple[Any, str]]] = {}
    """Fields of the JobSpec that do not suit the strategy: the value that does, and why no other, with advice."""
    may_be_private: ClassVar[bool] = False
    """Whether the job may have `privacy`: workers send a gradient for each unit, and keep no state of samples."""

    # The plan of a round

    takes_any: ClassVar[bool] = False
    """Whether a version combines the first updates to arrive, of any units of the epoch, stale updates included."""

    @property
    def steps(self) -> int:
        """Micro-batches in a unit."""
        return 1

    @property
    def steps_may_grow(self) -> bool:
        """Whether `codec: auto` may choose more steps for a unit, and a delay."""
        return False

    def chosen(self, steps: int | None, delay: int = 0) -> Self:
        """The strategy with what was chosen for `codec: auto`.

        Args:
            steps: micro-batches per unit; None changes nothing.
            delay: the `lag` it should have; 0 changes nothing.
        """
        return self

    def round(self, plan: Plan, version: int, carried: Sequence[int]) -> Round:
        """The round that starts from `version`, with the units carried over from the round before; where the first
        updates make the version, a window of the epoch's units.
        """
        return plan.window(version) if self.takes_any else plan.round(version, carried)

    def foreseen(self, plan: Plan, version: int) -> Sequence[int]:
        """The units of the round that starts from `version`, if known before it opens; workers prefetch them. Where the
        first updates make the version, the units left depend on the workers' speeds.
        """
        return () if self.takes_any else plan.round(version).units

    # Who makes a version, and when it closes

    suspects: ClassVar[bool] = False
    """Whether, with audits, an update that is unlike the others of its round is computed again before it counts."""

    most_unmeasured: ClassVar[int] = 0
    """Most units in one lease of a worker of unknown speed; 0: no limit."""

    @property
    def waits_for_slowest(self) -> bool:
        """Whether a round lasts until the slowest worker has finished its part."""
        return not self.takes_any

    @property
    def lag(self) -> int:
        """Number of versions between the version that a round's units are computed on and the one that the round starts
        from, 0 or 1. With 1, the units of two rounds are computed on version 0, which has no version before it.
        """
        return 0

    @property
    def overlaps(self) -> bool:
        """Whether a worker computes while its last updates are sent and the next version comes."""
        return self.lag > 0 or self.averaging is not None

    @property
    def early_steps(self) -> int:
        """Steps of a unit that a worker takes before it goes over to the version that the unit's round starts from."""
        return 0

    @property
    def recent(self) -> int:
        """Number of recent versions, including the current one, that an accepted update may be computed on."""
        return 1 + self.lag

    def quorum_of(self, is_last: bool) -> float:
        """Share of a round's units that suffices past the deadline; `is_last`: in the last round of an epoch or job."""
        return 1.0

    def sharers(self, fewest: int) -> int:
        """Number of workers that must share each round so that the strategy tolerates bad workers; 0: no such need.

        Args:
            fewest: the number of workers that the job waits for (`workers.min`).
        """
        return 0

    # What a worker does with a unit

    @property
    def inner(self) -> OptimizerSpec | None:
        """The optimizer with which a worker steps through a unit to send a pseudo-gradient; None: workers send
        gradients.
        """
        return None

    @property
    def keeps_inner(self) -> bool:
        """Whether the state of `inner` is kept from unit to unit, and handed over by workers that leave."""
        return False

    @property
    def hands_over_inner(self) -> bool:
        """Whether a worker that leaves hands the state of `inner` over to another."""
        return self.keeps_inner

    @property
    def averaging(self) -> "Averaging | None":
        """How each worker, a peer, averages weights of its own with those of others; None: workers have none.

        With peers, an update is the version's weights minus the peer's, and a version is the mean of each peer's newest
        weights, whether or not the round has any of its units.
        """
        return None

    @property
    def staging(self) -> "Staging | None":
        """How the model is split into stages, which several workers hold; None: each worker holds all of it."""
        return None

    @property
    def extra_vectors(self) -> int:
        """Vectors of the model's size in a worker's memory besides `LEAST_VECTORS`: where it computes meanwhile, the
        two versions that are held and the updates being sent.
        """
        return 3 * self.overlaps

    def sent(self, values: Vector) -> Vector:
        """The values that a worker sends for a bucket of its update; `values` is not changed."""
        return values

    # The combination

    @property
    def combines_early(self) -> bool:
        """Whether a bucket of the gradient follows from this bucket of the round's updates, all of which are known
        before they have arrived: then it may be made while other buckets are on their way.
        """
        whole = self.takes_any or self.needs_norms or self.averaging or self.staging
        return not whole and self.quorum_of(False) == 1

    @property
    def needs_norms(self) -> bool:
        """Whether `gradient` needs the norms of whole updates when it combines buckets."""
        return False

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """Combine updates, or one bucket of each, into the gradient for the server's optimizer.

        Adds in the order of units, so that the bits do not depend on which worker computed which update.

        Args:
            updates: one update per unit, shape (d,), float32; iterated once, each valid until the next.
            out: array (d,) that may receive the result.
        Returns: shape (d,), float32; `out` or a new array.
        """
        raise NotImplementedError

    def average(self, samples: Sequence[int], workers: int) -> Average:
        """An average for the updates' buffers, added in the order of units.

        Args:
            samples: number of samples of each update to be added.
            workers: as in `Contributions`.
        """
        return Mean(sum(samples))
