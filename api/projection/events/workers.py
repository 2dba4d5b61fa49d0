"""Events about a job's workers."""

import json

from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import Row, StreamEvent, count_of, kind_of, memory_of, name_of, numbers_of, text_of
from computeshare.codecs.registry import CODECS


def joined(projection: JobProjection, event: StreamEvent) -> None:
    data, state = event.data, projection.state
    worker, seat = name_of(data["worker"]), name_of(data["seat"])
    about = {"name": name_of(data["name"]), "device": name_of(data["device"])}
    kind = kind_of(data.get("kind", {}))
    known = {"kind": kind, "seat": seat, "memory_bytes": memory_of(data)}
    _add_presence(projection, event, {**about, **known, "joined": True})
    projection.add_event(event, {"worker": worker, "seat": seat, "kind": kind, **about})
    if state["version"] and _feeds_back(state["spec"]):
        state.add("residual_resets", 1)
    if state["status"] == "queued":
        state["status"], state["started_ms"], state["reason"] = "running", state["started_ms"] or event.at_ms, None


def left(projection: JobProjection, event: StreamEvent) -> None:
    data = event.data
    worker, reason, freed = name_of(data["worker"]), text_of(data["reason"]), numbers_of(data.get("freed", []))
    _add_presence(projection, event, {"reason": reason, "joined": False})
    projection.add_event(event, {"worker": worker, "reason": reason})
    projection.rates.workers.pop(worker, None)
    projection.count_reassigned(freed)


def banned(projection: JobProjection, event: StreamEvent) -> None:
    data = event.data
    worker, why, strikes = name_of(data["worker"]), text_of(data["reason"]), count_of(data["strikes"])
    _add_presence(projection, event, {"reason": f"banned: {why}", "joined": False})
    projection.changes.bans.append({"job_id": projection.state.id, "worker": worker, "reason": why})
    projection.worker_row(worker)  # there may be none yet
    projection.add_event(event, {"worker": worker, "strikes": strikes, "reason": why})
    projection.rates.workers.pop(worker, None)


def unfit(projection: JobProjection, event: StreamEvent) -> None:
    """A worker found that its machine cannot take part."""
    worker, about = name_of(event.data["worker"]), {n: name_of(event.data[n]) for n in ("name", "device")}
    about |= {"worker": worker, "reason": text_of(event.data["reason"])}
    found = {"job_id": projection.state.id, "at_ms": event.at_ms, "memory_bytes": memory_of(event.data)}
    projection.changes.unfit.append(found | about)
    projection.add_event(event, about)


def forgiven(projection: JobProjection, event: StreamEvent) -> None:
    """Take back a worker's strikes for values that are not finite: other workers found the same."""
    projection.worker_row(name_of(event.data["worker"]))["strikes"] -= count_of(event.data["strikes"])


def audited(projection: JobProjection, event: StreamEvent) -> None:
    """Two machines' updates for one unit were compared, or could not be."""
    outcome = event.data["outcome"]
    if outcome not in ("confirmed", "mismatched", "undecided", "skipped"):
        raise ValueError("not an outcome of an audit")
    projection.state.add("audited", int(outcome != "skipped"))
    projection.state.add("confirmed", int(outcome == "confirmed"))


def suspected(projection: JobProjection, event: StreamEvent) -> None:
    """An update is unlike the others of its round, or was right all the same."""
    outcome = event.data["outcome"]
    if outcome not in ("asked", "confirmed", "alone", "late"):
        raise ValueError("not an outcome of a suspicion")
    about = {name: count_of(event.data[name]) for name in ("version", "micro_batch")}
    projection.add_event(event, {**about, "worker": name_of(event.data["worker"]), "outcome": outcome})


def _add_presence(projection: JobProjection, event: StreamEvent, data: Row) -> None:
    """Note that the event's worker joined, or left, in its session."""
    row = {"job_id": projection.state.id, "at_ms": event.at_ms}
    row |= {name: name_of(event.data[name]) for name in ("worker", "session")}
    projection.changes.presence.append(row | data)


def _feeds_back(spec: str) -> bool:
    """Whether a job's upload codec uses error feedback, adding the residual of earlier updates; `spec` is JSON."""
    codec = json.loads(spec)["codec"]
    return codec != "auto" and CODECS[codec["up"]].residual
