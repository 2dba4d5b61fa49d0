"""Reads the weights that a job's workers have published, where the strategy has peers."""

import math
from dataclasses import dataclass

from redis import Redis

from computeshare.protocol.channel import Channel, pairs
from computeshare.protocol.keys import JobKeys
from computeshare.types import Message


@dataclass(frozen=True, slots=True)
class Published:
    """A peer's newest published weights."""

    token: str
    """The version from which they are a difference."""
    units: int
    """Units that the peer has made so far."""
    loss: float
    """Mean loss of the last unit."""

    @classmethod
    def parse(cls, entry: bytes) -> "Published | None":
        """Parse the broker's entry; None: no script has written it."""
        try:
            token, units, loss, _ = entry.decode().split("|")
            found = cls(token, int(units), float(loss))
        except ValueError:
            return None
        return found if math.isfinite(found.loss) else None


class PeerWeights:
    """The published weights of a job's other workers, over connections of its own."""

    def __init__(self, redis: Redis, job_id: str, worker: str) -> None:
        self._channel, self._keys, self._worker = Channel(redis), JobKeys(job_id), worker

    def others(self) -> dict[str, Published]:
        """Each other worker that takes part and has published weights."""
        entries = pairs(self._channel.exchange([["HGETALL", self._keys.peers()]])[0])
        found = {worker.decode(): Published.parse(entry) for worker, entry in entries if len(entry) < 200}
        return {worker: entry for worker, entry in found.items() if entry and worker != self._worker}

    def read(self, worker: str, parts: int) -> tuple[Published, Message] | None:
        """A worker's newest weights: what is known of them, and their message. None: they are gone."""
        asked = [["HGET", self._keys.peers(), worker], ["HMGET", self._keys.peer(worker), *range(parts)]]
        *_, (entry, message) = self._channel.exchange([["MULTI"], *asked, ["EXEC"]], large=True)
        published = Published.parse(entry) if entry and len(entry) < 200 else None
        return (published, message) if published and None not in message else None
