"""Checks of the services that this machine reaches: broker, control plane and its workers."""

from email.utils import parsedate_to_datetime
from typing import Any

from redis.exceptions import RedisError

from computeshare.doctor.machine import Check, Surroundings
from computeshare.errors import ApiError, ComputeShareError, SettingsError
from computeshare.protocol.handshake import OURS, Release, disagreement
from computeshare.terminal.output import duration, how_to_help, size
from computeshare.worker.invite import last_joined

SKEW_S = 5.0
FULL, NEARLY = 0.97, 0.85
"""Fractions of the broker's memory: at FULL there is no room for a round, at NEARLY there soon will be none."""
_OLDEST_BROKER = (7, 0)  # PEXPIRE LT, users with keys that they only read


def broker(machine: Surroundings) -> Check:
    try:
        address = last_joined(machine.settings).shown
    except SettingsError:
        return Check(
            "broker",
            "warn",
            "no control plane is configured here",
            "start `computeshare up`, or set COMPUTESHARE_REDIS_URL",
        )
    try:
        found = machine.broker
    except (RedisError, OSError, ValueError, SettingsError) as error:
        advice = "start `computeshare up`, or look at COMPUTESHARE_REDIS_URL, the network and the password"
        return Check("broker", "fail", f"{address}: {error}", advice)
    info = found.info
    name = f"Valkey {info['valkey_version']}" if "valkey_version" in info else f"Redis {info.get('redis_version')}"
    told = f"{name} at {found.url}, answers in {1000 * found.answers_in_s:.1f} ms"
    version = tuple(int(part) for part in str(info.get("redis_version", "0")).split(".")[:2])
    if version < _OLDEST_BROKER:
        return Check("broker", "fail", told, "use Valkey, or Redis 7.0 or newer")
    return Check("broker", "ok", told)


def broker_memory(machine: Surroundings) -> Check:
    try:
        info = machine.broker.info
    except (SettingsError, RedisError, OSError, ValueError):
        return Check("broker memory", "warn", "cannot be looked at: no broker answers")
    used, most = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    if not most:
        told = (
            f"{size(used)} used, as much as its machine has"
            if used
            else "the gateway does not tell: nothing to do here"
        )
        return Check("broker memory", "ok", told)
    told = f"{size(used)} of {size(most)} used"
    if info.get("maxmemory_policy") != "noeviction":
        advice = "set maxmemory-policy noeviction: with any other, rounds vanish when memory is short"
        return Check("broker memory", "warn", told, advice)
    advice = "cancel or delete jobs, or give the broker more: CONFIG SET maxmemory"
    if used >= FULL * most:
        return Check("broker memory", "fail", f"{told}: it refuses whatever takes more", advice)
    if used >= NEARLY * most:
        return Check("broker memory", "warn", told, advice)
    return Check("broker memory", "ok", told)


def control_plane(machine: Surroundings) -> Check:
    try:
        document, _, _ = machine.readiness
    except SettingsError:
        return Check(
            "control plane",
            "warn",
            "no control plane is configured here",
            "start `computeshare up`, or set COMPUTESHARE_URL",
        )
    except ComputeShareError as error:
        return Check("control plane", "fail", str(error), "start `computeshare up`, or check COMPUTESHARE_URL")
    dependencies: dict[str, dict[str, Any]] = document.get("dependencies") or {}
    lacking = [f"{name}: {found.get('detail')}" for name, found in dependencies.items() if not found.get("ok")]
    if lacking or document.get("status") != "ready":
        return Check("control plane", "fail", "; ".join(lacking) or "not ready", "read its logs")
    return Check("control plane", "ok", f"{machine.client.url} is ready")


def token(machine: Surroundings) -> Check:
    try:
        next(machine.client.jobs(limit=1), None)
    except ApiError as error:
        if error.status not in (401, 403):
            return Check("token", "warn", f"cannot be checked: {error}")
        advice = (
            "set COMPUTESHARE_TOKEN to what `computeshare token` prints on the control plane's machine, or ask its "
            "owner for a token of your own"
        )
        return Check("token", "fail", str(error), advice)
    except ComputeShareError:
        return Check("token", "warn", "cannot be checked: no control plane answers")
    return Check("token", "ok", "is accepted")


def versions(machine: Surroundings) -> Check:
    """Whether this machine's release works with the control plane's, as told by the API or else by the broker."""
    try:
        said = machine.client.release()
        theirs = Release(str(said.get("version"))[:64], int(said.get("protocol", 0)))
    except (ComputeShareError, ValueError, TypeError) as error:
        found = _published(machine)
        if found is None and isinstance(error, ApiError) and error.status == 404:
            told = "the control plane does not report its version: it is older than this machine's release"
            return Check("versions", "warn", told, "upgrade the control plane")
        if found is None:
            return Check("versions", "warn", "cannot be compared: no control plane answers")
        theirs = found
    if problem := disagreement("client", OURS, theirs):
        finding, _, advice = problem.rpartition(": ")
        return Check("versions", "fail", finding, advice)
    return Check("versions", "ok", f"{theirs} there, {OURS.version} here")


def _published(machine: Surroundings) -> Release | None:
    try:
        return machine.broker.release
    except (SettingsError, RedisError, OSError, ValueError):
        return None


def clock(machine: Surroundings) -> Check:
    try:
        _, headers, now = machine.readiness
        skew_s = now - parsedate_to_datetime(headers["Date"]).timestamp() - 0.5  # the header has whole seconds
    except (ComputeShareError, KeyError, ValueError):
        return Check("clock", "warn", "cannot be compared: no control plane answers")
    if abs(skew_s) <= SKEW_S:
        return Check("clock", "ok", "agrees with the control plane's")
    found = f"{duration(abs(skew_s))} {'ahead of' if skew_s > 0 else 'behind'} the control plane's"
    return Check("clock", "warn", found, "training is not affected, but times shown here are wrong: set the clock")


def workers(machine: Surroundings) -> Check:
    """Whether every queue with jobs has a worker."""
    try:
        queues = machine.client.queues()
    except ComputeShareError:
        return Check("workers", "warn", "cannot be counted: no control plane answers")
    waiting = [queue for queue in queues if queue["queued"] + queue["running"] and not queue["workers"]]
    if waiting:
        told = ", ".join(f"{queue['name']} ({queue['queued'] + queue['running']})" for queue in waiting)
        advice = "; ".join(how_to_help(str(queue["name"])) for queue in waiting)
        return Check("workers", "warn", f"none is online for the jobs of queue {told}", f"start some: {advice}")
    online = ", ".join(f"{queue['workers']} on {queue['name']}" for queue in queues if queue["workers"])
    return Check("workers", "ok", online or "no job is waiting for a worker")
