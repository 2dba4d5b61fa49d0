"""The protocol that every strategy implements: all that the rest of the code wants to know of the kind of a job.

Knows no torch: what a strategy has workers do is data (`inner`) and NumPy (`sent`), which `computeshare.training` runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field

from computeshare.jobspec.controls import ROUND, Control
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.part import Part
from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.strategies.load_balancer import Divider
from computeshare.types import Vector

LARGEST_ROUND = 4096
"""Most updates that a version may be made of."""
LARGEST_LOCAL_ROUND = 100_000
"""Most micro-batches in all the units of a round."""


@dataclass(frozen=True, slots=True)
class Contributions:
    """What is known of the updates that a version is made of, each in the order of units.

    Args:
        samples: how many samples each stands for.
        staleness: how many versions each one's weights were behind; none: all are fresh.
        workers: the fewest that share the round, of which fewer than half may be bad.
        norms: Euclidean norms of the whole updates, where buckets of them are combined and `needs_norms`; else none.
    """

    samples: Sequence[int]
    staleness: Sequence[int] = ()
    workers: int = 1
    norms: Sequence[float] = ()


class Strategy(Part):
    """How versions are made. A kind is a class with the kind's fields, listed in `registry`.

    What is answered here holds of strategies whose units are micro-batches, each sent as a gradient, and whose rounds
    wait for all of them; a kind overrides what is different. All answers are pure.
    """

    kind: Annotated[str, Control(ROUND, None)] = Field(title="Strategy")
    backup: bool = Field(True, description="lease slow work a second time once nothing else is left to lease")

    # The JobSpec

    suits: ClassVar[str]
    """What to take it for, in a few words."""
    instead: ClassVar[Mapping[str, str]] = {}
    """For each field of the JobSpec that is `implied`, what the user sets in its place."""
    units_from: ClassVar[str] = "micro_batches_per_round"
    """The field that says how many units a round has, and so how many workers can work on it at a time."""
    rate_field: ClassVar[str] = "optimizer.lr"
    """The learning rate that users tune."""
    unit: ClassVar[str] = "micro-batch"
    """What a unit of a round is called."""
    units: ClassVar[str] = "micro-batches"
    lease: ClassVar[str] = "micro-batch"
    """What a worker's work is called."""

    @property
    def implied(self) -> dict[str, Any]:
        """Fields of the JobSpec that follow from the strategy, and what they are."""
        return {}

    def check(self, plan: Plan, fewest: int) -> None:
        """Compare the strategy with its job.

        Args:
            fewest: the workers that the job waits for.
        Raises: ValidationError, ValueError: they do not go together.
        """

    # The plan of a round

    steps_may_grow: ClassVar[bool] = False
    """Whether `codec: auto` may choose more steps for a unit."""
    takes_any: ClassVar[bool] = False
    """Whether a version is made of whichever units of its epoch come first, late ones among them."""

    @property
    def steps(self) -> int:
        """Micro-batches in a unit."""
        return 1

    def with_steps(self, steps: int | None) -> Self:
        """The strategy with the steps that were chosen for it, if any were."""
        return self

    def round(self, plan: Plan, version: int, carried: Sequence[int]) -> Round:
        """The round that starts from `version`, with what the one before left over."""
        return plan.round(version, carried)

    def foreseen(self, plan: Plan, version: int) -> Sequence[int]:
        """The units of the round that starts from `version`, as far as they are known before it opens: workers assemble
        their batches ahead.
        """
        return plan.round(version).units

    def divider(self) -> Divider | None:
        """What divides each round among its units by how fast workers are; None: nothing, the plan does."""
        return None

    def sizes(self, samples: Sequence[int], micro_batch: int) -> list[int]:
        """The micro-batches in the units of a round, as its samples tell; none: as many as the plan has it."""
        return []

    # Who makes a version, and when it closes

    most_unmeasured: ClassVar[int] = 0
    """Units that a worker of unknown speed is leased at most at once; 0: no limit."""

    @property
    def waits_for_slowest(self) -> bool:
        """Whether a round takes as long as the slowest worker's part of it."""
        return True

    @property
    def recent(self) -> int:
        """From how many versions, the current one among them, a submission may start."""
        return 1

    def quorum_of(self, is_last: bool) -> float:
        """The share of a round that closes it past its deadline; `is_last`: of its epoch, or of all."""
        return 1.0

    def sharers(self, fewest: int) -> int:
        """How many workers must share a round for its combination to bear bad ones; 0: any number may make it.

        Args:
            fewest: the workers that the job waits for.
        """
        return 0

    # What a worker does with a unit

    @property
    def inner(self) -> OptimizerSpec | None:
        """The optimizer with which a worker steps through a unit, to send how far that led; None: it sends the unit's
        gradient.
        """
        return None

    @property
    def keeps_inner(self) -> bool:
        """Whether `inner`'s state goes on from unit to unit, and is handed over by workers that leave."""
        return False

    @property
    def extra_vectors(self) -> int:
        """Vectors of the model's size that a worker holds beside weights, gradient and what travels."""
        return 0

    def sent(self, values: Vector) -> Vector:
        """What a worker sends of a bucket of an update; the bucket is left as it is."""
        return values

    # The combination

    @property
    def needs_norms(self) -> bool:
        """Whether `gradient` needs the norms of whole updates where it is given buckets."""
        return False

    def gradient(self, updates: Iterable[Vector], about: Contributions, out: Vector | None = None) -> Vector:
        """The gradient that the server's optimizer steps on, or a bucket of it from that bucket of the updates.

        Runs in the order of units, so that its bits do not depend on who computed what.

        Args:
            updates: one update per unit, shape (d,) float32; read once, and each holds until the next is asked for.
            out: where to put it, if that is given and of use.
        Returns: shape (d,), float32.
        """
        raise NotImplementedError
