"""The needs of each stage: memory and work of the worker that holds it, and room in the broker. Pure."""

from collections.abc import Sequence

from computeshare.codecs.registry import CODECS
from computeshare.errors import SpecError
from computeshare.jobspec.machine_needs import size_text
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.placement import StageDemand
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.schedule import most_in_flight
from computeshare.strategies.base import MAIL_BYTES, STAGE_VECTORS, Staging


def in_flight(staging: Staging, plan: Plan) -> int:
    """The most pieces of a micro-batch whose activations wait for a backward pass at a stage."""
    return most_in_flight(staging.schedule, range(1), staging.stages, plan.accumulate)


def needs(stages: StagePlan, staging: Staging, plan: Plan) -> list[StageDemand]:
    """Each stage's memory, of which the values between its layers are not known, and its work."""
    pieces = in_flight(staging, plan)
    borders = [0, *(one.border_bytes for one in stages.stages)]
    return [
        StageDemand(
            4 * STAGE_VECTORS * one.parameters + pieces * (before + one.border_bytes), one.cost or one.parameters or 1.0
        )
        for one, before in zip(stages.stages, borders, strict=False)
    ]


def check_mail(stages: StagePlan, staging: Staging, plan: Plan) -> None:
    """Raises SpecError: more than `MAIL_BYTES` of a micro-batch may wait in the broker."""
    values = sum(one.border_bytes for one in stages.stages) // 4
    most = values * CODECS[staging.activations].bytes_per_value * in_flight(staging, plan)
    if most > MAIL_BYTES:
        raise SpecError(
            f"up to {size_text(most)} of a micro-batch's activations would wait in the broker between stages, more "
            f"than {size_text(MAIL_BYTES)}: lower micro_batch, raise accumulate with schedule 1f1b, or set "
            "strategy.activations to bfloat16 or int8"
        )


def works_of(needed: Sequence[StageDemand], held: range) -> float:
    """The work of a run of stages."""
    return sum(needed[stage].work for stage in held)
