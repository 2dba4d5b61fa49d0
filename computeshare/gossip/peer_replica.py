"""A peer's replica: keeps weights of its own, and averages them with another peer's before each unit."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np
import structlog

from computeshare.codecs.base import Codec
from computeshare.codecs.messages import decode_update, update_parts
from computeshare.gossip.exchange import ExchangeReport, Partners, PeerExchange, Source
from computeshare.gossip.peer_weights import PublishedNotice
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.strategies.base import Averaging
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.work_units import AnyReplica, Compilation, Take, Update
from computeshare.types import Message, Vector

PATIENCE, PATIENCE_S = 0.1, 0.05
"""How long to wait for another's weights before a unit: this part of the last unit's time, or so many seconds. If they
come later, a later unit uses them."""
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Mark:
    """A peer's weights, the number of its units, its momentum, and the job's incarnation, at a moment."""

    own: Weights
    units: int
    momentum: Vector
    incarnation: str


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
        self._replica, self._averaging = replica, averaging
        self._codec, self._layout, self._token = codec, layout, token
        self.exchange = PeerExchange(averaging, source, partners, update_parts(layout), self._decode)
        self._references: dict[str, Vector] = {}
        """Token to the parameters of the recent versions, the last one loaded last."""
        self._own: Weights | None = None
        self._momentum = np.empty(0, np.float32)
        self._asked_from, self._asked_units, self._unit_s = np.empty(0, np.float32), 0, 0.0
        """The weights and the units made when another's were asked for; seconds of the last unit."""
        self._units, self._loss, self._incarnation = 0, math.inf, ""
        self._remarks = Seldom(REMARK_EVERY_S)

    @property
    def compilation(self) -> Compilation:
        return self._replica.compilation

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        """Do nothing: which units come next depends on the others."""

    def load(self, weights: Weights) -> None:
        """Take a version as the reference from here on; also as this peer's weights, if the job was restored."""
        token = self._token()
        self._references.pop(token, None)  # it may be loaded again
        self._references[token] = weights.parameters.copy()  # the next version may come into the same memory
        for outdated in [*self._references][: -self._averaging.recent]:
            del self._references[outdated]
        incarnation = token.partition(".")[0]
        if self._own is None or incarnation != self._incarnation:
            self._incarnation, self._units = incarnation, 0
            self._start(weights)
        else:
            self._own = replace(self._own, counters=weights.counters.copy())

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """Average this peer's weights with another's, and take the unit's steps from there, then the outer step. The
        update is the reference minus the weights then. Raises Interrupted: the weights are as before.

        The next other's weights are asked for at the end, so that they come while these are sent: the steps should
        start from an average of weights that are as new as can be.
        """
        assert self._own is not None, "a version was loaded"
        own = self._averaged(self._own)
        self._replica.load(own)
        began = time.perf_counter()
        update = self._replica.compute(unit, goes_on)
        self._unit_s = time.perf_counter() - began
        self._units, self._loss = self._units + 1, update.loss
        self._own = Weights(own.parameters - self._outer_step(update.vector), update.buffers, own.counters)
        if self.exchange.ask(self._units):
            self._asked_from, self._asked_units = self._own.parameters, self._units
        difference = self._references[next(reversed(self._references))] - self._own.parameters
        for bucket, where in enumerate(self._layout.buckets if take else ()):
            assert take
            take(bucket, difference[where])
        return Update(difference, self._own.buffers, update.loss)

    def mark(self) -> Mark:
        """This peer's weights as they are, for `go_back`."""
        assert self._own is not None, "a version was loaded"
        return Mark(self._own, self._units, self._momentum, self._incarnation)

    def go_back(self, mark: Mark) -> None:
        """Return to the weights of `mark`, unless the job was restored: the units since then do not count, nor does the
        last exchange.
        """
        self.exchange.forget()
        if mark.incarnation == self._incarnation:
            self._own, self._units, self._momentum = mark.own, mark.units, mark.momentum
            if self._asked_units > mark.units:
                self._asked_from, self._asked_units = mark.own.parameters, mark.units

    def report(self) -> ExchangeReport:
        """Exchanges since the last report."""
        return self.exchange.report()

    def _start(self, reference: Weights) -> None:
        """Begin with the weights of a random other peer that has the same reference, else with the reference itself."""
        self._own = reference.copy()
        if found := self.exchange.begin(lambda published: published.token in self._references):
            self._own = Weights(found.parameters, found.buffers, self._own.counters)
        self._momentum = np.zeros_like(self._own.parameters if self._averaging.outer_momentum else self._momentum)

    def _decode(self, published: PublishedNotice, message: Message) -> tuple[Vector, Vector] | None:
        """None: the other has another reference, for which neither is to blame."""
        reference = self._references.get(published.token)
        if reference is None:
            why = "its weights are a difference from a version that was not loaded here"
            self._remarks.tell(log.warning, "no exchange", version=published.token, reason=why)
            return None
        difference, buffers = decode_update(self._codec, message, self._layout, np.empty_like(reference))
        return np.subtract(reference, difference, out=difference), buffers.copy()

    def _averaged(self, own: Weights) -> Weights:
        """This peer's weights, averaged with another's that was asked for, if it has answered.

        If it comes a unit late, the weights of when it was asked are averaged, and what was changed since is added: the
        other's weights do not contain as much.
        """
        other = self.exchange.answer(max(PATIENCE_S, PATIENCE * self._unit_s))
        if other is None:
            return own
        before, late = self._asked_from, max(0, self._units - self._asked_units)
        parameters, buffers = self.exchange.average(before, own.buffers, other, self._units, self._loss, late)
        if before is not own.parameters:
            parameters = parameters + (own.parameters - before)
        return Weights(parameters, buffers, own.counters)

    def _outer_step(self, difference: Vector) -> Vector:
        """The step of SGD with Nesterov momentum on a unit's pseudo-gradient."""
        rate, momentum = np.float32(self._averaging.outer_lr), np.float32(self._averaging.outer_momentum)
        if momentum:
            self._momentum = momentum * self._momentum + difference
            difference = difference + momentum * self._momentum
        return rate * difference
