"""The dispatcher: a level-triggered loop that compares the desired state with the actual state and issues the
difference.

One control plane at a time runs the loop. No turn depends on an earlier turn: after a crash of any process, the next
turn finds the difference again. (The fields that survive a turn only delay decisions.)
"""

import contextlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog
from pydantic import ValidationError
from redis import Redis
from redis.exceptions import ResponseError
from sqlalchemy import Connection, select, update

from api.database import Database, now_ms
from api.jobs.service import Jobs
from api.projection.archive import compact
from api.projection.disk_reconcile import contradiction, give_up, reconcile
from api.projection.row_retention import thin
from api.publication.outbox import SEAT, Courier
from api.publication.publication import JobInBroker, Publisher, broker_states
from api.scheduler.demand import Stored, demands_of, is_finished
from api.scheduler.eligibility import Excluded, excluded
from api.scheduler.machines import DISMISSED, Roll, admitted_machines, confined
from api.scheduler.reasons import STARTING_MS, Reason, Situation, reason
from api.scheduler.scores.seat_evaluators import SeatEvaluators
from api.scheduler.scores.seat_plan import WAIT_MS, WaitingJob, plan, unscored, waiting_of
from api.scheduler.seat_planner import (
    Action,
    Available,
    Demand,
    HeldSeat,
    Issue,
    Past,
    QueueShare,
    decide_seats,
    fair_shares,
)
from api.scheduler.seat_writer import place
from api.scheduler.shortage import shortages
from api.stored_specs import spec_of
from api.tables import ACTIVE, JOB, TELLING, WORKER, Event, table
from computeshare.checkpoints.offers import Offers
from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.machine_needs import device_type
from computeshare.protocol import handshake
from computeshare.protocol.keys import EVALUATOR, RECIPE_EVALUATOR
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Orders, Seat, SeatQueue, WorkerInfo, give_orders, list_workers
from computeshare.queue.seats import SCORING
from computeshare.runtime.signatures import SigningKey
from computeshare.types import ENDED, machine_of

CALM_MS = 12_000
"""How long after an outage no worker is taken for dead: each worker needs time for its next heartbeat."""
RETIRED_MS = 60_000
"""How long after a job's end its keys are deleted: every process has noticed the end by then."""
PLACING_MS = 5000
"""How long workers may take to find a place for a model's stages, before the page says that they have none."""
RECONCILE_MS = 5000
STAYING = ("queued", "started")
"""The states of seats that may be asked for scores."""
TIDY_MS = 600_000
REMOVED = "a user removed this worker; start it again to have it back"
EVENT = table(Event).c


log = structlog.get_logger()


class Dispatcher:
    """Delivers the outbox, keeps jobs published, issues seats, and records why a job is not running."""

    def __init__(
        self, database: Database, artifacts_dir: Path, key: SigningKey | None = None, offers: Offers | None = None
    ) -> None:
        """`offers`: through which workers that score get checkpoints; None: no worker scores."""
        self._database = database
        self._scores = SeatEvaluators(artifacts_dir, offers) if offers else None
        self._artifacts_dir = artifacts_dir
        self._jobs = Jobs(database, artifacts_dir)
        self._courier = Courier(database, artifacts_dir, key)
        self._publisher = Publisher(self._courier)
        self._roll = Roll(database)
        self._idle_since: dict[str, int] = {}
        self._short_since: dict[str, int] = {}
        self._known_since: dict[str, int] = {}
        self._forgotten: dict[str, int] = {}
        """When the broker was last seen without a started job."""
        self._doubtful: dict[str, str] = {}
        """Jobs whose rounds contradicted SQLite at the last check, with the contradiction."""
        self._evaluators_seen = dict.fromkeys((EVALUATOR, RECIPE_EVALUATOR), now_ms())
        self._calm_until = self._last = self._reconciled = self._tidied = 0

    def step(self, redis: Redis) -> None:
        """Run one turn of the loop."""
        now = now_ms()
        if not 0 <= now - self._last < CALM_MS // 2:  # just started, after an outage, or this machine was asleep
            self._calm_until = now + CALM_MS
        self._last = now
        with contextlib.suppress(ResponseError):  # for example out of memory: the handshake published before stands
            handshake.publish(redis)
        refused = self._courier.deliver(redis)
        self._jobs.resume_due(now)
        stored = self._readable(Stored.read(self._database.engine, now))
        published = self._publisher.look(redis, stored.jobs)
        begun = {job.id for job in stored.jobs if job.started_ms is not None}
        self._forgotten |= {job_id: now for job_id in begun if not published[job_id].known}
        self._align(redis, stored, published)
        with self._database.engine.connect() as connection:
            workers = confined(connection, list_workers(redis))
        if now > self._calm_until:
            self._bury(redis, stored, {w.id for w in workers}, now)
        off = self._roll.call(workers, now, calm=now <= self._calm_until)
        actions, situations = self._decide(redis, stored, published, workers, off, now, refused)
        if self._write(actions, stored, situations, refused, now):
            self._courier.deliver(redis)
        self._order(redis, {w.id for w in workers}, off)
        self._look_after(redis, stored, published, now)

    def rest(self) -> None:
        """Leave the loop to another control plane."""
        if self._scores:
            self._scores.stop()

    def _readable(self, stored: Stored) -> Stored:
        """Without the jobs whose specification this release cannot read: they wait, and their reason says why."""
        unreadable = [job for job in stored.jobs if isinstance(job.spec, str)]
        told = [(job.id, job.spec) for job in unreadable if job.spec != job.reason]
        if told:
            with self._database.writing() as connection:
                for job_id, why in told:
                    _touch(connection, job_id, _told(Reason("unreadable", why)), ACTIVE)
        return replace(stored, jobs=[job for job in stored.jobs if job not in unreadable]) if unreadable else stored

    def _align(self, redis: Redis, stored: Stored, jobs: Mapping[str, JobInBroker]) -> None:
        """Pause the rounds of paused jobs, and of no others: a reducer may have opened rounds after the pause."""
        wrong = [job_id for job_id, its in jobs.items() if its.status == "paused"]
        paused = broker_states(redis, stored.paused)
        wrong += [job_id for job_id, its in paused.items() if its.status == "running"]
        for job_id in wrong:
            with contextlib.suppress(ResponseError):  # for example out of memory: the next turn tries again
                self._courier.align(redis, job_id)

    def _bury(self, redis: Redis, stored: Stored, alive: set[str], now: int) -> None:
        """Remove workers without a heartbeat from their jobs, so that other workers get their leases."""
        for row in stored.present:
            if row.worker not in alive:
                text = "not heard of any more"
                RoundStore(redis, row.job_id).remove_worker(row.worker, text)
                mine = (WORKER.c.job_id == row.job_id) & (WORKER.c.worker == row.worker) & WORKER.c.left_ms.is_(None)
                with self._database.writing() as connection:
                    gone = {"left_ms": now, "left_reason": text, "samples_per_s": 0.0}
                    connection.execute(update(WORKER).where(mine).values(gone))
                    _touch(connection, row.job_id, {})

    def _decide(
        self,
        redis: Redis,
        stored: Stored,
        published: dict[str, JobInBroker],
        registered: list[WorkerInfo],
        off: Mapping[str, str],
        now: int,
        refused: dict[str, str],
    ) -> tuple[list[Action], dict[str, Situation]]:
        workers = [Available(w.id, w.queues, w.seat, w.resting, off.get(w.id, "")) for w in registered if not w.refusal]
        seats = self._held(redis, stored, {w.id: w for w in workers}, now)
        held = [seat for seat in seats if seat.number != SCORING]
        scoring = [seat for seat in seats if seat.number == SCORING]
        if now <= self._calm_until:
            heard = {w.id for w in registered}
            workers += [Available(s.worker, (), s.id) for s in seats if s.worker not in heard]
        demands = demands_of(stored, published, registered, now)
        ended = {s.id: Past(s.id, s.job_id, s.worker, s.state, now - s.ended_ms) for s in stored.past}
        past = [ended[s.id] for s in stored.past if s.number != SCORING]
        with self._database.engine.connect() as connection:
            out = excluded(connection, registered, now)
            invited = admitted_machines(connection)
        for job_id, why in out.hopeless.items():
            RoundStore(redis, job_id).append("failed", {"error": why, "detail": ""})
        score = {seat.worker for seat in scoring}
        train = [worker for worker in workers if worker.id not in score]
        share = fair_shares(demands, train, held, past, out.now)
        refused |= self._publish(redis, stored, published, demands, share)
        due = {job_id: its.due if published[job_id].known else 0 for job_id, its in share.items()}
        short = [job_id for job_id, its in share.items() if its.holds < its.due]
        self._short_since = {job_id: self._short_since.get(job_id, now) for job_id in short}
        demands = [replace(d, short_ms=now - self._short_since.get(d.job_id, now)) for d in demands]
        missing = shortages(demands, workers, held, out, {job_id: its.due for job_id, its in share.items()})
        for key in self._evaluators_seen:
            if redis.exists(key):
                self._evaluators_seen[key] = now
        actions = decide_seats(demands, train, held, past, out.now, due)
        own = [worker for worker in workers if machine_of(worker.id) not in invited] if self._scores else []
        situations = self._situations(stored, published, missing, out, now, own)
        if self._scores:
            fast = {w.id for w in registered if device_type(w.device) != "cpu"}
            actions += plan(
                self._waiting_scores(redis, self._scores, stored, published, scoring, now),
                demands,
                sorted(workers, key=lambda worker: worker.id not in fast),
                held,
                scoring,
                [action for action in actions if isinstance(action, Issue)],
                [ended[s.id] for s in stored.past if s.number == SCORING],
                out.now,
                {worker.id for worker in workers} - {worker.id for worker in own},
            )
        return actions, situations

    def _waiting_scores(
        self,
        redis: Redis,
        scores: SeatEvaluators,
        stored: Stored,
        published: Mapping[str, JobInBroker],
        scoring: Sequence[HeldSeat],
        now: int,
    ) -> list[WaitingJob]:
        """The jobs whose checkpoints wait for workers; serves the workers that score."""
        jobs = [job for job in stored.jobs if published[job.id].known]
        scores.keep(redis, [Seat.parse(seat.id) for seat in scoring if seat.state in STAYING], {job.id for job in jobs})
        with self._database.engine.connect() as connection:
            found = unscored(connection, jobs)
        before = {job.id: now - WAIT_MS if self._has_evaluator(job, now) else now for job in jobs}
        return waiting_of(redis, jobs, found, scores.memory.done(), scoring, before)

    def _has_evaluator(self, job: Any, now: int) -> bool:
        return now - self._evaluators_seen[_evaluator_of(job)] <= STARTING_MS

    def _publish(
        self,
        redis: Redis,
        stored: Stored,
        published: dict[str, JobInBroker],
        demands: Sequence[Demand],
        share: Mapping[str, QueueShare],
    ) -> dict[str, str]:
        """Publish the jobs that could start; returns the broker's error by job where it refused the job."""
        ready = {demand.job_id for demand in demands if demand.seats and share[demand.job_id].due >= demand.minimum}
        ready |= {job.id for job in stored.jobs if is_finished(job, published[job.id])}
        idle = published.keys() - ready - {seat.job_id for seat in stored.seats}
        self._publisher.withdraw(redis, stored.jobs, published, idle)
        return self._publisher.publish(redis, stored.jobs, published, ready)

    def _situations(
        self,
        stored: Stored,
        published: Mapping[str, JobInBroker],
        missing: Mapping[str, Reason | None],
        out: Excluded,
        now: int,
        own: Sequence[Available],
    ) -> dict[str, Situation]:
        present: dict[str, int] = {}
        for row in stored.present:
            present[row.job_id] = min(row.joined_ms or now, present.get(row.job_id, now))
        known = [job_id for job_id, its in published.items() if its.known]
        self._known_since = {job_id: self._known_since.get(job_id, now) for job_id in known}
        return {
            job.id: Situation(
                shortage=missing[job.id],
                finished=is_finished(job, published[job.id]),
                opened=published[job.id].status is not None,
                reducer=published[job.id].reducer,
                working=job.id in present,
                unplaced=_is_unplaced(job, present.get(job.id), now),
                waited_ms=now - self._known_since.get(job.id, now),
                trouble=out.trouble(job.id),
                no_room=published[job.id].no_room,
                evaluator=self._has_evaluator(job, now)
                or any(job.queue in w.queues and w.works and (job.id, w.id) not in out.now for w in own),
                is_recipe=job.spec.recipe is not None,
                unscored=self._unscored(job.id) if job.spec.recipe or is_finished(job, published[job.id]) else None,
            )
            for job in stored.jobs
        }

    def _unscored(self, job_id: str) -> str | None:
        """Why a job's newest attempt to score a version failed; None if it did not."""
        query = select(EVENT.type, EVENT.data).where(EVENT.job_id == job_id, TELLING)
        query = query.where(EVENT.type.in_(("scored", "unscored")))
        with self._database.engine.connect() as connection:
            last = connection.execute(query.order_by(EVENT.id.desc()).limit(1)).first()
        return str(last.data["error"]).rstrip(".") if last and last.type == "unscored" else None

    def _held(self, redis: Redis, stored: Stored, workers: dict[str, Available], now: int) -> list[HeldSeat]:
        """The open seats. However a seat ended that the broker has forgotten with its job, its worker is not to blame:
        it counts as missing.
        """
        issued = [Seat(s.worker, s.job_id, s.number, s.attempt) for s in stored.seats if s.state == "issued"]
        states = SeatQueue(redis).state(issued)
        forgotten = {s.id for s in stored.seats if s.created_ms < self._forgotten.get(s.job_id, 0)}
        states |= {seat_id: "missing" for seat_id in forgotten if states.get(seat_id) in ("finished", "failed")}
        idle = {s.id for s in stored.seats if (w := workers.get(s.worker)) and w.seat is None}
        self._idle_since = {seat_id: self._idle_since.get(seat_id, now) for seat_id in idle}
        return [
            HeldSeat(
                id=seat.id,
                job_id=seat.job_id,
                worker=seat.worker,
                number=seat.number,
                state=states.get(seat.id, "pending"),
                waiting_ms=now - self._idle_since.get(seat.id, now),
                stopped_ms=None if seat.stopped_ms is None else now - seat.stopped_ms,
                leaving_ms=None if seat.leaving_ms is None else now - seat.leaving_ms,
                left_to=seat.left_to,
            )
            for seat in stored.seats
        ]

    def _write(
        self,
        actions: Iterable[Action],
        stored: Stored,
        situations: dict[str, Situation],
        refused: dict[str, str],
        now: int,
    ) -> bool:
        """Store the decisions and the changed reasons; False if there were none."""
        reasons = [
            (job.id, told)
            for job in stored.jobs
            if (told := reason(situations[job.id], refused.get(job.id))) != _stored_reason(job)
        ]
        if not actions and not reasons:
            return False
        with self._database.writing() as connection:
            for action in actions:
                place(connection, action, now)
            for job_id, told in reasons:
                _touch(connection, job_id, _told(told), ACTIVE)
        return True

    def _order(self, redis: Redis, there: Collection[str], off: Mapping[str, str]) -> None:
        """Order workers to leave their seats, or to leave for good; repeated every turn while the order stands."""
        asked = (SEAT.c.leaving_ms.is_not(None), SEAT.c.ended_ms.is_(None), SEAT.c.state == "issued")
        with self._database.engine.connect() as connection:
            orders = {
                w: Orders(leave=seat) for w, seat in connection.execute(select(SEAT.c.worker, SEAT.c.id).where(*asked))
            }
        orders |= {worker: Orders(dismissed=REMOVED) for worker, why in off.items() if why == DISMISSED}
        with contextlib.suppress(ResponseError):  # for example out of memory: the next turn tries again
            give_orders(redis, {worker: order for worker, order in orders.items() if worker in there})

    def _look_after(self, redis: Redis, stored: Stored, published: Mapping[str, JobInBroker], now: int) -> None:
        """Do the periodic work that not every turn needs."""
        if now - self._reconciled > RECONCILE_MS:
            self._reconciled = now
            for job_id in (*(job_id for job_id, its in published.items() if its.known), *stored.paused):
                reconcile(self._database, self._artifacts_dir, job_id)
            self._mend(redis, stored, published)
            self._retire(redis, now)
            compact(self._database)
        if now - self._tidied > TIDY_MS:
            self._tidied = now
            self._courier.tidy()
            thin(self._database)

    def _mend(self, redis: Redis, stored: Stored, published: Mapping[str, JobInBroker]) -> None:
        """Give up rounds that contradict SQLite in two checks in a row: a single check may see a change half done."""
        doubtful: dict[str, str] = {}
        for job in stored.jobs:
            rounds, its = RoundStore(redis, job.id), published[job.id]
            if not its.known or its.status is None or (its.status == "running" and job.version < job.rounds_total):
                continue
            saved = Artifacts(self._artifacts_dir, job.id).tokens()[-1:]
            newest = saved[0].version if saved else 0
            why = contradiction(job.version, job.rounds_total, its.status, newest)
            if why is None or not rounds.is_stored():
                continue
            if self._doubtful.get(job.id) == why:
                log.warning("rounds given up", job=job.id, why=why)
                give_up(self._database, rounds, why)
            else:
                doubtful[job.id] = why
        self._doubtful = doubtful

    def _retire(self, redis: Redis, now: int) -> None:
        """End the rounds of ended jobs; delete a job's keys once `RETIRED_MS` have passed, its seats are closed, and
        its events and log lines are stored.
        """
        busy = select(SEAT.c.id).where(SEAT.c.job_id == JOB.c.id, SEAT.c.ended_ms.is_(None)).exists()
        ended = JOB.c.status.in_(ENDED) & JOB.c.purged_ms.is_(None)
        with self._database.engine.connect() as connection:
            query = select(JOB.c.id, JOB.c.status, JOB.c.finished_ms, JOB.c.spec, busy.label("busy")).where(ended)
            jobs = connection.execute(query).all()
        for job in jobs:
            rounds = RoundStore(redis, job.id)
            if rounds.status() not in (None, *ENDED):  # a reducer opened it while it was being cancelled
                rounds.end(job.status)
            if job.status == "completed":
                self._trim(job)
            if job.busy or job.finished_ms > now - RETIRED_MS:
                continue
            if not rounds.is_stored():
                continue
            rounds.purge()
            with self._database.writing() as connection:
                mine = (JOB.c.id == job.id) & JOB.c.status.in_(ENDED)  # unless it is tried again just now
                connection.execute(update(JOB).where(mine).values(purged_ms=now))

    def _trim(self, job: Any) -> None:
        """Remove the superseded checkpoints of a completed job that waited for their scores when the last was saved."""
        artifacts = Artifacts(self._artifacts_dir, job.id)
        saved = artifacts.tokens()
        with contextlib.suppress(ValidationError, OSError):  # an older release's job; a disk that fails
            if saved and Retention(artifacts, spec_of(job.spec)).prune(saved[-1]):
                reconcile(self._database, self._artifacts_dir, job.id)


def _is_unplaced(job: Any, joined_ms: int | None, now: int) -> bool:
    """Whether workers take part, the first since `joined_ms`, and the model's stages have found no place at them."""
    split = bool(job.stages and job.stages["stages"])
    return split and not job.stages["chains"] and joined_ms is not None and now - joined_ms > PLACING_MS


def _told(why: Reason | None) -> dict[str, Any]:
    """A job's columns that tell why it does not advance."""
    if why is None:
        return {"reason": None, "reason_code": None, "missing_workers": 0}
    return {"reason": why.text, "reason_code": why.code, "missing_workers": why.missing_workers}


def _stored_reason(job: Any) -> Reason | None:
    return None if job.reason is None else Reason(job.reason_code, job.reason, job.missing_workers)


def _touch(
    connection: Connection, job_id: str, values: dict[str, Any], only: Sequence[str] = (*ACTIVE, "paused")
) -> None:
    """Update a job's row if its status is still one of `only`."""
    mine = (JOB.c.id == job_id) & JOB.c.status.in_(only)
    values = values | {"revision": JOB.c.revision + 1, "updated_ms": now_ms()}
    connection.execute(update(JOB).where(mine).values(values))


def _evaluator_of(job: Any) -> str:
    """The key of the evaluators that may score a job."""
    return RECIPE_EVALUATOR if job.spec.recipe else EVALUATOR
