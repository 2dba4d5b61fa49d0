"""The choice of a job's codecs, inner steps and delay from its workers' measurements; once, before it opens. Pure.

The choice loses as little precision as possible while communication (sending, receiving, encoding and decoding) stays
under a tenth of the time of the worker that it delays most.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from computeshare.codecs.measured_link import MeasuredLink, shown
from computeshare.codecs.registry import CODECS, PAIRS
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.tensors.layout import bucket_values

SENDING = 0.1
"""Largest share of a worker's time that sending, receiving, encoding and decoding should take."""
PLANNED = SENDING / 2
"""The share aimed for: measurements of a second or two vary, and workers also wait for the slowest worker."""
SLACK = 0.01
"""Where no choice takes the planned share: how much longer than with the shortest messages a round may take with less
lossy ones, as a share of its time.
"""
HIDDEN = 0.5
"""The share of the computing that communication may take with a delay without being waited for: both vary."""
IDLE = 0.005
"""Largest share of time that replicas may idle in an epoch's short last round, if more inner steps can lower it."""
DELAYED_STEPS = 50
"""The fewest inner steps with a delay: 10 were measured to cost a point of accuracy more than 50."""
OVERLAPPED_STEPS = 5
"""The fewest inner steps with an overlap, which is a share of them."""
MANY_STEPS = 125
"""Inner steps beyond which a delay, or error feedback, costs less accuracy than more steps."""
MOST_STEPS = 500
"""Most inner steps to choose: with more, replicas drift apart."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The chosen codecs, inner steps and delay or overlap, and the worker that waits longest for communication."""

    codec: CodecSpec
    inner_steps: int | None
    """None if the strategy fixes them."""
    delay: int
    """The strategy's `lag`, 1 with a delay or an overlap."""
    overlap: int
    """The strategy's `early_steps`."""
    sending: float
    """Share of its time that this worker spends on communication which it does not compute beside."""
    slowest: MeasuredLink

    @property
    def reason(self) -> str:
        """The reason for the choice, for the job's users."""
        up, compute_ms = self.slowest.up_bytes_per_s * 8e-6, 1000 * self.slowest.compute_s
        size = self.slowest.messages[self.codec.up].size / 1e6
        steps = f", {self.inner_steps} inner steps" if self.inner_steps else ""
        if self.delay:
            hidden = f"an overlap of {self.overlap} steps" if self.overlap else "a delay of 1"
            steps += f", {hidden} (it computes while updates are on their way)"
        takes = "keep it from computing for" if self.delay else "take"
        verdict = "" if self.sending <= SENDING else "; no other choice takes less"
        if CODECS[self.codec.up].residual:
            verdict += f". With {self.codec.up} up, the weights depend on which workers take part"
        return (
            f"{self.codec.up} up, {self.codec.down} down{steps}: an update is {shown(size)} MB; the slowest worker "
            f"sends {shown(up)} Mbit/s and takes {shown(compute_ms)} ms for a micro-batch, so sending, encoding and "
            f"decoding {takes} {self.sending:.0%} of its time{verdict}"
        )


def choose_codecs(spec: JobSpec, measured: Sequence[MeasuredLink]) -> Choice:
    """Choose the first pair of codecs whose communication takes at most the planned share of every worker's time; if
    there is none, the first with which a round takes hardly longer than with the pair that takes least (`SLACK`).

    If the strategy's inner steps may grow, the job's own are the minimum, and the order is:

    1. pairs without error feedback either way, with the job's own steps;
    2. of these pairs the one that needs the fewest steps, up to `MANY_STEPS`;
    3. likewise with a delay and at least `DELAYED_STEPS`, with which pairs that need fewer come the least lossy first;
    4. with a delay, pairs with error feedback both ways, the least lossy that needs at most `MANY_STEPS`;
    5. with a delay, whatever needs the fewest steps.

    Where an epoch has fewer than `DELAYED_STEPS` for each replica, 3 to 5 go without a delay. Replicas whose state is
    kept get an overlap in place of the delay, with as few steps as suffice, and before more steps without it.

    Args:
        measured: one measurement for each worker that will take part; at least one.
    """
    choices = list(_choices(spec, measured))
    least = min(one.sending for one in choices)
    enough = max(PLANNED, 1 - (1 - least) / (1 + SLACK))
    return next(one for one in choices if one.sending <= enough)


def _choices(spec: JobSpec, measured: Sequence[MeasuredLink]) -> Iterator[Choice]:
    known = set.intersection(*(set(one.messages) for one in measured))  # a worker of an older release knows fewer
    pairs = [CodecSpec(up=up, down=down) for up, down in PAIRS if {up, down} <= known]
    if not spec.strategy.steps_may_grow:
        yield from (_judged(spec, pair, None, measured) for pair in pairs)
        return
    fine = [pair for pair in pairs if not (CODECS[pair.up].residual or CODECS[pair.down].residual)]
    coarse = [pair for pair in pairs if CODECS[pair.up].residual and CODECS[pair.down].residual]
    own, hidden = spec.strategy.steps, spec
    overlaps = spec.strategy.chosen(DELAYED_STEPS, delay=1).early_steps > 0
    fewest, many = max(own, OVERLAPPED_STEPS if overlaps else DELAYED_STEPS), max(own, MANY_STEPS)
    if _most_steps(spec) >= fewest:
        hidden = spec.model_copy(update={"strategy": spec.strategy.chosen(None, delay=1)})
    yield from (_judged(spec, pair, own, measured) for pair in fine)
    if not overlaps:
        yield from _grown(spec, fine, measured, own, many)
    yield from _grown(hidden, fine, measured, fewest, many)
    yield from _grown(hidden, coarse, measured, fewest, many, by_loss=True)
    yield from _grown(hidden, fine + coarse, measured, fewest)


def _grown(
    spec: JobSpec,
    pairs: Sequence[CodecSpec],
    measured: Sequence[MeasuredLink],
    fewest: int,
    most: int | None = None,
    by_loss: bool = False,
) -> Iterator[Choice]:
    """These pairs with as many inner steps as each needs, at least `fewest`: in ascending order of steps, or with
    `by_loss` as they come. Those that need more than `most` are left out; None: they get as many as there may be.
    """
    units, limit = spec.plan.units_per_round, _most_steps(spec)
    fewest = min(fewest, limit)
    needed = {pair: max(fewest, *(_steps(spec, pair, one, len(measured)) for one in measured)) for pair in pairs}
    for pair in pairs if by_loss else sorted(pairs, key=lambda one: needed[one]):
        if most is None or needed[pair] <= most:
            yield _judged(spec, pair, _even(spec, units, min(needed[pair], limit), limit), measured)


def _most_steps(spec: JobSpec) -> int:
    """The most inner steps that there may be: the job's own, or as many as an epoch has for each replica."""
    in_epoch = math.ceil(spec.plan.micro_batches_per_epoch / spec.plan.units_per_round)
    return max(spec.strategy.steps, min(MOST_STEPS, in_epoch))


def _even(spec: JobSpec, replicas: int, steps: int, most: int) -> int:
    """The smallest number of inner steps, from `steps` to `most`, with which replicas idle at most `IDLE`; else
    `steps`.

    Replicas idle in an epoch's last round if it is cut short.
    """
    total = spec.plan.micro_batches_per_epoch

    def idle(steps: int) -> float:
        """The share of time that replicas idle if all are equally fast."""
        before = (total - 1) // (replicas * steps)
        longest = before * steps + min(steps, total - before * replicas * steps)
        return 1 - total / (replicas * longest)

    return next((more for more in range(steps, most + 1) if idle(more) <= IDLE), steps)


def _judged(spec: JobSpec, pair: CodecSpec, steps: int | None, measured: Sequence[MeasuredLink]) -> Choice:
    """Rate a pair of codecs by the worker that it delays most."""
    strategy = spec.strategy.chosen(steps, spec.strategy.lag)

    def share(one: MeasuredLink) -> float:
        coding, sending, computing = _seconds(spec, pair, one, len(measured))
        computing *= strategy.steps
        if strategy.early_steps:
            sending = max(0.0, sending - computing * strategy.early_steps / strategy.steps)
        elif strategy.lag:
            sending = max(0.0, sending - computing * HIDDEN) / 2  # a round is half of computing and sending
        return (coding + sending) / (coding + sending + computing)

    slowest = max(measured, key=share)
    return Choice(pair, steps, strategy.lag, strategy.early_steps, share(slowest), slowest)


def _seconds(spec: JobSpec, pair: CodecSpec, one: MeasuredLink, workers: int) -> tuple[float, float, float]:
    """A worker's seconds of its own encoding and decoding in a round, of other communication, which it can compute
    beside where there is a delay, and of computing one micro-batch of each of its units.

    The reducer is assumed to be as fast as this worker: it decodes every update, encodes the difference, and decodes it
    as every worker does.
    """
    in_round = spec.plan.units_per_round
    units = math.ceil(in_round / workers)
    up, down = one.messages[pair.up], one.messages[pair.down]
    ways = units * up.size / one.up_bytes_per_s, down.size / one.down_bytes_per_s
    parts = math.ceil(spec.parameters / bucket_values(spec.parameters)) if spec.has_drafts else 1
    link = max(ways) + min(ways) / parts  # parts of a draft come down while later parts go up
    own, reducing = units * up.encode_s + down.decode_s, in_round * up.decode_s + down.encode_s + down.decode_s
    return own, link + reducing, units * one.compute_s


def _steps(spec: JobSpec, pair: CodecSpec, one: MeasuredLink, workers: int) -> int:
    """The inner steps with which communication takes the planned share of this worker's time."""
    coding, sending, computing = _seconds(spec, pair, one, workers)
    ratio, strategy = PLANNED / (1 - PLANNED), spec.strategy.chosen(DELAYED_STEPS, spec.strategy.lag)
    if strategy.early_steps or not strategy.lag:
        hidden = strategy.early_steps / strategy.steps
        return math.ceil(max(coding / ratio, (coding + sending) / (ratio + hidden)) / computing)
    all_hidden = sending / HIDDEN
    some_hidden = (coding + sending / 2) / (ratio + HIDDEN / 2)
    return math.ceil(max(coding / ratio, min(all_hidden, some_hidden)) / computing)
