"""A simulated reducer: the steps of the real one, each of which can be its last."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

from redis import Redis

from computeshare.jobspec.quorum import needed
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.terms import Terms
from computeshare.types import Blob, Token
from tests.simulation.journal import Journal
from tests.simulation.model import (
    INITIAL,
    MAGIC,
    NOT_FINITE,
    PLAN,
    ROUNDS,
    Disk,
    Version,
    Weights,
    following,
    waits_for_all,
)

LIFE_MS = 600_000


@dataclass(frozen=True, slots=True)
class Reading:
    """A full or closed round as it was read."""

    base: RoundState
    parts: list[Received]
    blobs: list[bytes | None]


@dataclass(frozen=True, slots=True)
class Unsaved:
    """A version that was committed, its state not stored yet; `base` is the version whose state is stored, `counted`
    the updates since.
    """

    base: Token
    counted: Sequence[tuple[str, int]]
    token: Token
    weights: Weights


class SimReducer:
    """One reducer process; `crash` takes everything it knows."""

    def __init__(
        self,
        redis: Redis,
        job_id: str,
        name: str,
        disk: Disk,
        journal: Journal,
        rng: random.Random,
        quorum: float = 1.0,
    ) -> None:
        self.redis, self.job_id, self.name, self.disk, self.journal = redis, job_id, name, disk, journal
        self.rng, self.quorum = rng, quorum
        self.lives = 0
        self.crash()

    def crash(self) -> None:
        self.lives += 1
        self.reducer = ReducerSession(self.redis, self.job_id, f"{self.name}-{self.lives}")
        self.holds = False  # what it believes: another may have taken over
        self.current: Version | None = None
        self.reading: Reading | None = None
        self.unsaved: Unsaved | None = None

    def take(self) -> str:
        """Claim the job, unless this reducer believes that it holds it."""
        if self.holds:
            return f"renewed: {self.reducer.renew(LIFE_MS)}"
        self.holds = self.reducer.claim("host", 1, LIFE_MS)
        self.journal.claimed(self.reducer.fence, self.reducer.redis.get(self.reducer.keys.reducer()))
        return f"fence {self.reducer.fence}"

    def lose(self) -> str:
        """Let go, as the real one does once it notices that it lost its claim; late effects are left to `late`."""
        self.holds, self.current, self.reading = False, None, None
        return "lost the claim"

    def advance(self) -> str:
        """Whatever is due next: open, resume, read, commit or keep the state."""
        if not self.holds:
            return self.take()
        if self.reading or (self.unsaved and self.rng.random() < 0.5):
            return self.commit() if self.reading else self.store()
        state, parts = self.reducer.progress()
        if state is None or self.current is None:
            return self._open() if state is None else self._resume(state)
        if self.current.token != state.token:
            return self.lose()
        if state.count and (state.closed or len(parts) == state.total):
            return self._read(state, parts)
        return self._close(state)

    def fold(self) -> str:
        """Fold what waits for the control plane, if this reducer still may."""
        self.journal.drain()
        return f"folded {self.reducer.fold()}"

    def checkpoint(self) -> str:
        """Write the version this reducer holds to the disk; a late one may, for what it holds was committed."""
        if self.current and not self.unsaved:
            self.disk.checkpoints[self.current.token] = self.current
        return "checkpoint"

    def _open(self) -> str:
        saved = self.disk.newest()
        version, weights = (saved.token.version, saved.weights) if saved else (0, INITIAL)
        carried = saved.carried if saved else ()
        token = weights.token(self.disk.next_incarnation(), version)
        before = saved.before if saved and version < ROUNDS else b""
        earlier = Token(token.incarnation, version - 1, hashlib.sha256(before).hexdigest()[:16]) if before else None
        event = {"token": str(token), "version": version, "incarnation": token.incarnation, "sha256": weights.sha256}
        opened = self.reducer.open(
            token,
            [weights.weights],
            weights.dump(),
            self._following(version, carried),
            event,
            recent=2 if self.journal.delay else 1,
            terms=Terms(sharers=self.journal.sharers, delay=self.journal.delay),
            before=(earlier, [before]) if earlier else None,
        )
        current = Version(token, weights, carried, before)
        self.journal.opened(opened, self.reducer.fence, current, saved.token if saved else None, earlier)
        if not opened:
            return self.lose()
        self.current, self.unsaved = current, None
        return f"opened {token}"

    def _resume(self, state: RoundState) -> str:
        """Take over from what lies in Redis: weights and state, or what the state came from."""
        saved = self.disk.newest()
        if saved and saved.token.version > state.version:
            done = self.reducer.discard(state)
            self.journal.discarded(done, self.reducer.fence, state.token)
            return f"gave up {state.token}: {done}"
        weights, steps = self._load(state.token), self.reducer.steps()
        base = steps[0].base if steps else state.token
        stored = self.reducer.load_state(base)
        assert stored is not None, f"the state of {base} is gone though a takeover needs it"
        again = Weights.parse(bytes(stored))
        for step in steps:
            again = again.step([self._whole(blob) for blob in self._updates(step.counted)])
        assert again.weights == weights, f"replaying {len(steps)} steps to {state.token} gave other bits"
        before = self._load(state.base) if self.journal.delay and state.base else b""
        self.current = Version(state.token, again, state.carried, before)
        counted = [update for step in steps for update in step.counted]
        self.unsaved = Unsaved(base, counted, state.token, again) if steps else None
        return f"resumed {state.token} after {len(steps)} steps"

    def _following(self, version: int, carried: Sequence[int]) -> Round:
        return following(version, carried, self.journal.delay)

    def _load(self, token: Token) -> bytes:
        blob = _only(self.reducer.load(self.reducer.keys.weights(str(token))))
        assert blob is not None, f"the weights of {token} are gone though a takeover needs them"
        return blob

    def _updates(self, wanted: Sequence[tuple[str, int]]) -> list[bytes | None]:
        return [_only(message) for message in self.reducer.updates(wanted, range(1))]

    @staticmethod
    def _whole(blob: bytes | None) -> bytes:
        assert blob is not None and blob.startswith(MAGIC), f"a replay needs a whole update, found {blob!r}"
        return blob

    def _close(self, state: RoundState) -> str:
        """Let the round close without what is late, as if its deadline had passed."""
        if self.quorum == 1 or not state.count or waits_for_all(state.version) or self.rng.random() < 0.5:
            return "idle"
        enough = needed(state.total, self.quorum)
        closed = self.reducer.close(state.token, enough)
        self.journal.closed_early(closed, self.reducer.fence, state.token, enough)
        return f"closed with {enough} of {state.total}: {closed}"

    def _read(self, state: RoundState, parts: dict[int, Received]) -> str:
        numbers = sorted(parts)
        blobs = self._updates([(parts[m].base, m) for m in numbers])
        assert None not in blobs, f"a counted update of {state.token} is gone: {blobs}"
        self.reading = Reading(state, [parts[m] for m in numbers], blobs)
        return f"read {state.token}"

    def commit(self) -> str:
        """Check what was read, refuse what is damaged, else commit; the state is stored in a step of its own."""
        assert self.reading is not None and self.current is not None
        read, self.reading = self.reading, None
        bad = [(part, blob) for part, blob in zip(read.parts, read.blobs, strict=True) if not _valid(blob)]
        for part, blob in bad:
            fault = "not_finite" if blob == NOT_FINITE else "damaged"
            answer = self.reducer.refuse(read.base.token, part, "bad", fault)  # type: ignore[arg-type]
            self.journal.refused(answer.machines >= 0, self.reducer.fence, read.base.token, part, fault)
        if bad:
            return f"refused {[part.micro_batch for part, _ in bad]}"
        weights = self.current.weights.step([blob for blob in read.blobs if blob is not None])
        token = weights.token(read.base.token.incarnation, read.base.version + 1)
        counted = [(part.base, part.micro_batch) for part in read.parts]
        left = {*read.base.units} - {part.micro_batch for part in read.parts}
        carried = tuple(m for m in read.base.units if m in left)
        event = {"token": str(token), "version": token.version, "base": str(read.base.token), "carried": carried}
        event |= {"sha256": weights.sha256, "counted": [[p.micro_batch, p.worker, _size(p)] for p in read.parts]}
        before, self.unsaved = self.unsaved or Unsaved(read.base.token, (), token, weights), None
        done = self.reducer.commit(
            read.base,
            read.parts,
            token,
            [weights.weights],
            self._following(token.version, carried),
            event,
            stored=before.base,
        )
        current = Version(token, weights, carried, self.current.weights.weights if self.journal.delay else b"")
        self.journal.committed(done, self.reducer.fence, read.base.token, current, read.parts, before.base)
        if not done:
            return self.lose()
        self.current = current
        self.unsaved = Unsaved(before.base, [*before.counted, *counted], token, weights)
        return f"committed {token}, carrying {list(carried)}"

    def store(self) -> str:
        """Keep the state that goes with what was committed, however late."""
        if self.unsaved is None:
            return "nothing to store"
        unsaved, self.unsaved = self.unsaved, None
        self.reducer.store_state(unsaved.base, unsaved.counted, unsaved.token, unsaved.weights.dump())
        return f"stored the state of {unsaved.token}"


def _only(message: list[Blob] | None) -> bytes | None:
    """What a message of one part consists of."""
    if message is None:
        return None
    (part,) = message
    return bytes(part)


def _valid(blob: bytes | None) -> bool:
    return blob is not None and blob.startswith(MAGIC)


def _size(part: Received) -> int:
    return PLAN.size(part.micro_batch)
