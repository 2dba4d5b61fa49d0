"""A broker that loses the end of its append-only file, or all it has: rounds go back, and no branch mixes with another.

Real server, scripts, reducer, checkpoints, control plane and SQLite; the workers speak the protocol and make up their
updates. COMPUTESHARE_CUTS sets how many cuts (10), COMPUTESHARE_SEED the first seed (0): to repeat a failure, set the
seed it names and one cut.
"""

import hashlib
import os
import random
import secrets
import signal
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from redis import Redis
from redis.exceptions import RedisError
from sqlalchemy import select

from api.database import Database
from api.jobs.history import History
from api.jobs.service import Jobs
from api.projection.projector import Projector
from api.scheduler.dispatcher import Dispatcher
from api.tables import LedgerEntry, VersionRow, table
from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import decode_update, decode_weights, encode_update, update_parts, weights_parts
from computeshare.codecs.registry import CODECS
from computeshare.errors import Fenced, JobGone, LostClaim
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundState, RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.reducer.job_reducer import JobReducer
from computeshare.tensors.layout import Layout, Weights
from computeshare.transport.connections import connect
from computeshare.types import Blob, Message, Token, Vector
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.rounds import age, take_seat
from tests.support.scheduling_clock import online
from tests.support.wait import wait_until

CUTS = int(os.environ.get("COMPUTESHARE_CUTS", "10"))
FIRST_SEED = int(os.environ.get("COMPUTESHARE_SEED", "0"))
LR, MOMENTUM = 0.05, 0.9
SPEC = JobSpec.model_validate(
    {
        "dataset": "digits",
        "model": "mlp",
        "micro_batch": 64,
        "micro_batches_per_round": 4,
        "epochs": 2,
        "optimizer": {"name": "SGD", "lr": LR, "momentum": MOMENTUM},
        "codec": {"up": "float32", "down": "float32"},
        "checkpoint_every": 4,
        "evaluate_every": 0,
    }
)
FLOAT32 = CODECS["float32"]
MOST_STEPS = 20_000


@cache
def model() -> tuple[Layout, Weights]:
    from computeshare.tasks import modules
    from computeshare.tasks.registry import task_of

    module = task_of(SPEC).module(SPEC.seed)
    return modules.layout_of(module), modules.weights_of(module, modules.layout_of(module))


@dataclass(frozen=True, slots=True)
class Work:
    """A submission, ready to be sent, once or more often."""

    session: WorkerSession
    token: str
    nonce: str
    updates: list[tuple[int, list[Blob], float]]


class Worker:
    """Computes at once, sends sooner or later, sometimes twice; knows nothing of what happens to the broker."""

    def __init__(self, run: "Run", name: str) -> None:
        self.run, self.name, self.rng = run, name, run.rng
        self.session: WorkerSession | None = None
        self.token, self.weights = "", list[Blob]()
        self.to_send: list[Work] = []
        self.sent: list[Work] = []

    def act(self) -> str:
        """One step; says what came of it."""
        try:
            if self.session is None:
                return self._join()
            if self.to_send and self.rng.random() < 0.7:
                return self._send(self.to_send.pop(self.rng.randrange(len(self.to_send))))
            if self.sent and self.rng.random() < 0.05:
                return self._send(self.rng.choice(self.sent))
            return self._lease()
        except (Fenced, JobGone):
            self.session = None
            return "left"

    def _join(self) -> str:
        session = WorkerSession(self.run.redis, self.run.job_id, self.name, secrets.token_hex(8))
        status = take_seat(session, "seat", {"name": self.name, "device": "cpu"})
        self.session = session if status == "running" else None
        return "wait" if self.session is None else "joined"

    def _lease(self) -> str:
        assert self.session is not None
        grant = self.session.lease(self.token)
        if grant.answer == "stale":
            message, grant = self.session.pull(grant.token, weights_parts(model()[0]))
            self.token, self.weights = grant.token, message or []
        if grant.answer == "leased":
            updates = [(m, self.run.compute(self.weights, m), 0.5) for m in grant.micro_batches]
            self.to_send.append(Work(self.session, self.token, secrets.token_hex(8), updates))
        return grant.answer

    def _send(self, work: Work) -> str:
        seconds = dict.fromkeys(("waiting", "computing", "encoding", "uploading"), 0.0)
        receipt = work.session.submit(
            work.token, work.nonce, work.updates, {"bytes_up": 1, "bytes_down": 1, "seconds": seconds}
        )
        self.sent = [*self.sent, work][-3:]
        return receipt.outcome


class Run:
    """A job from its beginning to its end, in one thread; the seed decides who acts and when the broker dies."""

    def __init__(self, seed: int, home: Path, faults: int, fault: str, salted: bool) -> None:
        self.seed, self.rng, self.salted = seed, random.Random(seed), salted
        self.fault = fault
        self.due = sorted(self.rng.sample(range(60, 200), faults))
        self.broker = EmbeddedBroker.start(home / "broker.log", home / "broker")
        self.redis = connect(self.broker.url, retries=0)
        self.database = Database(f"sqlite:///{home / 'computeshare.db'}")
        self.database.migrate()
        self.root = home / "artifacts"
        self.jobs = Jobs(self.database, self.root)
        self.job_id = self.jobs.create(SPEC).id
        self.store = RoundStore(self.redis, self.job_id)
        self.new_control_plane()
        self.reducer: JobReducer | None = None
        self.workers = [Worker(self, f"worker{number}") for number in range(3)]
        self.waits = 0
        self.told: list[str] = []
        self.computed: dict[bytes, bytes] = {}  # digest of an update to that of the weights it was computed on
        self.journal: dict[tuple[int, str], tuple[Vector, Vector]] = {}  # version and digest to weights and momentum
        self.went_back = 0

    def new_control_plane(self) -> None:
        self.projector = Projector(self.database, self.root)
        self.dispatcher = Dispatcher(self.database, self.root)

    def compute(self, weights: list[Blob], micro_batch: int) -> list[Blob]:
        """An update that depends on the weights to the last bit, and where salted on the moment too."""
        digest = digest_of(weights)
        salt = self.rng.randbytes(8) if self.salted else b""
        seed = hashlib.sha256(digest + salt + micro_batch.to_bytes(8)).digest()
        vector = np.random.default_rng(list(seed)).standard_normal(model()[0].parameters, np.float32)
        message = encode_update(FLOAT32, 0.1 * vector, np.zeros(0, np.float32), model()[0], 0)
        self.computed[digest_of(message)] = digest
        return message

    def finish(self) -> str:
        """Run to the end; returns the digest of the last weights."""
        steps = 0
        while not Artifacts(self.root, self.job_id).tokens() or not self._done():
            steps += 1
            assert steps < MOST_STEPS, f"no end after {steps} steps: {self.store.read()}"
            if self.due and steps >= self.due[0]:
                self.due.pop(0)
                self._fail()
            try:
                self._step()
            except RedisError as error:
                self.told.append(f"broker: {error}")
                self.reducer = None
        return self._check_end()

    def _done(self) -> bool:
        state = self.store.read()
        return bool(state and state.status == "finished" and Artifacts(self.root, self.job_id).has(state.token))

    def _step(self) -> None:
        choice = self.rng.random()
        if choice < 0.7:
            worker = self.rng.choice(self.workers)
            self.told.append(f"{worker.name}: {(outcome := worker.act())}")
            self.waits = self.waits + 1 if outcome == "wait" else 0
            if self.waits > 20 and self.store.status() == "running":
                age(self.store, 3_600_000)  # what nobody knows of any more was leased
        elif choice < 0.88:
            self._reduce()
        elif choice < 0.98:
            self.projector.step(self.redis)
        elif choice < 0.995:
            self._dispatch()
        elif self.rng.random() < 0.5:
            self.new_control_plane()
        else:
            self.reducer = None

    def _dispatch(self) -> None:
        online(self.redis, SPEC.queue, worker="0123456789ab")  # a job that nobody could serve is not published
        self.dispatcher.step(self.redis)

    def _reduce(self) -> None:
        if self.reducer is None:
            self.redis.delete(self.store.keys.reducer())  # the claim of the one before has run out
            reducer = ReducerSession(self.redis, self.job_id, secrets.token_hex(4))
            if reducer.claim("host", 1, 600_000):
                self.reducer = JobReducer(reducer, self.root, self.root / "bundles")
            return
        before, parts = self.reducer.session.progress()
        full = before is not None and before.status == "running" and len(parts) == before.count
        wanted = [(part.base, m) for m, part in sorted(parts.items())]
        messages = self.reducer.session.updates(wanted, range(update_parts(model()[0]))) if full else []
        try:
            self.reducer.advance()
        except LostClaim as lost:
            self.told.append(f"reducer: {lost}")
            self.reducer.close()
            self.reducer = None
            return
        after = self.store.read()
        if after is None:
            return
        if (after.version, after.token.digest16) not in self.journal:
            self._check(before, after, sorted(parts), messages)

    def _check(
        self, before: RoundState | None, after: RoundState, numbers: list[int], messages: list[Message | None]
    ) -> None:
        """A version seen for the first time is the step from its base with the updates counted, and nothing else."""
        weights = decode_weights(FLOAT32, self._weights_of(after.token), model()[0]).parameters
        if after.version == 0:
            self.journal[0, after.token.digest16] = (weights, np.zeros_like(weights))
            return
        assert before is not None and before.version + 1 == after.version, f"{before} became {after}"
        old, velocity = self.journal[before.version, before.token.digest16]
        base = digest_of(self._weights_of(before.token))
        for micro_batch, update in zip(numbers, messages, strict=True):
            assert update is not None and self.computed[digest_of(update)] == base, (
                f"micro-batch {micro_batch} of {after.token} was computed on other weights than {before.token}"
            )
        samples = np.array([SPEC.plan.size(m) for m in numbers], np.float64)
        vectors = [decode_update(FLOAT32, one, model()[0])[0].astype(np.float64) for one in messages if one]
        mean = sum(n * v for n, v in zip(samples, vectors, strict=True)) / samples.sum()
        velocity = MOMENTUM * velocity + mean if before.version else mean
        expected = old - LR * velocity
        assert np.allclose(weights, expected, atol=1e-4), f"{after.token} is not the step from {before.token}"
        self.journal[after.version, after.token.digest16] = (weights, velocity)

    def _weights_of(self, token: Token) -> list[Blob]:
        parts = range(weights_parts(model()[0]))  # kept until the version after the next
        return [part for part in self.redis.hmget(self.store.keys.weights(str(token)), parts) if part is not None]

    def _fail(self) -> None:
        before = self.store.read()
        if self.fault == "flush":
            self.redis.flushall()
            self.told.append("the broker was emptied")
        else:
            os.kill(self.broker.pid, signal.SIGKILL)
            wait_until(lambda: self.broker.poll() is not None)
            (file,) = (self.broker.data_dir or Path()).glob("**/*.incr.aof")
            size = file.stat().st_size
            lost = self.rng.randint(0, size) if self.rng.random() < 0.3 else self.rng.randint(0, min(size, 400_000))
            os.truncate(file, size - lost)
            self.broker.spawn()
            wait_until(lambda: answers(self.redis))
            self.told.append(f"the broker lost {lost} of {size} bytes")
        after = self.store.read()
        self.went_back += (after.version if after else -1) < (before.version if before else -1)

    def _check_end(self) -> str:
        state = self.store.read()
        assert state is not None and state.version == SPEC.rounds_total
        assert not self.due, "the job ended before its broker did"
        score = {"loss": 0.5, "accuracy": 0.5, "samples": 360}
        self.store.append("scored", {"token": str(state.token), "version": state.version, **score})
        wait_until(self._completed)
        job = self.jobs.show(self.job_id)
        manifest = Artifacts(self.root, self.job_id).manifest(state.token)
        assert (job.version, job.durable_version) == (state.version, state.version)
        assert job.weights_sha256 == manifest.sha256 and manifest.sha256.startswith(state.token.digest16)
        saved = [(token.version, token.digest16) for token in Artifacts(self.root, self.job_id).tokens()]
        assert len({version for version, _ in saved}) == len(set(saved)), f"what was durable was done again: {saved}"
        epochs = History(self.database, self.root).ledger(self.job_id).epochs
        assert [(e.samples, e.counted, e.missing) for e in epochs] == [(1437, 1437, 0)] * 2
        with self.database.engine.connect() as connection:
            ledger, versions = table(LedgerEntry).c, table(VersionRow).c
            counted = list(connection.scalars(select(ledger.micro_batch).where(ledger.voided.is_(False))))
            standing = list(connection.scalars(select(versions.version).where(versions.voided.is_(False))))
        assert sorted(counted) == list(range(46)), "the ledger holds a micro-batch twice, or lacks one"
        assert len(standing) == len(set(standing)), f"two rows stand for one version: {sorted(standing)}"
        return state.token.digest16

    def _completed(self) -> bool:
        self._dispatch()  # it looks at the disk: a reducer that was left may not have told of its last
        return self.projector.step(self.redis) == 0 and self.jobs.show(self.job_id).status == "completed"

    def close(self) -> None:
        if self.reducer:
            self.reducer.close()
        self.redis.close()
        self.broker.stop()
        self.database.close()


def digest_of(message: Message) -> bytes:
    return hashlib.sha256(b"".join(part for part in message if part is not None)).digest()


def answers(redis: Redis) -> bool:
    try:
        return bool(redis.ping())
    except RedisError:
        return False


def run(home: Path, seed: int, faults: int, fault: str = "cut", salted: bool = False) -> tuple[str, int]:
    """The digest of the last weights, and how often the broker went back."""
    home.mkdir()
    job = Run(seed, home, faults, fault, salted)
    try:
        return job.finish(), job.went_back
    except Exception as error:
        last = "\n  ".join(job.told[-30:])
        raise AssertionError(f"seed {seed}: {error!r}\nthe last steps:\n  {last}") from error
    finally:
        job.close()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> str:
    return run(tmp_path_factory.mktemp("calm") / "home", 0, faults=0)[0]


@pytest.mark.slow
def test_a_broker_whose_file_was_cut_mixes_no_branches_and_ends_with_the_same_bits(tmp_path: Path, calm: str) -> None:
    went_back = 0
    for seed in range(FIRST_SEED, FIRST_SEED + CUTS):
        salted = seed % 2 == 1  # then no two branches are alike, and a mixture would show
        digest, times = run(tmp_path / str(seed), seed, faults=1 + seed % 3 // 2, salted=salted)
        assert salted or digest == calm, f"seed {seed} ended with other weights"
        went_back += times
    assert went_back >= CUTS // 5, f"only {went_back} of {CUTS} cuts lost a version"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(4))
def test_a_broker_that_is_emptied_while_it_runs_mixes_no_branches(tmp_path: Path, calm: str, seed: int) -> None:
    digest, _ = run(tmp_path / "home", seed, faults=2, fault="flush", salted=seed % 2 == 1)
    assert seed % 2 == 1 or digest == calm
