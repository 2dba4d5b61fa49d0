"""A reducer's side of the round protocol: claim, open, gather, refuse, commit."""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from itertools import chain
from typing import Any, Literal

import numpy as np
from redis import Redis

from computeshare.codecs.messages import seal
from computeshare.errors import CodecError, DamagedRound
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.channel import AT_ONCE_BYTES, Channel, Messages, pairs, staging
from computeshare.protocol.ledger import LONGEST
from computeshare.protocol.round_store import FIELDS, RoundState, RoundStore, numbers_in, numbers_text
from computeshare.protocol.terms import DEFAULTS, Terms
from computeshare.transport.commands import Command
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Message, Token

BANNING_STRIKES = 5
"""A worker of which this many submissions were refused may not join the job any more."""
PIECE = 2000
"""Events read at a time."""
EVENTS_KEPT, EVENTS_FOLDED = 5000, 1000
"""Events that wait for the control plane as they are, and how many at a time are folded of what is beyond that."""
STAGED_S = 120
"""Seconds that weights may lie staged before they are committed."""

Fault = Literal["damaged", "not_finite", "lost"]
"""Why an update is refused: its sender's fault, nobody's until others disagree, or the broker's."""


@dataclass(frozen=True, slots=True)
class Suspicion:
    """Who sent values that are not finite."""

    sessions: int
    """That sent this micro-batch so; -1 if the round had moved on."""
    times: int
    """That this micro-batch was sent so."""
    senders: int
    """Sessions that sent any micro-batch of the round so."""
    there: int
    """Sessions that take part."""


@dataclass(frozen=True, slots=True)
class Received:
    """An accepted submission's part for one micro-batch."""

    micro_batch: int
    worker: str
    session: str
    nonce: str
    base: str
    """Token of the version that it was computed on."""
    loss: float
    size: int
    """Of its message, in bytes."""
    leased: int
    """When it was leased, as `at`."""
    at: float
    """When it came, in milliseconds since the epoch by the broker's clock."""
    entry: bytes = field(repr=False)
    """As the broker holds it."""


@dataclass(frozen=True, slots=True)
class Link:
    """How a version that is published as a difference continues its chain."""

    snapshot: Sequence[Blob] | None = None
    """The version's whole weights, if they are published, too."""
    kept: int = 0
    """How many versions before it the chain keeps then."""
    outdated: Sequence[Token] = ()
    """Those that it lets go of."""


class Claim(RoundStore):
    """One job's rounds in the hands of one reducer; everything it does carries its fence."""

    def __init__(self, redis: Redis, job_id: str, reducer_id: str, wires: Wires | None = None) -> None:
        """`wires`: what updates, weights and states travel over; one thread alone may ask for those then."""
        super().__init__(redis, job_id)
        self._channel = Channel(redis, wires)
        self.reducer_id = reducer_id
        self.fence = 0
        self._held = ""
        self._commits: deque[tuple[bytes, dict[bytes, bytes]]] = deque(maxlen=LONGEST)
        self._opened: tuple[bytes, int | None] | None = None
        self._read_upto = b"0-0"

    def claim(self, host: str, pid: int, life_ms: int) -> bool:
        """Become the job's active reducer, under a new fence; False while another is."""
        identity = f"{host}|{pid}|{self.reducer_id}"
        self.fence = int(self.scripts.call("claim", self.keys, identity=identity, life_ms=life_ms, host=host, pid=pid))
        self._held = f"{self.fence}|{identity}"
        return self.fence > 0

    def renew(self, life_ms: int) -> bool:
        """Stay the active reducer; 0 gives the claim up. False if it was lost."""
        k = self.keys
        return bool(self.scripts.call("renew", k, claim_key=k.reducer(), holder=self._held, life_ms=life_ms))

    def is_newest(self) -> bool:
        """Whether no other reducer has become the active one since."""
        fence: Any = self.redis.get(self.keys.fence())
        return fence is not None and int(fence) == self.fence

    def open(
        self,
        token: Token,
        weights: Sequence[Blob],
        state: Sequence[Blob],
        following: Round,
        event: dict[str, Any],
        recent: int = 1,
        terms: Terms = DEFAULTS,
    ) -> bool:
        """Publish the first weights, initial or restored; False if the job is open already (or gone).

        Args:
            recent: from how many versions, the current one among them, updates count in the next.
        """
        k = self.keys
        staged_weights, staged_state, agreed = self._staged("weights"), self._staged("state"), terms.fields()
        command = self._channel.script(
            "open",
            k,
            staged_weights_key=staged_weights,
            weights_key=k.weights(str(token)),
            staged_state_key=staged_state,
            state_key=k.state(str(token)),
            fence=self.fence,
            token=str(token),
            version=token.version,
            first=following.first,
            count=following.count,
            event=json.dumps(event),
            carried=numbers_text(following.carried),
            total=following.total,
            needed=following.needed,
            recent=recent,
            term_names=agreed.keys(),
            term_values=agreed.values(),
        )
        return self._run_staged({staged_weights: weights, staged_state: seal(state)}, command)

    def progress(self) -> tuple[RoundState | None, dict[int, Received]]:
        """The current round, and its micro-batches that arrived so far, in one exchange."""
        state, received, _ = self.look()
        return state, received

    def look(
        self, wanted: Sequence[tuple[str, int]] = (), parts: int = 0, patience_s: float = 0.0, room_bytes: int = 0
    ) -> tuple[RoundState | None, dict[int, Received], dict[tuple[str, int], Message]]:
        """As `progress`, with the messages of those updates `wanted` (see `updates`) that are there and no longer than
        `room_bytes`.

        Raises DamagedRound.

        Args:
            patience_s: look once the round is full, or so many seconds have passed; 0: at once.
        """
        first: list[Command] = [["BLPOP", self.keys.full(), patience_s]] if patience_s else []
        commands: list[Command] = [*first, ["HMGET", self.keys.round(), *FIELDS], ["HGETALL", self.keys.received()]]
        rooms = [np.empty(room_bytes, np.uint8).data for _ in wanted]
        asked = [*commands, *self._asked(wanted, range(parts))]
        replies = self._channel.fetch(asked, [*[None] * len(commands), *rooms], large=False)
        values, entries, *messages = replies[len(first) :]
        try:
            received = {int(m): Received(int(m), **json.loads(e), entry=e) for m, e in pairs(entries)}
        except (ValueError, TypeError, RecursionError) as error:
            raise DamagedRound(f"what the round has received cannot be read: {error}") from error
        there = zip(wanted, messages, strict=True)
        whole = {one: found for one, found in there if _is_there(found) and _too_large(found) is None}
        return RoundState.parse(values), received, whole

    def now_ms(self) -> float:
        """Milliseconds since the epoch by the broker's clock."""
        now: Any = self.redis.time()
        return 1000 * int(now[0]) + int(now[1]) / 1000

    def updates(
        self, wanted: Sequence[tuple[str, int]], parts: range, into: Sequence[Blob | None] | None = None
    ) -> list[Message | CodecError | None]:
        """These parts of the messages of accepted micro-batches (a part that was never sent is None); None for those of
        which none is there, and an error for those that are longer than their memory.

        Args:
            wanted: token of the version that each was computed on, and its number.
            into: memory for each, of which what is returned are views; without it, messages of any length are read.
        """
        found = self._channel.fetch(self._asked(wanted, parts), into or [None] * len(wanted), large=len(wanted) == 1)
        return [_too_large(message) or (message if _is_there(message) else None) for message in found]

    def has_update(self, base: str, micro_batch: int) -> bool:
        """Whether anything of an accepted micro-batch's message is there."""
        return bool(self.redis.exists(self.keys.update(base, micro_batch)))

    def _asked(self, wanted: Sequence[tuple[str, int]], parts: range) -> list[Command]:
        return [["HMGET", self.keys.update(*one), *parts] for one in wanted]

    def counted(self, state: RoundState) -> tuple[list[tuple[str, int]], tuple[int, ...]]:
        """The updates that made the version of `state`, which has a base, and the sizes of their round.

        Returns: token of the version each was computed on, and number; sizes as `RoundState.sizes`.
        """
        raw: Any = self.redis.hmget(self.keys.round(), ["counted", "bases", "sizes_before"])
        counted, bases, sizes = (bytes(value or b"").decode() for value in raw)
        numbers = numbers_in(counted)
        tokens = bases.split(",") if bases else [str(state.base)] * len(numbers)
        return list(zip(tokens, numbers, strict=True)), numbers_in(sizes)

    def pending(self, token: Token) -> tuple[int, list[int]] | None:
        """What of the round from `token` on is not counted: how far the leases have got, and the units before that.

        None if the version has moved on.
        """
        k = self.keys
        asked: list[Command] = [["HMGET", k.round(), "token", "first", "cursor"], ["LRANGE", k.free(), 0, -1]]
        asked += [["HKEYS", key] for key in (k.leases(), k.backups(), k.received())]
        (round_, *rest) = self._channel.exchange([["MULTI"], *asked, ["EXEC"]])[-1]
        if round_[0] is None or round_[0].decode() != str(token):
            return None
        return int(round_[1]) + int(round_[2]), sorted({int(unit) for some in rest for unit in some})

    def close(self, token: Token, at_least: int) -> bool:
        """Freeze what the round has received, if that is enough; False if it is not, or the round has moved on."""
        return bool(self.scripts.call("close", self.keys, token=str(token), fence=self.fence, at_least=at_least))

    def discard(self, state: RoundState | None = None) -> bool:
        """Give up a round and what belongs to rounds; False if the version or the fence had moved on.

        Args:
            state: the round; None: whatever there is, which may be none that can be read.
        """
        k = self.keys
        token: Any = str(state.token) if state else self.redis.hget(k.round(), "token")
        dropped = [k.leases(), k.backups(), k.received(), k.free(), k.suspects(), k.full(), k.recent(), k.chain()]
        there = (bytes(key).decode() for key in self.redis.scan_iter(k.pattern(), count=1000))
        dropped += [key for key in there if key.startswith(k.messages())]
        return bool(self.scripts.call("discard", k, token=token or "", fence=self.fence, dropped_keys=dropped))

    def refuse(self, token: Token, part: Received, reason: str, fault: Fault) -> Suspicion:
        """Free a micro-batch whose blob failed the checks, and open the round if it was closed."""
        event: dict[str, Any] = {"worker": part.worker, "nonce": part.nonce, "base": str(token)}
        event |= {"micro_batch": part.micro_batch, "reason": reason}
        found = self.scripts.call(
            "refuse",
            self.keys,
            update_key=self.keys.update(part.base, part.micro_batch),
            token=str(token),
            fence=self.fence,
            micro_batch=part.micro_batch,
            worker=part.worker,
            session=part.session,
            event=json.dumps(event),
            fault=fault,
            banning_strikes=BANNING_STRIKES,
            reason=reason,
            nonce=part.nonce,
        )
        return Suspicion(*map(int, found))

    def begin(self, weights: Iterable[Blob]) -> Sequence[Blob]:
        """Send a version's weights on before it is known what it will be called, if they are large.

        Returns: what `commit` is still to be given of them.
        """
        first: list[Blob] = []
        rest = iter(weights)
        for part in rest:
            first.append(part)
            if sum(map(len, first)) > AT_ONCE_BYTES:
                self._channel.stage({self._staged("weights"): chain(first, rest)}, STAGED_S)
                return ()
        return first

    def commit(
        self,
        base: RoundState,
        parts: Sequence[Received],
        token: Token,
        weights: Sequence[Blob],
        following: Round,
        event: dict[str, Any],
        link: Link | None = None,
        news: bool = False,
        state: Sequence[Blob] | None = None,
    ) -> bool:
        """Publish the next version, once; False if the version or the fence had moved on.

        Args:
            base: the round that was reduced.
            parts: what made the version, ascending: all that the round has received, unless the next one is the same
                window of units.
            weights: what `begin` has left of them; nothing if it has sent them all.
            following: the next round, with what is carried into it; its count is 0 after the last one.
            link: where `weights` are the difference from the version before, what else becomes of the chain.
            news: whether `weights` are small enough to come with the news of the version.
            state: the state that goes with the version, if that is to be kept right after, in the same exchange; else
                `store_state` is to follow.
        """
        k = self.keys
        staged, snapshot = self._staged("weights"), self._staged("snapshot")
        bases = [part.base for part in parts]
        entries = sha1(b"".join(part.entry for part in parts), usedforsecurity=False)
        command = self._channel.script(
            "commit",
            k,
            staged_weights_key=staged,
            next_weights_key=k.delta(str(token)) if link else k.weights(str(token)),
            outdated_weights_key=k.weights(str(base.base)) if base.base and not link else k.staged("none"),
            base_state_key=k.state(str(base.token)),
            staged_snapshot_key=snapshot,
            snapshot_key=k.weights(str(token)),
            base_news_key=k.news(str(base.base)),
            next_news_key=k.news(str(base.token)),
            outdated_keys=[key(str(old)) for old in (link.outdated if link else ()) for key in (k.weights, k.delta)],
            token=str(base.token),
            next_token=str(token),
            fence=self.fence,
            next_version=token.version,
            next_first=following.first,
            next_count=following.count,
            event=json.dumps(event, separators=(",", ":")),
            counted=numbers_text(part.micro_batch for part in parts),
            entries_sha1=entries.hexdigest(),
            carried=numbers_text(following.carried),
            next_total=following.total,
            next_needed=following.needed,
            bases="" if set(bases) == {str(base.token)} else ",".join(bases),
            published_as="delta" if link else "whole",
            kept=link.kept if link and link.snapshot else "",
            sizes=numbers_text(following.sizes),
            owners=",".join(following.owners),
            has_news=int(news),
        )
        messages = {staged: weights, snapshot: link.snapshot if link else None}
        there = {key: message for key, message in messages.items() if message}
        others: list[Command] = []
        if state is not None:
            where, keep = self._keep(base.token, [(part.base, part.micro_batch) for part in parts], token)
            others = [["MULTI"], *staging(where, seal(state), STAGED_S), keep, ["EXEC"]]
        return self._run_staged(there, command, *others, before=[] if weights else [staged])

    def republish(self, state: RoundState, weights: Sequence[Blob], is_snapshot: bool) -> bool:
        """Put these weights in the place of the current version's, which were damaged; False if that has moved on.

        Args:
            is_snapshot: versions are published as differences.
        """
        k, staged, token = self.keys, self._staged("weights"), str(state.token)
        command = self._channel.script(
            "republish",
            k,
            staged_weights_key=staged,
            weights_key=k.weights(token),
            news_key=k.news(str(state.base)),
            token=token,
            fence=self.fence,
            is_snapshot=int(is_snapshot),
        )
        return self._run_staged({staged: weights}, command)

    def store_state(self, base: Token, counted: Sequence[tuple[str, int]], token: Token, state: Sequence[Blob]) -> bool:
        """Keep the state that goes with the current `token`; what it could be recomputed from is then dropped: the
        state of its `base` and the updates `counted`, named as in `updates`.

        Returns False, changing nothing, if the version or the fence had moved on.
        """
        staged, command = self._keep(base, counted, token)
        return self._run_staged({staged: seal(state)}, command)

    def _keep(self, base: Token, counted: Sequence[tuple[str, int]], token: Token) -> tuple[str, Command]:
        """Where a state is to be staged, and the command that keeps it then."""
        k, staged = self.keys, self._staged("state")
        return staged, self._channel.script(
            "keep",
            k,
            staged_state_key=staged,
            state_key=k.state(str(token)),
            dropped_keys=[k.state(str(base)), *(k.update(*one) for one in counted)],
            token=str(token),
            fence=self.fence,
        )

    def _run_staged(self, messages: Messages, script: Command, *others: Command, before: Sequence[str] = ()) -> bool:
        return bool(self._channel.run_staged(messages, STAGED_S, script, *others, before=before)[0])

    def _staged(self, what: str) -> str:
        """A key that no other reducer writes, whatever fence it believes to have."""
        return self.keys.staged(f"{self.reducer_id}:{self.fence}:{what}")

    def load(self, key: str) -> Sequence[Blob] | None:
        """All parts of one of the job's messages; None if it is gone."""
        return self._channel.load(key)

    def load_state(self, token: Token) -> Blob | None:
        """The state that goes with a version, as one piece that can be written to; None if it is gone.

        Raises CodecError: it was damaged.
        """
        return self._channel.load_sealed(self.keys.state(str(token)))

    def chain(self) -> tuple[list[str], str]:
        """The tokens of the job's chain, oldest first, and the newest snapshot's."""
        tokens, snapshot = self._channel.exchange(
            [["LRANGE", self.keys.chain(), 0, -1], ["HGET", self.keys.round(), "snapshot"]]
        )
        return [token.decode() for token in tokens], (snapshot or b"").decode()

    def measured(self) -> dict[str, str]:
        """What workers have measured (JSON), by worker."""
        found: Any = self.redis.hgetall(self.keys.measured())
        return {bytes(worker).decode(): bytes(text).decode() for worker, text in found.items()}

    def origin(self) -> str | None:
        """Token of the checkpoint that the job was forked from."""
        raw: Any = self.redis.get(self.keys.origin())
        return None if raw is None else bytes(raw).decode()

    def commits(self, incarnation: int) -> tuple[list[dict[str, Any]], bool]:
        """The versions that the event stream still tells of, oldest first, and whether it tells of this opening.

        What is no longer in the stream has been stored by the control plane. The stream is read on from where it was
        read to before, so one thread alone may ask.
        """
        first, last = self._ends()
        if _order(last) < _order(self._read_upto):  # the broker went back
            self._commits.clear()
            self._opened, self._read_upto = None, b"0-0"
        while entries := self._events("(" + self._read_upto.decode()):
            for stream_id, fields in entries:
                self._read_upto = stream_id
                if fields[b"type"] == b"version":
                    self._commits.append((stream_id, fields))
                elif fields[b"type"] == b"opened":
                    self._opened = stream_id, json.loads(fields[b"data"]).get("incarnation")
        while self._commits and _order(self._commits[0][0]) < _order(first):
            self._commits.popleft()
        opened = self._opened and _order(self._opened[0]) >= _order(first) and self._opened[1] == incarnation
        found = [{"at": int(float(f[b"at"])), "data": json.loads(f[b"data"])} for _, f in self._commits]
        return found, bool(opened)

    def _ends(self) -> tuple[bytes, bytes]:
        """The ids of the oldest event that is not stored yet (above all others where there is none) and of the newest
        there ever was.
        """
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.xrange(self.keys.backlog(), count=1)
        pipeline.xrange(self.keys.events(), count=1)
        pipeline.xinfo_stream(self.keys.events())
        *oldest, about = pipeline.execute(raise_on_error=False)
        last = about["last-generated-id"] if isinstance(about, dict) else b"0-0"
        return min((some[0][0] for some in oldest if some), key=_order, default=b"%d-0" % 2**63), last

    def _events(self, start: str) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """The events from there on, a piece of them, of the backlog and the stream alike."""
        pipeline = self.redis.pipeline(transaction=True)
        pipeline.xrange(self.keys.backlog(), min=start, count=PIECE)
        pipeline.xrange(self.keys.events(), min=start, count=PIECE)
        backlog, events = pipeline.execute()
        return backlog if len(backlog) == PIECE else [*backlog, *events]

    def fold(self) -> int:
        """Move events of which too many wait for the control plane to the backlog, submissions folded into counts.

        Returns the number of events moved; 0 once there are few enough.
        """
        return int(self.scripts.call("fold", self.keys, fence=self.fence, kept=EVENTS_KEPT, moved=EVENTS_FOLDED))

    def announce(self, kind: str, event: dict[str, Any]) -> bool:
        """Append an event, unless another reducer has taken over."""
        return self.append(kind, event, str(self.fence))


def _too_large(message: Sequence[Any]) -> CodecError | None:
    """The error in the place of a part that did not fit."""
    return next((part for part in message if isinstance(part, CodecError)), None)


def _order(stream_id: bytes) -> tuple[int, int]:
    milliseconds, number = stream_id.split(b"-")
    return int(milliseconds), int(number)


def _is_there(message: Message) -> bool:
    return any(part is not None for part in message)
