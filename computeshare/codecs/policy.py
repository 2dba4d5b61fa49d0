"""Which codecs a job takes, and how many inner steps, by what its workers measured: chosen once, before it opens. Pure.

Sending, with the encoding and decoding it takes, is to stay under a tenth of the time of the worker that it holds up
most, with as little lost on the way as that allows.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from computeshare.jobspec.spec import CodecName, CodecSpec, JobSpec
from computeshare.jobspec.strategy_fields import LocalStrategy

SENDING = 0.1
"""The most that sending, receiving and what both take of the processors may take of a worker's time."""
PLANNED = SENDING / 2
"""What is chosen for: what was measured for a second or two varies, and workers wait for the slowest of them, too."""
IDLE = 0.005
"""The most that replicas may idle for want of whole rounds, if more inner steps can help it."""
MOST_STEPS = 500
"""More inner steps than this are not chosen: replicas drift apart."""
PAIRS: tuple[CodecSpec, ...] = (
    CodecSpec(up="float16", down="float32"),
    CodecSpec(up="float16", down="float16"),
    CodecSpec(up="int8", down="int8"),
    CodecSpec(up="topk", down="int8"),
    CodecSpec(up="topk", down="topk"),
)
"""Up and down, from the one that loses least to the one that sends least."""
CANDIDATES: tuple[CodecName, ...] = ("float32", "float16", "int8", "topk")


class Coded(BaseModel):
    """What an update comes to with one codec."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0, description="bytes")
    encode_s: float = Field(ge=0, allow_inf_nan=False, description="seconds, error feedback included")
    decode_s: float = Field(ge=0, allow_inf_nan=False)


class MeasuredLink(BaseModel):
    """What one worker measured on its own machine and link."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute_s: float = Field(gt=0, allow_inf_nan=False, description="seconds for a micro-batch")
    up_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    down_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    messages: Mapping[CodecName, Coded] = Field(description="one update, by codec; all the candidates")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen."""

    codec: CodecSpec
    inner_steps: int | None
    """For strategy `local`."""
    sending: float
    """Share of its time in which the worker that it holds up most waits for messages, or makes or reads them."""
    slowest: MeasuredLink

    @property
    def reason(self) -> str:
        """Why, for whoever watches the job."""
        up, compute_ms = self.slowest.up_bytes_per_s * 8e-6, 1000 * self.slowest.compute_s
        size = self.slowest.messages[self.codec.up].size / 1e6
        steps = f" and {self.inner_steps} inner steps" if self.inner_steps else ""
        verdict = "" if self.sending <= SENDING else "; nothing that was tried takes less than a tenth"
        return (
            f"{self.codec.up} up and {self.codec.down} down{steps}: an update is {size:.3g} MB, the slowest link sends "
            f"{up:.3g} Mbit/s, a micro-batch takes {compute_ms:.3g} ms there, so that sending, with encoding and "
            f"decoding, takes {self.sending:.0%} of the time{verdict}"
        )


def choose(spec: JobSpec, measured: Sequence[MeasuredLink]) -> Choice:
    """The first pair of codecs with which sending takes as little as is planned of everybody's time; if there is none,
    the one with which it takes least.

    With strategy `local` the job's own inner steps are the fewest: where no pair suffices with them, they grow, with
    codecs that every job's bits bear before those that make them depend on who took part.

    Args:
        measured: by each worker that will take part; at least one.
    """
    choices = list(_choices(spec, measured))
    return next((one for one in choices if one.sending <= PLANNED), None) or min(choices, key=lambda one: one.sending)


def _choices(spec: JobSpec, measured: Sequence[MeasuredLink]) -> Iterator[Choice]:
    strategy = spec.strategy
    if not isinstance(strategy, LocalStrategy):
        yield from (_judged(spec, pair, None, measured) for pair in PAIRS)
        return
    fewest = strategy.inner_steps
    most = max(fewest, min(MOST_STEPS, math.ceil(spec.plan.micro_batches_per_epoch / strategy.replicas)))
    faithful = [pair for pair in PAIRS if pair.up != "topk"]
    yield from (_judged(spec, pair, fewest, measured) for pair in faithful)
    for pair in (faithful[-1], *PAIRS[len(faithful) :]):
        needed = max(_steps(spec, pair, one, len(measured)) for one in measured)
        yield _judged(spec, pair, _even(spec, strategy.replicas, min(max(fewest, needed), most), most), measured)


def _even(spec: JobSpec, replicas: int, steps: int, most: int) -> int:
    """So many inner steps, or more with which replicas idle less: where an epoch's last round is cut short, some have
    nothing to do in it.
    """
    total = spec.plan.micro_batches_per_epoch

    def idle(steps: int) -> float:
        """Share of the time, where all compute alike."""
        before = (total - 1) // (replicas * steps)
        longest = before * steps + min(steps, total - before * replicas * steps)
        return 1 - total / (replicas * longest)

    return next((more for more in range(steps, most + 1) if idle(more) <= IDLE), steps)


def _judged(spec: JobSpec, pair: CodecSpec, steps: int | None, measured: Sequence[MeasuredLink]) -> Choice:
    """What a pair comes to for the worker that it holds up most."""

    def share(one: MeasuredLink) -> float:
        sending, computing = _seconds(spec, pair, one, len(measured))
        return sending / (sending + computing * (steps or 1))

    slowest = max(measured, key=share)
    return Choice(pair, steps, share(slowest), slowest)


def _seconds(spec: JobSpec, pair: CodecSpec, one: MeasuredLink, workers: int) -> tuple[float, float]:
    """A worker's seconds of sending and receiving in a round, and of computing its units' first micro-batches.

    The reducer, which works while the workers wait, is taken to be as fast as this worker: it decodes every update,
    encodes the difference, and decodes that as every worker does.
    """
    in_round = spec.plan.units_per_round
    units = math.ceil(in_round / workers)
    up, down = one.messages[pair.up], one.messages[pair.down]
    link = units * up.size / one.up_bytes_per_s + down.size / one.down_bytes_per_s
    coding = units * up.encode_s + in_round * up.decode_s + down.encode_s + 2 * down.decode_s
    return link + coding, units * one.compute_s


def _steps(spec: JobSpec, pair: CodecSpec, one: MeasuredLink, workers: int) -> int:
    """How many inner steps keep sending to what is planned of this worker's time."""
    sending, computing = _seconds(spec, pair, one, workers)
    return math.ceil(sending * (1 - PLANNED) / PLANNED / computing)
