"""A worker's side of the round protocol."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from redis import Redis

from computeshare.codecs.messages import seal
from computeshare.errors import Banned, CodecError, Fenced, JobGone
from computeshare.protocol.channel import Channel, Messages, pairs
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import leave
from computeshare.protocol.scripts import Scripts
from computeshare.protocol.versions.chain import route
from computeshare.runtime.failpoints import armed, failpoint
from computeshare.transport.commands import Command
from computeshare.transport.connections import BLOCK_MS
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Message

Update = tuple[int, Message, float]
"""Micro-batch number, message of its update (None for parts staged earlier), and loss."""
STAGED_S = 600
"""Lifetime of a staged message, in seconds."""
PROBED_S, MEASURED_S = 60, 7 * 86_400
HANDED_S = 86_400
"""Lifetime of an inner state that a session handed over, in seconds."""
EXTENDED_MS = 5000
"""Minimum remaining life of a lease after `extend`, in milliseconds."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The answer to a request for a lease: micro-batches to compute on `token`, or why there are none."""

    answer: str
    token: str
    ask_again_ms: int
    micro_batches: tuple[int, ...]
    weights: tuple[Blob, ...] = ()
    """The weights of `token`, or their difference from the version loaded; to be loaded before computing."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How to wait for the next version and receive its weights in the same exchange."""

    timeout_ms: int
    parts: int
    """Number of parts of a version's weights."""
    meanwhile: Callable[[], object] | None = None
    """Called after the request was sent, before waiting for its reply."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """The answer to a submission."""

    outcome: str
    token: str
    status: str
    before: str
    """The outcome of an earlier submission with the same nonce; empty: none."""
    grant: Grant | None = None
    """The answer to the lease request sent in the same exchange, if any."""


@dataclass(frozen=True, slots=True)
class Pulled:
    """Messages that lead to a version: whole weights (None: start from the loaded weights), then differences to add."""

    whole: Sequence[Blob] | None
    deltas: Sequence[Sequence[Blob]]


@dataclass(frozen=True, slots=True)
class Draft:
    """Parts of the version after `token` that were read before its commit."""

    token: str = ""
    name: str = ""
    parts: Mapping[int, Blob] = field(default_factory=dict)
    bytes: int = 0
    """Of these parts and of those of drafts that were given up meanwhile."""

    def holds(self, part: Blob) -> bool:
        """Whether this is one of its parts, the same object."""
        return any(part is one for one in self.parts.values())


NO_DRAFT = Draft()


class WorkerSession:
    """One worker's session in one job."""

    def __init__(self, redis: Redis, job_id: str, worker_id: str, session_id: str, wires: Wires | None = None) -> None:
        """`wires`: connections for leases, updates and weights; only one thread may then use the methods for those."""
        self.redis = redis
        self.keys = JobKeys(job_id)
        self.worker_id = worker_id
        self.session_id = session_id
        self._scripts = Scripts(redis)
        self._channel = Channel(redis, wires)
        self._last_id = self._last_draft = "0-0"
        self.devices = 1
        """Number of units that this worker computes at once."""

    def join(self, seat: str, about: dict[str, Any], frozen: str = "") -> str:
        """Begin the session; returns the job's status, `unopened`, `banned`, `unlike`: this worker has built other
        untrained parameters than the job's, or `altered`: it joined before as a machine of another kind.

        Args:
            frozen: digest of the parameters that are not trained; empty: there are none.
        Raises Fenced: this worker has no seat, or a newer one than `seat`.
        """
        status, last_id = self._scripts.call(
            "join",
            self.keys,
            worker=self.worker_id,
            session=self.session_id,
            seat=seat,
            event=json.dumps(about),
            frozen=frozen,
        )
        self._last_id = last_id.decode()
        if status == b"fenced":
            raise Fenced(f"worker {self.worker_id} has been given another seat than {seat}")
        return str(status.decode())

    def put_probe(self, data: Blob) -> None:
        """Send arbitrary bytes, for the caller to time the upload."""
        self._channel.exchange([["SET", self.keys.probe(self.worker_id), data, "EX", PROBED_S]])

    def take_probe(self) -> None:
        """Read the bytes of `put_probe` back and delete them."""
        self._channel.exchange([["GET", self.keys.probe(self.worker_id)]])
        self._channel.exchange([["UNLINK", self.keys.probe(self.worker_id)]])

    def report(self, measured: str) -> None:
        """Store this worker's measurements (JSON)."""
        self._channel.exchange([["SET", self.keys.measured(self.worker_id), measured, "EX", MEASURED_S]])

    def leave(self, reason: str) -> None:
        """End the session and free its leases; does nothing if the session has ended."""
        failpoint("in_leave")
        leave(self._scripts, self.keys, self.worker_id, self.session_id, reason)

    def release(self, micro_batches: Sequence[int] = ()) -> None:
        """Hand back these leased micro-batches; by default all."""
        self._scripts.call("release", self.keys, session=self.session_id, micro_batches=micro_batches)

    def extend(self, micro_batches: Sequence[int], nonce: str = "") -> str:
        """Extend the leases on these micro-batches and the life of their staged messages. Safe from any thread.

        Args:
            nonce: nonce of the submission that messages are staged for; empty: none are staged.
        Returns: the job's status; `lost`: the session holds none of these leases any more; `gone`; or `fenced`.
        """
        status = self._scripts.call(
            "extend",
            self.keys,
            staged_keys=[self._staged(nonce, m) for m in micro_batches] if nonce else (),
            worker=self.worker_id,
            session=self.session_id,
            least_ms=EXTENDED_MS,
            staged_s=STAGED_S,
            micro_batches=micro_batches,
        )
        return bytes(status).decode()

    def current(self) -> str:
        """The token of the current version. Raises JobGone."""
        (found,) = self._channel.exchange([["HMGET", self.keys.round(), "token", "draft"]])
        if found[0] is None:
            raise JobGone("the job is gone")
        return bytes(found[0]).decode()

    def lease(self, token: str) -> Grant:
        """Ask for micro-batches of the round that starts from `token`. Raises Fenced, Banned, JobGone."""
        return self._granted(self._channel.exchange([self._lease(token)])[0])

    def pull(
        self, token: str, parts: int, into: Sequence[Blob] | None = None, draft: Draft = NO_DRAFT
    ) -> tuple[list[Blob] | None, Grant]:
        """Fetch a version's weights (None if they are gone) and a lease on its round, in one exchange.

        Args:
            parts: number of parts of the weights.
            into: a buffer for each part, to save copies of large weights; the returned parts are views of the buffers.
            draft: parts that were read before; these are read again unless the version was made of this draft.
        """
        found, (reply,) = self._read(self.keys.weights(token), token, parts, into, draft, [self._lease(token)])
        return found, self._granted(reply)

    def follow(
        self, loaded: str, token: str, parts: int, into: Sequence[Blob] | None = None, draft: Draft = NO_DRAFT
    ) -> tuple[Pulled | None, Grant]:
        """As `pull`, for versions published as differences: fetch the messages from version `loaded` to `token`.

        `into` holds a buffer for each part of the last difference, and `draft` parts of that one.
        """
        pulled, (reply,) = self._follow(loaded, token, parts, into, [self._lease(token)], draft)
        return pulled, self._granted(reply)

    def snapshot(self) -> str:
        """The token of the newest version that is published whole; empty: none, or versions are not differences."""
        (token,) = self._channel.exchange([["HGET", self.keys.round(), "snapshot"]])
        return bytes(token or b"").decode()

    def drafted(self, timeout_ms: int) -> list[tuple[str, str, int]]:
        """Wait for parts of drafts. Returns token, draft's name and index of each new one, since the last call."""
        block = max(1, min(timeout_ms, BLOCK_MS))
        (reply,) = self._channel.exchange([["XREAD", "BLOCK", block, "STREAMS", self.keys.drafts(), self._last_draft]])
        if not reply:
            return []
        entries = (reply if isinstance(reply, list) else [*reply.items()])[0][1]
        self._last_draft = entries[-1][0].decode()
        told = [dict(pairs(fields)) for _, fields in entries]
        return [(one[b"token"].decode(), one[b"name"].decode(), int(one[b"part"])) for one in told]

    def read_draft(self, name: str, parts: Sequence[int], into: Sequence[Blob]) -> list[Blob | None]:
        """These parts of a draft, as views of `into`; None for one that is gone, or too long."""
        asked: list[Command] = [["HGET", self.keys.draft(name), part] for part in parts]
        return [None if isinstance(one, CodecError) else one for one in self._channel.fetch(asked, into)]

    def _read(
        self,
        key: str,
        token: str,
        parts: int,
        into: Sequence[Blob] | None,
        draft: Draft,
        others: Sequence[Command] = (),
    ) -> tuple[list[Blob] | None, list[Any]]:
        """As `Channel.read`, of a version, without the parts of `draft` if the version was made of it."""
        if into is None or not draft.parts:
            return self._channel.read(key, parts, into, others)
        missing = [part for part in range(parts) if part not in draft.parts]
        asked: list[Command] = [["HGET", key, part] for part in missing]
        asked += [["HMGET", self.keys.round(), "token", "draft"], *others]
        replies = self._channel.exchange(asked, [*(into[part] for part in missing), None, *[None] * len(others)])
        found, (told, *rest) = replies[: len(missing)], replies[len(missing) :]
        early = draft.parts
        if told != [token.encode(), draft.name.encode()]:
            asked = [["HGET", key, part] for part in early]
            early = dict(zip(early, self._channel.exchange(asked, [into[part] for part in early]), strict=True))
        message = [{**early, **dict(zip(missing, found, strict=True))}[part] for part in range(parts)]
        return None if None in message else message, rest

    def read_weights(
        self, token: str, parts: int, into: Sequence[Blob] | None = None, draft: Draft = NO_DRAFT
    ) -> list[Blob] | None:
        """As `pull`, without a lease."""
        return self._read(self.keys.weights(token), token, parts, into, draft)[0]

    def read_since(
        self, loaded: str, token: str, parts: int, into: Sequence[Blob] | None = None, draft: Draft = NO_DRAFT
    ) -> Pulled | None:
        """As `follow`, without a lease."""
        return self._follow(loaded, token, parts, into, [], draft)[0]

    def _follow(
        self,
        loaded: str,
        token: str,
        parts: int,
        into: Sequence[Blob] | None,
        others: list[Command],
        draft: Draft = NO_DRAFT,
    ) -> tuple[Pulled | None, list[Any]]:
        """The messages from version `loaded`, or from a snapshot, to `token`; and the replies to `others`."""
        k = self.keys
        asked: list[Command] = [["LRANGE", k.chain(), 0, -1], ["HGET", k.round(), "snapshot"], *others]
        newest, (chain, snapshot, *replies) = self._read(k.delta(token), token, parts, into, draft, asked)
        tokens = [one.decode() for one in chain]
        for start in dict.fromkeys((loaded, "")):  # a version that was opened has no difference from the one before
            way = route(tokens, (snapshot or b"").decode(), start, token)
            if way is None:
                break
            keys = [k.weights(way.snapshot)] if way.snapshot else []
            keys += [k.delta(one) for one in way.deltas if one != token]
            found = [self._channel.read(key, parts)[0] for key in keys]
            found += [newest] if token in way.deltas else []
            messages = [message for message in found if message is not None]
            if len(messages) == len(found):
                first = messages.pop(0) if way.snapshot else None
                return Pulled(first, messages), replies
        return None, replies

    def doubt(self, token: str, again: bool) -> None:
        """Report that the weights read do not match the digest in `token`, and free the worker's leases.

        Args:
            again: a second read did not match either; asks the reducer to publish the weights again.
        """
        self._scripts.call(
            "doubt", self.keys, token=token, worker=self.worker_id, session=self.session_id, again=int(again)
        )

    def stage(self, nonce: str, micro_batch: int, parts: Mapping[int, Blob], offered_on: str = "") -> None:
        """Send parts of an update, by index, ahead of the submission `nonce`; call `extend` to keep them from expiring.

        Args:
            offered_on: tell the reducer of them; the version that the update is computed on.
        """
        key = self._staged(nonce, micro_batch)
        offer = self._offer(offered_on, nonce, micro_batch, parts) if offered_on else None
        sent = [one for part in parts.items() for one in part]
        commands: list[Command] = [["HSET", key, *sent], ["EXPIRE", key, STAGED_S]]
        self._channel.exchange([*commands, offer] if offer else commands, large=True)

    def unstage(self, nonce: str, micro_batches: Iterable[int]) -> None:
        """Delete the parts staged for the submission `nonce`, which will not be made."""
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
            report: bytes and seconds for the job's page.
            and_lease: also ask for a lease on the same version.
            and_wait: also begin to wait for the next version; call `waited` next.
        """
        messages: Messages = {self._staged(nonce, m): parts for m, parts, _ in updates}
        failpoint("before_push")
        if armed("between_stage_and_submit"):
            self._channel.stage(messages, STAGED_S)
            failpoint("between_stage_and_submit")
            messages = {}
        submission = self._submission(token, nonce, updates, report)
        others = [self._lease(token)] if and_lease else []
        pipelined = self._waiting(token, and_wait) if and_wait else []
        meanwhile = and_wait.meanwhile if and_wait else None
        (outcome, current, status, before), *granted = self._channel.run_staged(
            messages, STAGED_S, submission, *others, pipelined=pipelined, meanwhile=meanwhile
        )
        failpoint("after_push")
        grant = self._parsed(granted[0]) if granted else None
        return Receipt(outcome.decode(), current.decode(), status.decode(), before.decode(), grant)

    def hand_over(self, state: Sequence[Blob]) -> None:
        """Store the inner optimizer state of this worker's replica for a worker that joins later."""
        self._channel.stage({self.keys.inner(self._own): seal(state)}, HANDED_S)
        self._scripts.call("hand_over", self.keys, worker=self.worker_id, session=self.session_id)

    def take_over(self) -> Blob | None:
        """Take an inner state that another session handed over, exclusively; None if there is none.

        Raises CodecError: the state is damaged.
        """
        key = self.keys.inner(self._own)
        about = {"worker": self.worker_id, "session": self.session_id}
        while self._scripts.call("take_over", self.keys, inner_key=key, **about):
            if state := self._channel.load_sealed(key):
                self._channel.exchange([["UNLINK", key]])
                return state
        return None

    def wait(self, timeout_ms: int = BLOCK_MS) -> str | None:
        """Block until the job's next version, change of status or freed lease, at most `timeout_ms`.

        Returns: the token of a version just published; else None (ask for a lease to learn more).
        """
        tokens = self.announced(timeout_ms)
        return tokens[-1] if tokens else None

    def announced(self, timeout_ms: int) -> list[str]:
        """As `wait`: the tokens of all versions published since the last call, oldest first."""
        return self._told(self._channel.exchange([self._blocked(timeout_ms)])[0])

    def wait_for(self, token: str, waiting: Waiting) -> Grant:
        """Block as `wait` does, then ask for a lease: on the version after `token`, with its weights, if that was
        published with news; else on `token`, the version loaded.
        """
        return self._next(token, self._channel.exchange(self._waiting(token, waiting)))

    def waited(self, token: str) -> Grant:
        """Complete the wait that `submit` began; returns the grant as `wait_for` does."""
        return self._next(token, self._channel.pipelined_replies())

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

    def _told(self, reply: Any) -> list[str]:
        """The tokens of the versions that the new entries announce, oldest first."""
        if not reply:
            return []
        entries = (reply if isinstance(reply, list) else [*reply.items()])[0][1]
        self._last_id = entries[-1][0].decode()
        told = [dict(pairs(fields)) for _, fields in entries]
        return [one[b"token"].decode() for one in told if b"token" in one]

    @property
    def _own(self) -> str:
        """The name under which its inner state is offered: `WORKER:SESSION`."""
        return f"{self.worker_id}:{self.session_id}"

    def _staged(self, nonce: str, micro_batch: int) -> str:
        return self.keys.staged(f"{self.worker_id}:{nonce}:{micro_batch}")

    def _submission(self, token: str, nonce: str, updates: Sequence[Update], report: dict[str, Any]) -> Command:
        about = {"micro_batches": [micro_batch for micro_batch, _, _ in updates], **report}
        return self._channel.script(
            "submit",
            self.keys,
            staged_keys=[self._staged(nonce, micro_batch) for micro_batch, _, _ in updates],
            update_keys=[self.keys.update(token, micro_batch) for micro_batch, _, _ in updates],
            peer_key=self.keys.peer(self.worker_id),
            token=token,
            worker=self.worker_id,
            session=self.session_id,
            nonce=nonce,
            event=json.dumps(about, separators=(",", ":")),
            parts=len(updates[0][1]),
            micro_batches=[micro_batch for micro_batch, _, _ in updates],
            losses=[loss for _, _, loss in updates],
        )

    def _offer(self, token: str, nonce: str, micro_batch: int, parts: Iterable[int]) -> Command:
        about = {"token": token, "worker": self.worker_id, "session": self.session_id, "nonce": nonce}
        return self._channel.script("offer", self.keys, **about, micro_batch=micro_batch, parts=[*parts])

    def _lease(self, token: str, and_news: bool = False) -> Command:
        return self._channel.script(
            "lease",
            self.keys,
            token=token,
            worker=self.worker_id,
            session=self.session_id,
            and_news=int(and_news),
            devices=self.devices,
        )

    @staticmethod
    def _parsed(reply: list[Any]) -> Grant:
        answer, token, ask_again_ms, *micro_batches = reply
        return Grant(answer.decode(), token.decode(), ask_again_ms, tuple(map(int, micro_batches)))

    def _granted(self, reply: list[Any]) -> Grant:
        grant = self._parsed(reply)
        if grant.answer == "banned":
            raise Banned(f"worker {self.worker_id} is banned from the job: too many of its updates were refused")
        if grant.answer == "fenced":
            raise Fenced(f"a newer session of worker {self.worker_id} has taken over")
        if grant.answer == "gone":
            raise JobGone(f"job {self.keys.job_id} is not open")
        return grant
