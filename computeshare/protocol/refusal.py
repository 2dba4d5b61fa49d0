"""Takes back accepted updates that failed the reducer's checks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

from redis import Redis

from computeshare.errors import DamagedRound
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.limits import ENTRY_BYTES
from computeshare.protocol.scripts import Scripts
from computeshare.types import Token, machine_of

BANNING_STRIKES = 5
"""Refused submissions of a machine, over all its workers, after which it is banned from the job."""

Fault = Literal["damaged", "not_finite", "lost"]
"""Why an update is refused: damaged by its sender, not finite (a strike unless others agree), or lost by the broker."""
DisputeOutcome = Literal["agreed", "over", "open"]
"""How a dispute ends: two machines sent the same, or nobody can tell; or it goes on, as the copy proved nothing."""


@dataclass(frozen=True, slots=True)
class Received:
    """An accepted submission's part for one micro-batch."""

    micro_batch: int
    worker: str
    session: str
    nonce: str
    base: str
    """Token of the version that the update was computed on."""
    loss: float
    size: int
    """Bytes of the update's message."""
    at: float
    """Time of arrival, in milliseconds since the epoch by the broker's clock."""
    entry: bytes = field(repr=False)
    """The raw JSON entry in Redis."""

    @classmethod
    def parse(cls, micro_batch: bytes, entry: bytes) -> Self:
        """Parse an entry. Raises DamagedRound: no script has written it."""
        try:
            if len(entry) > ENTRY_BYTES:
                raise ValueError(f"an entry of {len(entry)} bytes")
            found = cls(int(micro_batch), **json.loads(entry), entry=entry)
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedRound(f"what the round has received cannot be read: {str(error)[:200]}") from error
        texts, numbers = (found.worker, found.session, found.nonce, found.base), (found.loss, found.at)
        if not all(isinstance(one, str) for one in texts) or type(found.size) is not int or found.size < 0:
            raise DamagedRound("what the round has received names no worker, or no size")
        if not all(type(one) in (int, float) for one in numbers):
            raise DamagedRound("what the round has received has no loss, or no time")
        return found


@dataclass(frozen=True, slots=True)
class Suspicion:
    """How many machines sent non-finite values in a round."""

    machines: int
    """Machines that sent non-finite values for this micro-batch; -1 if the round had moved on."""
    times: int
    """How often this micro-batch was sent with non-finite values."""
    senders: int
    """Machines that sent non-finite values for any micro-batch of the round."""
    there: int
    """Machines in the job."""


@dataclass(frozen=True, slots=True)
class Dispute:
    """A unit that another machine of the same kind is to compute again, or has."""

    parties: Mapping[str, str]
    """The workers that computed it, each with its update's digest; empty once two machines sent the same."""
    copied: bool = False
    """Whether the update stays while another machine makes a copy, because it is suspected; else it was taken back."""
    left_ms: float = 0.0
    """Time left until any machine may compute it, and a suspected update counts without a copy."""

    @property
    def is_settled(self) -> bool:
        """Whether two machines sent the same."""
        return not self.parties


@dataclass(frozen=True, slots=True)
class AuditRecords:
    """A round's updates that a second machine computed as well, and what is known of the machines."""

    copies: Mapping[int, Received]
    """Unit to the second machine's update."""
    disputes: Mapping[int, Dispute]
    """Units that are to be computed again, or were."""
    kinds: Mapping[str, str]
    """Worker that has joined the job to the digest of its machine's kind."""
    present: frozenset[str]
    """The workers that are in the job now."""
    liars: Mapping[str, str]
    """Machine that an audit banned to the reason."""

    @classmethod
    def read(cls, redis: Redis, keys: JobKeys) -> Self:
        """Read the current round's. Raises DamagedRound."""
        pipeline = redis.pipeline(transaction=False)
        for key in (keys.copies(), keys.disputes(), keys.kinds(), keys.banned()):
            pipeline.hgetall(key)
        pipeline.hkeys(keys.sessions())
        pipeline.time()
        copies, disputes, kinds, banned, sessions, (seconds, micros) = pipeline.execute()
        now_ms = 1000 * seconds + micros / 1000
        return cls(
            {int(unit): Received.parse(unit, entry) for unit, entry in copies.items()},
            {int(unit): _dispute(about, now_ms) for unit, about in disputes.items()},
            {worker.decode(): kind.decode() for worker, kind in kinds.items()},
            frozenset(worker.decode() for worker in sessions),
            {machine_of(worker.decode()): why.decode() for worker, why in banned.items() if why.startswith(b"audit: ")},
        )


def _dispute(entry: bytes, now_ms: float) -> Dispute:
    try:
        about = json.loads(entry)
        return Dispute(dict(about["parties"]), about["copied"] is True, about["ends"] - now_ms)
    except (ValueError, TypeError, KeyError) as error:
        raise DamagedRound(f"a dispute of the round cannot be read: {str(error)[:200]}") from error


def refuse(
    scripts: Scripts, keys: JobKeys, fence: int, token: Token, part: Received, reason: str, fault: Fault
) -> Suspicion:
    """Take back an accepted micro-batch, as `ReducerSession.refuse`."""
    event: dict[str, Any] = {"worker": part.worker, "nonce": part.nonce, "base": str(token)}
    event |= {"micro_batch": part.micro_batch, "reason": reason}
    found = scripts.call(
        "refuse",
        keys,
        update_key=keys.update(part.base, part.micro_batch),
        token=str(token),
        fence=fence,
        micro_batch=part.micro_batch,
        worker=part.worker,
        event=json.dumps(event),
        fault=fault,
        banning_strikes=BANNING_STRIKES,
        reason=reason,
        nonce=part.nonce,
    )
    return Suspicion(*map(int, found))
