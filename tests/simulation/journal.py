"""What is promised of every schedule: the journal replays the event stream beside the scheduler's own knowledge."""

import copy
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from redis import Redis

from computeshare.jobspec.quorum import largest_share
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.refusal import BANNING_STRIKES, Received
from computeshare.protocol.worker_session import Grant, Receipt
from computeshare.types import Token
from tests.simulation.model import ROUNDS, Version, Weights, following, update, waits_for_all


@dataclass
class Held:
    """What the broker must hold at a moment; it goes with it, and comes back with it."""

    delay: bool = False
    token: Token | None = None
    before: Token | None = None  # with a delay, the version before
    carried: tuple[int, ...] = ()
    closed: bool = False
    received: dict[int, Received] = field(default_factory=dict)
    early: dict[int, Received] = field(default_factory=dict)  # of the next round
    granted: set[tuple[str, str, int]] = field(default_factory=set)  # session, token, micro-batch
    sessions: dict[str, str] = field(default_factory=dict)
    banned: set[str] = field(default_factory=set)
    strikes: dict[str, int] = field(default_factory=dict)
    struck: set[str] = field(default_factory=set)  # nonces
    suspects: dict[int, set[str]] = field(default_factory=dict)  # micro-batch to workers
    forgivable: dict[tuple[int, str], int] = field(default_factory=dict)  # of micro-batch and worker: strikes
    answered: set[str] = field(default_factory=set)
    claimed_by: bytes | None = None
    fence: int = 0

    @property
    def round(self) -> Round:
        assert self.token is not None
        return following(self.token.version, self.carried, self.delay)

    @property
    def units(self) -> list[int]:
        """All that may be leased: of this round, and of those ahead."""
        after = self.round.first + self.round.count
        return [*self.round.units, *range(after, after + self.round.ahead)]

    def base_of(self, micro_batch: int) -> str:
        """The version that a micro-batch's update is to be computed on."""
        is_early = micro_batch >= self.round.first + self.round.count
        return str(self.before if self.delay and self.before and not is_early else self.token)


class Journal:
    """Knows what each answer must have been; every violation is an AssertionError that says which promise broke."""

    def __init__(self, redis: Redis, keys: JobKeys, sharers: int = 0, delay: bool = False) -> None:
        self.redis, self.keys, self.sharers, self.delay = redis, keys, sharers, delay
        self.history: dict[str, Weights] = {}  # every version ever published, by its token
        self.made: dict[str, tuple[Token | None, tuple[int, ...]]] = {}  # by its token: base, what was counted
        self.closings: set[tuple[int, Token]] = set()  # fence and base of the rounds that were closed early
        self.highest_fence = 0
        self.told: Counter[tuple[str, str]] = Counter()  # worker and outcome of every submission that was answered
        self.accepted: dict[str, str] = {}  # by nonce: the worker, of those that nothing was refused of
        self.forget()

    def forget(self) -> None:
        """The broker lost everything; what was published before can no longer be current."""
        self.held = Held(self.delay)
        self.last_id = "-"

    def remember(self) -> Held:
        """What the broker holds now, to go back to."""
        return copy.deepcopy(self.held)

    def go_back(self, held: Held) -> None:
        """The broker went back to an earlier state of its keys."""
        self.held = copy.deepcopy(held)
        self.last_id = "-"
        self.drain()

    # What reducers did

    def claimed(self, fence: int, holder: bytes | None) -> None:
        if fence:
            assert fence > self.highest_fence, f"fence {fence} was given after {self.highest_fence}"
            assert self.held.claimed_by is None, f"claimed while {self.held.claimed_by!r} is active"
            self.highest_fence = self.held.fence = fence
            self.held.claimed_by = holder
        else:
            assert self.held.claimed_by is not None, "a job without an active reducer could not be claimed"

    def lapsed(self) -> None:
        self.held.claimed_by = None

    def opened(
        self, done: bool, fence: int, version: Version, restored: Token | None, before: Token | None = None
    ) -> None:
        token = version.token
        assert done == (self.held.token is None and fence == self.held.fence), f"opening {token} under {fence}: {done}"
        if done:
            assert str(token) not in self.history, f"{token} was published before"
            self._publish(version, restored, (), before)

    def discarded(self, done: bool, fence: int, token: Token) -> None:
        assert done == self._may(fence, token), f"giving up {token} under fence {fence}: {done}"
        if done:
            held = self.held
            self.held = Held(self.delay, claimed_by=held.claimed_by, fence=held.fence, answered=held.answered)
            self.held.sessions, self.held.banned = held.sessions, held.banned
            self.held.strikes, self.held.struck = held.strikes, held.struck

    def closed_early(self, done: bool, fence: int, token: Token, enough: int) -> None:
        held = self.held
        expected = self._may(fence, token) and not held.closed and len(held.received) >= enough
        assert done == expected, f"closing {token} with {len(held.received)} of {enough} under fence {fence}: {done}"
        if done:
            assert not waits_for_all(token.version), f"the round of {token} closed early"
            held.closed = True
            self.closings.add((fence, token))

    def committed(
        self, done: bool, fence: int, base: Token, version: Version, parts: Sequence[Received], stored: Token
    ) -> None:
        """`stored`: the version whose state the reducer stored last."""
        held, token = self.held, version.token
        numbers = [part.micro_batch for part in parts]
        expected = self._may(fence, base) and held.received == {part.micro_batch: part for part in parts}
        expected = expected and bool(self.redis.exists(self.keys.state(str(stored))))
        assert done == expected, f"commit of {token} on {base} under {fence}: {done}, current {held.token}/{held.fence}"
        if not done:
            return
        missing = tuple(m for m in held.round.units if m not in numbers)
        assert set(numbers) <= set(held.round.units), f"{token} counted {numbers} of {held.round}"
        closed = held.closed or (fence, base) in self.closings  # by the one who commits, if the broker has forgotten it
        assert closed or not missing, f"{token} was made without {missing}, though its round was not closed"
        assert version.carried == missing, f"{token} carries {version.carried}, not {missing}"
        right = self.history[str(base)].step([update(held.base_of(m), m) for m in numbers])
        assert version.weights == right, f"{token} is no function of {base} and its round"
        self._check_event(base, version)
        self._publish(version, base, tuple(numbers), base)

    def refused(self, done: bool, fence: int, token: Token, part: Received, fault: str) -> None:
        held = self.held
        expected = self._may(fence, token) and held.received.get(part.micro_batch) == part
        assert done == expected, f"refusing {part} of {token} under fence {fence}: {done}"
        banned = [data for kind, data in self.drain() if kind == "banned"]
        if not done:
            assert not banned
            return
        if self.accepted.pop(part.nonce, None):
            self.told[part.worker, "accepted"] -= 1
            self.told[part.worker, "refused"] += 1
        del held.received[part.micro_batch]
        held.closed = False
        self.closings.discard((fence, token))
        due = self._strike(part, fault) and part.worker not in held.banned
        due = due and held.strikes[part.worker] >= BANNING_STRIKES
        assert [data["worker"] for data in banned] == ([part.worker] if due else []), f"{banned} for {held.strikes}"
        if due:
            held.banned.add(part.worker)
            self.left(part.worker)

    def pardoned(self, done: bool, worker: str) -> None:
        assert done == (worker in self.held.banned)
        if done:
            self.held.banned.discard(worker)
            self.held.strikes.pop(worker, None)

    def check_end(self) -> Token:
        """The last version is there, and each sample counted once on the way to it, whatever was restored meanwhile."""
        token = self.held.token
        assert token is not None and token.version == ROUNDS, f"finished at {token}"
        counted: list[int] = []
        step: Token | None = token
        while step is not None:
            step, numbers = self.made[str(step)]
            counted += numbers
        rounds = [following(version) for version in range(ROUNDS)]
        assert sorted(counted) == [m for one in rounds for m in one.units], f"the branch counted {counted}"
        return token

    def _may(self, fence: int, token: Token) -> bool:
        return self.held.token == token and fence == self.held.fence

    def _strike(self, part: Received, fault: str) -> bool:
        """Whether this refusal is a strike; those of workers that others agree with are taken back."""
        held, m = self.held, part.micro_batch
        strike = part.nonce not in held.struck
        if fault == "not_finite":
            held.suspects.setdefault(m, set()).add(part.worker)
            agreed = len(held.suspects[m]) > 1
            strike = strike and len(held.sessions) > 1 and not agreed
            if strike:
                held.forgivable[m, part.worker] = held.forgivable.get((m, part.worker), 0) + 1
            for worker in held.suspects[m] if agreed else ():
                held.strikes[worker] = held.strikes.get(worker, 0) - held.forgivable.pop((m, worker), 0)
        if strike:
            held.struck.add(part.nonce)
            held.strikes[part.worker] = held.strikes.get(part.worker, 0) + 1
        return strike

    def _publish(self, version: Version, base: Token | None, counted: tuple[int, ...], before: Token | None) -> None:
        held, token = self.held, version.token
        assert self.history.setdefault(str(token), version.weights) == version.weights
        self.made[str(token)] = (base, counted)
        held.token, held.before, held.carried, held.closed = token, before, version.carried, False
        held.granted = {one for one in held.granted if self.delay and one[2] not in counted}
        held.received, held.early = held.early, {}
        held.suspects.clear()
        held.forgivable.clear()

    def _check_event(self, base: Token, version: Version) -> None:
        events = [data for kind, data in self.drain() if kind == "version"]
        assert len(events) == 1, f"{len(events)} events tell of {version.token}"
        assert (events[0]["base"], events[0]["token"]) == (str(base), str(version.token))
        assert events[0]["sha256"] == version.weights.sha256 and tuple(events[0]["carried"]) == version.carried
        counted = {micro_batch: worker for micro_batch, worker, _ in events[0]["counted"]}
        right = {micro_batch: part.worker for micro_batch, part in self.held.received.items()}
        assert len(events[0]["counted"]) == len(counted) and counted == right, f"the ledger of {version.token}"

    # What workers did

    def joined(self, worker: str, session: str) -> None:
        self.held.sessions[worker] = session

    def left(self, worker: str) -> None:
        self.held.sessions.pop(worker, None)

    def lease_expected(self, worker: str, session: str, token: str) -> str | None:
        """The answer a request for a lease must get, or None if it depends on what is left."""
        held = self.held
        if held.token is None:
            return "gone"
        if held.round.count == 0:
            return "finished"
        if held.sessions.get(worker) != session:
            return "banned" if worker in held.banned else "fenced"
        if token != str(held.token) and not self.delay:
            return "stale"
        return "wait" if held.closed else None

    def leased(self, worker: str, session: str, grant: Grant) -> None:
        held = self.held
        assert grant.answer in ("leased", "wait") and held.token is not None
        assert len(set(grant.micro_batches)) == len(grant.micro_batches), f"leased twice in {grant}"
        begun = {micro_batch for _, token, micro_batch in held.granted if token == grant.token}
        for micro_batch in grant.micro_batches:
            assert micro_batch in held.units, f"{micro_batch} is not in the round of {held.token}"
            assert grant.token == held.base_of(micro_batch), f"{micro_batch} was leased on {grant.token}"
            is_there = micro_batch in held.received or micro_batch in held.early
            assert not is_there, f"{micro_batch} was leased though it has been received"
            held.granted.add((session, grant.token, micro_batch))
        fresh = set(grant.micro_batches) - begun - set(held.carried)
        left_over = set(held.carried) - begun - set(grant.micro_batches)
        assert not (fresh and left_over), f"{fresh} were leased before {left_over}, which were carried over"
        leased = set(grant.micro_batches) & set(held.round.units)
        mine = sum(part.worker == worker for part in held.received.values()) + len(leased)
        assert not leased or mine <= self._share(), f"{worker} may make {mine} of {held.round}"
        for kind, data in self.drain():
            if kind == "reassigned":
                assert data["micro_batch"] in grant.micro_batches
                assert data["after_ms"] >= 2000, f"taken before it ran out: {data}"

    def _share(self) -> int:
        total = self.held.round.total
        return largest_share(total, self.sharers) if self.sharers else total

    def submitted(
        self, worker: str, session: str, nonce: str, token: str, numbers: list[int], receipt: Receipt
    ) -> None:
        held, outcome = self.held, receipt.outcome
        if held.token is None:
            assert outcome == "gone", f"{outcome} for a job that is not open"
            return
        counted = self._counted(nonce, outcome)
        self.told[worker, outcome] += 1
        if outcome == "accepted":
            self.accepted[nonce] = worker
        if nonce in held.answered:
            assert outcome == "duplicate", f"{outcome} for a nonce that was answered"
        elif held.sessions.get(worker) != session:
            assert outcome == "fenced", f"{outcome} for a session that is not the newest"
        elif token not in self._recent() or held.round.count == 0:
            assert outcome == "stale", f"{outcome} on {token} while {held.token} is current"
        else:
            wrong = [m for m in numbers if token != held.base_of(m)]
            assert outcome in ("accepted", "duplicate", "lease_lost") or (outcome == "stale" and wrong), outcome
            assert outcome != "accepted" or not held.closed, f"{numbers} was taken by a closed round"
            if outcome == "duplicate":
                assert set(numbers) & {*held.received, *held.early}, "called a duplicate of nothing"
        held.answered.add(nonce)
        assert bool(counted) == (outcome == "accepted"), f"{outcome} counted {counted}"
        for micro_batch in counted:
            is_early = micro_batch not in held.round.units
            there, key = (held.early, self.keys.early()) if is_early else (held.received, self.keys.received())
            assert micro_batch in numbers, f"{micro_batch} was counted without being sent"
            assert micro_batch not in there, f"{micro_batch} was counted twice"
            assert (session, token, micro_batch) in held.granted, f"{micro_batch} was counted without a lease"
            entry: Any = self.redis.hget(key, str(micro_batch))
            part = there[micro_batch] = Received(micro_batch, **json.loads(entry), entry=entry)
            assert (part.worker, part.session, part.nonce) == (worker, session, nonce)
            assert part.base == token == held.base_of(micro_batch), f"{micro_batch} was counted on {token}"
        mine = sum(part.worker == worker for part in held.received.values())
        assert not counted or mine <= self._share(), f"{worker} made {mine} of {held.round}"

    def _recent(self) -> set[str]:
        """The versions on which an update may be computed."""
        return {str(self.held.token)} | ({str(self.held.before)} if self.delay and self.held.before else set())

    def _counted(self, nonce: str, outcome: str) -> list[int]:
        events = [data for kind, data in self.drain() if kind == "submission"]
        assert [(data["nonce"], data["outcome"]) for data in events] == [(nonce, outcome)], f"events {events}"
        return [int(micro_batch) for micro_batch in events[0]["counted"]]

    def drain(self) -> list[tuple[str, dict[str, Any]]]:
        """The events since the last call."""
        entries: Any = self.redis.xrange(self.keys.events(), min=self.last_id)
        if entries:
            self.last_id = "(" + entries[-1][0].decode()
        return [(fields[b"type"].decode(), json.loads(fields[b"data"])) for _, fields in entries]
