"""Why a job is not advancing, and what would help. Pure."""

from dataclasses import dataclass

STARTING_MS = 20_000
"""How long reducers may take to notice a job, and evaluators to start, before the page says so."""
NO_EVALUATOR = "no evaluator is running"
START_EVALUATOR = "start computeshare-evaluator or a worker of your own, or use computeshare up"
NO_RECIPE_EVALUATOR = "no evaluator that runs recipes is running"
START_RECIPE_EVALUATOR = "start computeshare-evaluator or a worker of your own, with --recipes, or use computeshare up"


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about a job that has not ended from which its reason follows."""

    shortage: str | None
    """Why the job has too few seats, if so."""
    finished: bool
    """All rounds are done."""
    opened: bool
    """The weights are published."""
    reducer: bool
    """A reducer serves the job."""
    working: bool
    """Workers take part."""
    waited_ms: int
    """Milliseconds since the dispatcher first found the job published."""
    trouble: str | None = None
    """Why single workers cannot take part, though the job goes on without them."""
    no_room: str | None = None
    """Why the broker's memory does not let the job start or go on, if so."""
    evaluator: bool = True
    """An evaluator or a worker that may score runs, and runs recipes if the job trains one."""
    is_recipe: bool = False
    """The job trains a recipe."""
    unscored: str | None = None
    """Why the last attempt to score a version failed, if so."""


def reason(situation: Situation, refused: str | None = None) -> str | None:
    """The reason to show, or None for a job that advances.

    Args:
        refused: the broker's error when it refused a write for this job.
    """
    unattended = not situation.reducer and situation.waited_ms > STARTING_MS
    absent, start = (
        (NO_RECIPE_EVALUATOR, START_RECIPE_EVALUATOR) if situation.is_recipe else (NO_EVALUATOR, START_EVALUATOR)
    )
    causes = (
        (refused, f"The broker refuses to store data: {refused}"),
        (situation.no_room, situation.no_room),
        (
            situation.finished and not situation.evaluator,
            f"All rounds are done, but {absent} to score the last version: {start}",
        ),
        (
            situation.finished and situation.unscored,
            f"All rounds are done, but a version cannot be scored: {situation.unscored}. It is tried again every "
            "minute; cancel the job to end it unscored",
        ),
        (situation.finished, "All rounds are done: saving and scoring the last version"),
        (unattended, "No reducer is running: start computeshare-reducer, or use computeshare up"),
        (situation.shortage, situation.shortage),
        (situation.trouble, situation.trouble),
        (not situation.opened, "A reducer is preparing the first weights"),
        (not situation.working, "Workers are loading the model and the data"),
        (not situation.evaluator, f"Training continues, but {absent} to score versions: {start}"),
        (situation.unscored, f"Training continues, but a version cannot be scored: {situation.unscored}"),
    )
    return next((text for applies, text in causes if applies), None)
