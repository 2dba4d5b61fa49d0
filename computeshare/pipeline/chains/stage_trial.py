"""A split model on a device, and trials of a stage alone, in which nobody else takes part: its speed, and whether the
device computes it rightly.
"""

import contextlib
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from zlib import crc32

import numpy as np
import numpy.typing as npt
import structlog
import torch

from computeshare.codecs.base import Codec
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline import frames
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.chains.stage_needs import needs
from computeshare.pipeline.frames import Value
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.runtime.processes import collect_garbage
from computeshare.strategies.base import Staging
from computeshare.tasks.base import Split, Task
from computeshare.tensors.layout import Layout
from computeshare.training import selftest
from computeshare.training.work_units import SelfTestResult
from computeshare.types import Blob, Vector

log = structlog.get_logger()
UNIT = 0
"""The micro-batch that is computed; nobody is told the result."""


@dataclass(frozen=True)
class TrialMail:
    """A `Mailbox` that sends nothing, and answers with zeros in the place of other stages; with noise from a `seed`."""

    replica: StageReplica
    stages: StagePlan
    plan: Plan
    codec: Codec
    seed: int | None = None

    def send(self, stage: int, tag: str, message: Blob) -> None:
        """Do nothing."""

    def receive(self, stage: int, tag: str) -> Blob:
        """Values in the form of what another stage sends. Raises Interrupted: the form is not known, or all pieces are
        computed and a later stage would send gradients of weights that it borrows.
        """
        source, _, piece = tag[1:].partition(".")
        if tag.startswith("f"):
            where = self.plan.pieces(UNIT)[int(piece)]
            form = self.stages.stages[int(source)].form(stage, where.stop - where.start)
            if form is not None:
                return self._filled(frames.zeros(form), tag)
        elif tag.startswith("b"):
            wanted = self.replica.stages[stage].wanted(int(piece))[int(source)]
            return self._filled([torch.zeros(one.shape, dtype=one.dtype) for one in wanted], tag)
        raise Interrupted("the trial ends here")

    def _filled(self, values: list[Value], tag: str) -> bytes:
        if self.seed is not None:
            source = torch.Generator().manual_seed(crc32(f"{self.seed} {tag}".encode()))
            for one in (tensor for value in values for tensor in frames.tensors_of(value)):
                if one.is_floating_point():
                    one.detach().normal_(generator=source)
        return frames.encode(values, self.codec)


def smallest(needed: Sequence[StageDemand]) -> int:
    """The stage to try: the one that takes the least memory."""
    return min(range(len(needed)), key=lambda stage: needed[stage].bytes)


def measured_rate(
    replica: StageReplica,
    layout: Layout,
    mail: TrialMail,
    needed: Sequence[StageDemand],
    goes_on: Callable[[], bool] = lambda: True,
) -> float:
    """The work per second of a replica of one stage, as a `StageWorker` tells it: of the second of two micro-batches,
    since the first takes longer. 0: it could not be measured, or was called off. Changes the replica's weights.
    """
    (number,) = replica.held
    shapes = {one.name: one.shape for one in layout.tensors}
    replica.load({name: np.zeros(shapes[name], np.float32) for name in replica.names})
    pieces = len(mail.plan.pieces(UNIT))
    for _ in range(2):
        with contextlib.suppress(Interrupted):
            replica.compute(UNIT, mail, goes_on)
        timing = replica.stages[number].timing
        if timing.pieces < pieces:
            return 0.0
    return needed[number].work / max(timing.forward_s + timing.backward_s, 1e-6)


@dataclass(frozen=True)
class ModelStages:
    """A task's model, split as `stages` says, on a device that may hold any run of them.

    Args:
        layout: of the whole model, with the cuts of `stages`.
    """

    task: Task
    samples: Split
    layout: Layout
    plan: Plan
    staging: Staging
    stages: StagePlan
    device: torch.device

    def replica(self, held: range) -> StageReplica:
        """The replica of a run of stages, without weights yet; those given up before make room. Raises SpecError, as
        `StageReplica`.
        """
        gc.collect()  # they hold themselves in circles; their memory is taken again at once, not returned to the system
        about = self.task, self.samples, self.layout, self.plan, self.staging, self.stages
        return StageReplica(*about, held, self.device)

    def rate(self, stage: int, goes_on: Callable[[], bool]) -> float:
        """As `measured_rate`, of a stage alone."""
        try:
            return self._rate(stage, goes_on)
        finally:
            collect_garbage()

    def _rate(self, stage: int, goes_on: Callable[[], bool]) -> float:
        replica = self.replica(range(stage, stage + 1))
        mail = TrialMail(replica, self.stages, self.plan, CODECS[self.staging.activations])
        needed = needs(self.stages, self.staging, self.plan)
        return measured_rate(replica, self.layout, mail, needed, goes_on)

    def test(self, room_bytes: int) -> SelfTestResult:
        """Test the device with each stage alone that takes no more than `room_bytes`, until it computes one wrongly: as
        `selftest.run` with a whole model, with random weights, and noise in the place of other stages' messages.
        """
        plan = replace(self.plan, micro_batch=self.plan.micro_batch // self.plan.accumulate, accumulate=1)
        single = replace(self, plan=plan)  # one piece in each micro-batch
        told = SelfTestResult(0.0, 0.0, 0, "")
        needed = needs(self.stages, self.staging, plan)
        for number, demand in enumerate(needed):
            if demand.bytes > room_bytes:
                continue
            name = f"stage {number + 1} of {self.task.name}"
            try:
                found = selftest.check(name, self._own_layout(number), self.device, partial(single._gradient, number))
            except Exception as error:  # a model may be unable to compute noise
                log.warning("stage not tested", stage=name, error=f"{type(error).__name__}: {error}"[:300])
                continue
            told = replace(found, error=max(told.error, found.error), seconds=told.seconds + found.seconds)
            if told.trouble:
                break
        collect_garbage()
        return told

    def _own_layout(self, number: int) -> Layout:
        """Of a stage's own parameters, in the order of its gradient."""
        entries = {one.name: one for one in self.layout.tensors if one.kind == "parameter"}
        names = (name for name in self.stages.stages[number].names if name in entries)
        return Layout.build((name, entries[name].shape, "parameter") for name in names)

    def _gradient(self, number: int, device: torch.device, batch: selftest.TrialBatch) -> selftest.Compute:
        replica = replace(self, device=device).replica(range(number, number + 1))
        replica.load(self._weights(replica.names, batch))
        mail = TrialMail(replica, self.stages, self.plan, EXACT, batch.number)
        if replica.is_unrolled:
            raise ValueError("its random layers cannot be switched off")
        for part in replica.modules:
            selftest.still(part)
        is_reference = device.type == "cpu"

        def compute() -> Vector:
            nonlocal is_reference
            with contextlib.suppress(Interrupted):
                replica.compute(UNIT, mail)
            found = replica.stages[number].gradient
            if not is_reference:
                return found  # compared before it changes: a copy would take more memory than training does
            if not np.isfinite(found).all():
                raise ValueError("noise in the place of other stages' values gives no finite gradient")
            is_reference = False
            return found.copy()

        return compute

    def _weights(self, names: Sequence[str], batch: selftest.TrialBatch) -> dict[str, npt.NDArray[np.generic]]:
        """Weights of about the size that layers begin with, by name, and the model's own buffers; nudged, the weights
        differ by rounding.
        """
        source, nudges = (np.random.Generator(np.random.PCG64([batch.number, salt])) for salt in (0, batch.nudge))
        found: dict[str, npt.NDArray[np.generic]] = {}
        state = self.task.outline().state_dict()
        for entry in (one for one in self.layout.tensors if one.name in names):
            if entry.kind != "parameter":
                kept = state[entry.name]
                found[entry.name] = np.zeros(entry.shape, np.float32) if kept.is_meta else kept.numpy(force=True)
                continue
            is_matrix = len(entry.shape) > 1
            scale = np.float32(1 / math.sqrt(math.prod(entry.shape[1:])) if is_matrix else 0.1)
            values = scale * source.standard_normal(entry.shape, np.float32)
            if not is_matrix and entry.name.endswith("weight"):  # of a normalisation
                values += 1
            if batch.nudge:
                values += np.float32(selftest.NUDGE) * scale * nudges.standard_normal(entry.shape, np.float32)
            found[entry.name] = values
        return found
