"""Formats numbers, times and events for the pages. Pure. `static/format.js` does the same in the browser."""

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from api.schemas import EpochPublic, EventPublic, JobPublic, OnTestSet
from computeshare.jobspec.machine_needs import NEEDS, need_texts
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.facts import perplexity
from computeshare.strategies.registry import stored

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def count(value: float) -> str:
    """A whole number with separated thousands: 21,840."""
    return f"{value:,.0f}"


def rate(value: float) -> str:
    """A rate per second or per minute: 7.5, 21,840."""
    return f"{value:,.1f}" if value < 100 else count(value)


def percent(fraction: float) -> str:
    """An accuracy: 97.31 %."""
    return f"{fraction * 100:.2f} %"


def score(accuracy: float | None, test_loss: float | None, textual: bool = False) -> str:
    """A version's score: 97.31 %, without an accuracy loss 1.47, or of a language model (`textual`) 1.47 nats,
    perplexity 4.35.
    """
    if accuracy is not None:
        return percent(accuracy)
    if not textual:
        return "–" if test_loss is None else f"loss {loss(test_loss)}"
    found = perplexity(test_loss)
    return "–" if found is None else f"{loss(test_loss)} nats, perplexity {found:.2f}"


def tested(found: OnTestSet | None) -> str:
    """A version's score on the test set: 97.31 %, or without an accuracy its loss, 1.47."""
    if found is None:
        return "–"
    return percent(found.accuracy) if found.accuracy is not None else loss(found.loss)


def tested_of(job: JobPublic) -> str:
    """The version behind `tested`, and the last version's score if it differs: best (version 30); last 97.10 %."""
    if job.tested is None:
        return ""
    last = f"; last {tested(job.tested_last)}" if job.tested_last else ""
    return f"best (version {count(job.tested.version)}){last}"


def share(fraction: float) -> str:
    """A fraction as a whole percentage: 42 %."""
    return f"{fraction * 100:.0f} %"


def done(version: int, total: int) -> str:
    """A job's progress as a percentage, rounded down: 100 % only with its last version."""
    return f"{100 * version // max(1, total)} %"


def spec_value(value: Any) -> str:
    """The value of a JobSpec's field."""
    return "–" if value is None else value if isinstance(value, str) else json.dumps(value)


def loss(value: float | None) -> str:
    """A loss to four digits, however small or large."""
    return "–" if value is None else f"{value:.4g}"


def size(number: int) -> str:
    """Bytes: 87.4 kB, 44.7 MB."""
    value = float(number)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:,.1f} TB"


def duration(seconds: float) -> str:
    """A duration in at most two units: 8 s, 3 min 12 s, 2 h 5 min."""
    left = max(0, int(seconds))
    for index, (length, unit) in enumerate(_UNITS):
        if left >= length and index < len(_UNITS) - 1:
            smaller, small_unit = _UNITS[index + 1]
            rest = left % length // smaller
            return f"{left // length} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{left} s"


def epsilon(value: float | None) -> str:
    """A privacy loss, which is None where it is too large to mean anything."""
    return "above 1,000" if value is None else f"{value:.3g}"


def ago(seconds: float) -> str:
    """The time since a moment: 2 s ago, 3 min ago."""
    left = max(0, int(seconds))
    length, unit = next((u for u in _UNITS if left >= u[0]), _UNITS[-1])
    return f"{left // length} {unit} ago"


def until(seconds: float) -> str:
    """The time until a moment: in 3 h 20 min."""
    return f"in {duration(seconds)}"


def moment(value: datetime) -> str:
    """A time in UTC, shown without JavaScript: 2026-01-01 12:00:00 UTC."""
    return value.strftime("%Y-%m-%d %H:%M:%S UTC")


def ledger_line(epoch: EpochPublic) -> str:
    """The ledger of an epoch on one line: samples counted, missing and reassigned."""
    line = f"{count(epoch.samples - epoch.missing)} of {count(epoch.samples)} samples counted"
    twice = epoch.counted - (epoch.samples - epoch.missing)
    line += f", {count(twice)} more than once" if twice else " once"
    if epoch.missing:
        line += f", {count(epoch.missing)} missing"
    return f"{line}, {count(epoch.reassigned)} reassigned"


def polyline(values: Sequence[float]) -> str:
    """The points of a small curve in a box of 100 by 30, the highest value at the top."""
    low, high = min(values), max(values)
    last, height = max(1, len(values) - 1), (high - low) or 1
    return " ".join(f"{100 * n / last:.1f},{28 - 26 * (value - low) / height:.1f}" for n, value in enumerate(values))


def bars(values: Sequence[float]) -> str:
    """The path of bars in a box of 100 by 30, full height for 1."""
    width = 100 / max(1, len(values))
    tops = ((n * width, 30 - 30 * value) for n, value in enumerate(values))
    return "".join(f"M{left:.2f} 30V{top:.1f}h{width:.2f}V30Z" for left, top in tops)


def unit_of(spec: dict[str, Any]) -> str:
    """The name of a job's work unit: `micro-batch`, or `work unit` with strategy `local`."""
    return stored(spec).lease


def plural(unit: str) -> str:
    """The plural of a unit's name."""
    return f"{unit}es" if unit.endswith("ch") else f"{unit}s"


def told(event: EventPublic, names: dict[str, str], unit: str = "micro-batch", textual: bool = False) -> str:
    """A timeline entry as a sentence; `names` maps worker ids to names, `unit` is the job's `unit_of`; `textual`: the
    job trains a language model.
    """
    sentence = _SENTENCES.get(event.type)
    try:
        if sentence:
            return sentence(
                {"unit": unit, "textual": textual, **event.data}, lambda worker: names.get(worker) or worker
            )
    except (KeyError, TypeError, ValueError):
        pass  # written by another version: its type says enough
    return event.type.replace("_", " ").capitalize()


BRIEF = 200
"""The most characters of a text in the timeline."""
Data = dict[str, Any]
Name = Callable[[str], str]


def _created(data: Data, _name: Name) -> str:
    origin, by = data.get("forked_from"), f" by {data['by']}" if data.get("by") else ""
    if not origin:
        return f"Created{by}"
    state = "with its optimizer's state" if origin["optimizer"] == "kept" else "with a fresh optimizer"
    return f"Forked{by} from version {count(origin['version'])} of job {origin['job_id']}, {state}"


def _opened(data: Data, _name: Name) -> str:
    if data["restored"]:
        return f"Continued from version {count(data['version'])}, the last checkpoint"
    return f"First weights published, {count(data['parameters'])} parameters"


def _left(data: Data, name: Name) -> str:
    reason = re.sub(r"^the job is ", "job ", data["reason"])
    return f"{name(data['worker'])} left" + (f" ({reason})" if reason not in ("", "left") else "")


def _banned(data: Data, name: Name) -> str:
    return f"{name(data['worker'])} was banned after {data['strikes']} refused updates: {data['reason']}"


def _unfit(data: Data, name: Name) -> str:
    return f"{data['name'] or name(data['worker'])} cannot take part: {data['reason']}"


def _edited(data: Data, _name: Name) -> str:
    title = JobSpec.model_fields[data["field"]].title or data["field"]
    before, after = (_edit_text(data["field"], data[when]) for when in ("before", "after"))
    if not isinstance(after, str):
        return f"{title} changed from {before} to {after} by {data['by']}"
    if not after:
        return f'{title} "{brief(before)}" removed by {data["by"]}'
    how = f'changed from "{brief(before)}" to "{brief(after)}"' if before else f'set to "{brief(after)}"'
    return f"{title} {how} by {data['by']}"


def _edit_text(field: str, value: Any) -> Any:
    """A field's value before or after an edit, as text where it is a list."""
    if field in NEEDS:
        return ", ".join(need_texts(value))
    return ", ".join(value) if isinstance(value, list) else value


def brief(text: str) -> str:
    """A text on one line, cut after `BRIEF` characters."""
    line = " ".join(text.split())
    return line if len(line) <= BRIEF else line[: BRIEF - 1] + "…"


def _closed(data: Data, _name: Name) -> str:
    arrived = f"{count(data['received'])} of {count(data['total'])} {plural(data['unit'])}"
    return f"The round of version {count(data['version'] + 1)} closed at its deadline with {arrived}"


def _reassigned(data: Data, name: Name) -> str:
    path = f"from {name(data['from'])} to {name(data['to'])} after {data['after_ms'] / 1000:.1f} s"
    return f"{data['unit'].capitalize()} {count(data['micro_batch'])} went {path}"


def _placed(data: Data, _name: Name) -> str:
    chains, workers = data["chains"], data["workers"]
    if not chains:
        return "The stages have no workers: those that are there cannot hold them all"
    chain = f" in {count(chains)} chains" if chains > 1 else ""
    return f"Stages placed on {count(workers)} {'worker' if workers == 1 else 'workers'}{chain}"


def _version(data: Data, _name: Name) -> str:
    line = f"Version {count(data['version'])} committed, loss {loss(data['loss'])}"
    if doubled := data.get("doubled"):
        line += f"; {count(doubled)} {data['unit'] if doubled == 1 else plural(data['unit'])} given to a second worker"
    return line


def _recalled(data: Data, name: Name) -> str:
    reasons = {"priority": "has a higher priority", "share": "is below its share"}
    if reason := reasons.get(data["why"]):
        return f"Moving {name(data['worker'])} to job {data['to']}, which {reason}"
    return f"Releasing {name(data['worker'])}: {data['why']}"


def _refused(data: Data, name: Name) -> str:
    return f"Refused {data['unit']} {count(data['micro_batch'])} from {name(data['worker'])}: {data['reason']}"


def _suspected(data: Data, name: Name) -> str:
    what = {
        "asked": "is unlike the others: another machine computes it again",
        "confirmed": "was right: another machine computed the same",
        "alone": "is unlike the others, and no other machine of its kind is there to compute it again: it counts",
        "late": "is unlike the others, and no other machine has computed it again in time: it counts",
    }[data["outcome"]]
    return f"The update of {data['unit']} {count(data['micro_batch'])} from {name(data['worker'])} {what}"


def _scored(data: Data, _name: Name) -> str:
    told = score(data.get("accuracy"), data["loss"], data["textual"])
    parts = [f"Version {count(data['version'])} scored {told}"]
    if data.get("accuracy") is not None:
        parts.append(f"loss {loss(data['loss'])}")
    return ", ".join([*parts, *_own(data)])


def _own(data: Data) -> list[str]:
    """A recipe's own metrics of a score."""
    return [f"{name} {loss(value)}" for name, value in (data.get("own_metrics") or {}).items()]


def _tested(data: Data, _name: Name) -> str:
    told = ", ".join([tested(OnTestSet.model_validate(data)), *_own(data)])
    return f"Version {count(data['version'])} scored {told} on the test set"


_SENTENCES: dict[str, Callable[[Data, Name], str]] = {
    "created": _created,
    "version": _version,
    "chosen": lambda data, _: f"Chosen from measurements: {data['reason']}",
    "opened": _opened,
    "recovered": lambda data, _: f"Ledger completed from the checkpoint of version {count(data['version'])}",
    "went_back": lambda data, _: (
        f"The broker restarted at version {count(data['version'])} and lost the versions up to "
        f"{count(data['lost'])}: training them again"
    ),
    "reducer": lambda data, _: f"Reducer started on {data['host']} (PID {data['pid']})",
    "joined": lambda data, _: f"{data['name'] or data['worker']} joined with {data['device']}",
    "left": _left,
    "banned": _banned,
    "unfit": _unfit,
    "unbanned": lambda data, name: f"Ban of {name(data['worker'])} lifted by {data['by']}",
    "recalled": _recalled,
    "edited": _edited,
    "closed": _closed,
    "reassigned": _reassigned,
    "placed": _placed,
    "refused": _refused,
    "suspected": _suspected,
    "folded": lambda data, _: (
        f"{count(data['submissions'])} submissions are counted but not listed, because the control plane was away"
    ),
    "damaged": lambda data, _: f"The checkpoint of version {count(data['version'])} is damaged: {data['error']}",
    "unscored": lambda data, _: (
        f"Version {count(data['version'])} could not be scored, and is tried again every minute: {data['error']}"
    ),
    "mended": lambda data, _: (
        f"The broker's data of this job is unusable ({data['error']}): continuing from the last checkpoint"
    ),
    "doubted": lambda data, name: (
        f"{name(data['worker'])} read weights of version {count(data['version'])} that do not match their digest; "
        "updates computed on them are dropped"
    ),
    "republished": lambda data, _: (
        f"Version {count(data['version'])} was published again: the broker's copy was damaged"
    ),
    "checkpoint": lambda data, _: f"Checkpoint of version {count(data['version'])}, {size(data['bytes'])}",
    "scored": _scored,
    "tested": _tested,
    "stopped": lambda data, _: f"Stopping early: {data['reason']}",
    "failed": lambda data, _: "Failed: " + data["error"].partition("\n")[0],
    "cancelled": lambda data, _: data["reason"] or "Cancelled",
    "held": lambda data, _: f"Paused: {data['reason']}",
    "paused": lambda data, _: f"Paused by {data['by']}",
    "pausing": lambda data, _: f"Pause after this round requested by {data['by']}",
    "resumed": lambda data, _: f"Resumed by {data['by']}",
    "retried": lambda data, _: f"Retried by {data['by']}, from the last checkpoint",
}
