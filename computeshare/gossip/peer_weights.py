"""Weights that peers have published: those of a job's workers, and those of processes with loops of their own."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

from redis import Redis

from computeshare.protocol import keys
from computeshare.protocol.channel import Channel, pairs, staging
from computeshare.protocol.keys import JobKeys
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Message

LONGEST_ENTRY = 200
LISTED_S = 0.5
"""For how long, in seconds, the list of peers is used: to read it before each exchange would cost the broker more, the
more peers there are."""
GROUP_S = 60
"""For how long, in seconds, a process of a group is read that publishes nothing more."""


@dataclass(frozen=True, slots=True)
class PublishedNotice:
    """A peer's description of its newest published weights."""

    token: str
    """The version from which they are a difference."""
    units: int
    """Units that the peer has made so far."""
    loss: float
    """Mean loss of the last unit."""
    at_ms: int
    """When they were published, in milliseconds since the epoch by the broker's clock."""

    def __str__(self) -> str:
        """As the broker holds it."""
        return f"{self.token}|{self.units}|{self.loss:.9g}|{self.at_ms}"

    @classmethod
    def parse(cls, entry: bytes) -> "PublishedNotice | None":
        """Parse the broker's entry; None: it is none."""
        try:
            token, units, loss, at_ms = entry[:LONGEST_ENTRY].decode().split("|")
            found = cls(token, int(units), float(loss), int(at_ms))
        except ValueError:
            return None
        return found if math.isfinite(found.loss) else None


class PeerWeights:
    """The published weights of other peers, over connections of its own."""

    def __init__(
        self, redis: Redis, peers_key: str, peer_key: Callable[[str], str], own: str, wires: Wires | None = None
    ) -> None:
        """`peers_key`, `peer_key`: as `JobKeys.peers` and `JobKeys.peer`; `own`: the peer that reads."""
        self._reading = Channel(redis, wires)
        self._peers_key, self._peer_key, self._own = peers_key, peer_key, own
        self._listed: dict[str, PublishedNotice] = {}
        self._listed_at = -math.inf

    @classmethod
    def of_job(cls, redis: Redis, job_id: str, worker: str, wires: Wires | None = None) -> Self:
        """Those of a job's workers."""
        job = JobKeys(job_id)
        return cls(redis, job.peers(), job.peer, worker, wires)

    def others(self) -> Mapping[str, PublishedNotice]:
        """Each other peer that has published weights and has not left; of `LISTED_S` ago, if there were any."""
        if not self._listed or time.monotonic() > self._listed_at + LISTED_S:
            self._listed, self._listed_at = self._list(), time.monotonic()
        return self._listed

    def read(self, worker: str, parts: int) -> tuple[PublishedNotice, Message] | None:
        """A peer's newest weights: what is known of them, and their message. None: they are gone."""
        asked = [["HGET", self._peers_key, worker], ["HMGET", self._peer_key(worker), *range(parts)]]
        *_, (entry, message) = self._reading.exchange([["MULTI"], *asked, ["EXEC"]], large=True)
        published = PublishedNotice.parse(entry) if entry else None
        return (published, message) if published and None not in message else None

    def _list(self) -> dict[str, PublishedNotice]:
        return self._others(self._reading.exchange([["HGETALL", self._peers_key]])[0])

    def _others(self, entries: Any) -> dict[str, PublishedNotice]:
        found = {name.decode(): PublishedNotice.parse(entry) for name, entry in pairs(entries)}
        return {name: published for name, published in found.items() if published and name != self._own}


class GroupWeights(PeerWeights):
    """Those of a group's processes, and this one's. `others` and `read` are for one thread, `publish` for another."""

    def __init__(self, redis: Redis, group: str, name: str) -> None:
        super().__init__(redis, keys.group_peers(group), partial(keys.group_peer, group), name)
        self._writing = Channel(redis)

    def publish(self, token: str, units: int, loss: float, message: Sequence[Blob]) -> None:
        """Replace this process's weights, at once for whoever reads them."""
        ((now_s, now_us),) = self._writing.exchange([["TIME"]])
        about = PublishedNotice(token, units, loss, 1000 * int(now_s) + int(now_us) // 1000)
        commands = [*staging(self._peer_key(self._own), message, GROUP_S)]
        commands += [["HSET", self._peers_key, self._own, str(about)], ["EXPIRE", self._peers_key, GROUP_S]]
        self._writing.exchange([["MULTI"], *commands, ["EXEC"]], large=True)

    def leave(self) -> None:
        """Remove this process's weights."""
        self._writing.exchange([["HDEL", self._peers_key, self._own], ["UNLINK", self._peer_key(self._own)]])

    def _list(self) -> dict[str, PublishedNotice]:
        """Without those that have published nothing lately."""
        entries, (now_s, _) = self._reading.exchange([["HGETALL", self._peers_key], ["TIME"]])
        oldest_ms = 1000 * (int(now_s) - GROUP_S)
        return {name: one for name, one in self._others(entries).items() if one.at_ms >= oldest_ms}
