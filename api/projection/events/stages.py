"""Events about the stages of a model that is spread over workers: the split, who holds what, how busy they are."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from api.projection.events.job_projection import JobProjection
from api.projection.events.parser import StreamEvent, count_of, finite_of, name_of
from computeshare.strategies.base import MOST_STAGES

MOST_LAYERS, MOST_CHAINS = 1000, 4096
"""The most layers of a stage that are kept, and the most chains of workers."""
MOST_POINTS = 60
"""In the course of a stage; then each two neighbours become one, of twice as many micro-batches."""
COURSE = ("every", "points", "sum", "count")
SMOOTH = 0.2
"""Weight of the newest micro-batch in the share of the time that a worker is busy."""


def split(projection: JobProjection, event: StreamEvent) -> None:
    """The reducer has decided where the model is split."""
    stages = [
        {"layers": [name_of(layer) for layer in one["layers"][:MOST_LAYERS]], "parameters": count_of(one["parameters"])}
        for one in event.data["stages"][:MOST_STAGES]
    ]
    projection.state["stages"] = json.dumps({"stages": stages, "chains": [], "workers": {}, "courses": {}})


def placed(projection: JobProjection, event: StreamEvent) -> None:
    """The stages were given to other workers than before."""
    chains = [[_held(one) for one in chain[:MOST_STAGES]] for chain in event.data["chains"][:MOST_CHAINS]]
    known = _known(projection)
    holding = _holding(chains)
    known |= {"chains": chains, "workers": {w: about for w, about in known["workers"].items() if w in holding}}
    projection.state["stages"] = json.dumps(known)
    projection.add_event(
        event, {"number": count_of(event.data["number"]), "chains": len(chains), "workers": len(holding)}
    )


def computed(
    projection: JobProjection, leader: str, shares: Sequence[Mapping[str, Any]], seconds: float, at_ms: int
) -> None:
    """A chain of workers computed a micro-batch in so many seconds; a worker that holds no stage is not counted."""
    known = _known(projection)
    holding, courses = _holding(known["chains"]), known.setdefault("courses", {})
    for share in shares[:MOST_STAGES]:
        worker, busy_s = name_of(share["worker"]), finite_of(share["busy_s"])
        if worker not in holding:
            continue
        busy = min(1.0, busy_s / seconds) if seconds > 0 else 0.0
        before = known["workers"].get(worker, {"busy": busy})["busy"]
        memory, mail = count_of(share["memory_bytes"]), count_of(share["mail_bytes"])
        now = {"busy": before + SMOOTH * (busy - before), "memory_bytes": memory, "mail_bytes": mail}
        known["workers"][worker] = now
        run = _held(share)
        for stage in range(run["first"], run["stop"]):
            courses[str(stage)] = extended(courses.get(str(stage)), busy)
        row = projection.worker_row(worker)
        row["accepted"] += worker != leader
        row["seen_ms"], row["memory_bytes"] = max(row["seen_ms"], at_ms), memory or row.get("memory_bytes")
    projection.state["stages"] = json.dumps(known)


def chains_by_leader(projection: JobProjection) -> dict[str, list[dict[str, Any]]]:
    """The chains of workers that hold the stages now; none if the model is not spread over workers."""
    chains = _known(projection)["chains"] if projection.state["stages"] else []
    return {chain[0]["worker"]: chain for chain in chains if chain}


def credited(chains: Mapping[str, Sequence[Mapping[str, Any]]], worker: str, samples: int) -> dict[str, int]:
    """How many of a unit's samples count for each worker of the chain that `worker` leads, by the number of its stages,
    which take about the same time each; all of them for `worker` if it leads none.
    """
    chain = chains.get(worker)
    if chain is None:
        return {worker: samples}
    stages = chain[-1]["stop"]
    return {one["worker"]: samples * one["stop"] // stages - samples * one["first"] // stages for one in chain}


def extended(course: dict[str, Any] | None, busy: float) -> dict[str, Any]:
    """A stage's course with another micro-batch: `points` are means of the shares of time in which it was busy, each of
    `every` micro-batches in a row; `sum` and `count` are of those of the next point.
    """
    every, points, total, count = (course[name] for name in COURSE) if course else (1, [], 0.0, 0)
    total, count = total + busy, count + 1
    if count == every:
        points, total, count = [*points, round(total / every, 3)], 0.0, 0
    if len(points) == MOST_POINTS:
        pairs = zip(points[::2], points[1::2], strict=True)
        every, points = 2 * every, [round((one + other) / 2, 3) for one, other in pairs]
    return dict(zip(COURSE, (every, points, total, count), strict=True))


def _known(projection: JobProjection) -> dict[str, Any]:
    known: dict[str, Any] = json.loads(projection.state["stages"] or '{"stages": [], "chains": [], "workers": {}}')
    return known


def _holding(chains: Sequence[Sequence[Mapping[str, Any]]]) -> set[str]:
    return {one["worker"] for chain in chains for one in chain}


def _held(one: Mapping[str, Any]) -> dict[str, Any]:
    first, stop = count_of(one["first"]), count_of(one["stop"])
    if not first < stop <= MOST_STAGES:
        raise ValueError("no run of stages")
    return {"worker": name_of(one["worker"]), "first": first, "stop": stop}
