"""Events about workers' submissions and the micro-batches of a round."""

from api.projection.events import stages
from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import (
    OUTCOMES,
    StreamEvent,
    count_of,
    finite_of,
    memory_of,
    name_of,
    numbers_of,
    optional_of,
    text_of,
    version_of,
)


def submission(projection: JobProjection, event: StreamEvent) -> None:
    data, state = event.data, projection.state
    outcome, worker = data["outcome"], name_of(data["worker"])
    if outcome not in OUTCOMES:
        raise ValueError("unknown outcome")
    sent, counted = numbers_of(data["micro_batches"]), numbers_of(data["counted"])
    samples = sum(map(state.plan.unit_size, counted))
    bytes_up, bytes_down, seconds = count_of(data["bytes_up"]), count_of(data["bytes_down"]), data["seconds"]
    projection.changes.submissions.append(
        {
            "job_id": state.id,
            "stream_id": event.stream_id,
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
            "at_ms": event.at_ms,
            "voided": False,
        }
    )
    state.add(outcome, 1)
    state.add("bytes_up", bytes_up)
    state.add("bytes_down", bytes_down)
    row = projection.worker_row(worker)
    row["seen_ms"] = event.at_ms
    row[outcome] += 1
    row["bytes_up"] += bytes_up
    row["bytes_down"] += bytes_down
    row["memory_bytes"] = memory_of(data) or row.get("memory_bytes")
    if (met := data.get("exchange")) and outcome == "accepted":
        projection.count_exchange(worker, name_of(met["peer"]), optional_of(met["distance"]))
    if (shares := data.get("stages")) and outcome == "accepted":
        stages.computed(projection, worker, shares, finite_of(seconds["computing"]), event.at_ms)
    if counted:
        for each, part in stages.credited(stages.chains_by_leader(projection), worker, samples).items():
            projection.rates.of(each).add(event.at_ms, part)
    if outcome in ("accepted", "duplicate"):
        for micro_batch in set(sent) - set(counted) - set(numbers_of(data.get("late", []))):
            projection.add_to_epoch(micro_batch, "duplicates_refused")


def folded(projection: JobProjection, event: StreamEvent) -> None:
    """A summary of submissions whose own events were dropped, as too many came while no projector stored them."""
    data, state = event.data, projection.state
    submissions, first = count_of(data["submissions"]), name_of(data["first"])
    of_workers = {name_of(worker): {k: count_of(v) for k, v in of.items()} for worker, of in data["workers"].items()}
    again = [(count_of(micro_batch), count_of(times)) for micro_batch, times in data["again"]]
    state.add("folded", submissions)
    for worker, of in of_workers.items():
        row = projection.worker_row(worker)
        row["seen_ms"] = max(row["seen_ms"], event.at_ms)
        for name in (*OUTCOMES, "bytes_up", "bytes_down"):
            if count := of.get(name, 0):
                row[name] += count
                state.add(name, count)
    for micro_batch, times in again:
        projection.add_to_epoch(micro_batch, "duplicates_refused", times)
    projection.add_event(event, {"first": first, "submissions": submissions})


def reassigned(projection: JobProjection, event: StreamEvent) -> None:
    data = event.data
    micro_batch = count_of(data["micro_batch"])
    projection.count_reassigned([micro_batch])
    shown = {"version": count_of(data["version"]), "micro_batch": micro_batch, "from": name_of(data["from"])}
    shown |= {"to": name_of(data["to"]), "after_ms": finite_of(data["after_ms"])}
    projection.add_event(event, shown)


def closed(projection: JobProjection, event: StreamEvent) -> None:
    """A round goes on without the micro-batches that are late."""
    data = {name: count_of(event.data[name]) for name in ("version", "received", "total")}
    projection.add_event(event, data)


def refused(projection: JobProjection, event: StreamEvent) -> None:
    """The reducer refused an accepted submission; `row_store` changes the outcome only once."""
    data = event.data
    worker, reason = name_of(data["worker"]), text_of(data["reason"])
    projection.changes.refusals.append({"worker": worker, "nonce": name_of(data["nonce"]), "reason": reason})
    projection.worker_row(worker)["strikes"] += bool(data.get("strike", True))
    projection.add_event(event, {"worker": worker, "micro_batch": count_of(data["micro_batch"]), "reason": reason})
