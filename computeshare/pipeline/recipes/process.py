"""Stages of a recipe's model in a confined process: the side of the seat, the reducer or a replay."""

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from computeshare.errors import Interrupted, RecipeError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.stage_replica import Mailbox, StageUpdate
from computeshare.strategies.base import MAIL_BYTES
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.connection import ProcessConnection
from computeshare.training.recipe_process.process import RecipeProcess
from computeshare.training.recipe_process.replica import SharedBuckets
from computeshare.training.recipe_process.shared_vectors import SharedVectors
from computeshare.training.work_units import SelfTestResult, Take
from computeshare.types import Blob, Vector

MOST_PLAN = 64 << 20
"""The most bytes of a plan of stages."""


class StageProcess(RecipeProcess):
    """A recipe's process that splits the model, holds stages of it, or recomputes units by all stages in turn."""

    SERVER: ClassVar[str] = "computeshare.pipeline.recipes.server"

    def split(self) -> StagePlan:
        """How the model is split. Raises RecipeError: it cannot be split as the job asks, or the answer is no split."""
        _, body = self._connection.ask(
            messages.Split(), messages.SplitUp, most_body=MOST_PLAN, limit_s=self._limits.open_s
        )
        try:
            plan = StagePlan.parse(body)
            plan.check(self._layout, self._spec.staging.stages)
        except ValueError as error:
            raise RecipeError(f"the recipe's process answered with a split that is none: {str(error)[:500]}") from error
        return plan

    def cut(self, plan: StagePlan) -> None:
        """Have `layout` have the cuts of a plan."""
        self._layout = plan.cut(self._layout)

    def test_stages(self, plan: StagePlan, room_bytes: int) -> SelfTestResult:
        """As `ModelStages.test`. Raises RecipeError."""
        limit_s = len(plan.stages) * self._limits.step_s
        return self._tested(messages.TestStages(stages=plan.dump(), room_bytes=room_bytes), limit_s)

    def hold(self, parts: StageParts) -> "RecipeStages":
        """Hold a run of stages in place of any other, without weights yet. Raises RecipeError: the model is not split
        here as the plan says.
        """
        plan, held = parts.plan, parts.held
        self._shared.clear()
        request = messages.HoldStages(stages=plan.dump(), first=held.start, stop=held.stop)
        self._connection.ask(request, messages.Done, limit_s=self._limits.open_s)
        return RecipeStages(self._connection, self._shared, parts, self._spec.plan, self._memory.hear_peak)

    def _steps(self, plan: Plan, unit: int) -> int:
        return 2 * len(plan.pieces(unit)) * self._spec.staging.stages + 1

    def rate(self, plan: StagePlan, stage: int, goes_on: Callable[[], bool]) -> float:
        """As `ModelStages.rate`; the stages that are held are given up. Raises RecipeError."""
        if not goes_on():
            return 0.0
        request = messages.RateStage(stages=plan.dump(), number=stage)
        steps = 4 * len(self._spec.plan.pieces(0)) + 1  # of two units
        return self._connection.ask(request, messages.Rated, steps=steps, tick=self._shared.begin(goes_on))[0].rate


class RecipeStages:
    """A run of stages that a recipe's process holds; as `StageReplica` to a chain."""

    def __init__(
        self,
        connection: ProcessConnection,
        shared: SharedVectors,
        parts: StageParts,
        plan: Plan,
        measured: Callable[[int], None],
    ) -> None:
        """`measured`: is given the process's peak memory after each unit."""
        self._connection, self._shared, self._parts, self._plan = connection, shared, parts, plan
        self._measured = measured
        self._views = parts.layout.views(shared.weights)
        self._own = {bucket: shared.update[parts.layout.buckets[bucket]] for bucket in parts.own}

    @property
    def room(self) -> Vector | None:
        """As `HeldStages.room`: in memory that both processes map; None where the buckets are no neighbours."""
        read = self._parts.read
        if not read or read[-1] - read[0] >= len(read):
            return None
        buckets = self._parts.layout.buckets
        return self._shared.parameters[buckets[read[0]].start : buckets[read[-1]].stop]

    def load(self, weights: Mapping[str, npt.NDArray[np.generic]]) -> None:
        """As `StageReplica.load`. Raises RecipeError."""
        for name, values in weights.items():
            view = self._views[name]
            if values.ctypes.data != view.ctypes.data:
                np.copyto(view, values)
        self._connection.tell(messages.Load())

    def compute(
        self, unit: int, mailbox: Mailbox, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None
    ) -> list[StageUpdate]:
        """As `StageReplica.compute`; gradients go to `take` alone. Raises RecipeError; what the mailbox raises."""
        if not goes_on():
            raise Interrupted("the work was called off")
        unit_mail = _UnitMail(mailbox, self._parts, len(self._plan.pieces(unit)), goes_on, take)
        buckets = SharedBuckets(self._own, unit_mail.take)
        steps = 2 * len(self._plan.pieces(unit)) * len(self._parts.held) + 1
        try:
            told, _ = self._connection.ask(
                messages.ComputeStages(unit=unit),
                messages.StagesComputed,
                most_body=MAIL_BYTES,
                steps=steps,
                tick=self._shared.begin(unit_mail.goes_on),
                take=buckets.taken,
                mail=unit_mail.pass_on,
            )
        except Interrupted as interrupted:
            unit_mail.check()
            if not unit_mail.is_called_off:
                raise RecipeError("the recipe's process gave a unit up that was wanted: it is broken") from interrupted
            raise
        unit_mail.check()
        buckets.check()
        self._measured(told.peak_bytes)
        if [one.stage for one in told.stages] != [*self._parts.held]:
            raise RecipeError("the recipe's process computed other stages than it holds: it is broken")
        return [self._update(one) for one in told.stages]

    def _update(self, told: messages.StageComputed) -> StageUpdate:
        names, places = set(self._parts.plan.stages[told.stage].names), self._parts.buffers
        buffers = {name: self._shared.new_buffers[places[name]].copy() for name in places if name in names}
        return StageUpdate(
            told.stage,
            np.empty(0, np.float32),
            buffers,
            told.loss,
            told.forward_s,
            told.backward_s,
            told.most_in_flight,
            told.sent_bytes,
        )


class _UnitMail:
    """Passes a unit's messages and buckets on. An error at that calls the unit off, and is kept until the process has
    answered: what it sends meanwhile would else be taken for the next unit's.
    """

    def __init__(
        self, mailbox: Mailbox, parts: StageParts, pieces: int, goes_on: Callable[[], bool], take: Take | None
    ) -> None:
        self._mailbox, self._goes_on, self._take = mailbox, goes_on, take
        others = [one for one in range(len(parts.plan.stages)) if one not in parts.held]
        self._posted, self._wanted = _mail_of(parts.held, others, pieces), _mail_of(others, parts.held, pieces)
        self._error: Exception | None = None
        self.is_called_off = False

    def goes_on(self) -> bool:
        """Whether the unit is still wanted, and nothing has failed."""
        self.is_called_off = self.is_called_off or self._error is not None or not self._goes_on()
        return not self.is_called_off

    def take(self, bucket: int, values: Vector) -> None:
        """Pass a bucket on."""
        if self._take and self._error is None:
            try:
                self._take(bucket, values)
            except Exception as error:
                self._error = error

    def pass_on(
        self, told: messages.Posted | messages.Wanted, body: bytes
    ) -> tuple[messages.Head, Sequence[Blob]] | None:
        """As `Mail`. Raises RecipeError: no stage sends such a message in this unit, or it was sent before."""
        is_wanted = isinstance(told, messages.Wanted)
        left = self._wanted if is_wanted else self._posted
        if (told.stage, told.tag) not in left:
            raise RecipeError("the recipe's process has mail that its stages cannot have: it is broken")
        left.remove((told.stage, told.tag))
        try:
            if self._error is None and is_wanted:
                return messages.Delivered(), [self._mailbox.receive(told.stage, told.tag)]
            if self._error is None:
                self._mailbox.send(told.stage, told.tag, body)
        except Exception as error:
            self._error = error
        return (messages.CalledOff(), ()) if is_wanted else None

    def check(self) -> None:
        """Raises the first error."""
        if self._error:
            raise self._error


def _mail_of(sources: Sequence[int], targets: Sequence[int], pieces: int) -> set[tuple[int, str]]:
    """The stage and tag of each message that stages may send to others in a unit of so many pieces."""
    pairs = [(source, target) for source in sources for target in targets]
    found = {(target, f"t{source}") for source, target in pairs}
    for source, target in pairs:
        found |= {(target, f"{'f' if source < target else 'b'}{source}.{piece}") for piece in range(pieces)}
    return found
