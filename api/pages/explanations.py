"""Explains in words, for a job's pages, why a submission did not count, and what helps a failed job. Pure."""

import re

from api.schemas import SubmissionPublic
from api.text_format import count


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


def advice(error: str) -> str:
    """The advice for a job that failed with this error."""
    return next((text for sign, text in _ADVICE if re.search(sign, error, re.IGNORECASE)), _OTHERWISE)


_ADVICE = (
    (
        "^(training )?diverged at version 0:",
        "Clone the job with a lower learning rate; max_norm in the strategy clips large updates.",
    ),
    (
        "^(training )?diverged",
        "Clone the job with a lower learning rate, or fork one of its checkpoints; max_norm in the strategy clips "
        "large updates.",
    ),
    ("no space left on device", "Free space on the reducer's disk, then retry: saved checkpoints are intact."),
    (
        "input/output error|read-only file system",
        "Check the reducer's disk, then retry: saved checkpoints are intact.",
    ),
    (
        "MemoryError|out of memory|(can't|cannot) allocate memory",
        "Retry on a machine with more memory, or clone the job with a smaller micro_batch.",
    ),
    ("forked from are missing or damaged", "Fork again, from another version or from another job."),
    ("take an earlier checkpoint", "Fork an earlier checkpoint of this job."),
)
_OTHERWISE = (
    "Retry to continue from the last checkpoint. If the job fails the same way again, clone it and change the settings "
    "that the error names; computeshare doctor checks this machine."
)
