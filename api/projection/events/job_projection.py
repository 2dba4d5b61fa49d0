"""A job while its events are applied, and the rows that follow from them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from api.projection.events.parser import OUTCOMES, Row, StreamEvent, token_of
from api.projection.rates import JobRates
from computeshare.jobspec.sampling_plan import Plan
from computeshare.types import ENDED, Token


@dataclass(slots=True)
class JobState:
    """The job's plan and columns, updated as events are applied."""

    id: str
    plan: Plan
    columns: Row
    """The job's row; `changed` names the columns that differ from the database."""
    changed: set[str] = field(default_factory=set)

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self.columns[name] = value
        self.changed.add(name)

    def add(self, name: str, amount: int) -> None:
        self[name] = self.columns[name] + amount


@dataclass(slots=True)
class Changes:
    """The rows that follow from a batch of events."""

    versions: list[Row] = field(default_factory=list)
    ledger: list[Row] = field(default_factory=list)
    submissions: list[Row] = field(default_factory=list)
    checkpoints: list[Row] = field(default_factory=list)
    scores: list[Row] = field(default_factory=list)
    tested: list[Row] = field(default_factory=list)
    """Scores on the test set, of versions that are scored on a validation split."""
    events: list[Row] = field(default_factory=list)
    refusals: list[Row] = field(default_factory=list)
    workers: dict[str, Row] = field(default_factory=dict)
    """Increments of each worker's counters."""
    exchanges: dict[tuple[str, str], Row] = field(default_factory=dict)
    """Increments, by worker and the peer whose weights it read."""
    presence: list[Row] = field(default_factory=list)
    """Joins and leaves, in order."""
    bans: list[Row] = field(default_factory=list)
    unfit: list[Row] = field(default_factory=list)
    damaged: list[Row] = field(default_factory=list)
    """Checkpoints that cannot be read."""
    epochs: dict[int, Row] = field(default_factory=dict)

    def epoch(self, job_id: str, epoch: int) -> Row:
        """The increments of an epoch's counters."""
        counters = {"reassigned": 0, "duplicates_refused": 0, "counted": 0, "covered": 0}
        return self.epochs.setdefault(epoch, {"job_id": job_id, "epoch": epoch, **counters})


class JobProjection:
    """The rows that follow from a batch of one job's events, applied in order by `handlers.apply`."""

    def __init__(self, state: JobState, rates: JobRates) -> None:
        self.state, self.rates, self.changes = state, rates, Changes()

    def finish(self, is_scored: Callable[[], bool]) -> None:
        """Complete a job once its last version is durable and scored, and so are all other versions to be scored.

        Args:
            is_scored: whether no checkpoint is left to score; called only once everything else is done.
        """
        state = self.state
        done = state["version"] == state["durable_version"] == state["scored_version"] == state["rounds_total"]
        if done and state["status"] not in ENDED and is_scored():
            state["status"], state["reason"] = "completed", None

    def token(self, text: str) -> Token:
        """Parse a token of the job. Raises ValueError, also for a version beyond the job's last."""
        token = token_of(text)
        if token.version > self.state["rounds_total"]:
            raise ValueError("a version beyond the last")
        return token

    def version_columns(self, token: Token) -> Row:
        """The columns that name a version, for a row about it."""
        about = {"incarnation": token.incarnation, "version": token.version}
        return {"job_id": self.state.id, "token": str(token), **about}

    def worker_row(self, worker: str) -> Row:
        """The increments of a worker's counters."""
        row = self.changes.workers.get(worker)
        if row is None:
            counters = dict.fromkeys((*OUTCOMES, "bytes_up", "bytes_down", "samples", "seen_ms", "strikes"), 0)
            row = self.changes.workers[worker] = {"job_id": self.state.id, "worker": worker, **counters}
        return row

    def count_exchange(self, worker: str, peer: str, distance: float | None) -> None:
        """Count that a worker averaged its weights with another's, so far apart."""
        known = self.changes.exchanges.get((worker, peer), {"count": 0})
        row = {"job_id": self.state.id, "worker": worker, "peer": peer, "count": known["count"] + 1}
        self.changes.exchanges[worker, peer] = row | {"distance": distance}

    def count_reassigned(self, micro_batches: Sequence[int]) -> None:
        """Count micro-batches that were leased to another worker, in addition or instead."""
        self.state.add("reassigned", len(micro_batches))
        for micro_batch in micro_batches:
            self.add_to_epoch(micro_batch, "reassigned")

    def add_to_epoch(self, micro_batch: int, counter: str, times: int = 1) -> None:
        """Add the samples of a micro-batch to a counter of its epoch."""
        plan = self.state.plan
        self.changes.epoch(self.state.id, plan.epoch_of(micro_batch))[counter] += times * plan.unit_size(micro_batch)

    def add_event(self, event: StreamEvent, data: Row) -> None:
        """Show the event in the job's timeline, with this data."""
        self.changes.events.append(
            {
                "job_id": self.state.id,
                "stream_id": event.stream_id,
                "type": event.type,
                "at_ms": event.at_ms,
                "data": data,
            }
        )
