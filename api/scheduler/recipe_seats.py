"""Which workers get no seat in a recipe's job, because their owners have not agreed or because it fails on them; and
when it is given up.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from api.scheduler.seat_planner import Pair
from api.scheduler.start_backoff import LEFT_OUT_MS
from api.tables import ACTIVE, JOB, TELLING, Event, table
from computeshare.jobspec.tasks.recipes import lacking_package
from computeshare.queue import WorkerInfo
from computeshare.queue.roster import ALL_RECIPES
from computeshare.queue.seats import RECIPE_FAILED
from computeshare.types import machine_of

FAILURES = 3
"""How often a recipe fails, without a new version in between, before its job is given up: on as many machines, or at
least once on every machine that could serve it."""
LONGEST = 250
"""Most characters of a failure in the sentence that ends its job."""
PROGRESS = ("version", "folded", "retried", "resumed")
"""The types of events after which failures are counted anew."""
EVENT = table(Event).c


@dataclass(frozen=True, slots=True)
class RecipeJob:
    """An active job that trains a recipe."""

    id: str
    queue: str
    recipe: str
    package: str = ""
    """The release with which a recipe `package:NAME` was tried."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A seat that a recipe ended by its own code, or because it is not as the job's facts say."""

    job_id: str
    worker: str
    why: str
    at_ms: int


def recipe_jobs(connection: Connection) -> list[RecipeJob]:
    """The active jobs that train a recipe."""
    recipe = func.json_extract(JOB.c.spec, "$.recipe")
    package = func.coalesce(func.json_extract(JOB.c.spec, "$.recipe_facts.package"), "")
    query = select(JOB.c.id, JOB.c.queue, recipe, package).where(JOB.c.status.in_(ACTIVE), recipe.is_not(None))
    return [RecipeJob(*row) for row in connection.execute(query)]


def unwilling(jobs: Iterable[RecipeJob], workers: Sequence[WorkerInfo]) -> dict[Pair, str]:
    """The workers of a job's queue whose owners have not agreed to its recipe."""
    return {
        (job.id, worker.id): f"{worker.name or worker.id} runs {'other' if worker.recipes else 'no'} recipes: start it "
        f"with --recipes, or with --recipe {job.recipe}"
        for job in jobs
        for worker in workers
        if job.queue in worker.queues and job.recipe not in worker.recipes and ALL_RECIPES not in worker.recipes
    }


def without_package(jobs: Iterable[RecipeJob], workers: Sequence[WorkerInfo]) -> dict[Pair, str]:
    """The workers of a job's queue that have not the package of its recipe, or another version of it."""
    return {
        (job.id, worker.id): f"{worker.name or worker.id} {why}"
        for job in jobs
        if job.package
        for worker in workers
        if job.queue in worker.queues and (why := lacking_package(job.recipe, job.package, worker.packages))
    }


def failures(connection: Connection, jobs: Iterable[RecipeJob]) -> list[Failure]:
    """The failures of recipes since their jobs last advanced, oldest first."""
    found = []
    reason, worker = EVENT.data["reason"].as_string(), EVENT.data["worker"].as_string()
    for job in jobs:
        mine = select(EVENT.id).where(EVENT.job_id == job.id)
        last = connection.scalar(mine.where(EVENT.type.in_(PROGRESS)).order_by(EVENT.id.desc()).limit(1))
        query = select(worker, reason, EVENT.at_ms).where(EVENT.job_id == job.id, EVENT.id > (last or 0), TELLING)
        query = query.where(EVENT.type == "left", reason.startswith(RECIPE_FAILED)).order_by(EVENT.id)
        found += [
            Failure(job.id, row[0], row[1].removeprefix(RECIPE_FAILED), row[2]) for row in connection.execute(query)
        ]
    return found


def left_out(found: Sequence[Failure], names: Mapping[str, str], now_ms: int) -> tuple[dict[Pair, str], set[Pair]]:
    """The troubles of online workers, and the pairs that are left out for a growing while, as `start_backoff` does.

    Args:
        names: of the online workers, by id.
    """
    times: dict[Pair, list[Failure]] = {}
    for one in found:
        times.setdefault((one.job_id, one.worker), []).append(one)
    known = {pair: its for pair, its in times.items() if pair[1] in names}
    troubles = {pair: f"the recipe failed on {names[pair[1]]}: {its[-1].why}" for pair, its in known.items()}
    until = {pair: its[-1].at_ms + LEFT_OUT_MS[min(len(its), len(LEFT_OUT_MS)) - 1] for pair, its in known.items()}
    return troubles, {pair for pair, end_ms in until.items() if now_ms < end_ms}


def hopeless(
    found: Sequence[Failure],
    jobs: Iterable[RecipeJob],
    able: Mapping[str, set[str]],
    working: Collection[Pair],
    names: Mapping[str, str],
) -> dict[str, str]:
    """The jobs whose recipes fail on every machine that tries, each with the sentence that ends it.

    Args:
        able: the workers that could serve a job, by the job's id.
        working: the workers that take part in a job now.
        names: of the online workers, by id.
    """
    given_up = {}
    for job in jobs:
        mine = [one for one in found if one.job_id == job.id]
        failed = {machine_of(one.worker) for one in mine}
        machines = {machine_of(worker) for worker in able.get(job.id, ())}
        enough = len(failed) >= FAILURES or (len(mine) >= FAILURES and machines and machines <= failed)
        if enough and not any(job_id == job.id for job_id, _ in working):
            last = mine[-1]
            where, why = names.get(last.worker, last.worker), last.why[:LONGEST].rstrip(".")
            given_up[job.id] = (
                f"The recipe failed on every machine that tried it ({len(failed)}), last on {where}: {why}. Mend it, "
                "try it by `computeshare recipes check --confined`, and create the job again or fork this one with the "
                "mended recipe"
            )
    return given_up
