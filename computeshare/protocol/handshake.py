"""Checks that processes of ComputeShare are compatible: the control plane publishes its release, the others compare.

Scripts and keys change with the protocol: other processes could not read the submissions of a worker with another one.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare import __version__
from computeshare.errors import VersionError
from computeshare.protocol import keys

PROTOCOL = 22
"""Incremented with every change of keys, scripts, events or messages that an older process would not understand."""


@dataclass(frozen=True, slots=True)
class Release:
    """The package version of a process, and its protocol number (0: unknown)."""

    version: str
    protocol: int

    @property
    def series(self) -> tuple[int, ...]:
        """Major and minor version, which must be equal between processes; empty if `version` has another form."""
        match = re.match(r"(\d{1,9})\.(\d{1,9})(?!\d)", self.version)
        return tuple(map(int, match.groups())) if match else ()

    def __str__(self) -> str:
        return f"ComputeShare {self.version} (protocol {self.protocol or 'unknown'})"


OURS = Release(__version__, PROTOCOL)


def disagreement(who: str, theirs: Release, control: Release = OURS) -> str | None:
    """Why a process of kind `who` is incompatible with the control plane, and the fix; None if compatible. Pure."""
    if (theirs.protocol, theirs.series) == (control.protocol, control.series):
        return None
    older = (theirs.protocol, theirs.series) < (control.protocol, control.series)
    where = f"this {who}'s machine" if older else "the control plane's machine"
    again = "" if who == "client" else f", then start this {who} again"
    return (
        f"this {who} runs {theirs}, the control plane {control}: "
        f"upgrade {where}, there type git pull && make install{again}"
    )


def publish(redis: Redis) -> None:
    """Publish this control plane's release.

    First deletes the rounds that a control plane of another protocol left: their jobs continue from checkpoints, as if
    the broker had lost the rounds.
    """
    before = published(redis)
    if before and before.protocol != PROTOCOL:
        for key in redis.scan_iter(keys.ROUNDS, count=1000):
            if keys.is_fence(key.decode()):
                redis.incr(key)  # so that no reducer that has not noticed yet opens the job again
            elif not keys.outlives_rounds(key.decode()):
                redis.unlink(key)
    redis.set(keys.RELEASE, json.dumps({"version": OURS.version, "protocol": OURS.protocol}))


def published(redis: Redis) -> Release | None:
    """The release that a control plane published last; None if there is none, or an unreadable one."""
    raw: Any = redis.get(keys.RELEASE)
    try:
        said = json.loads(raw or b"")
        return Release(str(said["version"])[:64], int(said["protocol"]))
    except (ValueError, KeyError, TypeError):
        return None


def check(redis: Redis, who: str) -> None:
    """Raises VersionError: this process, of kind `who`, is incompatible with the control plane of this broker."""
    control = published(redis)
    if control and (problem := disagreement(who, OURS, control)):
        raise VersionError(problem)
