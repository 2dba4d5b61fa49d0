"""A peer's replica: keeps weights of its own, and averages them with another peer's after each unit."""

import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import structlog
from redis.exceptions import RedisError

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import decode_update, update_parts
from computeshare.errors import CodecError, Interrupted
from computeshare.gossip.peer_weights import Published
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.strategies.base import Averaging
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.work_units import AnyReplica, Compilation, Take, Update
from computeshare.types import Message, Vector

REFERENCES = 2
"""Versions that are kept to decode other peers' weights."""
FASTER, SLOWER, LEAST = 1.2, 0.5, 0.02
"""By which a peer's score, between `LEAST` and 1, changes with an exchange that succeeded or failed."""
log = structlog.get_logger()


class Source(Protocol):
    """Where the others' weights are, as `PeerWeights`."""

    def others(self) -> Mapping[str, Published]: ...
    def read(self, worker: str, parts: int) -> tuple[Published, Message] | None: ...


@dataclass(slots=True)
class Fetched:
    """Another peer's weights."""

    worker: str
    published: Published
    parameters: Vector
    buffers: Vector


@dataclass(slots=True)
class Exchanges:
    """The exchanges since the last report."""

    bytes: int = 0
    met: dict[str, Any] = field(default_factory=dict)
    """With whom, the share taken of its weights, and how far they were: the root mean square of the difference."""


class Partners:
    """Chooses with whom to exchange, and remembers who answered in time."""

    def __init__(self, worker: str, seed: int, matching: str) -> None:
        self._worker, self._seed, self._matching = worker, seed, matching
        self._random = random.Random(f"{seed} {worker}")  # no secret depends on it
        self._scores: dict[str, float] = {}

    def wants(self, probability: float) -> bool:
        """Whether to exchange now."""
        return self._random.random() < probability

    def choose(self, others: Sequence[str], units: int) -> str | None:
        """Another peer, or None: there is none, or `pairs` leaves this peer out.

        Args:
            units: made by this peer so far; peers that have made the same number are paired off alike.
        """
        if self._matching == "pairs":
            present = sorted([*others, self._worker])
            random.Random(f"{self._seed} {units}").shuffle(present)
            place = present.index(self._worker) ^ 1
            return present[place] if place < len(present) else None
        if not others:
            return None
        return self._random.choices(others, [self._scores.get(one, 1.0) for one in others])[0]

    def note(self, other: str, succeeded: bool) -> None:
        """Remember how an exchange went."""
        score = self._scores.get(other, 1.0) * (FASTER if succeeded else SLOWER)
        self._scores[other] = min(1.0, max(LEAST, score))


class PeerReplica:
    """Steps another replica from unit to unit with weights of its own; see `strategies.gossip`.

    `load` gives the reference from which the weights are published as a difference. The first time, the peer starts
    with a random other peer's weights, or with the reference itself if there is none.
    """

    kept: None = None
    room: None = None

    def __init__(
        self,
        replica: AnyReplica,
        averaging: Averaging,
        source: Source,
        partners: Partners,
        codec: Codec,
        layout: Layout,
        token: Callable[[], str],
    ) -> None:
        """`token`: of the version that was loaded last."""
        self._replica, self._averaging, self._source, self._partners = replica, averaging, source, partners
        self._codec, self._layout, self._token = codec, layout, token
        self._references: dict[str, Vector] = {}
        self._order: deque[str] = deque()
        self._own: Weights | None = None
        self._before: tuple[Weights, int, Vector, Vector] | None = None
        """For `go_back`: the weights, the units made, the weights after the last exchange and their momentum."""
        self._outer, self._momentum = np.empty(0, np.float32), np.empty(0, np.float32)
        self._units, self._loss, self._incarnation = 0, math.inf, ""
        self._helper = ThreadPoolExecutor(1, "peers")
        self._coming: Future[Fetched | None] | None = None
        self._late: Future[Fetched | None] | None = None
        """An answer that was not waited for any longer."""
        self._asked = ""
        self._since = Exchanges()
        self._remarks = Seldom(REMARK_EVERY_S)

    @property
    def compilation(self) -> Compilation:
        return self._replica.compilation

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Do nothing: which units come next depends on the others."""

    def walk(self, micro_batches: Sequence[int]) -> Update:
        return self._replica.walk(micro_batches)

    def load(self, weights: Weights) -> None:
        """Take a version as the reference from here on; also as this peer's weights, if the job was restored."""
        token = self._token()
        self._references[token] = weights.parameters
        self._order.append(token)
        while len(self._order) > REFERENCES:
            del self._references[self._order.popleft()]
        incarnation = token.partition(".")[0]
        if self._own is None or incarnation != self._incarnation:
            self._incarnation, self._units = incarnation, 0
            self._start(weights)
        else:
            self._own = replace(self._own, counters=weights.counters)

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """The unit's steps from this peer's own weights, then an exchange. The update is the reference minus the
        weights then. Raises Interrupted: the weights are as before.
        """
        assert self._own is not None, "a version was loaded"
        own = self._own
        self._ask()
        self._replica.load(own)
        update = self._replica.compute(unit, goes_on)
        stepped = Weights(own.parameters - update.vector, update.buffers, own.counters)
        self._units, self._loss = self._units + 1, update.loss
        self._own = self._averaged(stepped, self._answer())
        difference = self._references[self._order[-1]] - self._own.parameters
        for bucket, where in enumerate(self._layout.buckets if take else ()):
            assert take
            take(bucket, difference[where])
        return Update(difference, self._own.buffers, update.loss)

    def mark(self) -> None:
        """Save this peer's weights for `go_back`."""
        assert self._own is not None, "a version was loaded"
        self._before = self._own, self._units, self._outer, self._momentum

    def go_back(self) -> None:
        """Return to the weights of the last `mark`: the units since then do not count."""
        if self._before:
            self._own, self._units, self._outer, self._momentum = self._before

    def report(self) -> dict[str, Any]:
        """The bytes read from others since the last report, and the last exchange, if there was one since."""
        since, self._since = self._since, Exchanges()
        return {"bytes": since.bytes, "met": since.met}

    def _start(self, reference: Weights) -> None:
        """Begin with a random other peer's weights, else with the reference."""
        self._own = reference
        self._ask(always=True)
        if found := self._answer():
            self._own = Weights(found.parameters, found.buffers, reference.counters)
        self._outer = self._own.parameters
        self._momentum = np.zeros_like(self._outer) if self._averaging.outer_momentum else np.empty(0, np.float32)
        self._before = None

    # Exchanges

    def _ask(self, always: bool = False) -> None:
        """Begin to read another peer's weights, unless the last reading has not ended."""
        is_free = self._coming is None and (self._late is None or self._late.done())
        if is_free and (always or self._partners.wants(self._averaging.fetch_probability)):
            self._asked = ""
            self._coming = self._helper.submit(self._read)

    def _read(self) -> Fetched | None:
        """In the helper's thread: another peer's weights; None: there is no other, or they cannot be had."""
        others = self._source.others()
        chosen = self._partners.choose(sorted(others), self._units)
        if chosen is None or chosen not in others:
            return None
        self._asked = chosen
        found = self._source.read(chosen, update_parts(self._layout))
        if found is None:
            return None
        published, message = found
        reference = self._references.get(published.token)
        if reference is None:
            return None  # it has another reference, for a moment
        difference, buffers = decode_update(self._codec, message, self._layout, np.empty_like(reference))
        parameters = np.subtract(reference, difference, out=difference)
        if not (np.isfinite(parameters).all() and np.isfinite(buffers).all()):
            raise CodecError(f"peer {chosen} has published values that are not finite")
        self._since.bytes += sum(len(part) for part in message if part is not None)
        return Fetched(chosen, published, parameters, buffers.copy())

    def _answer(self) -> Fetched | None:
        """What was asked for, if it comes in time; the score of whoever was asked changes accordingly."""
        coming, found, self._coming = self._coming, None, None
        if coming is None:
            return None
        try:
            found = coming.result(self._averaging.timeout_ms / 1000)
        except FutureTimeoutError:
            self._late = coming
            self._remark(f"no answer within {self._averaging.timeout_ms} ms")
        except (RedisError, Interrupted, CodecError) as error:
            self._remark(str(error))
        if self._asked:
            self._partners.note(self._asked, found is not None)
        return found

    def _remark(self, why: str) -> None:
        self._remarks.tell(log.warning, "no exchange", peer=self._asked, reason=why)

    def _averaged(self, own: Weights, other: Fetched | None) -> Weights:
        """This peer's weights after a unit: averaged with another's, then a step towards that."""
        target, buffers, averaging = own.parameters, own.buffers, self._averaging
        if other:
            share = averaging.share((self._units, self._loss), (other.published.units, other.published.loss))
            distance = math.sqrt(float(np.square(other.parameters - target).mean()))
            target = averaging.towards(target, other.parameters, share)
            buffers = buffers + np.float32(share) * (other.buffers - buffers)
            self._since.met = {"peer": other.worker, "share": round(share, 4), "distance": float(f"{distance:.4g}")}
        if averaging.outer_momentum or averaging.outer_lr != 1:
            target = self._stepped(target)
        return Weights(target, buffers, own.counters)

    def _stepped(self, target: Vector) -> Vector:
        """The weights after the last exchange, moved towards `target` by SGD with Nesterov momentum."""
        averaging = self._averaging
        step = self._outer - target
        if averaging.outer_momentum:
            self._momentum = np.float32(averaging.outer_momentum) * self._momentum + step
            step = step + np.float32(averaging.outer_momentum) * self._momentum
        self._outer = self._outer - np.float32(averaging.outer_lr) * step
        return self._outer
