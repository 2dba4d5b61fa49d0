"""The live workers, by the broker's clock."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.host.rest_policy import UNKNOWN, Power
from computeshare.jobspec.machine_needs import MOST_LABELS, MachineFacts
from computeshare.protocol import keys
from computeshare.protocol.handshake import OURS, PROTOCOL, Release, disagreement
from computeshare.protocol.limits import RECORD_BYTES
from computeshare.types import plain

ALIVE_MS = 10_000
"""Milliseconds without a heartbeat after which a worker counts as dead."""
HEARTBEAT_S = 2.0
WORKER_ID = re.compile(r"[a-z0-9]{8,32}")
"""The form of a worker's id, which becomes part of Redis keys and of seats' ids."""


MOST_PACKAGES = 20
ALL_RECIPES = "*"
"""In place of digests: every recipe that the control plane has signed."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A worker's description of itself: name, device, queues and versions, as stored in Redis.

    `memory_bytes` is the memory that its device computes with: a GPU's own with CUDA, else the machine's.
    `last_seen_ms` is the time of its last heartbeat, by the broker's clock.
    """

    id: str
    name: str
    device: str
    queues: tuple[str, ...]
    versions: dict[str, str]
    memory_bytes: int
    host: str
    pid: int
    seat: str | None = None
    state: str = "idle"
    last_seen_ms: int = 0
    protocol: int = PROTOCOL
    """The protocol version that the worker speaks; 0 for a worker that does not tell."""
    resting: str = ""
    """Why the worker takes no seats at present, by its owner's settings; empty: it takes seats."""
    power: Power = UNKNOWN
    max_memory_bytes: int = 0
    """Its owner's limit on a seat's use of device memory; 0: no limit."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """Its owner's labels, such as `room` with the value `attic`; they stay until the worker is started again."""
    recipes: tuple[str, ...] = ()
    """The digests of the recipes that its owner lets run, or `ALL_RECIPES`."""
    confinement: str = ""
    """By what it confines recipes: a method's name, such as `landlock`, or `none`; empty: it runs none."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Recipes of packages installed there, by name, each with distribution and version: `mine 1.2.0`."""

    @property
    def machine(self) -> MachineFacts:
        """Facts to compare with a job's needs: the memory within the owner's limit, the device and the labels."""
        limit = self.max_memory_bytes or self.memory_bytes
        return MachineFacts(min(limit, self.memory_bytes), self.device, self.labels)

    @property
    def refusal(self) -> str | None:
        """Why a control plane of this version gives this worker no seat, and the remedy; None: it gives seats."""
        theirs = Release(self.versions.get("computeshare", OURS.version), self.protocol)
        return disagreement("worker", theirs)


def register(redis: Redis, worker: WorkerInfo) -> None:
    """Record that this worker is alive; repeated every `HEARTBEAT_S`, so that a broker that has lost its data recovers.

    Raises OutOfMemoryError: the broker has no room, and no earlier record of this worker.
    """
    values: dict[Any, str | int] = {
        "name": worker.name,
        "device": worker.device,
        "queues": json.dumps(worker.queues),
        "versions": json.dumps(worker.versions),
        "memory_bytes": worker.memory_bytes,
        "max_memory_bytes": worker.max_memory_bytes,
        "host": worker.host,
        "pid": worker.pid,
        "seat": worker.seat or "",
        "state": worker.state,
        "protocol": worker.protocol,
        "resting": worker.resting,
        "labels": json.dumps(dict(worker.labels)),
        "recipes": json.dumps(worker.recipes),
        "confinement": worker.confinement,
        "packages": json.dumps(dict(worker.packages)),
        "power": json.dumps({"plugged": worker.power.plugged, "percent": worker.power.percent}),
    }
    pipeline = redis.pipeline(transaction=True)
    pipeline.hset(keys.worker(worker.id), mapping=values)
    pipeline.pexpire(keys.worker(worker.id), ALIVE_MS)
    pipeline.sadd(keys.WORKERS, worker.id)
    try:
        pipeline.execute()
    except OutOfMemoryError:
        if not redis.pexpire(keys.worker(worker.id), ALIVE_MS):  # else the earlier record stays, and the worker alive
            raise


def unregister(redis: Redis, worker_id: str) -> None:
    """Delete a worker's record, so that it no longer counts as alive."""
    redis.delete(keys.worker(worker_id))


def list_workers(redis: Redis) -> list[WorkerInfo]:
    """The live workers, by id; dead workers are removed from the set."""
    members: Any = redis.smembers(keys.WORKERS)
    ids = sorted(bytes(member).decode(errors="replace") for member in members)
    pipeline = redis.pipeline(transaction=False)
    pipeline.time()
    for worker_id in ids:
        pipeline.hgetall(keys.worker(worker_id))
        pipeline.pttl(keys.worker(worker_id))
    (seconds, microseconds), *answers = pipeline.execute()
    now_ms = seconds * 1000 + microseconds // 1000
    workers, dead = [], []
    for worker_id, values, ttl in zip(ids, answers[::2], answers[1::2], strict=True):
        if ttl > ALIVE_MS or ttl == -1:  # the broker's clock was set back, or the worker set no limit
            redis.pexpire(keys.worker(worker_id), ALIVE_MS, lt=True)
        worker = _read(worker_id, values, now_ms - ALIVE_MS + max(0, ttl)) if values else None
        if worker:
            workers.append(worker)
        else:
            dead.append(worker_id)
    if dead:
        redis.srem(keys.WORKERS, *dead)
    return workers


def _read(worker_id: str, raw: dict[bytes, bytes], last_seen_ms: int) -> WorkerInfo | None:
    """A worker's record, with values cut to size; None if it is malformed (workers' data are not trusted)."""
    if not WORKER_ID.fullmatch(worker_id) or sum(map(len, raw.values())) > RECORD_BYTES:
        return None
    try:
        values = {name.decode(): value.decode()[:4000] for name, value in raw.items()}
        return WorkerInfo(
            id=worker_id,
            name=_short(values["name"], 100),
            device=_short(values["device"], 100),
            queues=tuple(_short(queue, 64) for queue in json.loads(values["queues"])),
            versions=_words(values["versions"]),
            memory_bytes=_whole(values["memory_bytes"]),
            host=_short(values["host"], 100),
            pid=_whole(values["pid"]),
            seat=_short(values["seat"], 100) or None,
            state=_short(values["state"], 32),
            last_seen_ms=last_seen_ms,
            protocol=_whole(values.get("protocol", "0")),
            resting=_short(values.get("resting", ""), 200),
            power=_power(values.get("power", "{}")),
            max_memory_bytes=_whole(values.get("max_memory_bytes", "0")),
            labels=_words(values.get("labels", "{}"), MOST_LABELS),
            packages=_words(values.get("packages", "{}"), MOST_PACKAGES),
            recipes=tuple(_short(one, 80) for one in json.loads(values.get("recipes", "[]"))),
            confinement=_short(values.get("confinement", ""), 32),
        )
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def _words(text: str, most: int | None = None) -> dict[str, str]:
    """The first `most` names with their texts in a JSON object, cut to size."""
    return {_short(name, 64): _short(value, 64) for name, value in list(json.loads(text).items())[:most]}


def _short(value: object, length: int) -> str:
    return plain(value)[:length]


def _whole(text: str) -> int:
    """An integer clamped to 0 to 2**53, which JSON and SQLite can represent. Raises ValueError."""
    return max(0, min(2**53, int(text)))


def _power(text: str) -> Power:
    """The power state in a JSON text; fields that make no sense are None."""
    said = json.loads(text)
    plugged, percent = said.get("plugged"), said.get("percent")
    is_percent = isinstance(percent, int | float) and not isinstance(percent, bool) and 0 <= percent <= 100
    return Power(plugged if isinstance(plugged, bool) else None, float(percent) if is_percent else None)
