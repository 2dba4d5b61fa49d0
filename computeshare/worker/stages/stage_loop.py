"""A seat's loop where workers hold stages of the model: lead a chain, follow a leader, or stand by."""

import contextlib
import itertools
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.codecs.messages import UpdateEncoder
from computeshare.codecs.registry import CODECS
from computeshare.errors import CodecError, Interrupted
from computeshare.pipeline.chains.mail import DONE, FAILED, ChainMail, Letter, LetterInbox, LetterOutbox
from computeshare.pipeline.chains.membership import EVERY_S, Membership
from computeshare.pipeline.chains.placement import Held, Placement, StageWorker
from computeshare.pipeline.chains.stage_needs import needs, works_of
from computeshare.pipeline.chains.stage_trial import smallest
from computeshare.pipeline.chains.stage_weights import StageParts, StageVersions
from computeshare.pipeline.stage_replica import HeldStages, StageUpdate
from computeshare.protocol.channel import Channel
from computeshare.protocol.worker_session import STAGED_S, WorkerSession
from computeshare.training.device_group.group import DeviceGroup
from computeshare.transport.connections import is_next_door, when_there_is_room
from computeshare.transport.wire import Wires
from computeshare.types import Blob, Token, Vector
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.seat_loop import ASKED, SeatLoop, SeatStatus
from computeshare.worker.seat.seat_setup import SeatMemory
from computeshare.worker.seat.update_sender import UpdateQueue
from computeshare.worker.stages.chain_replica import ChainReplica, LeaderOrder, StageShare
from computeshare.worker.stages.stage_setup import StageSetup

SMOOTH = 0.5
"""Weight of the newest unit in a worker's measured rate."""
log = structlog.get_logger()


@dataclass(slots=True)
class StageSeat:
    """The context of a seat that holds stages, for as long as it takes part."""

    redis: Redis
    session: WorkerSession
    keeper: LeaseKeeper
    setup: StageSetup
    membership: Membership
    memory: SeatMemory
    status: SeatStatus
    wires: Wires
    """For weights, and messages from other stages."""
    mail: Wires
    """For messages to other stages, and parts of updates, sent by a thread."""
    stop: threading.Event


def join_members(
    redis: Redis, session: WorkerSession, setup: StageSetup, memory: SeatMemory, stop: threading.Event
) -> Membership:
    """The membership of a session, to be entered once that has joined."""
    spec, own = setup.spec, StageWorker(session.worker_id, session.session_id, memory.room_bytes)
    needed = needs(setup.stages, spec.staging, spec.plan)
    return Membership(redis, session.keys.job_id, own, needed, spec.plan.units_per_round, stop)


class StageLoop:
    """Holds the stages that each placement gives to this seat, until the job or the seat ends."""

    def __init__(self, seat: StageSeat) -> None:
        self.seat = seat
        keys, own = seat.session.keys, seat.session.session_id
        self._inbox, self._outbox = (
            LetterInbox(seat.redis, keys.mail(own), seat.wires),
            LetterOutbox(seat.redis, keys.mail, seat.mail),
        )
        self._codecs = seat.setup.spec.codecs
        self._turns = itertools.count(1)
        self._held: tuple[range, StageParts, HeldStages, StageVersions] | None = None
        self._is_tried = self._is_warm = False

    def run(self) -> str:
        """Take part until the job or the seat ends. Returns the reason."""
        membership = self.seat.membership
        try:
            while not self.seat.stop.is_set():
                placement, recall = membership.current
                chain = placement.chain_of(membership.own.session)
                if membership.status != "running":
                    return f"the job is {membership.status}"
                if not chain:
                    self._try_out(recall)
                    recall.wait(1)
                elif chain[0].session == membership.own.session:
                    reason = self._lead(placement, chain, recall)
                    if reason != ASKED:
                        return reason
                else:
                    self._follow(placement, chain, recall)
            return ASKED
        finally:
            self._outbox.drop()
            self._inbox.close()

    def _hold(self, held: range) -> tuple[StageParts, HeldStages, StageVersions]:
        """The replica of a run of stages, and what reads its weights; those of another run are given up before."""
        if self._held is None or self._held[0] != held:
            self._held = None
            seat, setup = self.seat, self.seat.setup
            parts = StageParts(setup.layout, setup.stages, held)
            stages, codec = setup.hold(parts), CODECS[self._codecs.down]
            versions = StageVersions(seat.redis, seat.session, codec, parts, seat.wires, stages.room)
            self._held, self._is_warm = (held, parts, stages, versions), False
            log.info("holds stages", job=seat.session.keys.job_id, first=held.start, count=len(held))
        return self._held[1:]

    def _try_out(self, recall: threading.Event) -> None:
        """Measure once how fast this worker computes a stage, so that it is given one if it is faster than others."""
        membership, setup = self.seat.membership, self.seat.setup
        needed, own = membership.stages, membership.own
        number = smallest(needed)
        if self._is_tried or own.rate or (own.room_bytes and needed[number].bytes > own.room_bytes):
            return
        self._is_tried, self._held = True, None
        try:
            rate = setup.rate(number, lambda: not recall.is_set())
        except Exception as error:  # a model may be unable to compute zeros
            log.warning("speed not measured", job=self.seat.session.keys.job_id, error=str(error))
            return
        membership.own = replace(own, rate=rate)
        self._is_tried = not recall.is_set()  # called off: it is tried again when it next stands by

    def _encoder(self) -> UpdateEncoder:
        compress = not is_next_door(self.seat.redis)
        return UpdateEncoder(CODECS[self._codecs.up], self.seat.setup.layout, compress=compress)

    def _lead(self, placement: Placement, chain: tuple[Held, ...], recall: threading.Event) -> str:
        """Lease micro-batches, and have the chain compute them, while the placement holds. Returns why it ended."""
        seat, setup = self.seat, self.seat.setup
        parts, replica, versions = self._hold(chain[0].stages)
        others = {one: StageParts(setup.layout, setup.stages, one.stages) for one in chain[1:]}
        queue = UpdateQueue(seat.session, self._encoder())
        chained = ChainReplica(
            placement.number,
            chain,
            replica,
            {chain[0]: parts, **others},
            self._inbox,
            self._outbox,
            queue,
            lambda: versions.token,
            recall.is_set,
            seat.memory.peak_bytes,
            seat.session.release,
            self._turns,
        )

        def about() -> dict[str, Any]:
            self._measure(chain[0], chained.shares[0].busy_s)
            return chained.report()

        devices = DeviceGroup([chained])
        loop = SeatLoop(
            setup.spec,
            seat.session,
            seat.keeper,
            devices,
            None,
            versions,
            queue,
            seat.memory,
            seat.status,
            recall,
            about=about,
        )
        try:
            return loop.run()
        except OutOfMemoryError:  # it waited for room in the broker until the placement ended
            return ASKED
        finally:
            seat.session.release()

    def _follow(self, placement: Placement, chain: tuple[Held, ...], recall: threading.Event) -> None:
        """Compute the own stages of the units that the leader orders, while the placement holds."""
        own = next(one for one in chain if one.session == self.seat.membership.own.session)
        parts, replica, versions = self._hold(own.stages)
        follower = StageFollower(self.seat, chain, own, parts, replica, self._inbox, self._outbox, recall)
        encoder = self._encoder()
        while letter := self._inbox.order(lambda: not recall.is_set()):
            try:
                order = LeaderOrder.of(letter)
            except CodecError as error:  # no leader waits for an answer to it
                log.warning("order dropped", job=self.seat.session.keys.job_id, error=str(error))
                continue
            if order.placement > placement.number:  # the leader has heard of the next placement before
                self._inbox.keep(letter)
                recall.wait(EVERY_S)
                return
            if order.placement < placement.number:
                continue
            self._inbox.begin(letter.turn)
            self.seat.memory.check_taken()
            updates = follower.answer(letter, order, versions, encoder)
            if updates:
                self._measure(own, sum(one.busy_s for one in updates))

    def _measure(self, held: Held, busy_s: float) -> None:
        """Note how long this worker took for its stages of a unit: not the first of a replica, which takes up to 2.5
        times as long, so that this worker might lose its stages to another, and stand by from then on.
        """
        if not self._is_warm:
            self._is_warm = True
            return
        membership = self.seat.membership
        rate = works_of(membership.stages, held.stages) / max(busy_s, 1e-6)
        before = membership.own.rate or rate
        membership.own = replace(membership.own, rate=before + SMOOTH * (rate - before))


class StageFollower:
    """A worker of a chain that another one leads, for as long as a placement holds."""

    def __init__(
        self,
        seat: StageSeat,
        chain: tuple[Held, ...],
        own: Held,
        parts: StageParts,
        replica: HeldStages,
        inbox: LetterInbox,
        outbox: LetterOutbox,
        recall: threading.Event,
    ) -> None:
        self._seat, self._chain, self._own = seat, chain, own
        self._parts, self._replica, self._inbox, self._outbox = parts, replica, inbox, outbox
        self._recall = recall
        self._loaded, self._doubted = "", ""

    def answer(
        self, letter: Letter, order: LeaderOrder, versions: StageVersions, encoder: UpdateEncoder
    ) -> list[StageUpdate] | None:
        """Compute the stages of a unit, send their part of the update, and report to the leader; None: it was called
        off, or the version cannot be had, of which the leader is told.
        """
        seat, status = self._seat, self._seat.status
        status.is_working, status.version = True, Token.parse(order.token).version
        try:
            if not self._load(order.token, versions):
                self._fail(letter)
                return None
            updates, sent = self._compute(letter, order, encoder)
            self._outbox.settle()
            share = StageShare.of(self._own, updates, seat.memory.peak_bytes(), sent)
            buffers = self._parts.joined_buffers([one.buffers for one in updates])
            done = replace(letter, stage=0, tag=f"{DONE}{self._own.first}", body=share.dump(buffers))
            self._outbox.tell(self._chain[0].session, done)
            status.samples += seat.setup.spec.plan.unit_size(order.unit)
            return updates
        except Interrupted:
            self._outbox.drop()
            return None
        except (OutOfMemoryError, CodecError) as error:
            log.warning("stages not computed", job=seat.session.keys.job_id, error=str(error))
            self._outbox.drop()
            self._fail(letter)
            return None
        finally:
            status.is_working = False

    def _fail(self, letter: Letter) -> None:
        """Tell the leader that this attempt comes to nothing, as soon as the broker has room."""
        failed = replace(letter, stage=0, tag=FAILED, body=b"")
        with contextlib.suppress(OutOfMemoryError):  # the placement has ended meanwhile
            when_there_is_room(lambda: self._outbox.tell(self._chain[0].session, failed), self._recall)

    def _load(self, token: str, versions: StageVersions) -> bool:
        """Load a version, unless it is loaded; False: it is gone or damaged."""
        if token == self._loaded:
            return True
        try:
            weights = versions.read(token)
        except CodecError as error:
            again, self._doubted = token == self._doubted, token
            log.warning("damaged weights", job=self._seat.session.keys.job_id, error=str(error))
            self._seat.session.doubt(token, again)
            time.sleep(1 if again else 0)
            return False
        if weights is None:
            return False
        self._replica.load(self._parts.views(weights))
        self._loaded = token
        return True

    def _compute(self, letter: Letter, order: LeaderOrder, encoder: UpdateEncoder) -> tuple[list[StageUpdate], int]:
        """The updates of the own stages, whose buckets are being sent, and the number of bytes of those."""
        keys, plan = self._seat.session.keys, self._seat.setup.spec.plan
        key, seed, sent = (
            keys.staged(f"{order.leader}:{letter.attempt}:{order.unit}"),
            plan.generator_seed(order.unit),
            0,
        )

        def goes_on() -> bool:
            return not self._recall.is_set()

        def take(bucket: int, values: Vector) -> None:
            nonlocal sent
            part = encoder.part(bucket, values, seed)
            sent += len(part)
            self._outbox.run(lambda channel: _stage(channel, key, bucket, part))

        mail = ChainMail(letter.attempt, letter.turn, self._chain, self._own, self._inbox, self._outbox, goes_on)
        return self._replica.compute(order.unit, mail, goes_on, take), sent


def _stage(channel: Channel, key: str, bucket: int, part: Blob) -> None:
    channel.exchange([["HSET", key, bucket, part], ["EXPIRE", key, STAGED_S]], large=True)
