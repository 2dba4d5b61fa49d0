"""One seat: a worker's participation in one job, in a process of its own.

The loop reads like docs/protocol.md: pull the version and a lease, compute, submit, wait for the next version.
"""

import os
import signal
import threading
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import structlog
from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.codecs import CODECS
from computeshare.codecs.messages import UpdateEncoder, feedback_of, in_parts
from computeshare.errors import ArtifactError, CodecError, Fenced, Interrupted, JobGone, Unfit
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.memory_estimate import allowed_bytes, does_not_fit, seat_bytes
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.job_log import JobLog, log_warnings
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import Grant, Member, Receipt, Waiting
from computeshare.queue import Seat
from computeshare.runtime.failpoints import failpoint
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom, Writer
from computeshare.runtime.processes import configure_logging, hostname, keep_freed_memory, spare_the_collector
from computeshare.settings import Settings
from computeshare.transport.connections import by_loopback, connect, is_next_door, when_there_is_room
from computeshare.transport.rate_limit import Pacer, parse_rate
from computeshare.transport.wire import Wires
from computeshare.types import Token, Vector
from computeshare.worker.seat.lease_keeper import LeaseKeeper
from computeshare.worker.seat.link_benchmark import measure
from computeshare.worker.seat.progress_pipe import SeatProgress, Teller
from computeshare.worker.seat.update_sender import UpdateQueue
from computeshare.worker.seat.weights_receiver import Inbox

if TYPE_CHECKING:
    import torch

AHEAD = 8
"""Micro-batches that are assembled ahead, at most: of a longer round it is not known which of them will be leased."""
SHORTEST_WAIT_MS, LONGEST_WAIT_MS = 20, 1000
"""For how long a seat waits for news at a time; a signal to leave is looked at after each."""
ALL_AT_ONCE_S = 0.25
"""Computing up to which a lease is taken to be all that the worker gets of a round; after more it asks."""
ASK_AGAIN_S = 0.5
"""How often a seat looks whether the codecs have been chosen."""
SLOW_UPLOAD_S = 5.0
REMARKS = {
    "stale": "too late: another version is current",
    "lease_lost": "lease lost: another worker has the work",
    "fenced": "fenced: a newer session of this worker is there",
    "refused": "not taken: what was sent is gone or not whole",
}
"""What the outcomes of a submission mean to whoever reads the log."""
ASKED = "the worker was asked to leave"
log = structlog.get_logger()


def serve(seat_id: str) -> str:
    """Run a seat until its job ends, the worker leaves, or another session takes over; returns why it ended."""
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])  # blocked so far: the seat would have died of it
    if stop.is_set():
        return ASKED
    keep_freed_memory()
    settings, seat = Settings(), Seat.parse(seat_id)
    url = settings.resolve_redis_url()
    with JobLog(url, Writer(seat.worker, settings.name or hostname()), seat.job) as job_log:
        configure_logging(job_log.capture)
        log_warnings()
        redis = connect(url)
        spec = RoundStore(redis, seat.job).spec()
        if spec is None:
            return "the job is gone"
        session = SeatSession(redis, seat, JobSpec.model_validate_json(spec), settings, stop)
        return session.run(settings.device)


class SeatSession:
    """The state of one seat: its model, its session in the round protocol, and the clock of its report."""

    def __init__(self, redis: Redis, seat: Seat, spec: JobSpec, settings: Settings, stop: threading.Event) -> None:
        self.redis, self.seat, self.spec, self.stop = redis, seat, spec, stop
        self.data_dir, self.home, self.name = settings.data_dir, settings.home, settings.name or hostname()
        session = os.environ.get("RQ_EXECUTION_ID") or uuid.uuid4().hex
        pacer = Pacer(parse_rate(settings.max_up)) if settings.max_up else None
        self.wires = Wires.to(redis, by_loopback(redis), pacer=pacer, interrupt=self._is_called_off)
        self.member = Member(redis, seat.job, seat.worker, session, self.wires)
        self.keeper = LeaseKeeper(self.member)
        self.compress = not is_next_door(redis)
        self.is_working = False  # computing, or sending what came of it
        self.max_memory = allowed_bytes(settings.max_memory)
        self.needed_bytes = 0
        self.waiting_s = 0.0
        self.submitted_at = 0.0
        self.usual_wait_s = 0.0  # from a submission to the next version; 0: there is more to do before that
        self.loaded = self.joined = False
        self.doubted = ""
        """Token of the version whose weights were found damaged last."""
        self.uploading_s = 0.0  # of the submission before: none can report its own
        self.remarks = Seldom(REMARK_EVERY_S)
        self.version = self.samples = 0
        self.teller = Teller(self._progress)

    def run(self, device_name: str | None) -> str:
        """Load what the job needs, join, take part, leave."""
        reason = "left"
        try:
            self._load(device_name)
            reason = self._agree() or self._join() or self._serve()
        except Fenced as fenced:
            reason = str(fenced)
        except JobGone as gone:
            reason = str(gone)
        except OutOfMemoryError:
            reason = ASKED
        except Unfit as unfit:
            reason = str(unfit)
            self._tell_unfit(reason)
        except BaseException as error:
            reason = f"failed: {type(error).__name__}: {error}"
            if not self.joined:  # whoever watches the job is to know why it gets no further
                about = {"worker": self.seat.worker, "session": self.member.session, "reason": reason[:500]}
                RoundStore(self.redis, self.seat.job).append("left", about)
            raise
        finally:
            log.info("leaving", job=self.seat.job, reason=reason)
            self.member.leave(reason)
        return reason

    def _tell_unfit(self, reason: str) -> None:
        """Tell the control plane not to give this worker a seat in this job again, and why."""
        about: dict[str, Any] = {"worker": self.seat.worker, "session": self.member.session, "reason": reason[:500]}
        about |= {"name": self.name, "device": self.device, "memory_bytes": self.needed_bytes}
        RoundStore(self.redis, self.seat.job).append("unfit", about)
        log.error("this machine cannot take part in the job", job=self.seat.job, reason=reason)

    def _load(self, device_name: str | None) -> None:
        """Import torch, open the data set, build the model: everything slow, before any work is claimed."""
        import torch

        from computeshare.tasks import datasets, models
        from computeshare.training import devices
        from computeshare.training.work_units import replica_of

        spec, started = self.spec, time.perf_counter()
        log.info("loading", job=self.seat.job, model=spec.model, dataset=spec.dataset)
        if spec.threads:
            torch.set_num_threads(spec.threads)
        device = devices.choose(device_name)
        devices.make_deterministic(device)
        self.device, self.kind = devices.describe(device), devices.kind(device)
        datasets.prepare(spec.dataset, self.data_dir)
        split = datasets.open_split(spec.dataset, "train", self.data_dir, spec.shape)
        module = models.of(spec)
        self.layout = models.layout_of(module)
        self.module = module
        self._check_room(device)
        self._test(device)
        spare_the_collector()
        self.make_replica = partial(replica_of, module=module, layout=self.layout, split=split, device=device)
        seconds = round(time.perf_counter() - started, 1)
        log.info("loaded", job=self.seat.job, seconds=seconds, device=self.device, threads=torch.get_num_threads())

    def _check_room(self, device: "torch.device", saved_bytes: int = 0) -> None:
        """Find out whether this job fits; `saved_bytes` as for `seat_bytes`. Raises Unfit: it does not."""
        from computeshare.training import memory

        self.peak_bytes = partial(memory.peak_bytes, device)
        room = self.max_memory or memory.room_bytes(device)
        self.needed_bytes = seat_bytes(self.spec, device.type, saved_bytes, memory.resident_bytes())
        if why := does_not_fit(self.needed_bytes, room, measured=False, by_flag=bool(self.max_memory)):
            raise Unfit(why)

    def _mind_memory(self) -> None:
        """Raises Unfit where this seat has taken more than its worker's owner allows."""
        taken = self.peak_bytes()
        if self.max_memory and (why := does_not_fit(taken, self.max_memory, measured=True, by_flag=True)):
            self.needed_bytes = taken
            raise Unfit(why)

    def _test(self, device: "torch.device") -> None:
        """Find out whether the device computes this model's gradient rightly. Raises Unfit: it does not."""
        from computeshare.training import selftest

        classes = catalog().datasets[self.spec.dataset].classes
        subject = selftest.Subject(self.spec.model, self.module, self.layout, self.spec.shape, classes)
        trial = selftest.check(subject, device, self.home)
        if trial.trouble:
            raise Unfit(f"{trial.trouble}. Run computeshare doctor --selftest there; a restarted worker is tested anew")
        self._check_room(device, trial.saved_bytes)
        log.info(
            "self-test passed", job=self.seat.job, error=float(f"{trial.error:.1g}"), seconds=round(trial.seconds, 2)
        )

    def _agree(self) -> str | None:
        """Measure what the job's codecs are to be chosen by, if they are; a reason to end if they never are."""
        rounds = RoundStore(self.redis, self.seat.job)
        if self.spec.codec == "auto":
            from computeshare.tasks.models import weights_of

            replica = self.make_replica(self.spec)
            replica.load(weights_of(self.module, self.layout))

            def compute(micro_batches: Sequence[int]) -> tuple[Vector, Vector]:
                update = replica.walk(micro_batches)
                return update.vector, update.buffers

            found = when_there_is_room(lambda: measure(self.member, compute, self.layout), self.stop)
            log.info("measured", job=self.seat.job, **found.model_dump())
            self.member.report(found.model_dump_json())
        while self.spec.codec == "auto":
            if self.stop.wait(ASK_AGAIN_S):
                return ASKED
            raw = rounds.spec()
            if raw is None:
                return "the job is gone"
            self.spec = JobSpec.model_validate_json(raw)
        codecs = self.spec.codecs
        self.plan = self.spec.plan
        self.feedback = feedback_of(CODECS[codecs.up], self.layout)
        self.outbox = UpdateQueue(
            self.member, UpdateEncoder(CODECS[codecs.up], self.layout, self.feedback, self.compress)
        )
        self.replica = self.make_replica(self.spec)
        self.inbox = Inbox(self.member, codecs.down, self.layout, self.replica.room)
        return None

    def _join(self) -> str | None:
        """Begin the session once the job is open; a reason if that is not to be."""
        about: dict[str, Any] = {"name": self.name, "device": self.device}
        about["kind"] = self.kind
        about["memory_bytes"] = self.needed_bytes
        self.loaded = True
        self.teller.tell()  # from here on there may be something to finish
        while not self.stop.is_set():
            status = when_there_is_room(lambda: self.member.join(self.seat.id, about), self.stop)
            if status == "running":
                self.joined = True
                self._take_over()
                codecs = {"up": self.spec.codecs.up, "down": self.spec.codecs.down}
                log.info("joined", job=self.seat.job, model=self.spec.model, device=self.device, **codecs)
                return None
            if status == "banned":
                return "this worker is banned from the job: too many of its updates were refused"
            if status != "unopened":
                return f"the job is {status}"
            self.member.wait(1000)
        return ASKED

    def _take_over(self) -> None:
        """Go on with a replica whose worker has left, where its inner state is kept."""
        if kept := self.replica.kept:
            try:
                if state := self.member.take_over():
                    kept.restore(state)
            except (ArtifactError, CodecError) as error:
                log.warning("inner state not taken over", job=self.seat.job, error=str(error))

    def _hand_over(self) -> None:
        """Leave the inner state of this seat's replica to another, while the job can still make use of it."""
        status, kept = self.member.extend(()), self.replica.kept
        if kept and status in ("running", "paused") and (state := kept.dump()):
            try:
                self.member.hand_over(in_parts(state))
            except OutOfMemoryError as error:
                log.warning("inner state not handed over", job=self.seat.job, error=str(error))

    def _serve(self) -> str:
        with self.keeper:
            reason = self._take_part()
        self._hand_over()
        return reason

    def _take_part(self) -> str:
        """Compute and submit until there is a reason to end, which is returned."""
        loaded = ""
        grant = self.member.lease(loaded)
        while not self.stop.is_set():
            if grant.weights:
                if not self._load_news(grant):
                    grant = self._doubt(grant.token)
                    continue
                loaded = grant.token
                self.usual_wait_s = time.perf_counter() - self.submitted_at if self.submitted_at else 0.0
            elif grant.answer == "leased":
                self.usual_wait_s = 0.0
            match grant.answer:
                case "stale":
                    try:
                        weights, grant = self.inbox.pull(grant.token)
                    except CodecError as error:
                        grant = self._doubt(grant.token, str(error))
                        continue
                    if grant.answer == "stale":
                        continue  # superseded while it was on its way
                    if weights is None:
                        grant = self._superseded(grant.token)
                        continue
                    self.replica.load(weights)
                    loaded = grant.token
                case "leased":
                    grant = self._work(grant) or self._waited(loaded)
                case "wait":
                    grant = self._wait(loaded, grant.ask_again_ms)
                case "fenced" | "banned" | "gone":
                    grant = self.member.lease(loaded)  # raises the reason
                case status:
                    return f"the job is {status}"
        return ASKED

    def _load_news(self, grant: Grant) -> bool:
        """Load the weights that came with the news of a version; False if they are damaged."""
        try:
            self.replica.load(self.inbox.decoded(grant))
        except CodecError:
            return False
        return True

    def _doubt(self, token: str, error: str = "they do not match its digest") -> Grant:
        """Tell that a version's weights are damaged, and read them again: at once, or, if that was of no use, once the
        reducer has published them again.
        """
        again, self.doubted = token == self.doubted, token
        log.warning("damaged weights", job=self.seat.job, version=Token.parse(token).version, error=error)
        self.member.doubt(token, again)
        self.inbox.forget()
        if again:
            self.member.wait(LONGEST_WAIT_MS)
        return self.member.lease("")

    def _superseded(self, token: str) -> Grant:
        """The next version, where the weights of one were let go of while they were read.

        Raises JobGone: there is none; the broker has lost them.
        """
        grant = self.member.lease("")
        if grant.answer == "stale" and grant.token == token:
            raise JobGone(f"the weights of version {token} are gone")
        return grant

    def _wait(self, loaded: str, ask_again_ms: int) -> Grant:
        """Sleep until the next version, or until it is worth asking for a lease again."""
        started = time.perf_counter()
        self._look_ahead(loaded)
        timeout_ms = min(ask_again_ms, LONGEST_WAIT_MS)
        if self.inbox.with_news:
            grant = self.member.wait_for(loaded, Waiting(timeout_ms, self.inbox.parts))
        else:
            token = self.member.wait(timeout_ms)
            grant = Grant("stale", token, 0, ()) if token and token != loaded else self.member.lease(loaded)
        self.waiting_s += time.perf_counter() - started
        return grant

    def _waited(self, loaded: str) -> Grant:
        """What the waiting that was begun with a submission ends with."""
        started = time.perf_counter()
        grant = self.member.waited(loaded)
        self.waiting_s += time.perf_counter() - started
        return grant

    def _look_ahead(self, loaded: str) -> None:
        """Assemble what may be leased of the next round, while there is nothing else to do."""
        if loaded:
            units = self.spec.strategy.foreseen(self.plan, Token.parse(loaded).version + 1)
            self.replica.prefetch(units if len(units) <= AHEAD else ())

    def _work(self, grant: Grant) -> Grant | None:
        """Compute what was leased and submit it; None: waiting for the next version has begun."""
        self._mind_memory()
        self.version = Token.parse(grant.token).version
        self.outbox.begin()
        self.keeper.begin(grant.micro_batches, self.outbox.nonce)
        self.is_working = True
        try:
            seconds = self._compute(grant)
            if self.inbox.is_right():
                return self._submit(grant.token, seconds)
            self.outbox.drop()
            self._take_back()
            return self._doubt(grant.token)
        except Interrupted:
            self._take_back()
            return self.member.lease(grant.token)  # which says why
        finally:
            self.is_working = False
            self.keeper.end()

    def _take_back(self) -> None:
        """Do without the updates that were computed."""
        self.is_working = False  # what follows is not called off
        if self.feedback:
            self.feedback.go_back()
        self.outbox.forget()

    def _compute(self, grant: Grant) -> dict[str, float]:
        """Put the updates of what was leased into the outbox; returns where the time went.

        Raises Interrupted: there is no use in them.
        """
        started = time.perf_counter()
        outbox = self.outbox
        if self.feedback:
            self.feedback.mark()
        try:
            for unit in grant.micro_batches:
                take = outbox.taker(unit, self.plan.generator_seed(unit))
                update = self.replica.compute(unit, self.keeper.goes_on, grant.sizes, take)
                failpoint("after_compute")
                outbox.complete(unit, update.buffers, update.loss)
                self.samples += self.plan.unit_size(unit, grant.sizes)
        except BaseException:
            outbox.drop()
            raise
        computing_s = time.perf_counter() - started - outbox.encoding_s
        return {"waiting": self.waiting_s, "computing": computing_s, "encoding": outbox.encoding_s}

    def _progress(self) -> SeatProgress:
        """How this seat gets on, for whoever sits before its machine."""
        state = ("working" if self.is_working else "waiting") if self.loaded else "loading"
        moved = self.wires.bytes_sent, self.wires.bytes_received
        return SeatProgress(state, self.spec.title, self.version, self.spec.rounds_total, self.samples, *moved)

    def _is_called_off(self) -> bool:
        """Whether nobody has any use for what is being sent."""
        return self.is_working and not self.keeper.takes_more()

    def _submit(self, token: str, seconds: dict[str, float]) -> Grant | None:
        started = time.perf_counter()
        seconds["uploading"] = self.uploading_s
        report: dict[str, Any] = {
            "bytes_up": self.outbox.bytes,
            "bytes_down": self.inbox.bytes,
            "memory_bytes": self.peak_bytes(),
            "seconds": {name: round(s, 6) for name, s in seconds.items()},
        }
        waiting = self._expected(token, seconds["computing"])
        self.waiting_s = 0.0
        receipt = when_there_is_room(lambda: self.outbox.submit(token, report, waiting), self.stop)
        self.is_working = False
        self.submitted_at = time.perf_counter()
        self.uploading_s = self.submitted_at - started - self.waiting_s
        self._remark(receipt, token)
        self.inbox.bytes = 0
        if receipt.outcome == "gone":
            raise JobGone(f"job {self.seat.job} is not open")
        if self.feedback and "accepted" not in (receipt.outcome, receipt.before):
            self.feedback.go_back()
        if waiting and receipt.outcome != "accepted":
            return self.member.lease(token)  # the next version may not be what comes next
        return receipt.grant

    def _remark(self, receipt: Receipt, token: str) -> None:
        """Say now and then in the log what went wrong with a submission, or took long."""
        job = self.seat.job
        if told := REMARKS.get(receipt.outcome):
            self.remarks.tell(log.warning, told, job=job, version=Token.parse(token).version)
        if self.uploading_s >= SLOW_UPLOAD_S:
            seconds, sent = round(self.uploading_s, 1), self.outbox.bytes
            self.remarks.tell(log.warning, "slow upload", job=job, seconds=seconds, bytes=sent)

    def _expected(self, loaded: str, computed_s: float) -> Waiting | None:
        """How to wait for the next version right after a submission; None if there may be more to do before.

        Args:
            computed_s: what the submission took to compute; where that is long, work is leased bit by bit.
        """
        more = self.spec.strategy.takes_any or computed_s > ALL_AT_ONCE_S
        if not self.inbox.with_news or not self.usual_wait_s or more or self.stop.is_set():
            return None
        timeout_ms = min(max(SHORTEST_WAIT_MS, int(2000 * self.usual_wait_s)), LONGEST_WAIT_MS)
        return Waiting(timeout_ms, self.inbox.parts, partial(self._begin_to_wait, loaded))

    def _begin_to_wait(self, loaded: str) -> None:
        started = time.perf_counter()
        self._look_ahead(loaded)
        self.waiting_s += time.perf_counter() - started
