"""A worker's side of the round protocol."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from redis import Redis

from computeshare.codecs.messages import seal
from computeshare.errors import Banned, Fenced, JobGone
from computeshare.protocol.channel import Channel, Messages, pairs
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import leave, numbers_in
from computeshare.protocol.scripts import Scripts
from computeshare.protocol.version_chain import route
from computeshare.runtime.failpoints import armed, failpoint
from computeshare.transport.commands import Command
from computeshare.transport.connections import BLOCK_MS
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Message

Update = tuple[int, Message, float]
"""A micro-batch, the message of its update, without the parts that were staged before; its loss."""
STAGED_S = 600
"""Seconds that a staged message is kept."""
PROBED_S = 60
HANDED_S = 86_400
"""Seconds that an inner state which was handed over is kept."""
EXTENDED_MS = 5000
"""What a lease has left at least, each time that its worker is heard of."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request for a lease: micro-batches to compute on `token`, or what to do instead."""

    answer: str
    token: str
    ask_again_ms: int
    micro_batches: tuple[int, ...]
    sizes: tuple[int, ...] = ()
    """Of the round's units, where they are not as the job's plan has them (`Plan.micro_batches`)."""
    weights: tuple[Blob, ...] = ()
    """Those of `token`, or their difference from those of the version named: to be loaded first."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait for the next version, whose weights are to come with the news of it."""

    timeout_ms: int
    parts: int
    """Of which a version's weights consist."""
    meanwhile: Callable[[], object] | None = None
    """What there is to do before, once the request for it is sent with a submission."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a submission."""

    outcome: str
    token: str
    status: str
    before: str
    """The answer that the same nonce has had before; empty: none."""
    grant: Grant | None = None
    """The lease that was asked for in the same exchange."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Messages that lead to a version: whole weights to begin with (none: those at hand), then differences."""

    whole: Sequence[Blob] | None
    deltas: Sequence[Sequence[Blob]]


class Member:
    """One worker's session in one job."""

    def __init__(self, redis: Redis, job_id: str, worker_id: str, session: str, wires: Wires | None = None) -> None:
        """`wires`: what leases, updates and weights travel over; one thread alone may ask for those then."""
        self.redis = redis
        self.keys = JobKeys(job_id)
        self.worker_id = worker_id
        self.session = session
        self._scripts = Scripts(redis)
        self._channel = Channel(redis, wires)
        self._last_id = "0-0"

    def join(self, seat: str, about: dict[str, Any]) -> str:
        """Begin the session; returns the job's status, or `unopened`, or `banned`.

        Raises Fenced: this worker was given no seat, or another one meanwhile.
        """
        status, last_id = self._scripts.call(
            "join", self.keys, worker=self.worker_id, session=self.session, seat=seat, event=json.dumps(about)
        )
        self._last_id = last_id.decode()
        if status == b"fenced":
            raise Fenced(f"worker {self.worker_id} has been given another seat than {seat}")
        return str(status.decode())

    def put_probe(self, data: Blob) -> None:
        """Send bytes that mean nothing, to see how long that takes."""
        self._channel.exchange([["SET", self.keys.probe(self.session), data, "EX", PROBED_S]])

    def take_probe(self) -> None:
        """Get them back, and delete them."""
        self._channel.exchange([["GET", self.keys.probe(self.session)]])
        self._channel.exchange([["UNLINK", self.keys.probe(self.session)]])

    def report(self, measured: str) -> None:
        """Tell what was measured (JSON)."""
        self._channel.exchange([["HSET", self.keys.measured(), self.worker_id, measured]])

    def leave(self, reason: str) -> None:
        """End the session and hand its leases back; does nothing if it has ended."""
        failpoint("in_leave")
        leave(self._scripts, self.keys, self.worker_id, self.session, reason)

    def extend(self, micro_batches: Sequence[int], nonce: str = "") -> str:
        """Keep the leases on these a while longer, and what was staged of them; any thread may.

        Args:
            nonce: that of the submission that they are staged for; empty: nothing is.
        Returns: the job's status, `lost` where others have done or got all of them, `gone`, or `fenced`.
        """
        status = self._scripts.call(
            "extend",
            self.keys,
            staged_keys=[self._staged(nonce, m) for m in micro_batches] if nonce else (),
            worker=self.worker_id,
            session=self.session,
            least_ms=EXTENDED_MS,
            staged_s=STAGED_S,
            micro_batches=micro_batches,
        )
        return bytes(status).decode()

    def lease(self, token: str) -> Grant:
        """Ask for micro-batches of the round that starts from `token`. Raises Fenced, Banned, JobGone."""
        return self._granted(self._channel.exchange([self._lease(token)])[0])

    def pull(self, token: str, parts: int, into: Sequence[Blob] | None = None) -> tuple[list[Blob] | None, Grant]:
        """A version's weights (None if superseded by now) and a lease on its round, in one exchange.

        Args:
            parts: of which the weights consist.
            into: memory for each, of which what is returned are views; worth its while for large ones.
        """
        found, (reply,) = self._channel.read(self.keys.weights(token), parts, into, [self._lease(token)])
        return found, self._granted(reply)

    def follow(
        self, loaded: str, token: str, parts: int, into: Sequence[Blob] | None = None
    ) -> tuple[Pulled | None, Grant]:
        """As `pull`, where versions are published as differences: what leads from the version `loaded` to `token`.

        `into` is memory for the parts of the last difference.
        """
        k = self.keys
        others: list[Command] = [["LRANGE", k.chain(), 0, -1], ["HGET", k.round(), "snapshot"], self._lease(token)]
        newest, (chain, snapshot, reply) = self._channel.read(k.delta(token), parts, into, others)
        grant = self._granted(reply)
        way = route([one.decode() for one in chain], (snapshot or b"").decode(), loaded, token)
        if way is None:
            return None, grant
        keys = [k.weights(way.snapshot)] if way.snapshot else []
        keys += [k.delta(one) for one in way.deltas if one != token]
        found = [self._channel.read(key, parts)[0] for key in keys]
        found += [newest] if token in way.deltas else []
        messages = [message for message in found if message is not None]
        if len(messages) < len(found):
            return None, grant
        return Pulled(messages[0] if way.snapshot else None, messages[1:] if way.snapshot else messages), grant

    def doubt(self, token: str, again: bool) -> None:
        """Tell that the weights read do not match the digest in this token, and hand all leases back.

        Args:
            again: they were read twice; the reducer is asked to publish them again.
        """
        self._scripts.call(
            "doubt", self.keys, token=token, worker=self.worker_id, session=self.session, again=int(again)
        )

    def stage(self, nonce: str, micro_batch: int, index: int, part: Blob) -> None:
        """Send a part of an update ahead of the submission `nonce`; `extend` is to keep it until then."""
        key = self._staged(nonce, micro_batch)
        self._channel.exchange([["HSET", key, index, part], ["EXPIRE", key, STAGED_S]], large=True)

    def unstage(self, nonce: str, micro_batches: Iterable[int]) -> None:
        """Let go of what was sent ahead of the submission `nonce`, which is not to come."""
        self._channel.exchange([["UNLINK", *(self._staged(nonce, m) for m in micro_batches)]])

    def submit(
        self,
        token: str,
        nonce: str,
        updates: Sequence[Update],
        report: dict[str, Any],
        and_lease: bool = False,
        and_wait: Waiting | None = None,
    ) -> Receipt:
        """Stage the messages and submit them; safe to repeat with the same nonce.

        Args:
            token: the version the updates were computed on.
            report: what the job's page shows of it (bytes, seconds).
            and_lease: ask for a lease on the same version, too.
            and_wait: begin to wait for the next version; `waited` is to follow.
        """
        messages: Messages = {self._staged(nonce, m): parts for m, parts, _ in updates}
        failpoint("before_push")
        if armed("between_stage_and_submit"):
            self._channel.stage(messages, STAGED_S)
            failpoint("between_stage_and_submit")
            messages = {}
        submission = self._submission(token, nonce, updates, report)
        others = [self._lease(token)] if and_lease else []
        following = self._waiting(token, and_wait) if and_wait else []
        meanwhile = and_wait.meanwhile if and_wait else None
        (outcome, current, status, before), *granted = self._channel.run_staged(
            messages, STAGED_S, submission, *others, following=following, meanwhile=meanwhile
        )
        failpoint("after_push")
        grant = self._parsed(granted[0]) if granted else None
        return Receipt(outcome.decode(), current.decode(), status.decode(), before.decode(), grant)

    def hand_over(self, state: Sequence[Blob]) -> None:
        """Leave the inner state of this worker's replica to whoever joins next."""
        self._channel.stage({self.keys.inner(self.session): seal(state)}, HANDED_S)
        self._channel.exchange([["RPUSH", self.keys.handed(), self.session]])

    def take_over(self) -> Blob | None:
        """An inner state that another session has handed over, which nobody else gets then; None if there is none.

        Raises CodecError: it was damaged.
        """
        while (session := self._channel.exchange([["LPOP", self.keys.handed()]])[0]) is not None:
            key = self.keys.inner(session.decode())
            if state := self._channel.load_sealed(key):
                self._channel.exchange([["UNLINK", key]])
                return state
        return None

    def wait(self, timeout_ms: int = BLOCK_MS) -> str | None:
        """Block until something happened to the job, at most `timeout_ms`.

        Returns: the token of a version just published; None otherwise (ask for a lease to learn more).
        """
        return self._told(self._channel.exchange([self._blocked(timeout_ms)])[0])

    def wait_for(self, token: str, waiting: Waiting) -> Grant:
        """Block as `wait` does, then ask for a lease on `token`, the version loaded; or on the one right after it, with
        its weights, if there is one and they are small.
        """
        return self._next(token, self._channel.exchange(self._waiting(token, waiting)))

    def waited(self, token: str) -> Grant:
        """What `wait_for` returns, where `submit` has begun to wait."""
        return self._next(token, self._channel.rest())

    def _waiting(self, token: str, waiting: Waiting) -> list[Command]:
        news: Command = ["HMGET", self.keys.news(token), *range(waiting.parts)]
        return [self._blocked(waiting.timeout_ms), ["MULTI"], self._lease(token, and_news=True), news, ["EXEC"]]

    def _next(self, token: str, replies: list[Any]) -> Grant:
        self._told(replies[0])
        reply, weights = replies[-1]
        grant = self._granted(reply)
        is_next = grant.answer in ("leased", "wait") and grant.token != token
        return replace(grant, weights=tuple(weights)) if is_next else grant

    def _blocked(self, timeout_ms: int) -> Command:
        block = max(1, min(timeout_ms, BLOCK_MS))
        return ["XREAD", "BLOCK", block, "STREAMS", self.keys.versions(), self._last_id]

    def _told(self, reply: Any) -> str | None:
        """The token of the version that was just published, if that is what happened."""
        if not reply:
            return None
        entries = reply if isinstance(reply, list) else [*reply.items()]
        last_id, fields = entries[0][1][-1]
        self._last_id = last_id.decode()
        told = dict(pairs(fields))
        return told[b"token"].decode() if b"token" in told else None

    def _staged(self, nonce: str, micro_batch: int) -> str:
        return self.keys.staged(f"{nonce}:{micro_batch}")

    def _submission(self, token: str, nonce: str, updates: Sequence[Update], report: dict[str, Any]) -> Command:
        about = {"micro_batches": [micro_batch for micro_batch, _, _ in updates], **report}
        return self._channel.script(
            "submit",
            self.keys,
            staged_keys=[self._staged(nonce, micro_batch) for micro_batch, _, _ in updates],
            update_keys=[self.keys.update(token, micro_batch) for micro_batch, _, _ in updates],
            token=token,
            worker=self.worker_id,
            session=self.session,
            nonce=nonce,
            event=json.dumps(about, separators=(",", ":")),
            parts=len(updates[0][1]),
            micro_batches=[micro_batch for micro_batch, _, _ in updates],
            losses=[loss for _, _, loss in updates],
        )

    def _lease(self, token: str, and_news: bool = False) -> Command:
        return self._channel.script(
            "lease",
            self.keys,
            news_key=self.keys.news(token),
            token=token,
            worker=self.worker_id,
            session=self.session,
            and_news=int(and_news),
        )

    @staticmethod
    def _parsed(reply: list[Any]) -> Grant:
        answer, token, ask_again_ms, *more = reply
        sizes = numbers_in(more[0].decode()) if more else ()
        return Grant(answer.decode(), token.decode(), ask_again_ms, tuple(int(unit) for unit in more[1:]), sizes)

    def _granted(self, reply: list[Any]) -> Grant:
        grant = self._parsed(reply)
        if grant.answer == "banned":
            raise Banned(f"worker {self.worker_id} is banned from the job: too many of its updates were refused")
        if grant.answer == "fenced":
            raise Fenced(f"a newer session of worker {self.worker_id} has taken over")
        if grant.answer == "gone":
            raise JobGone(f"job {self.keys.job_id} is not open")
        return grant
