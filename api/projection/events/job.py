"""Events about a job as a whole: its reducer, its choices, its failures."""

import json

from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import TRACE_LENGTH, StreamEvent, count_of, name_of, text_of
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.types import ENDED

REASON_LENGTH = 1000
"""Characters of the reason for a choice: longer than other texts, since it names all that was chosen and measured."""


def chosen(projection: JobProjection, event: StreamEvent) -> None:
    """Codecs, inner steps, delay or precision of a job with `auto` were chosen. Only the first choice counts."""
    state, data = projection.state, event.data
    spec = JobSpec.model_validate(json.loads(state["spec"]))
    if not spec.is_open:
        return
    codec, delay = CodecSpec.model_validate(data["codec"]), data.get("delay", 0)
    decided = spec.chosen(codec, data["inner_steps"], data.get("precision"), delay)
    reason = text_of(data["reason"], REASON_LENGTH)
    state["spec"], state["rounds_total"], state["chosen"] = decided.model_dump_json(), decided.rounds_total, reason
    state.plan = decided.plan
    projection.add_event(event, {"reason": reason})


def reducer(projection: JobProjection, event: StreamEvent) -> None:
    host, pid = name_of(event.data["host"]), count_of(event.data["pid"])
    projection.state["reducer_host"], projection.state["reducer_pid"] = host, pid
    projection.add_event(event, {"host": host, "pid": pid})


def failed(projection: JobProjection, event: StreamEvent) -> None:
    error = "\n\n".join(filter(None, (text_of(event.data["error"]), text_of(event.data["detail"], TRACE_LENGTH))))
    if projection.state["status"] not in ENDED:
        projection.state["status"], projection.state["error"], projection.state["reason"] = "failed", error, None


def held(projection: JobProjection, event: StreamEvent) -> None:
    """The disk takes no checkpoint: the job pauses until a user has made room and resumes it."""
    state, reason = projection.state, text_of(event.data["reason"])
    if state["status"] in ("queued", "running"):
        state["status"], state["paused_ms"] = "paused", event.at_ms
        state["reason"], state["reason_code"] = f"Paused: {reason}", "disk"
        projection.add_event(event, {"reason": reason})


def mended(projection: JobProjection, event: StreamEvent) -> None:
    """The job's rounds in the broker were given up: the job goes on from its last checkpoint."""
    projection.add_event(event, {"error": text_of(event.data["error"])})
