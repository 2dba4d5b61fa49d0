"""Turns a job's events into database rows. Pure: no database, no Redis.

Events come from workers too, so nothing in them is trusted: malformed events are skipped, and every text is bounded.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from api.projection.event_parser import (
    OUTCOMES,
    TRACE_LENGTH,
    Entry,
    Row,
    count_of,
    finite_of,
    kind_of,
    name_of,
    numbers_of,
    optional_of,
    text_of,
    token_of,
    version_of,
)
from api.projection.rates import Rates
from computeshare.codecs.registry import CODECS
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.types import ENDED, Token


@dataclass(slots=True)
class JobState:
    """The job's plan and columns, updated as events are folded."""

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
    events: list[Row] = field(default_factory=list)
    refusals: list[Row] = field(default_factory=list)
    workers: dict[str, Row] = field(default_factory=dict)
    """Increments of each worker's counters."""
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


def _feeds_back(spec: str) -> bool:
    """Whether a job's upload codec uses error feedback, adding the residual of earlier updates; `spec` is JSON."""
    codec = json.loads(spec)["codec"]
    return codec != "auto" and CODECS[codec["up"]].residual


def _memory_of(data: Row) -> int | None:
    """The bytes of memory that a worker reports for its seat; None if it reports none."""
    return count_of(data.get("memory_bytes", 0)) or None


class Fold:
    """Folds a batch of one job's events, in order."""

    def __init__(self, state: JobState, rates: Rates) -> None:
        self.state, self.rates, self.changes = state, rates, Changes()

    def take(self, entry: Entry) -> None:
        """Fold one event; unknown types are ignored. Raises KeyError, TypeError or ValueError where it is malformed."""
        handler = _HANDLERS.get(entry.type)
        if handler:
            handler(self, entry)

    def submission(self, entry: Entry) -> None:
        data, state = entry.data, self.state
        outcome, worker = data["outcome"], name_of(data["worker"])
        if outcome not in OUTCOMES:
            raise ValueError("unknown outcome")
        sent, counted = numbers_of(data["micro_batches"]), numbers_of(data["counted"])
        sizes = numbers_of(data.get("sizes", []))
        samples = sum(state.plan.unit_size(m, sizes) for m in counted)
        bytes_up, bytes_down, seconds = count_of(data["bytes_up"]), count_of(data["bytes_down"]), data["seconds"]
        self.changes.submissions.append(
            {
                "job_id": state.id,
                "stream_id": entry.stream_id,
                "worker": worker,
                "nonce": name_of(data["nonce"]),
                "outcome": outcome,
                "reason": None,
                "base": name_of(data["base"]),
                "base_version": version_of(data["base"]),
                "current": name_of(data["current"]),
                "current_version": version_of(data["current"]),
                "micro_batches": sent,
                "samples": samples,
                "bytes_up": bytes_up,
                "bytes_down": bytes_down,
                "waiting_s": finite_of(seconds["waiting"]),
                "computing_s": finite_of(seconds["computing"]),
                "encoding_s": finite_of(seconds["encoding"]),
                "uploading_s": finite_of(seconds["uploading"]),
                "at_ms": entry.at_ms,
                "voided": False,
            }
        )
        state.add(outcome, 1)
        state.add("bytes_up", bytes_up)
        state.add("bytes_down", bytes_down)
        row = self._worker(worker)
        row["seen_ms"] = entry.at_ms
        row[outcome] += 1
        row["bytes_up"] += bytes_up
        row["bytes_down"] += bytes_down
        row["memory_bytes"] = _memory_of(data) or row.get("memory_bytes")
        if counted:
            self.rates.of(worker).add(entry.at_ms, samples)
        if outcome in ("accepted", "duplicate"):
            for micro_batch in set(sent) - set(counted) - set(numbers_of(data.get("late", []))):
                self._tally(micro_batch, "duplicates_refused")

    def folded(self, entry: Entry) -> None:
        """A summary of submissions whose own events were dropped, as too many came while no projector stored them."""
        data, state = entry.data, self.state
        submissions, first = count_of(data["submissions"]), name_of(data["first"])
        of_workers = {
            name_of(worker): {k: count_of(v) for k, v in of.items()} for worker, of in data["workers"].items()
        }
        again = [(count_of(micro_batch), count_of(times)) for micro_batch, times in data["again"]]
        state.add("folded", submissions)
        for worker, of in of_workers.items():
            row = self._worker(worker)
            row["seen_ms"] = max(row["seen_ms"], entry.at_ms)
            for name in (*OUTCOMES, "bytes_up", "bytes_down"):
                if count := of.get(name, 0):
                    row[name] += count
                    state.add(name, count)
        for micro_batch, times in again:
            self._tally(micro_batch, "duplicates_refused", times)
        self._event(entry, {"first": first, "submissions": submissions})

    def version(self, entry: Entry) -> None:
        data, state = entry.data, self.state
        token = self._token(data["token"])
        epoch, loss = count_of(data["epoch"]), optional_of(data["loss"])
        counted = [(count_of(m), name_of(worker), count_of(samples)) for m, worker, samples in data["counted"]]
        staleness = [count_of(late) for late in data.get("staleness", [])] or [0] * len(counted)
        samples = sum(part[2] for part in counted)
        self.rates.job.add(entry.at_ms, samples)
        rate = round(self.rates.job.value(entry.at_ms), 1)
        about = {"job_id": state.id, "token": str(token), "incarnation": token.incarnation, "version": token.version}
        self.changes.versions.append(
            {
                **about,
                "epoch": epoch,
                "loss": loss,
                "sha256": name_of(data["sha256"]),
                "samples": samples,
                "samples_per_s": rate,
                "bytes_up": state["bytes_up"],
                "bytes_down": state["bytes_down"],
                "seconds": {str(k)[:20]: finite_of(v) for k, v in list(data["seconds"].items())[:10]},
                "at_ms": entry.at_ms,
                "voided": False,
            }
        )
        for (micro_batch, worker, size), late in zip(counted, staleness, strict=True):
            row = {"micro_batch": micro_batch, "epoch": epoch, "worker": worker, "samples": size, "voided": False}
            self.changes.ledger.append(about | row | {"staleness": late})
            self._worker(worker)["samples"] += size
        shown = {"version": token.version, "token": str(token), "epoch": epoch, "loss": loss, "samples": samples}
        if any(staleness):
            shown["staleness"] = round(sum(staleness) / len(staleness), 3)
        if doubled := numbers_of(data.get("doubled", [])):
            shown["doubled"] = len(doubled)
            self._reassign(doubled)
        self._event(entry, shown | {"samples_per_s": rate})
        if token.incarnation < state["incarnation"]:
            return  # of a branch that was lost meanwhile
        state["token"], state["incarnation"], state["version"] = str(token), token.incarnation, token.version
        state["epoch"], state["loss"], state["weights_sha256"] = epoch, loss, name_of(data["sha256"])
        state["samples_per_s"] = rate
        if state["pause_after"] is not None and token.version >= state["pause_after"]:
            self._rest(entry)

    def _rest(self, entry: Entry) -> None:
        """Pause a job once the round that its user wanted finished is done; after the last round, let it complete."""
        state = self.state
        state["pause_after"] = None
        if state["status"] == "running" and state["version"] < state["rounds_total"]:
            state["status"], state["paused_ms"] = "paused", entry.at_ms
            state["reason"] = "Paused by a user, once the round was done"
            shown = {"job_id": state.id, "stream_id": None, "at_ms": entry.at_ms, "data": {"by": "a user"}}
            self.changes.events.append({**shown, "type": "paused"})

    def chosen(self, entry: Entry) -> None:
        """The codec and inner steps of a job with codec `auto` were chosen. Only the first choice counts."""
        state, data = self.state, entry.data
        spec = JobSpec.model_validate(json.loads(state["spec"]))
        if spec.codec != "auto":
            return
        decided = spec.chosen(CodecSpec.model_validate(data["codec"]), data["inner_steps"])
        reason = text_of(data["reason"])
        state["spec"], state["rounds_total"], state["chosen"] = decided.model_dump_json(), decided.rounds_total, reason
        state.plan = decided.plan
        self._event(entry, {"reason": reason})

    def opened(self, entry: Entry) -> None:
        """The first weights are published. (After a restore, the projector voids the rows of lost versions.)"""
        data, state = entry.data, self.state
        token, sha256 = self._token(data["token"]), name_of(data["sha256"])
        parameters, kind = count_of(data["parameters"]), kind_of(data.get("kind", {}))
        shown = {"version": token.version, "incarnation": token.incarnation, "restored": bool(data["restored"])}
        self._event(entry, shown | {"parameters": parameters, "kind": kind})
        state["token"], state["incarnation"], state["version"] = str(token), token.incarnation, token.version
        state["weights_sha256"], state["parameters"] = sha256, parameters
        state["reducer_kind"] = to_json(kind).decode()

    def reducer(self, entry: Entry) -> None:
        host, pid = name_of(entry.data["host"]), count_of(entry.data["pid"])
        self.state["reducer_host"], self.state["reducer_pid"] = host, pid
        self._event(entry, {"host": host, "pid": pid})

    def joined(self, entry: Entry) -> None:
        data, state = entry.data, self.state
        worker, seat = name_of(data["worker"]), name_of(data["seat"])
        about = {"name": name_of(data["name"]), "device": name_of(data["device"])}
        kind = kind_of(data.get("kind", {}))
        row = {"job_id": state.id, "worker": worker, "at_ms": entry.at_ms, "session": name_of(data["session"])}
        known = {"kind": kind, "seat": seat, "memory_bytes": _memory_of(data)}
        self.changes.presence.append({**row, **about, **known, "joined": True})
        self._event(entry, {"worker": worker, "seat": seat, "kind": kind, **about})
        if state["version"] and _feeds_back(state["spec"]):
            state.add("residual_resets", 1)
        if state["status"] == "queued":
            state["status"], state["started_ms"], state["reason"] = "running", state["started_ms"] or entry.at_ms, None

    def left(self, entry: Entry) -> None:
        data = entry.data
        worker, reason, freed = name_of(data["worker"]), text_of(data["reason"]), numbers_of(data.get("freed", []))
        row = {"job_id": self.state.id, "worker": worker, "at_ms": entry.at_ms, "session": name_of(data["session"])}
        self.changes.presence.append({**row, "reason": reason, "joined": False})
        self._event(entry, {"worker": worker, "reason": reason})
        self.rates.workers.pop(worker, None)
        self._reassign(freed)

    def banned(self, entry: Entry) -> None:
        data = entry.data
        worker, reason = name_of(data["worker"]), f"banned: {text_of(data['reason'])}"
        row = {"job_id": self.state.id, "worker": worker, "at_ms": entry.at_ms, "session": name_of(data["session"])}
        self.changes.presence.append({**row, "reason": reason, "joined": False})
        self.changes.bans.append({"job_id": self.state.id, "worker": worker, "reason": text_of(data["reason"])})
        self._worker(worker)  # there may be none yet
        self._event(entry, {"worker": worker, "strikes": count_of(data["strikes"]), "reason": text_of(data["reason"])})
        self.rates.workers.pop(worker, None)

    def unfit(self, entry: Entry) -> None:
        """A worker found that its machine cannot take part."""
        worker, about = name_of(entry.data["worker"]), {n: name_of(entry.data[n]) for n in ("name", "device")}
        about |= {"worker": worker, "reason": text_of(entry.data["reason"])}
        found = {"job_id": self.state.id, "at_ms": entry.at_ms, "memory_bytes": _memory_of(entry.data)}
        self.changes.unfit.append(found | about)
        self._event(entry, about)

    def forgiven(self, entry: Entry) -> None:
        """Take back a worker's strikes for values that are not finite: other workers found the same."""
        self._worker(name_of(entry.data["worker"]))["strikes"] -= count_of(entry.data["strikes"])

    def reassigned(self, entry: Entry) -> None:
        data = entry.data
        micro_batch = count_of(data["micro_batch"])
        self._reassign([micro_batch])
        shown = {"version": count_of(data["version"]), "micro_batch": micro_batch, "from": name_of(data["from"])}
        shown |= {"to": name_of(data["to"]), "after_ms": finite_of(data["after_ms"])}
        self._event(entry, shown)

    def closed(self, entry: Entry) -> None:
        """A round goes on without the micro-batches that are late."""
        data = {name: count_of(entry.data[name]) for name in ("version", "received", "total")}
        self._event(entry, data)

    def refused(self, entry: Entry) -> None:
        """The reducer refused an accepted submission; `projection_store` changes the outcome only once."""
        data = entry.data
        worker, reason = name_of(data["worker"]), text_of(data["reason"])
        self.changes.refusals.append({"worker": worker, "nonce": name_of(data["nonce"]), "reason": reason})
        self._worker(worker)["strikes"] += bool(data.get("strike", True))
        self._event(entry, {"worker": worker, "micro_batch": count_of(data["micro_batch"]), "reason": reason})

    def checkpoint(self, entry: Entry) -> None:
        self.saved(entry.data, entry.at_ms)

    def saved(self, data: Row, at_ms: int) -> None:
        """A version is on disk."""
        state, token = self.state, self._token(data["token"])
        row = {"job_id": state.id, "token": str(token), "incarnation": token.incarnation, "version": token.version}
        row |= {"sha256": name_of(data["sha256"]), "bytes": count_of(data["bytes"]), "at_ms": at_ms, "voided": False}
        self.changes.checkpoints.append(row)
        state["durable_version"] = max(state["durable_version"], token.version)

    def scored(self, entry: Entry) -> None:
        self.rated(entry.data, entry.at_ms)

    def rated(self, data: Row, at_ms: int) -> None:
        """A version was scored: loss and accuracy on the test set."""
        state, token = self.state, self._token(data["token"])
        loss, accuracy = optional_of(data["loss"]), finite_of(data["accuracy"])
        row = {"job_id": state.id, "token": str(token), "incarnation": token.incarnation, "version": token.version}
        row |= {"loss": loss, "accuracy": accuracy, "samples": count_of(data["samples"])}
        self.changes.scores.append({**row, "at_ms": at_ms, "voided": False})
        if state["scored_version"] is None or token.version >= state["scored_version"]:
            state["scored_version"], state["accuracy"] = token.version, accuracy
        if state["best_accuracy"] is None or accuracy > state["best_accuracy"]:
            state["best_version"], state["best_accuracy"] = token.version, accuracy

    def failed(self, entry: Entry) -> None:
        error = "\n\n".join(filter(None, (text_of(entry.data["error"]), text_of(entry.data["detail"], TRACE_LENGTH))))
        if self.state["status"] not in ENDED:
            self.state["status"], self.state["error"], self.state["reason"] = "failed", error, None

    def held(self, entry: Entry) -> None:
        """The disk takes no checkpoint: the job pauses until a user has made room and resumes it."""
        state, reason = self.state, text_of(entry.data["reason"])
        if state["status"] in ("queued", "running"):
            state["status"], state["reason"], state["paused_ms"] = "paused", f"Paused: {reason}", entry.at_ms
            self._event(entry, {"reason": reason})

    def damaged(self, entry: Entry) -> None:
        """A checkpoint cannot be read: the job no longer waits for its score, and users cannot download it."""
        token = self._token(entry.data["token"])
        self.changes.damaged.append({"job_id": self.state.id, "token": str(token)})
        shown = {"version": token.version, "token": str(token), "error": text_of(entry.data["error"])}
        self._event(entry, shown)

    def mended(self, entry: Entry) -> None:
        """The job's rounds in the broker were given up: the job goes on from its last checkpoint."""
        self._event(entry, {"error": text_of(entry.data["error"])})

    def doubted(self, entry: Entry) -> None:
        """A worker read weights that do not match their version's digest."""
        self._event(entry, {"version": count_of(entry.data["version"]), "worker": name_of(entry.data["worker"])})

    def republished(self, entry: Entry) -> None:
        """The reducer replaced a version's damaged weights with its own copy."""
        self._event(entry, {"version": count_of(entry.data["version"])})

    def finish(self, is_scored: Callable[[], bool]) -> None:
        """Complete a job once its last version is durable and scored, and so are all other versions to be scored.

        Args:
            is_scored: whether no checkpoint is left to score; called only once everything else is done.
        """
        state = self.state
        done = state["version"] == state["durable_version"] == state["scored_version"] == state["rounds_total"]
        if done and state["status"] not in ENDED and is_scored():
            state["status"], state["reason"] = "completed", None

    def _token(self, text: str) -> Token:
        token = token_of(text)
        if token.version > self.state["rounds_total"]:
            raise ValueError("a version beyond the last")
        return token

    def _worker(self, worker: str) -> Row:
        row = self.changes.workers.get(worker)
        if row is None:
            counters = dict.fromkeys((*OUTCOMES, "bytes_up", "bytes_down", "samples", "seen_ms", "strikes"), 0)
            row = self.changes.workers[worker] = {"job_id": self.state.id, "worker": worker, **counters}
        return row

    def _reassign(self, micro_batches: Sequence[int]) -> None:
        """Count micro-batches that were leased to another worker, in addition or instead."""
        self.state.add("reassigned", len(micro_batches))
        for micro_batch in micro_batches:
            self._tally(micro_batch, "reassigned")

    def _tally(self, micro_batch: int, what: str, times: int = 1) -> None:
        plan = self.state.plan
        self.changes.epoch(self.state.id, plan.epoch_of(micro_batch))[what] += times * plan.unit_size(micro_batch)

    def _event(self, entry: Entry, data: Row) -> None:
        self.changes.events.append(
            {
                "job_id": self.state.id,
                "stream_id": entry.stream_id,
                "type": entry.type,
                "at_ms": entry.at_ms,
                "data": data,
            }
        )


_HANDLERS: dict[str, Callable[[Fold, Entry], None]] = {
    "submission": Fold.submission,
    "folded": Fold.folded,
    "version": Fold.version,
    "chosen": Fold.chosen,
    "opened": Fold.opened,
    "reducer": Fold.reducer,
    "joined": Fold.joined,
    "left": Fold.left,
    "banned": Fold.banned,
    "unfit": Fold.unfit,
    "reassigned": Fold.reassigned,
    "closed": Fold.closed,
    "refused": Fold.refused,
    "forgiven": Fold.forgiven,
    "checkpoint": Fold.checkpoint,
    "scored": Fold.scored,
    "damaged": Fold.damaged,
    "mended": Fold.mended,
    "doubted": Fold.doubted,
    "republished": Fold.republished,
    "failed": Fold.failed,
    "held": Fold.held,
}
