"""Exchanges of one's own weights with those of another peer, which a thread reads meanwhile."""

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import structlog
from redis.exceptions import RedisError

from computeshare.errors import CodecError, Interrupted
from computeshare.gossip.peer_weights import PublishedNotice
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.strategies.base import Averaging
from computeshare.types import Message, Vector

FASTER, SLOWER, LEAST = 1.2, 0.5, 0.02
"""By which a peer's score, between `LEAST` and 1, changes with an exchange that succeeded or failed."""
UNITS_OF_A_PAIR = 2
"""Units that a peer makes on average before pairs are drawn anew: with fewer, two peers would seldom read each other,
as each hears late how far the others are.
"""
LATE = 0.5
"""By which the share of another's weights shrinks with each unit that they are late: two peers overshoot that both move
to where the other was. With a distance x, a share f and a delay of one unit, x[t+1] = x[t] - 2 f x[t-1].
"""
log = structlog.get_logger()
Decode = Callable[[PublishedNotice, Message], "tuple[Vector, Vector] | None"]
"""The parameters (d,) and buffers (b,) of a peer's message; None: they cannot be told now. Raises CodecError."""
Choose = Callable[[Mapping[str, PublishedNotice]], str | None]
"""Of the other peers, the one to exchange with; None: with none."""
Read = tuple[PublishedNotice, Message]
"""A peer's entry and its message."""


class Source(Protocol):
    """Where the others' weights are, as `PeerWeights`."""

    def others(self) -> Mapping[str, PublishedNotice]: ...
    def read(self, worker: str, parts: int) -> Read | None: ...


@dataclass(slots=True)
class FetchedWeights:
    """Another peer's weights."""

    worker: str
    published: PublishedNotice
    parameters: Vector
    buffers: Vector


@dataclass(slots=True)
class ExchangeReport:
    """Exchanges since the last report."""

    bytes: int = 0
    """Read from others."""
    met: dict[str, Any] = field(default_factory=dict)
    """Of the last exchange: with whom, the share taken of its weights, and the distance: the root mean square
    of the difference. Empty: there was none.
    """
    waited_s: float = field(default=0.0, compare=False)
    """How long the peer waited for others' weights before it computed on."""


class Partners:
    """Chooses with whom to exchange, and remembers who answered in time."""

    def __init__(self, worker: str, seed: int, matching: str) -> None:
        self._worker, self._seed, self._matching = worker, seed, matching
        self._random = random.Random(f"{seed} {worker}")  # no secret depends on it
        self._scores: dict[str, float] = {}

    def wants(self, probability: float) -> bool:
        """Whether to exchange now."""
        return self._random.random() < probability

    def choose(self, others: Mapping[str, int], units: int) -> str | None:
        """Another peer, or None: there is none, or `pairs` leaves this peer out.

        Args:
            others: the units that each other peer has made, as far as it has published. The units of all together say
                when pairs are drawn anew, so that peers draw the same ones, however fast each is.
            units: made by this peer so far.
        """
        if self._matching == "pairs":
            present = sorted([*others, self._worker])
            drawn = (units + sum(others.values())) // (UNITS_OF_A_PAIR * len(present))
            random.Random(f"{self._seed} {drawn}").shuffle(present)
            place = present.index(self._worker) ^ 1
            return present[place] if place < len(present) else None
        return self.any_of(sorted(others))

    def any_of(self, others: Sequence[str]) -> str | None:
        """A random peer, seldom a slow one; None: there is none."""
        if not others:
            return None
        return self._random.choices(others, [self._scores.get(one, 1.0) for one in others])[0]

    def note(self, other: str, succeeded: bool) -> None:
        """Remember how an exchange went."""
        score = self._scores.get(other, 1.0) * (FASTER if succeeded else SLOWER)
        self._scores[other] = min(1.0, max(LEAST, score))


class PeerExchange:
    """One peer's exchanges: `ask`, later `answer`, then `average`."""

    def __init__(self, averaging: Averaging, source: Source, partners: Partners, parts: int, decode: Decode) -> None:
        """`parts`: of a peer's message."""
        self.averaging, self.partners = averaging, partners
        self._source, self._parts, self._decode = source, parts, decode
        self._helper = ThreadPoolExecutor(1, "peers")
        self._coming: Future[Read | None] | None = None
        self.late: Future[Read | None] | None = None
        """An answer that was not waited for any longer."""
        self._asked, self._asked_at = "", 0.0
        self._took_s = 0.0
        """Seconds that the last answer took to come."""
        self._report = ExchangeReport()
        self._read_bytes = self._told_bytes = 0
        """Read so far, which the helper's thread counts; of these, in reports."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def ask(self, units: int, always: bool = False) -> bool:
        """Begin to read another peer's weights, by chance, unless the last reading goes on. Returns whether it began.

        Args:
            units: made by this peer so far.
            always: leave nothing to chance.
        """
        is_free = self._coming is None and (self.late is None or self.late.done())
        if is_free and (always or self.partners.wants(self.averaging.fetch_probability)):
            self._begin_to_read(
                lambda others: self.partners.choose({name: one.units for name, one in others.items()}, units)
            )
            return True
        return False

    def begin(self, suits: Callable[[PublishedNotice], bool]) -> FetchedWeights | None:
        """The weights of any other peer that `suits`; what was asked for before is no longer wanted. None: nobody's can
        be decoded, or they do not come in time.
        """
        self.late, self._coming = self._coming or self.late, None
        tried: set[str] = set()

        def choose(others: Mapping[str, PublishedNotice]) -> str | None:
            return self.partners.any_of(
                sorted(name for name, one in others.items() if name not in tried and suits(one))
            )

        while True:
            coming = self._begin_to_read(choose)
            found = self.answer()
            if found or not self._asked or not coming.done() or coming.exception():
                return found
            tried.add(self._asked)

    def answer(self, patience_s: float = math.inf) -> FetchedWeights | None:
        """Wait up to `patience_s` for the requested peer's weights, if the last ones were as fast. None: they have not
        arrived, cannot be used, or were not requested. The peer's score changes when they arrive, or once they have
        taken `timeout_ms`.

        They are decoded here, not when they are read: the version they refer to may have been loaded since.
        """
        coming, found = self._coming, None
        if coming is None:
            return None
        left_s = max(0.0, self._asked_at + self.averaging.timeout_ms / 1000 - time.monotonic())
        if patience_s < left_s and not self._comes_within(coming, patience_s):
            return None
        self._coming = None
        try:
            if read := coming.result(left_s):
                found = self._decoded(*read)
                if found is None:
                    return None  # it has another reference, for which it is not to blame
        except FutureTimeoutError:
            self.late = coming
            self._remark(f"no answer within {self.averaging.timeout_ms} ms")
        except (RedisError, Interrupted, CodecError) as error:
            self._remark(str(error))
        if self._asked:
            self.partners.note(self._asked, found is not None)
        return found

    def _comes_within(self, coming: "Future[Read | None]", patience_s: float) -> bool:
        began = time.monotonic()
        in_vain = self._took_s > began - self._asked_at + patience_s
        has_come = bool(wait([coming], 0 if in_vain else patience_s).done)
        self._report.waited_s += time.monotonic() - began
        return has_come

    def average(
        self, parameters: Vector, buffers: Vector, other: FetchedWeights, units: int, loss: float, late: int = 0
    ) -> tuple[Vector, Vector]:
        """One's own parameters (d,) and buffers (b,), averaged with another's, unless these are so large that the sum
        would not be finite.

        Args:
            units, loss: made by this peer so far, and the mean loss of the last.
            late: units made since the other's weights were asked for; each halves the share.
        """
        share = self.averaging.share((units, loss), (other.published.units, other.published.loss)) * LATE**late
        with np.errstate(over="ignore"):
            distance = math.sqrt(float(np.square(other.parameters - parameters).mean()))
        if not math.isfinite(distance):
            self._remark("its weights are too large to average with")
            return parameters, buffers
        self._report.met = {"peer": other.worker, "share": round(share, 4), "distance": float(f"{distance:.4g}")}
        middle = buffers + np.float32(share) * (other.buffers - buffers)
        return self.averaging.towards(parameters, other.parameters, share), middle

    def report(self) -> ExchangeReport:
        """Exchanges since the last report."""
        report, self._report = self._report, ExchangeReport()
        read = self._read_bytes
        report.bytes, self._told_bytes = read - self._told_bytes, read
        return report

    def forget(self) -> None:
        """Report no exchange, and no wait for one: the weights are again as they were before."""
        self._report.met, self._report.waited_s = {}, 0.0

    def _begin_to_read(self, choose: Choose) -> "Future[Read | None]":
        self._asked, self._asked_at = "", time.monotonic()
        self._coming = self._helper.submit(self._read, choose)
        return self._coming

    def _read(self, choose: Choose) -> Read | None:
        """In the helper's thread: another peer's weights; None: there is no other, or they cannot be had."""
        began = time.monotonic()
        others = self._source.others()
        chosen = choose(others)
        if chosen is None or chosen not in others:
            return None
        self._asked = chosen
        found = self._source.read(chosen, self._parts)
        if found is None:
            return None
        self._read_bytes += sum(len(part) for part in found[1] if part is not None)
        self._took_s = time.monotonic() - began
        return found

    def _decoded(self, published: PublishedNotice, message: Message) -> FetchedWeights | None:
        decoded = self._decode(published, message)
        if decoded is None:
            return None
        if not all(np.isfinite(one).all() for one in decoded):
            raise CodecError(f"peer {self._asked} has published values that are not finite")
        return FetchedWeights(self._asked, published, *decoded)

    def _remark(self, why: str) -> None:
        self._remarks.tell(log.warning, "no exchange", peer=self._asked, reason=why)
