"""Why a submission did not count, and what to do about a job that failed, in words for its page. Pure."""

from api.schemas import SubmissionPublic
from api.services.wording import count


def why(submission: SubmissionPublic) -> str:
    """What became of a submission, and why."""
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
    """What to try about a job that failed with this error."""
    told = error.lower()
    return next((text for sign, text in _ADVICE if sign in told), _OTHERWISE)


_ADVICE = (
    (
        "diverged",
        "Fork the newest good checkpoint, or clone the job, with a lower learning rate; max_norm in the strategy clips "
        "updates that are too long.",
    ),
    (
        "no space left",
        "Make room on the disk of the reducer that is named, then retry: nothing that was saved is lost.",
    ),
    ("disk", "Look after the disk of the reducer that is named, then retry: nothing that was saved is lost."),
    ("memory", "Retry on machines with more memory, or clone the job with a smaller micro_batch."),
    ("data set", "Put the data set into COMPUTESHARE_DATA on the machine that is named, then retry."),
    ("version", "Bring every machine to the same version of ComputeShare, then retry."),
)
_OTHERWISE = (
    "Retry goes on from the last checkpoint. If it fails again the same way, clone the job and change what the error "
    "names; computeshare doctor checks this machine."
)
