"""A reducer's side of the round protocol: claim, open, gather, refuse, commit."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare.rounds.scripts import Argument
from computeshare.rounds.store import FIELDS, RoundState, RoundStore
from computeshare.sampling import Round
from computeshare.types import Token

BANNING_STRIKES = 5
"""A worker of which this many micro-batches were refused may not join the job any more."""
STAGED_S = 120
"""Seconds that weights may lie staged before they are committed."""


@dataclass(frozen=True, slots=True)
class Received:
    """An accepted submission's part for one micro-batch."""

    micro_batch: int
    worker: str
    session: str
    nonce: str
    loss: float


class Claim(RoundStore):
    """One job's rounds in the hands of one reducer; everything it does carries its fence."""

    def __init__(self, redis: Redis, job_id: str, reducer_id: str) -> None:
        super().__init__(redis, job_id)
        self.reducer_id = reducer_id
        self.fence = 0
        self._held = ""

    def claim(self, host: str, pid: int, life_ms: int) -> bool:
        """Become the job's active reducer, under a new fence; False while another is."""
        identity = f"{host}|{pid}|{self.reducer_id}"
        names = [self.keys.spec(), self.keys.reducer(), self.keys.fence(), self.keys.events()]
        self.fence = int(self.scripts.call("claim", names, [identity, life_ms, host, pid]))
        self._held = f"{self.fence}|{identity}"
        return self.fence > 0

    def renew(self, life_ms: int) -> bool:
        """Stay the active reducer; 0 gives the claim up. False if it was lost."""
        return bool(self.scripts.call("renew", [self.keys.reducer()], [self._held, life_ms]))

    def open(self, token: Token, weights: bytes, state: bytes, following: Round, event: dict[str, Any]) -> bool:
        """Publish the first weights, initial or restored; False if the job is open already (or gone)."""
        k = self.keys
        staged = [self._staged("weights"), self._staged("state")]
        self.redis.set(staged[0], weights, ex=STAGED_S)
        self.redis.set(staged[1], state, ex=STAGED_S)
        names = [k.round(), k.fence(), staged[0], k.weights(str(token)), staged[1], k.state(str(token))]
        names += [k.versions(), k.events(), k.spec()]
        arguments: list[Argument] = [
            self.fence,
            str(token),
            token.version,
            following.first,
            following.count,
            json.dumps(event),
        ]
        return bool(self.scripts.call("open", names, arguments))

    def progress(self) -> tuple[RoundState | None, dict[int, Received]]:
        """The current round, and its micro-batches that arrived so far, in one exchange."""
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.hmget(self.keys.round(), FIELDS)
        pipeline.hgetall(self.keys.received())
        values, entries = pipeline.execute()
        return RoundState.parse(values), {int(m): Received(int(m), **json.loads(e)) for m, e in entries.items()}

    def updates(self, token: Token, micro_batches: Sequence[int]) -> list[bytes | None]:
        """The blobs of accepted micro-batches, None for those that are gone."""
        blobs: Any = self.redis.mget([self.keys.update(str(token), m) for m in micro_batches])
        return list(blobs)

    def refuse(self, token: Token, part: Received, reason: str, not_finite: bool) -> tuple[int, int]:
        """Free a micro-batch whose blob failed the checks.

        Returns: the number of sessions that sent it not finite, and how often that happened; (-1, -1) if moved on.
        """
        k = self.keys
        event: dict[str, Any] = {"worker": part.worker, "nonce": part.nonce, "base": str(token)}
        event |= {"micro_batch": part.micro_batch, "reason": reason, "strike": not not_finite}
        names = [k.round(), k.fence(), k.received(), k.free(), k.update(str(token), part.micro_batch)]
        names += [k.strikes(), k.suspects(), k.versions(), k.events(), k.banned(), k.sessions()]
        names += [k.leases(), k.backups()]
        arguments: list[Argument] = [str(token), self.fence, part.micro_batch, part.worker, part.session]
        arguments += [json.dumps(event), int(not_finite), BANNING_STRIKES, reason, part.nonce]
        sessions, times = self.scripts.call("refuse", names, arguments)
        return int(sessions), int(times)

    def commit(self, base: RoundState, token: Token, weights: bytes, following: Round, event: dict[str, Any]) -> bool:
        """Publish the next version, once; False if the version or the fence had moved on.

        Args:
            base: the round that was reduced.
            following: the next round; its count is 0 after the last one.
        """
        k = self.keys
        staged = self._staged("weights")
        before = k.weights(str(base.base)) if base.base else k.staged("none")
        names = [k.round(), k.fence(), staged, k.weights(str(token)), before, k.leases(), k.backups(), k.received()]
        names += [k.free(), k.suspects(), k.versions(), k.events(), k.full()]
        arguments: list[Argument] = [
            str(base.token),
            str(token),
            self.fence,
            token.version,
            following.first,
            following.count,
        ]
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.set(staged, weights, ex=STAGED_S)
        self.scripts.queue(pipeline, "commit", names, [*arguments, json.dumps(event, separators=(",", ":"))])
        return bool(self.scripts.execute(pipeline)[-1])

    def store_state(self, base: RoundState, token: Token, state: bytes) -> bool:
        """Keep the state that goes with the current `token`; what it could be recomputed from is then dropped.

        Returns False, changing nothing, if the version or the fence had moved on.
        """
        k = self.keys
        staged = self._staged("state")
        drop = [k.update(str(base.token), m) for m in range(base.first, base.first + base.count)]
        pipeline = self.redis.pipeline(transaction=False)
        pipeline.set(staged, state, ex=STAGED_S)
        names = [k.fence(), k.round(), staged, k.state(str(token)), k.state(str(base.token)), *drop]
        self.scripts.queue(pipeline, "keep", names, [self.fence, str(token)])
        return bool(self.scripts.execute(pipeline)[-1])

    def _staged(self, what: str) -> str:
        """A key that no other reducer writes, whatever fence it believes to have."""
        return self.keys.staged(f"{self.reducer_id}:{self.fence}:{what}")

    def load(self, key: str) -> bytes | None:
        """The value of one of the job's keys."""
        blob: Any = self.redis.get(key)
        return blob if blob is None else bytes(blob)

    def announce(self, kind: str, event: dict[str, Any]) -> bool:
        """Append an event, unless another reducer has taken over."""
        return self.append(kind, event, str(self.fence))
