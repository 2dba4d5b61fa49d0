"""How fast a worker computes a stage, measured alone, before it holds any: nobody else has to take part."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from computeshare.codecs.base import Codec
from computeshare.errors import Interrupted
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline import frames
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.tensors.layout import Layout
from computeshare.types import Blob

UNIT = 0
"""The micro-batch that is computed; nobody is told the result."""


@dataclass(frozen=True)
class TrialMail:
    """A `Mailbox` that sends nothing, and answers with zeros in the place of other stages."""

    replica: StageReplica
    stages: StagePlan
    plan: Plan
    codec: Codec

    def send(self, stage: int, tag: str, message: Blob) -> None:
        """Do nothing."""

    def receive(self, stage: int, tag: str) -> Blob:
        """Zeros in the form of what another stage sends. Raises Interrupted: the form is not known, or all pieces are
        computed and a later stage would send gradients of weights that it borrows.
        """
        source, _, piece = tag[1:].partition(".")
        if tag.startswith("f"):
            where = self.plan.pieces(UNIT)[int(piece)]
            form = self.stages.stages[int(source)].form(stage, where.stop - where.start)
            if form is not None:
                return frames.encode(frames.zeros(form), self.codec)
        elif tag.startswith("b"):
            wanted = self.replica.stages[stage].wanted(int(piece))[int(source)]
            return frames.encode([torch.zeros(one.shape, dtype=one.dtype) for one in wanted], self.codec)
        raise Interrupted("the trial ends here")


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
