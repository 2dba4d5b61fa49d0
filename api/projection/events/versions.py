"""Events about versions, their checkpoints and their scores."""

from pydantic_core import to_json

from api.access.caller import A_USER
from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import (
    MOST_METRICS,
    NAME_LENGTH,
    Row,
    StreamEvent,
    count_of,
    finite_of,
    kind_of,
    name_of,
    numbers_of,
    optional_of,
    text_of,
)
from api.projection.events.stages import chains_by_leader, credited
from computeshare.jobspec.tasks.facts import goodness
from computeshare.types import ENDED


def opened(projection: JobProjection, event: StreamEvent) -> None:
    """The first weights are published. (After a restore, the projector voids the rows of lost versions.)"""
    data, state = event.data, projection.state
    token, sha256 = projection.token(data["token"]), name_of(data["sha256"])
    parameters, kind = count_of(data["parameters"]), kind_of(data.get("kind", {}))
    shown = {"version": token.version, "incarnation": token.incarnation, "restored": bool(data["restored"])}
    projection.add_event(event, shown | {"parameters": parameters, "kind": kind})
    state["token"], state["incarnation"], state["version"] = str(token), token.incarnation, token.version
    state["weights_sha256"], state["parameters"] = sha256, parameters
    state["reducer_kind"] = to_json(kind).decode()


def version(projection: JobProjection, event: StreamEvent) -> None:
    data, state = event.data, projection.state
    token = projection.token(data["token"])
    epoch, loss = count_of(data["epoch"]), optional_of(data["loss"])
    counted = [(count_of(m), name_of(worker), count_of(samples)) for m, worker, samples in data["counted"]]
    staleness = [count_of(late) for late in data.get("staleness", [])] or [0] * len(counted)
    samples = sum(part[2] for part in counted)
    projection.rates.job.add(event.at_ms, samples)
    rate = round(projection.rates.job.value(event.at_ms), 1)
    about = projection.version_columns(token)
    projection.changes.versions.append(
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
            "at_ms": event.at_ms,
            "voided": False,
            "consensus": optional_of(data["consensus"]) if "consensus" in data else None,
        }
    )
    chains = chains_by_leader(projection)
    for (micro_batch, worker, size), late in zip(counted, staleness, strict=True):
        row = {"micro_batch": micro_batch, "epoch": epoch, "worker": worker, "samples": size, "voided": False}
        projection.changes.ledger.append(about | row | {"staleness": late})
        for each, part in credited(chains, worker, size).items():
            projection.worker_row(each)["samples"] += part
    shown = {"version": token.version, "token": str(token), "epoch": epoch, "loss": loss, "samples": samples}
    if any(staleness):
        shown["staleness"] = round(sum(staleness) / len(staleness), 3)
    if "consensus" in data:
        shown["consensus"] = optional_of(data["consensus"])
    if doubled := numbers_of(data.get("doubled", [])):
        shown["doubled"] = len(doubled)
        projection.count_reassigned(doubled)
    projection.add_event(event, shown | {"samples_per_s": rate})
    if token.incarnation < state["incarnation"]:
        return  # of a branch that was lost meanwhile
    state["token"], state["incarnation"], state["version"] = str(token), token.incarnation, token.version
    state["epoch"], state["loss"], state["weights_sha256"] = epoch, loss, name_of(data["sha256"])
    state["samples_per_s"] = rate
    if state["pause_after"] is not None and token.version >= state["pause_after"]:
        _pause_as_asked(projection, event)


def _pause_as_asked(projection: JobProjection, event: StreamEvent) -> None:
    """Pause a job once the round that its user wanted finished is done; after the last round, let it complete."""
    state = projection.state
    state["pause_after"] = None
    if state["status"] == "running" and state["version"] < state["rounds_total"]:
        state["status"], state["paused_ms"] = "paused", event.at_ms
        by = state["pause_by"] or A_USER
        state["reason"], state["reason_code"] = f"Paused by {by}, once the round was done", "user"
        shown = {"job_id": state.id, "stream_id": None, "at_ms": event.at_ms, "data": {"by": by}}
        projection.changes.events.append({**shown, "type": "paused"})


def checkpoint(projection: JobProjection, event: StreamEvent) -> None:
    add_checkpoint(projection, event.data, event.at_ms)


def add_checkpoint(projection: JobProjection, data: Row, at_ms: int) -> None:
    """A version is on disk."""
    state, token = projection.state, projection.token(data["token"])
    row = projection.version_columns(token) | {"sha256": name_of(data["sha256"]), "bytes": count_of(data["bytes"])}
    projection.changes.checkpoints.append({**row, "at_ms": at_ms, "voided": False})
    state["durable_version"] = max(state["durable_version"], token.version)


def scored(projection: JobProjection, event: StreamEvent) -> None:
    add_score(projection, event.data, event.at_ms)


def add_score(projection: JobProjection, data: Row, at_ms: int) -> None:
    """A version was scored: its loss, the accuracy of a classifier, and a recipe's own metrics. It is announced again,
    with `test`, once it is scored on the test set too.
    """
    state, token = projection.state, projection.token(data["token"])
    score, version = _score_of(data), token.version
    about = projection.version_columns(token)
    sample = text_of(data["sample"]) if "sample" in data else None
    projection.changes.scores.append({**about, **score, "sample": sample, "at_ms": at_ms, "voided": False})
    tested = None
    if "test" in data:
        shown = {"version": version, **_score_of(data["test"])}
        if not shown["own_metrics"]:
            del shown["own_metrics"]
        tested = to_json(shown).decode()
        projection.changes.tested.append({**about, "at_ms": at_ms, "tested": tested, "data": shown})
    last, best = state["scored_version"], state["best_version"]
    if last is None or version >= last:
        state["scored_version"], state["accuracy"], state["test_loss"] = version, score["accuracy"], score["loss"]
        state["tested_last"] = tested or (state["tested_last"] if version == last else None)
        state["own_metrics"] = to_json(score["own_metrics"]).decode() if score["own_metrics"] else None
    known = goodness({"accuracy": state["best_accuracy"], "loss": state["best_loss"]})
    if best is None or (goodness(score), -version) >= (known, -best):
        state["best_version"], state["best_accuracy"], state["best_loss"] = version, score["accuracy"], score["loss"]
        state["tested"] = tested or (state["tested"] if version == best else None)


def _score_of(data: Row) -> Row:
    """A score on a split. Raises KeyError, TypeError or ValueError where it is malformed."""
    accuracy = data.get("accuracy")
    loss, samples = optional_of(data["loss"]), count_of(data["samples"])
    own = data.get("own_metrics", {})
    if not isinstance(own, dict):
        raise TypeError("own metrics are no object")
    own = {text_of(name, NAME_LENGTH): optional_of(value) for name, value in list(own.items())[:MOST_METRICS]}
    accuracy = None if accuracy is None else finite_of(accuracy)
    return {"loss": loss, "accuracy": accuracy, "samples": samples, "own_metrics": own or None}


def stopped(projection: JobProjection, event: StreamEvent) -> None:
    """The job is to be complete with a version before its last. (The projector voids the rows of later versions.)"""
    token, reason = projection.token(event.data["token"]), text_of(event.data["reason"])
    state = projection.state
    if state["status"] in ENDED or token.version >= state["rounds_total"]:
        raise ValueError("the job is over")
    projection.add_event(event, {"version": token.version, "reason": reason})


def damaged(projection: JobProjection, event: StreamEvent) -> None:
    """A checkpoint cannot be read: the job no longer waits for its score, and users cannot download it."""
    token = projection.token(event.data["token"])
    projection.changes.damaged.append({"job_id": projection.state.id, "token": str(token)})
    shown = {"version": token.version, "token": str(token), "error": text_of(event.data["error"])}
    projection.add_event(event, shown)


def unscored(projection: JobProjection, event: StreamEvent) -> None:
    """An evaluator could not score a version, and tries again."""
    projection.add_event(event, {"version": count_of(event.data["version"]), "error": text_of(event.data["error"])})


def doubted(projection: JobProjection, event: StreamEvent) -> None:
    """A worker read weights that do not match their version's digest."""
    projection.add_event(event, {"version": count_of(event.data["version"]), "worker": name_of(event.data["worker"])})


def republished(projection: JobProjection, event: StreamEvent) -> None:
    """The reducer replaced a version's damaged weights with its own copy."""
    projection.add_event(event, {"version": count_of(event.data["version"])})
