"""A reducer's side of the round protocol: claim, open, gather, refuse, commit."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha1
from itertools import chain
from typing import Any

import numpy as np
from redis import Redis

from computeshare.codecs.messages import seal
from computeshare.errors import CodecError
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.channel import AT_ONCE_BYTES, Channel, Messages, pairs, staging
from computeshare.protocol.limits import MEASUREMENT_BYTES
from computeshare.protocol.refusal import (
    BANNING_STRIKES,
    AuditRecords,
    DisputeOutcome,
    Fault,
    Received,
    Suspicion,
    refuse,
)
from computeshare.protocol.round_store import FIELDS, RoundState, RoundStore, numbers_in, numbers_text
from computeshare.protocol.terms import DEFAULTS, Terms
from computeshare.protocol.versions.history import VersionHistory
from computeshare.transport.commands import Command
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Message, Token

EVENTS_KEPT, EVENTS_FOLDED = 5000, 1000
"""Events kept unfolded for the control plane, and the number of older events folded at a time."""
STAGED_S = 120
"""Lifetime of staged weights and states, in seconds."""
_OFFER = re.compile(r"([^|]+)\|([^|]+)\|((?:,\d{1,4})*,)")


@dataclass(frozen=True, slots=True)
class StagedOffer:
    """The staged parts of an update that is not submitted yet."""

    worker: str
    nonce: str
    parts: frozenset[int]

    @classmethod
    def parse(cls, entry: bytes) -> "StagedOffer | None":
        """Parse an entry of `offers`; None: no script has written it."""
        match = _OFFER.fullmatch(entry.decode(errors="replace"))
        return match and cls(match[1], match[2], frozenset(int(part) for part in match[3].split(",") if part))


@dataclass(frozen=True, slots=True)
class Link:
    """Changes to the chain when a version is published as a difference."""

    snapshot: Sequence[Blob] | None = None
    """The version's whole weights, if they are published as a snapshot, too."""
    kept: int = 0
    """With a snapshot: how many earlier versions the chain keeps."""
    outdated: Sequence[Token] = ()
    """With a snapshot: versions that the chain drops."""


@dataclass(frozen=True, slots=True)
class StoredStep:
    """The step from the version `base` to the next: the updates that were counted, by base token and unit."""

    base: Token
    counted: Sequence[tuple[str, int]]

    @classmethod
    def parse(cls, entry: bytes) -> "StoredStep":
        """Parse an entry of `steps`. Raises ValueError."""
        base, units, bases = entry.decode().split("|")
        numbers = numbers_in(units)
        tokens = bases.split(",") if bases else [base] * len(numbers)
        return cls(Token.parse(base), list(zip(tokens, numbers, strict=True)))


class ReducerSession(RoundStore):
    """A reducer's exclusive claim on one job's rounds; every write carries the claim's fence."""

    def __init__(self, redis: Redis, job_id: str, reducer_id: str, wires: Wires | None = None) -> None:
        """`wires`: connections for updates, weights and states; only one thread may then use the methods for those."""
        super().__init__(redis, job_id)
        self._channel = Channel(redis, wires)
        self.reducer_id = reducer_id
        self.fence = 0
        self._held = ""
        self.history = VersionHistory(redis, self.keys)

    def claim(self, host: str, pid: int, life_ms: int) -> bool:
        """Become the job's active reducer, under a new fence; False while another reducer is active."""
        identity = f"{host}|{pid}|{self.reducer_id}"
        self.fence = int(self.scripts.call("claim", self.keys, identity=identity, life_ms=life_ms, host=host, pid=pid))
        self._held = f"{self.fence}|{identity}"
        return self.fence > 0

    def renew(self, life_ms: int) -> bool:
        """Renew the claim for `life_ms`; 0 gives the claim up. False if the claim was lost."""
        k = self.keys
        return bool(self.scripts.call("renew", k, claim_key=k.reducer(), holder=self._held, life_ms=life_ms))

    def is_newest(self) -> bool:
        """Whether no other reducer has claimed the job since."""
        fence: Any = self.redis.get(self.keys.fence())
        return fence is not None and int(fence) == self.fence

    def open(
        self,
        token: Token,
        weights: Sequence[Blob],
        state: Sequence[Blob],
        next_round: Round,
        event: dict[str, Any],
        recent: int = 1,
        terms: Terms = DEFAULTS,
        before: tuple[Token, Sequence[Blob]] | None = None,
    ) -> bool:
        """Publish the first weights, initial or restored; False if the job is open, gone or claimed by another reducer.

        Args:
            recent: number of versions, including the current, whose updates count towards the next.
            before: the version before with its weights, if the round's units are computed on it.
        """
        k = self.keys
        staged_weights, staged_state, agreed = self._staged("weights"), self._staged("state"), terms.fields()
        base, staged_base = str(before[0]) if before else "", self._staged("base")
        command = self._channel.script(
            "open",
            k,
            staged_weights_key=staged_weights,
            weights_key=k.weights(str(token)),
            staged_state_key=staged_state,
            state_key=k.state(str(token)),
            staged_base_key=staged_base,
            base_weights_key=k.weights(base),
            fence=self.fence,
            token=str(token),
            version=token.version,
            first=next_round.first,
            count=next_round.count,
            event=json.dumps(event),
            carried=numbers_text(next_round.carried),
            total=next_round.total,
            needed=next_round.needed,
            recent=recent,
            base=base,
            ahead=next_round.ahead,
            term_names=agreed.keys(),
            term_values=agreed.values(),
        )
        messages = {staged_weights: weights, staged_state: seal(state)} | ({staged_base: before[1]} if before else {})
        return self._run_staged(messages, command)

    def progress(self) -> tuple[RoundState | None, dict[int, Received]]:
        """The current round and the updates received so far, by micro-batch, in one exchange."""
        state, received, _ = self.look()
        return state, received

    def look(
        self, wanted: Sequence[tuple[str, int]] = (), parts: int = 0, patience_s: float = 0.0, room_bytes: int = 0
    ) -> tuple[RoundState | None, dict[int, Received], dict[tuple[str, int], Message]]:
        """As `progress`, with the messages of the updates `wanted` (see `updates`) that have arrived and fit into
        `room_bytes`.

        Raises DamagedRound.

        Args:
            patience_s: wait for a full round at most this many seconds; 0: do not wait.
        """
        first: list[Command] = [["BLPOP", self.keys.full(), patience_s]] if patience_s else []
        commands: list[Command] = [*first, ["HMGET", self.keys.round(), *FIELDS], ["HGETALL", self.keys.received()]]
        rooms = [np.empty(room_bytes, np.uint8).data for _ in wanted]
        asked = [*commands, *self._asked(wanted, range(parts))]
        replies = self._channel.fetch(asked, [*[None] * len(commands), *rooms], large=False)
        values, entries, *messages = replies[len(first) :]
        there = [Received.parse(unit, entry) for unit, entry in pairs(entries)]
        received = {part.micro_batch: part for part in there}
        read = zip(wanted, messages, strict=True)
        whole = {one: found for one, found in read if _is_there(found) and _too_large(found) is None}
        return RoundState.parse(values), received, whole

    def offers(self) -> dict[int, StagedOffer]:
        """By micro-batch, what is staged of the round's updates that are not submitted yet."""
        (entries,) = self._channel.exchange([["HGETALL", self.keys.offers()]])
        found = ((int(unit), StagedOffer.parse(entry)) for unit, entry in pairs(entries))
        return {unit: offer for unit, offer in found if offer}

    def staged_part(self, unit: int, offer: StagedOffer, part: int, into: Blob) -> Blob | None:
        """A staged part of an update, as a view of `into`; None if it is gone. Raises CodecError: it is too long."""
        key = self.keys.staged(f"{offer.worker}:{offer.nonce}:{unit}")
        (found,) = self._channel.fetch([["HGET", key, part]], [into], large=True)
        if isinstance(found, CodecError):
            raise found
        return None if found is None else memoryview(found)

    def draft(self, token: Token, name: str, part: int, blob: Blob) -> bool:
        """Publish a part of a draft of the version after `token`; False if the version or the fence had moved on."""
        key = self.keys.draft(name)
        told = self._channel.script("draft", self.keys, token=str(token), fence=self.fence, draft=name, part=part)
        commands: list[Command] = [["HSET", key, part, blob], ["EXPIRE", key, STAGED_S], told]
        return bool(self._channel.exchange(commands, large=True)[-1])

    def keep_draft(self, name: str) -> None:
        """Keep a draft from expiring."""
        self._channel.exchange([["EXPIRE", self.keys.draft(name), STAGED_S]])

    def drop_draft(self, name: str) -> None:
        """Delete a draft that will not be committed."""
        self._channel.exchange([["UNLINK", self.keys.draft(name)]])

    def now_ms(self) -> float:
        """Milliseconds since the epoch by the broker's clock."""
        now: Any = self.redis.time()
        return 1000 * int(now[0]) + int(now[1]) / 1000

    def arrivals(self) -> list[float]:
        """How many milliseconds after their round's opening the last updates arrived, the newest first. Entries that
        are no numbers, which no script writes, are left out.
        """
        found: Any = self.redis.lrange(self.keys.arrivals(), 0, -1)
        return [float(one) for one in found if one.replace(b".", b"", 1).isdigit()]

    def updates(
        self, wanted: Sequence[tuple[str, int | str]], parts: range, into: Sequence[Blob | None] | None = None
    ) -> list[Message | CodecError | None]:
        """Read `parts` of the messages of accepted updates. A part that was never sent is None; None stands in for a
        message without any of the parts, a CodecError for a message longer than its buffer.

        Args:
            wanted: base token and micro-batch number of each update.
            into: a buffer for each message; the returned parts are views of it. Without buffers, any length is read.
        """
        found = self._channel.fetch(self._asked(wanted, parts), into or [None] * len(wanted), large=len(wanted) == 1)
        return [_too_large(message) or (message if _is_there(message) else None) for message in found]

    def peers(self) -> list[str]:
        """The workers whose newest published weights the broker holds (`JobKeys.peers`), sorted."""
        (names,) = self._channel.exchange([["HKEYS", self.keys.peers()]])
        return sorted(name.decode(errors="replace") for name in names)

    def newest_of(self, worker: str, parts: int, into: Blob) -> tuple[bytes, Message | None]:
        """A worker's entry in `JobKeys.peers` (empty: none), and the message of its newest weights as views of `into`;
        None: it is gone, longer than `into`, or was replaced while it was read.
        """
        entry: Command = ["HGET", self.keys.peers(), worker]
        asked: list[Command] = [entry, ["HMGET", self.keys.peer(worker), *range(parts)], entry]
        before, message, after = self._channel.fetch(asked, [None, into, None], large=True)
        is_whole = before == after and _too_large(message) is None and None not in message
        return before or b"", message if is_whole else None

    def has_update(self, base: str, micro_batch: int) -> bool:
        """Whether Redis holds any part of an accepted micro-batch's message."""
        return bool(self.redis.exists(self.keys.update(base, micro_batch)))

    def _asked(self, wanted: Sequence[tuple[str, int | str]], parts: range) -> list[Command]:
        return [["HMGET", self.keys.update(*one), *parts] for one in wanted]

    def steps(self) -> list[StoredStep]:
        """The steps since the version whose state is stored, oldest first. Raises ValueError: they are damaged."""
        entries: Any = self.redis.lrange(self.keys.steps(), 0, -1)
        return [StoredStep.parse(bytes(entry)) for entry in entries]

    def pending(self, token: Token) -> tuple[int, list[int]] | None:
        """The uncounted units of the round that starts from `token`: the first unit never leased, and earlier units
        that are free, leased or received. None if the version has moved on.
        """
        k = self.keys
        asked: list[Command] = [["HMGET", k.round(), "token", "first", "cursor"], ["LRANGE", k.free(), 0, -1]]
        asked += [["HKEYS", key] for key in (k.leases(), k.backups(), k.received())]
        (round_, *unit_lists) = self._channel.exchange([["MULTI"], *asked, ["EXEC"]])[-1]
        if round_[0] is None or round_[0].decode() != str(token):
            return None
        return int(round_[1]) + int(round_[2]), sorted({int(unit) for units in unit_lists for unit in units})

    def close(self, token: Token, at_least: int) -> bool:
        """Close the round if it has received `at_least` updates; False if too few, or the round has moved on."""
        return bool(self.scripts.call("close", self.keys, token=str(token), fence=self.fence, at_least=at_least))

    def discard(self, state: RoundState | None = None) -> bool:
        """Delete the round and all messages of versions and updates; False if the version or the fence had moved on.

        Args:
            state: the round; None: whichever round Redis holds, even an unreadable one.
        """
        k = self.keys
        token: Any = str(state.token) if state else self.redis.hget(k.round(), "token")
        dropped = [k.leases(), k.backups(), k.received(), k.free(), k.suspects(), k.full(), k.recent(), k.chain()]
        dropped += [k.audits(), k.copies(), k.disputes(), k.peers(), k.early(), k.offers(), k.early_offers()]
        dropped += [k.drafts(), k.steps()]
        there = (bytes(key).decode() for key in self.redis.scan_iter(k.pattern(), count=1000))
        dropped += [key for key in there if key.startswith(k.messages())]
        return bool(self.scripts.call("discard", k, token=token or "", fence=self.fence, dropped_keys=dropped))

    def refuse(self, token: Token, part: Received, reason: str, fault: Fault) -> Suspicion:
        """Take back an accepted micro-batch whose update failed the checks, and reopen the round if it was closed."""
        return refuse(self.scripts, self.keys, self.fence, token, part, reason, fault)

    def audits(self) -> AuditRecords:
        """The current round's updates that a second machine computed as well. Raises DamagedRound."""
        return AuditRecords.read(self.redis, self.keys)

    def close_audit(self, token: Token, part: Received, outcome: DisputeOutcome = "over") -> bool:
        """Forget a unit's second update; False if the version or the fence had moved on.

        Args:
            part: the unit's update.
            outcome: what becomes of a dispute about the unit.
        """
        copy, named = self.keys.copy(part.base, part.micro_batch), {"token": str(token), "fence": self.fence}
        about = {"micro_batch": part.micro_batch, "outcome": outcome}
        return bool(self.scripts.call("close_audit", self.keys, copy_key=copy, **named, **about))

    def suspect(self, token: Token, part: Received, digest: str) -> bool:
        """Ask for a copy of a unit by another machine of the same kind; its update stays meanwhile.

        Args:
            digest: of the update.
        Returns: False if another submission was accepted, or the version or the fence had moved on.
        """
        return self._compute_again(token, part, {part.worker: digest}, copied=True)

    def dispute(self, token: Token, part: Received, parties: Mapping[str, str]) -> bool:
        """Take back an update that a second machine contradicts; a third machine is to compute the unit.

        Args:
            parties: both workers, each with the digest of its update.
        """
        return self._compute_again(token, part, parties, copied=False)

    def _compute_again(self, token: Token, part: Received, parties: Mapping[str, str], copied: bool) -> bool:
        key, named = self.keys.update(part.base, part.micro_batch), {"token": str(token), "fence": self.fence}
        unit = {"micro_batch": part.micro_batch, "nonce": part.nonce, "parties": json.dumps(parties)}
        return bool(self.scripts.call("dispute", self.keys, update_key=key, **named, **unit, copied=int(copied)))

    def ban(self, token: Token, worker: str, reason: str) -> bool:
        """Ban a worker at once; False if it was banned before, or the version or the fence had moved on."""
        named = {"token": str(token), "fence": self.fence, "worker": worker, "reason": reason}
        return bool(self.scripts.call("ban", self.keys, **named, strikes=BANNING_STRIKES))

    def begin(self, weights: Iterable[Blob]) -> Sequence[Blob]:
        """Stage a version's weights before its token is known, if they are large.

        Returns: the parts still to be passed to `commit`; empty if all were staged.
        """
        first: list[Blob] = []
        remaining = iter(weights)
        for part in remaining:
            first.append(part)
            if sum(map(len, first)) > AT_ONCE_BYTES:
                self._channel.stage({self._staged("weights"): chain(first, remaining)}, STAGED_S)
                return ()
        return first

    def commit(
        self,
        base: RoundState,
        parts: Sequence[Received],
        token: Token,
        weights: Sequence[Blob | None],
        next_round: Round,
        event: dict[str, Any],
        link: Link | None = None,
        news: bool = False,
        state: Sequence[Blob] | None = None,
        draft: str = "",
        stored: Token | None = None,
    ) -> bool:
        """Publish the next version, once; False if the version or the fence had moved on.

        Args:
            base: the round that was reduced.
            parts: the updates that made the version, ascending: all updates received, unless the next round is the same
                window of units.
            weights: the parts that `begin` returned, or all parts, with None for those in the draft.
            next_round: the next round, including carried units; its count is 0 after the last round.
            link: changes to the chain, if `weights` are the difference from the version before.
            news: whether to publish `weights` as news, too (`JobKeys.news`).
            state: the version's state, to be stored in the same exchange; None: call `store_state`, now or after some
                more versions.
            draft: name of the draft that holds the other parts.
            stored: the version whose state is stored; None: the base.
        """
        k = self.keys
        staged, snapshot = k.draft(draft) if draft else self._staged("weights"), self._staged("snapshot")
        outdated = [key(str(old)) for old in (link.outdated if link else ()) for key in (k.weights, k.delta)]
        outdated += [k.copy(str(base.token), unit) for unit in next_round.carried]
        bases = [part.base for part in parts]
        entries = sha1(b"".join(part.entry for part in parts), usedforsecurity=False)
        command = self._channel.script(
            "commit",
            k,
            staged_weights_key=staged,
            next_weights_key=k.delta(str(token)) if link else k.weights(str(token)),
            outdated_weights_key=k.weights(str(base.base)) if base.base and not link else k.staged("none"),
            stored_state_key=k.state(str(stored or base.token)),
            staged_snapshot_key=snapshot,
            snapshot_key=k.weights(str(token)),
            base_news_key=k.news(str(base.base)),
            next_news_key=k.news(str(base.token)),
            outdated_keys=outdated,
            token=str(base.token),
            next_token=str(token),
            fence=self.fence,
            next_version=token.version,
            next_first=next_round.first,
            next_count=next_round.count,
            event=json.dumps(event, separators=(",", ":")),
            counted=numbers_text(part.micro_batch for part in parts),
            entries_sha1=entries.hexdigest(),
            carried=numbers_text(next_round.carried),
            next_total=next_round.total,
            next_needed=next_round.needed,
            bases="" if set(bases) == {str(base.token)} else ",".join(bases),
            published_as="delta" if link else "whole",
            kept=link.kept if link and link.snapshot else "",
            has_news=int(news),
            next_ahead=next_round.ahead,
            draft=draft,
            draft_parts=len(weights),
        )
        messages = {staged: weights, snapshot: link.snapshot if link else None}
        there = {key: message for key, message in messages.items() if message}
        others: list[Command] = []
        if state is not None:
            where, keep = self._keep(base.token, [(part.base, part.micro_batch) for part in parts], token)
            others = [["MULTI"], *staging(where, seal(state), STAGED_S), keep, ["EXEC"]]
        return self._run_staged(there, command, *others, before=[] if weights else [staged])

    def republish(self, state: RoundState, weights: Sequence[Blob], is_snapshot: bool) -> bool:
        """Replace the current version's damaged weights; False if the version or the fence had moved on.

        Args:
            is_snapshot: whether versions are published as differences, so that these weights are a snapshot.
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
        """Store the state of the current version `token`, then delete the data that it could be recomputed from: the
        state of `base`, the newest stored, and the updates `counted` since, named as in `updates`.

        Returns False, storing nothing, if the version or the fence had moved on.
        """
        staged, command = self._keep(base, counted, token)
        return self._run_staged({staged: seal(state)}, command)

    def _keep(self, base: Token, counted: Sequence[tuple[str, int]], token: Token) -> tuple[str, Command]:
        """The key to stage a state under, and the command that then stores the state."""
        k, staged = self.keys, self._staged("state")
        return staged, self._channel.script(
            "keep",
            k,
            staged_state_key=staged,
            state_key=k.state(str(token)),
            dropped_keys=[k.state(str(base)), *(key for one in counted for key in (k.update(*one), k.copy(*one)))],
            token=str(token),
            fence=self.fence,
        )

    def _run_staged(self, messages: Messages, script: Command, *others: Command, before: Sequence[str] = ()) -> bool:
        return bool(self._channel.run_staged(messages, STAGED_S, script, *others, before=before)[0])

    def _staged(self, what: str) -> str:
        """A staging key unique to this reducer and fence."""
        return self.keys.staged(f"{self.reducer_id}:{self.fence}:{what}")

    def load(self, key: str) -> Sequence[Blob] | None:
        """All parts of the message under one of the job's keys; None if the key is gone."""
        return self._channel.load(key)

    def load_state(self, token: Token) -> Blob | None:
        """The state of a version in one writable buffer; None if it is gone.

        Raises CodecError: the state is damaged.
        """
        return self._channel.load_sealed(self.keys.state(str(token)))

    def chain(self) -> tuple[list[str], str]:
        """The tokens of the job's chain, oldest first, and the token of the newest snapshot."""
        tokens, snapshot = self._channel.exchange(
            [["LRANGE", self.keys.chain(), 0, -1], ["HGET", self.keys.round(), "snapshot"]]
        )
        return [token.decode() for token in tokens], (snapshot or b"").decode()

    def measured(self) -> dict[str, str]:
        """Worker with a seat to its measurements (JSON), unless they are too long to be measurements."""
        seated: Any = self.redis.hkeys(self.keys.seats())
        workers = [bytes(worker).decode() for worker in seated]
        sizes = self._channel.exchange([["STRLEN", self.keys.measured(worker)] for worker in workers])
        there = [worker for worker, size in zip(workers, sizes, strict=True) if 0 < size <= MEASUREMENT_BYTES]
        texts = self._channel.exchange([["GET", self.keys.measured(worker)] for worker in there])
        return {worker: bytes(text).decode(errors="replace") for worker, text in zip(there, texts, strict=True) if text}

    def origin(self) -> str | None:
        """Token of the checkpoint that the job was forked from; None if the job is not a fork."""
        raw: Any = self.redis.get(self.keys.origin())
        return None if raw is None else bytes(raw).decode()

    def fold(self) -> int:
        """Move the oldest events to the backlog, submissions folded into counts, if too many await the control plane.

        Returns the number of events moved; 0 once few enough wait.
        """
        return int(self.scripts.call("fold", self.keys, fence=self.fence, kept=EVENTS_KEPT, moved=EVENTS_FOLDED))

    def fix_stages(self, plan: str) -> str:
        """Store where the model is split (JSON), unless that is decided; returns what holds."""
        self.redis.set(self.keys.stages(), plan, nx=True)
        return self.stages() or plan

    def announce(self, kind: str, event: dict[str, Any]) -> bool:
        """Append an event; False if another reducer has taken over or the job is gone."""
        return self.append(kind, event, str(self.fence))


def _too_large(message: Sequence[Any]) -> CodecError | None:
    """The first CodecError among the parts, of a part longer than its buffer; None if there is none."""
    return next((part for part in message if isinstance(part, CodecError)), None)


def _is_there(message: Message) -> bool:
    return any(part is not None for part in message)
