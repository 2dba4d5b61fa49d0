"""What is promised of every schedule: the journal replays the event stream beside the scheduler's own knowledge."""

import json
from typing import Any

from redis import Redis

from computeshare.keys import JobKeys
from computeshare.rounds import Grant, Receipt
from computeshare.rounds.claim import BANNING_STRIKES
from computeshare.types import Token
from tests.simulation.model import Weights, following, update


class Journal:
    """Knows what each answer must have been; every violation is an AssertionError that says which promise broke."""

    def __init__(self, redis: Redis, keys: JobKeys) -> None:
        self.redis, self.keys = redis, keys
        self.history: dict[str, Weights] = {}  # every version ever published, by its token
        self.fence = 0
        self.forget()

    def forget(self) -> None:
        """The broker lost everything; what was published before can no longer be current."""
        self.token: Token | None = None
        self.received: dict[int, str] = {}  # micro-batch of the current round to the worker it was counted from
        self.granted: set[tuple[str, str, int]] = set()  # session, token, micro-batch
        self.sessions: dict[str, str] = {}
        self.banned: set[str] = set()
        self.answered: set[str] = set()
        self.claimed_by: bytes | None = None
        self.stored_fence = 0  # what the broker remembers; `fence` is the highest there ever was
        self.last_id = "-"

    # What reducers did

    def claimed(self, fence: int, holder: bytes | None) -> None:
        if fence:
            assert fence > self.fence, f"fence {fence} was given after {self.fence}"
            assert self.claimed_by is None, f"claimed while {self.claimed_by!r} is active"
            self.fence = self.stored_fence = fence
            self.claimed_by = holder
        else:
            assert self.claimed_by is not None, "a job without an active reducer could not be claimed"

    def lapsed(self) -> None:
        self.claimed_by = None

    def opened(self, done: bool, fence: int, token: Token, weights: Weights) -> None:
        assert done == (self.token is None and fence == self.stored_fence), (
            f"opening {token} under fence {fence}: {done}"
        )
        if done:
            assert str(token) not in self.history, f"{token} was published before"
            self.history[str(token)] = weights
            self.token = token
            self.received.clear()

    def committed(self, done: bool, fence: int, base: Token, token: Token, weights: Weights) -> None:
        expected = self.token == base and fence == self.fence
        assert done == expected, f"commit of {token} on {base} under {fence}: {done}, current {self.token}/{self.fence}"
        if not done:
            return
        planned = following(base.version)
        numbers = range(planned.first, planned.first + planned.count)
        assert sorted(self.received) == list(numbers), f"{token} counted {sorted(self.received)}, not {list(numbers)}"
        right = self.history[str(base)].step([update(str(base), m) for m in numbers])
        assert weights == right, f"{token} is no function of {base} and its round"
        self._check_event(base, token, weights)
        self.history[str(token)] = weights
        self.token = token
        self.received.clear()

    def refused(self, done: bool, fence: int, token: Token, micro_batch: int) -> None:
        expected = self.token == token and fence == self.fence and micro_batch in self.received
        assert done == expected, f"refusing {micro_batch} of {token} under fence {fence}: {done}"
        if done:
            del self.received[micro_batch]
        for kind, data in self.drain():
            if kind == "banned":
                assert done and data["strikes"] >= BANNING_STRIKES, f"banned after {data['strikes']} strikes"
                self.banned.add(data["worker"])
                self.left(data["worker"])

    def _check_event(self, base: Token, token: Token, weights: Weights) -> None:
        events = [data for kind, data in self.drain() if kind == "version"]
        assert len(events) == 1, f"{len(events)} events tell of {token}"
        assert (events[0]["base"], events[0]["token"]) == (str(base), str(token))
        assert events[0]["sha256"] == weights.sha256
        counted = {micro_batch: worker for micro_batch, worker, _ in events[0]["counted"]}
        assert len(events[0]["counted"]) == len(counted) and counted == self.received, f"the ledger of {token}"

    # What workers did

    def joined(self, worker: str, session: str) -> None:
        self.sessions[worker] = session

    def left(self, worker: str) -> None:
        self.sessions.pop(worker, None)

    def lease_expected(self, worker: str, session: str, token: str) -> str | None:
        """The answer a request for a lease must get, or None if it depends on what is left."""
        if self.token is None:
            return "gone"
        if following(self.token.version).count == 0:
            return "finished"
        if self.sessions.get(worker) != session:
            return "fenced"
        return "stale" if token != str(self.token) else None

    def leased(self, session: str, grant: Grant) -> None:
        assert grant.answer in ("leased", "wait") and self.token is not None
        planned = following(self.token.version)
        numbers = range(planned.first, planned.first + planned.count)
        assert len(set(grant.micro_batches)) == len(grant.micro_batches), f"leased twice in {grant}"
        for micro_batch in grant.micro_batches:
            assert micro_batch in numbers, f"{micro_batch} is not in the round of {grant.token}"
            assert micro_batch not in self.received, f"{micro_batch} was leased though it has been received"
            self.granted.add((session, grant.token, micro_batch))
        for kind, data in self.drain():
            if kind == "reassigned":
                assert data["micro_batch"] in grant.micro_batches
                assert data["backup"] or data["after_ms"] >= 2000, f"taken before it ran out: {data}"

    def submitted(
        self, worker: str, session: str, nonce: str, token: str, numbers: list[int], receipt: Receipt
    ) -> None:
        outcome = receipt.outcome
        if self.token is None:
            assert outcome == "gone", f"{outcome} for a job that is not open"
            return
        counted = self._counted(nonce, outcome)
        if nonce in self.answered:
            assert outcome == "duplicate", f"{outcome} for a nonce that was answered"
        elif self.sessions.get(worker) != session:
            assert outcome == "fenced", f"{outcome} for a session that is not the newest"
        elif token != str(self.token) or following(self.token.version).count == 0:
            assert outcome == "stale", f"{outcome} on {token} while {self.token} is current"
        else:
            assert outcome in ("accepted", "duplicate", "lease_lost"), outcome
            if outcome == "duplicate":
                assert set(numbers) & set(self.received), "called a duplicate of nothing"
        self.answered.add(nonce)
        assert bool(counted) == (outcome == "accepted"), f"{outcome} counted {counted}"
        for micro_batch in counted:
            assert micro_batch in numbers, f"{micro_batch} was counted without being sent"
            assert micro_batch not in self.received, f"{micro_batch} was counted twice"
            assert (session, token, micro_batch) in self.granted, f"{micro_batch} was counted without a lease"
            self.received[micro_batch] = worker

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
