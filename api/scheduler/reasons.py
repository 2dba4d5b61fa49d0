"""Why a job is not advancing, in words that say what would help. Pure."""

from dataclasses import dataclass

STARTING_MS = 20_000
"""How long reducers may take to notice a job, and evaluators to start, before the page says so."""
NO_EVALUATOR = "no evaluator is running"
START_EVALUATOR = "start computeshare-evaluator (computeshare up brings one)"


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a job that has not ended."""

    shortage: str | None
    """Why it has too few seats, if so."""
    finished: bool
    """All its rounds are done."""
    opened: bool
    """Its weights are published."""
    reducer: bool
    """A reducer looks after it."""
    working: bool
    """Workers take part."""
    waited_ms: int
    """Since it was created."""
    trouble: str | None = None
    """What keeps single workers from taking part, though the job goes on without them."""
    no_room: str | None = None
    """Why the broker's memory does not let it start or go on, if so."""
    evaluator: bool = True
    """An evaluator runs."""


def reason(situation: Situation, refused: str | None = None) -> str | None:
    """The reason to show, or None for a job that advances.

    Args:
        refused: what the broker said when it refused to take something for this job.
    """
    unattended = not situation.reducer and situation.waited_ms > STARTING_MS
    causes = (
        (refused, f"The broker refuses: {refused}"),
        (situation.no_room, situation.no_room),
        (
            situation.finished and not situation.evaluator,
            f"All rounds are done, but {NO_EVALUATOR} to score the last version: {START_EVALUATOR}",
        ),
        (situation.finished, "All rounds are done: the last version is being saved and scored"),
        (unattended, "Waits for a reducer, none is running: start computeshare-reducer (computeshare up brings two)"),
        (situation.shortage, situation.shortage),
        (situation.trouble, situation.trouble),
        (not situation.opened, "A reducer is preparing the first weights"),
        (not situation.working, "Its workers are loading the model and the data"),
        (not situation.evaluator, f"Training continues, but {NO_EVALUATOR} to score versions: {START_EVALUATOR}"),
    )
    return next((text for applies, text in causes if applies), None)
