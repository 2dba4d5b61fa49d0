"""Why a job is not advancing, and what would help. Pure."""

from dataclasses import dataclass

from api.tables import ReasonCode

STARTING_MS = 20_000
"""How long reducers may take to notice a job, and evaluators to start, before the page says so."""
NO_EVALUATOR = "no evaluator is running"
START_EVALUATOR = "start computeshare-evaluator or a worker of your own, or use computeshare up"
NO_RECIPE_EVALUATOR = "no evaluator that runs recipes is running"
UNPLACED = (
    "The workers that take part have too little memory for all stages of the model: add workers, allow these more "
    "memory (--max-memory), or raise strategy.stages. A worker's log says how much is missing"
)
START_RECIPE_EVALUATOR = "start computeshare-evaluator or a worker of your own, with --recipes, or use computeshare up"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a job is not advancing: for programs, and in words; `missing_workers` more workers would help."""

    code: ReasonCode
    text: str
    missing_workers: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """The facts about a job that has not ended from which its reason follows."""

    shortage: Reason | None
    """Why the job has too few seats, if so."""
    finished: bool
    """All rounds are done."""
    opened: bool
    """The weights are published."""
    reducer: bool
    """A reducer serves the job."""
    working: bool
    """Workers take part."""
    unplaced: bool
    """The workers that take part cannot hold all stages of the model between them."""
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


def reason(situation: Situation, refused: str | None = None) -> Reason | None:
    """Why a job does not advance; None if it does.

    Args:
        refused: the broker's error when it refused a write for this job.
    """
    unattended = not situation.reducer and situation.waited_ms > STARTING_MS
    absent, start = (
        (NO_RECIPE_EVALUATOR, START_RECIPE_EVALUATOR) if situation.is_recipe else (NO_EVALUATOR, START_EVALUATOR)
    )
    if refused:
        return Reason("broker", f"The broker refuses to store data: {refused}")
    if situation.no_room:
        return Reason("memory", situation.no_room)
    if situation.finished:
        return _last_version(situation, f"All rounds are done, but {absent} to score the last version: {start}")
    if unattended:
        return Reason("reducer", "No reducer is running: start computeshare-reducer, or use computeshare up")
    if situation.shortage:
        return situation.shortage
    causes: tuple[tuple[object, ReasonCode, str], ...] = (
        (situation.trouble, "worker", situation.trouble or ""),
        (not situation.opened, "opening", "A reducer is preparing the first weights"),
        (situation.unplaced, "stages", UNPLACED),
        (not situation.working, "loading", "Workers are loading the model and the data"),
        (not situation.evaluator, "evaluator", f"Training continues, but {absent} to score versions: {start}"),
        (
            situation.unscored,
            "scoring",
            f"Training continues, but a version cannot be scored: {situation.unscored}",
        ),
    )
    return next((Reason(code, text) for applies, code, text in causes if applies), None)


def _last_version(situation: Situation, unattended: str) -> Reason:
    """The reason why a job whose rounds are all done still waits."""
    if not situation.evaluator:
        return Reason("evaluator", unattended)
    if situation.unscored:
        return Reason(
            "scoring",
            f"All rounds are done, but a version cannot be scored: {situation.unscored}. It is tried again every "
            "minute; cancel the job to end it unscored",
        )
    return Reason("finishing", "All rounds are done: saving and scoring the last version")
