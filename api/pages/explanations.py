"""Explains in words, for a job's pages, why a submission did not count, and what helps a failed job. Pure."""

import re

from api.schemas import SubmissionPublic
from api.text_format import count


def why(submission: SubmissionPublic) -> str:
    """A submission's outcome and its reason, in a sentence."""
    if submission.voided:
        return "Undone: the job went back to a checkpoint from before it"
    if submission.outcome == "refused":
        return f"Refused by the reducer: {submission.reason or 'it did not say why'}"
    if submission.outcome == "stale":
        return _stale(submission)
    return _WHY.get(submission.outcome, submission.outcome)


def _stale(submission: SubmissionPublic) -> str:
    if submission.base_version is None or submission.current_version is None:
        return "Dropped: it was computed on a version that is no longer the current one"
    base, current = count(submission.base_version), count(submission.current_version)
    if base == current:
        return f"Dropped: it was computed on a version {base} that the broker has lost"
    return f"Dropped: it was computed on version {base}, and version {current} had come by then"


_WHY = {
    "accepted": "Counted",
    "duplicate": "Not counted again: the same message had come before",
    "lease_lost": "Dropped: its lease had run out, or another worker was first with the same work",
    "fenced": "Dropped: a newer session of the same worker had taken over",
}


def advice(error: str) -> str:
    """The advice for a job that failed with this error."""
    return next((text for sign, text in _ADVICE if re.search(sign, error, re.IGNORECASE)), _OTHERWISE)


_ADVICE = (
    (
        "^(training )?diverged at version 0:",
        "Clone the job with a lower learning rate; max_norm in the strategy clips updates that are too long.",
    ),
    (
        "^(training )?diverged",
        "Clone the job with a lower learning rate, or fork one of its checkpoints, if there are any; max_norm in the "
        "strategy clips updates that are too long.",
    ),
    ("no space left on device", "Make room on the reducer's disk, then retry: nothing that was saved is lost."),
    (
        "input/output error|read-only file system",
        "Look after the reducer's disk, then retry: nothing that was saved is lost.",
    ),
    (
        "MemoryError|out of memory|(can't|cannot) allocate memory",
        "Retry on a machine with more memory, or clone the job with a smaller micro_batch.",
    ),
    ("forked from are missing or damaged", "Fork again, from another version or from another job."),
    ("take an earlier checkpoint", "Fork an earlier checkpoint of this job."),
)
_OTHERWISE = (
    "Retry continues from the last checkpoint. If it fails again the same way, clone the job and change what the error "
    "names; computeshare doctor checks this machine."
)
