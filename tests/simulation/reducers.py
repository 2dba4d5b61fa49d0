"""A simulated reducer: the steps of the real one, each of which can be its last."""

from dataclasses import dataclass

from redis import Redis

from computeshare.rounds import Claim, Received, RoundState
from computeshare.types import Token
from tests.simulation.journal import Journal
from tests.simulation.model import MAGIC, NOT_FINITE, PLAN, Disk, Weights, following

LIFE_MS = 600_000


@dataclass(frozen=True, slots=True)
class Reading:
    """A full round as it was read."""

    base: RoundState
    parts: list[Received]
    blobs: list[bytes | None]


class SimReducer:
    """One reducer process; `crash` takes everything it knows."""

    def __init__(self, redis: Redis, job_id: str, name: str, disk: Disk, journal: Journal) -> None:
        self.redis, self.job_id, self.name, self.disk, self.journal = redis, job_id, name, disk, journal
        self.lives = 0
        self.crash()

    def crash(self) -> None:
        self.lives += 1
        self.claim = Claim(self.redis, self.job_id, f"{self.name}-{self.lives}")
        self.holds = False  # what it believes: another may have taken over
        self.current: tuple[Token, Weights] | None = None
        self.reading: Reading | None = None
        self.unsaved: tuple[RoundState, Token, Weights] | None = None

    def take(self) -> str:
        """Claim the job, unless this reducer believes that it holds it."""
        if self.holds:
            return f"renewed: {self.claim.renew(LIFE_MS)}"
        self.holds = self.claim.claim("host", 1, LIFE_MS)
        self.journal.claimed(self.claim.fence, self.claim.load(self.claim.keys.reducer()))
        return f"fence {self.claim.fence}"

    def lose(self) -> str:
        """Let go, as the real one does once it notices that it lost its claim; late effects are left to `late`."""
        self.holds, self.current, self.reading = False, None, None
        return "lost the claim"

    def advance(self) -> str:
        """Whatever is due next: open, resume, read, commit or keep the state."""
        if not self.holds:
            return self.take()
        if self.unsaved or self.reading:
            return self.store() if self.unsaved else self.commit()
        state, parts = self.claim.progress()
        if state is None or self.current is None:
            return self._open() if state is None else self._resume(state)
        if self.current[0] != state.token:
            return self.lose()
        full = state.count > 0 and len(parts) == state.count
        return self._read(state, parts) if full else "idle"

    def checkpoint(self) -> str:
        """Write the version this reducer holds to the disk; a late one may, for what it holds was committed."""
        if self.current and not self.unsaved:
            self.disk.checkpoints[self.current[0]] = self.current[1]
        return "checkpoint"

    def _open(self) -> str:
        version, weights = self.disk.newest()
        token = weights.token(self.disk.next_incarnation(), version)
        event = {"token": str(token), "version": version, "incarnation": token.incarnation, "sha256": weights.sha256}
        opened = self.claim.open(token, weights.weights, weights.state, following(version), event)
        self.journal.opened(opened, self.claim.fence, token, weights)
        if not opened:
            return self.lose()
        self.current = (token, weights)
        return f"opened {token}"

    def _resume(self, state: RoundState) -> str:
        """Take over from what lies in Redis: weights and state, or what the state came from."""
        weights = self._load("weights", state.token)
        kept = self.claim.load(self.claim.keys.state(str(state.token)))
        if kept is None:
            assert state.base is not None, "a version without a state has a base"
            base = Weights(self._load("weights", state.base), self._load("state", state.base))
            planned = following(state.base.version)
            blobs = self.claim.updates(state.base, range(planned.first, planned.first + planned.count))
            again = base.step([self._whole(blob) for blob in blobs])
            assert again.weights == weights, f"replaying the step to {state.token} gave other bits"
            before = RoundState("running", state.base, None, planned.first, planned.count)
            self.current = (state.token, again)
            self.unsaved = (before, state.token, again)
            return f"replayed {state.token}"
        self.current = (state.token, Weights(weights, kept))
        return f"resumed {state.token}"

    def _load(self, kind: str, token: Token) -> bytes:
        name = self.claim.keys.weights if kind == "weights" else self.claim.keys.state
        blob = self.claim.load(name(str(token)))
        assert blob is not None, f"the {kind} of {token} are gone though a takeover needs them"
        return blob

    @staticmethod
    def _whole(blob: bytes | None) -> bytes:
        assert blob is not None and blob.startswith(MAGIC), f"a replay needs a whole update, found {blob!r}"
        return blob

    def _read(self, state: RoundState, parts: dict[int, Received]) -> str:
        numbers = range(state.first, state.first + state.count)
        assert sorted(parts) == list(numbers), f"received {sorted(parts)} in the round of {list(numbers)}"
        blobs = self.claim.updates(state.token, numbers)
        assert None not in blobs, f"a counted update of {state.token} is gone: {blobs}"
        self.reading = Reading(state, [parts[m] for m in numbers], blobs)
        return f"read {state.token}"

    def commit(self) -> str:
        """Check what was read, refuse what is damaged, else commit; the state is stored in a step of its own."""
        assert self.reading is not None and self.current is not None
        read, self.reading = self.reading, None
        bad = [(part, blob) for part, blob in zip(read.parts, read.blobs, strict=True) if not _valid(blob)]
        for part, blob in bad:
            answer = self.claim.refuse(read.base.token, part, "damaged", not_finite=blob == NOT_FINITE)
            self.journal.refused(answer != (-1, -1), self.claim.fence, read.base.token, part.micro_batch)
        if bad:
            return f"refused {[part.micro_batch for part, _ in bad]}"
        weights = self.current[1].step([blob for blob in read.blobs if blob is not None])
        token = weights.token(read.base.token.incarnation, read.base.version + 1)
        counted = [[part.micro_batch, part.worker, PLAN.size(part.micro_batch)] for part in read.parts]
        event = {"token": str(token), "version": token.version, "base": str(read.base.token)}
        event |= {"sha256": weights.sha256, "counted": counted}
        done = self.claim.commit(read.base, token, weights.weights, following(token.version), event)
        self.journal.committed(done, self.claim.fence, read.base.token, token, weights)
        if not done:
            return self.lose()
        self.current = (token, weights)
        self.unsaved = (read.base, token, weights)
        return f"committed {token}"

    def store(self) -> str:
        """Keep the state that goes with what was committed, however late."""
        if self.unsaved is None:
            return "nothing to store"
        base, token, weights = self.unsaved
        self.unsaved = None
        self.claim.store_state(base, token, weights.state)
        return f"stored the state of {token}"


def _valid(blob: bytes | None) -> bool:
    return blob is not None and blob.startswith(MAGIC)
