"""Explains in words, for a job's pages, what a job waits for, why it is as fast as it is, what helps a failed job,
and why a submission did not count. Pure.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from api.jobs.submissions import SECONDS, Spent
from api.schemas import EventPublic, JobPublic, SubmissionPublic
from api.text_format import count, share
from computeshare.codecs.registry import CODECS
from computeshare.strategies.base import Strategy


def why(submission: SubmissionPublic) -> str:
    """A submission's outcome and its reason, in a sentence."""
    if submission.voided:
        return "Undone: the job was restored from an earlier checkpoint"
    if submission.outcome == "refused":
        return f"Refused by the reducer: {submission.reason or 'no reason given'}"
    if submission.outcome == "stale":
        return _stale(submission)
    return _WHY.get(submission.outcome, submission.outcome)


def _stale(submission: SubmissionPublic) -> str:
    if submission.base_version is None or submission.current_version is None:
        return "Dropped: computed on a version that is no longer current"
    base, current = count(submission.base_version), count(submission.current_version)
    if base == current:
        return f"Dropped: computed on a version {base} that the broker has lost"
    return f"Dropped: computed on version {base} when version {current} was current"


_WHY = {
    "accepted": "Counted",
    "duplicate": "Not counted again: the same message had already arrived",
    "lease_lost": "Dropped: its lease had expired, or another worker had already submitted the same work",
    "fenced": "Dropped: a newer session of the same worker had taken over",
}


def advice(error: str, saved: bool = True) -> str:
    """The advice for a job that failed with this error; `saved`: whether it has a checkpoint."""
    known = _known(error)
    if known is None:
        return (_FROM_CHECKPOINT if saved else _FROM_START) + _AGAIN
    return known.advice + (known.with_checkpoint if saved else "") + "."


def may_help_to_retry(error: str) -> bool:
    """Whether a job that failed with this error may get further by itself, without another setting."""
    known = _known(error)
    return known is None or known.retry


@dataclass(frozen=True, slots=True)
class _Error:
    """An error by its `sign`, a pattern; what helps, and what to add where the job has checkpoints."""

    sign: str
    advice: str
    with_checkpoint: str = ""
    retry: bool = False


def _known(error: str) -> _Error | None:
    return next((one for one in _ERRORS if re.search(one.sign, error, re.IGNORECASE)), None)


_LOWER_RATE = "Clone the job with a lower learning rate; max_norm in the strategy clips large updates"
_INTACT = ": saved checkpoints are intact"
_ERRORS = (
    _Error("^(training )?diverged at version 0:", _LOWER_RATE),
    _Error("^(training )?diverged", _LOWER_RATE, ". Or fork one of its checkpoints with such a rate"),
    _Error("no space left on", "Free space on the reducer's disk, then retry", _INTACT, retry=True),
    _Error("input/output error|read-only file system", "Check the reducer's disk, then retry", _INTACT, retry=True),
    _Error(
        "MemoryError|out of memory|(can't|cannot) allocate memory",
        "Retry on a machine with more memory, or clone the job with a smaller micro_batch",
        retry=True,
    ),
    _Error("forked from are missing or damaged", "Fork again, from another version or from another job"),
    _Error("take an earlier checkpoint", "Fork an earlier checkpoint of this job"),
)
_FROM_CHECKPOINT = "Retry to continue from the last checkpoint."
_FROM_START = "Retry to start again from the first version: there is no checkpoint yet."
_AGAIN = (
    " If the job fails the same way again, clone it and change the settings that the error names; computeshare doctor "
    "checks this machine."
)


@dataclass(frozen=True, slots=True)
class StartStep:
    """A step that a job takes before its first version."""

    state: Literal["done", "now", "later", "trouble"]
    text: str


def first_steps(job: JobPublic, trouble: str | None = None) -> list[StartStep]:
    """The steps before a job's first version, each with its state; `trouble`: of the control plane."""
    fewest, joined = job.spec["workers"]["min"], job.workers > 0
    waits = job.reason_code in ("looking", "workers", "busy")
    there = fewest if not waits else max(0, fewest - (job.missing_workers or fewest))
    data = job.spec.get("dataset") or "the recipe's data"
    broker = StartStep("trouble", f"Broker: {trouble}") if trouble else StartStep("done", "Broker answers")
    workers = StartStep(
        "now" if waits else "done", f"Workers: {max(there, job.workers)} of {fewest} that the job waits for"
    )
    if joined:
        loaded = StartStep("done", f"Data: {data} is loaded")
    else:
        loaded = StartStep(
            "later" if waits else "now", f"Data: each worker loads {data}, and downloads it if it has to"
        )
    return [
        broker,
        workers,
        loaded,
        StartStep("now" if joined else "later", "First round: plots appear with its version"),
    ]


WORTH_NAMING = 0.2
"""The share of workers' time from which waiting, encoding or uploading explains a job's speed."""


def pace(spent: Sequence[Spent], strategy: Strategy, units: int, codec: str) -> str:
    """Why a job is as fast as it is, in a sentence with what would help; empty: nothing was measured, or the model is
    spread over workers, of which the leader's times say little.

    Args:
        units: work units in a round.
        codec: of updates.
    """
    total_s = sum(one.total_s for one in spent)
    if not total_s or strategy.staging:
        return ""
    shares = {name: sum(getattr(one.seconds, name) for one in spent) / total_s for name in SECONDS}
    who, verb = ("Workers", "") if len(spent) > 1 else ("The worker", "s")
    computing = shares.pop("computing")
    most = max(shares, key=lambda name: shares[name])
    told = share(shares[most])
    if shares[most] < WORTH_NAMING:
        return f"{who} compute{verb} {share(computing)} of the time: more or faster workers would help"
    is_small = codec in CODECS and CODECS[codec].differences
    if most == "encoding":
        helps = "update codec float16" if is_small else "a larger micro_batch"
        return f"{who} spend{verb} {told} of the time encoding updates: {helps} would help"
    if most == "uploading":
        rarer = "more steps per update" if strategy.inner else "strategy local"
        helps = rarer if is_small else "update codec int8"
        return f"{who} spend{verb} {told} of the time sending updates: {helps} would help"
    if len(spent) > 1 and strategy.waits_for_slowest and units < 4 * len(spent):
        return f"{who} wait {told} of the time for each other: more {strategy.units} per round would help"
    return f"{who} wait{verb} {told} of the time for the next version: a larger micro_batch would help"


SLOW_LINK = 1.5
"""How many times as long as the ideal a bubble is if something else than the number of pieces explains it."""


def bubble_remedy(bubble: float, stages: int, pieces: int) -> str:
    """What would shorten the bubble of a model that is spread over workers, as a sentence; empty: it is short.

    Args:
        bubble: share of the time of a micro-batch in which a worker waits for others.
        stages: number of stages.
        pieces: of a micro-batch (`accumulate`).
    """
    if bubble < WORTH_NAMING:
        return ""
    ideal = (stages - 1) / (pieces + stages - 1)
    if bubble < SLOW_LINK * ideal:
        more = "one piece" if pieces == 1 else f"{pieces} pieces"
        return f"Each micro-batch is computed in {more}: a larger accumulate would shorten it."
    return (
        f"With equal stages it would be {share(ideal)}: the link is slow, for which activations in bfloat16 and larger "
        "micro-batches help, or one stage takes longer than the others (split)."
    )


Group = Literal["workers", "checkpoints", "problems", "job"]
GROUPS: dict[Group, frozenset[str]] = {
    "workers": frozenset({"joined", "left", "recalled", "reassigned", "placed", "banned", "unbanned", "unfit"}),
    "checkpoints": frozenset({"checkpoint", "scored", "tested"}),
    "problems": frozenset(
        {
            "failed",
            "refused",
            "suspected",
            "closed",
            "went_back",
            "damaged",
            "mended",
            "doubted",
            "republished",
            "unscored",
            "held",
        }
        | {"folded", "banned", "unfit", "recovered"}
    ),
}
"""The events of a timeline by what readers look for; those of no other group are the job's own."""
LONGEST_RUN = 3
"""So many neighbours of one group are shown one by one; more of them are folded."""


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbours in a timeline, newest first, that are shown as one; `told`: what they are, empty for a single one."""

    events: Sequence[EventPublic]
    told: str = ""


def groups_of(event: EventPublic) -> list[Group]:
    """The groups of an event."""
    return [name for name, types in GROUPS.items() if event.type in types] or ["job"]


def runs(events: Sequence[EventPublic]) -> list[Run]:
    """A timeline with long runs of checkpoints and scores, and of reassigned units, folded."""
    found: list[Run] = []
    for what, neighbours in groupby(events, key=lambda event: _FOLDED.get(event.type)):
        same = list(neighbours)
        if what is None or len(same) <= LONGEST_RUN:
            found += [Run([event]) for event in same]
        else:
            found.append(Run(same, f"{count(len(same))} {what}"))
    return found


_FOLDED = {
    "checkpoint": "checkpoints and scores",
    "scored": "checkpoints and scores",
    "reassigned": "reassignments",
}
