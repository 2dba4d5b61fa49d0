"""Checks the control plane's dependencies: database, broker, background loops, reducer."""

import os
from collections.abc import Callable
from pathlib import Path

from redis.exceptions import RedisError
from sqlalchemy import select
from sqlalchemy.exc import SQLAlchemyError
from sqlmodel import col

from api.broker import Broker
from api.database import Database, now_ms
from api.publication.publication import JobInBroker, broker_states
from api.schemas import DependencyPublic, Readiness
from api.system.background import Background
from api.tables import Job
from computeshare.errors import ComputeShareError
from computeshare.settings import RunFile

PATIENCE_MS = 15_000
"""Milliseconds after a job's creation from which a missing reducer counts as an error."""


class HealthService:
    """Checks each dependency when asked."""

    def __init__(
        self, database: Database, broker: Broker, control: Background, run_path: Path, evaluator: bool
    ) -> None:
        """`run_path` is where `computeshare up` names its processes, if it started this one; `evaluator`: whether an
        evaluator is among them.
        """
        self._others = {"reducer", "evaluator"} if evaluator else {"reducer"}
        self._database, self._broker, self._control = database, broker, control
        self._run_path, self._started = run_path, False

    def check(self) -> Readiness:
        """The state of every dependency, with its error if it does not work."""
        checks: dict[str, Callable[[], tuple[bool, str]]] = {
            "sqlite": self._sqlite,
            "broker": self._broker_answers,
            "control": self._loops,
            "reducer": self._reducer,
        }
        found = {name: _ask(check) for name, check in checks.items()}
        ready = all(dependency.ok for dependency in found.values())
        return Readiness(status="ready" if ready else "not ready", dependencies=found)

    def _sqlite(self) -> tuple[bool, str]:
        self._database.check()
        return True, "readable and writable"

    def _broker_answers(self) -> tuple[bool, str]:
        self._broker.client().ping()
        return True, "answers"

    def _loops(self) -> tuple[bool, str]:
        if trouble := self._control.trouble():
            return False, trouble
        return True, "runs the jobs" if self._control.leading else "another control plane runs the jobs"

    def _reducer(self) -> tuple[bool, str]:
        self._started = self._started or not self._is_starting()
        if not self._started:
            return (
                False,
                f"computeshare up is starting {' and '.join(sorted(self._others, reverse=True))}: wait some seconds",
            )
        old = col(Job.created_ms) < now_ms() - PATIENCE_MS
        query = select(col(Job.id)).where(col(Job.status).in_(("queued", "running")), old).limit(100)
        with self._database.read() as session:
            job_ids = list(session.scalars(query))
        # Jobs unknown to the broker wait for workers, not for a reducer.
        found = broker_states(self._broker.client(), job_ids)
        without = [its for its in job_ids if found[its].known and not _is_looked_after(found[its])]
        if without:
            jobs = ", ".join(without[:5])
            return False, f"no reducer looks after job {jobs}: start computeshare-reducer"
        return True, f"alive for {len(job_ids)} jobs" if job_ids else "no job needs one"

    def _is_starting(self) -> bool:
        """Whether this process's `computeshare up` has not started all others yet: its run.json lacks some."""
        run = RunFile.read(self._run_path)
        mine = run is not None and os.getppid() in run.pids.get("up", [])
        return run is not None and mine and not self._others <= run.pids.keys()


def _is_looked_after(job: JobInBroker) -> bool:
    """Whether a job has a live reducer, or is finished and needs none."""
    return job.reducer or job.status == "finished"


def _ask(check: Callable[[], tuple[bool, str]]) -> DependencyPublic:
    try:
        ok, detail = check()
    except (RedisError, SQLAlchemyError, ComputeShareError, OSError) as error:
        ok, detail = False, str(error)[:300] or type(error).__name__
    return DependencyPublic(ok=ok, detail=detail)
