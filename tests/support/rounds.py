"""A job's rounds, opened by a reducer, and hands that take part in them: what the tests of the scripts begin with."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from redis import Redis

from computeshare.jobspec.sampling_plan import Plan, Round
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import Received, Suspicion
from computeshare.protocol.round_store import RoundState, RoundStore
from computeshare.protocol.terms import Terms
from computeshare.protocol.worker_session import WorkerSession
from computeshare.types import Token

PLAN = Plan(seed=0, samples=100, micro_batch=10, micro_batches_per_round=4)
"""Rounds of 4, 4 and 2 micro-batches in each epoch."""
ZERO, ONE, TWO, THREE = (Token(1, version, str(version) * 16) for version in range(4))
Join = Callable[..., WorkerSession]
GONE = Suspicion(-1, -1, -1, -1)
"""What a refusal answers that came too late."""


@pytest.fixture
def store(redis: Redis, job_id: str) -> RoundStore:
    store = RoundStore(redis, job_id)
    store.publish("{}")
    return store


def opened(redis: Redis, store: RoundStore, first: Round, recent: int = 1) -> ReducerSession:
    """The active reducer of a job that is open at version 0, with this round."""
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    assert reducer.open(ZERO, [b"weights 0"], [b"state 0"], first, {"version": 0}, recent)
    return reducer


@pytest.fixture
def reducer(redis: Redis, store: RoundStore) -> ReducerSession:
    return opened(redis, store, PLAN.round(0))


@pytest.fixture
def join(redis: Redis, reducer: ReducerSession) -> Join:
    def join(worker: str, session_id: str | None = None, **terms: Any) -> WorkerSession:
        if terms:
            agree(reducer, **terms)
        session = WorkerSession(redis, reducer.job_id, worker, session_id or f"session of {worker}")
        assert take_seat(session, f"seat of {worker}", {"name": worker}) == "running"
        return session

    return join


def take_seat(session: WorkerSession, seat: str = "seat", about: dict[str, Any] | None = None, frozen: str = "") -> str:
    """Join under a seat that the control plane has issued."""
    session.redis.hset(session.keys.seats(), session.worker_id, seat)
    return session.join(seat, about or {}, frozen)


def agree(store: RoundStore, **terms: Any) -> None:
    """Have the round on these terms, as if its reducer had opened it so."""
    store.redis.hset(store.keys.round(), mapping=Terms(**terms).fields())  # type: ignore[arg-type]


def know(store: RoundStore, **unit_ms: float) -> None:
    """Have these workers measured: so many milliseconds for a unit, the last one just now."""
    seconds, _ = store.redis.time()  # type: ignore[misc]
    told = {worker: f"{each}|{1000 * int(seconds)}" for worker, each in unit_ms.items()}
    store.redis.hset(store.keys.speeds(), mapping=told)  # type: ignore[arg-type]


def speed_ms(store: RoundStore, worker: str) -> float:
    """What a micro-batch takes this worker, as the scripts hold it."""
    told = store.redis.hget(store.keys.speeds(), worker)
    assert told is not None
    return float(bytes(told).split(b"|")[0])


def unseen(store: RoundStore, worker: str, ms: int) -> None:
    """Have a worker that may hold stages last seen so long ago, if it is there."""
    if entry := store.redis.hget(store.keys.members(), worker):
        session, _, rest = bytes(entry).decode().split("|", 2)
        seconds, microseconds = store.redis.time()  # type: ignore[misc]
        seen = 1000 * int(seconds) + int(microseconds) // 1000 - ms
        store.redis.hset(store.keys.members(), worker, f"{session}|{seen}|{rest}")


def send(
    session: WorkerSession, token: Token, *micro_batches: int, nonce: str = "nonce", blob: bytes = b"update"
) -> str:
    return session.submit(str(token), nonce, [(m, [blob], 0.5) for m in micro_batches], {"bytes_up": 6}).outcome


def submit_staged(store: RoundStore, session: WorkerSession, event: str) -> Any:
    """Submit micro-batch 0 of version 0 as nonce `n`, its message being what is staged for it, with this event."""
    return store.scripts.call(
        "submit",
        store.keys,
        staged_keys=[store.keys.staged("n:0")],
        update_keys=[store.keys.update(str(ZERO), 0)],
        peer_key=store.keys.peer(session.worker_id),
        token=str(ZERO),
        worker=session.worker_id,
        session=session.session_id,
        nonce="n",
        event=event,
        parts=1,
        micro_batches=[0],
        losses=[0.5],
    )


def of(token: Token, micro_batches: Sequence[int] = range(4)) -> list[tuple[str, int]]:
    """Updates, as the reducer names them."""
    return [(str(token), m) for m in micro_batches]


def current(reducer: ReducerSession) -> RoundState:
    state, _ = reducer.progress()
    assert state is not None
    return state


def parts(reducer: ReducerSession) -> list[Received]:
    """What the round has received, ascending."""
    _, received = reducer.progress()
    return [received[m] for m in sorted(received)]


def fill(join: Join, reducer: ReducerSession, worker: str = "filler") -> None:
    """The whole round, by one worker."""
    session, token = join(worker), current(reducer).token
    grant = session.lease(str(token))
    assert send(session, token, *grant.micro_batches, nonce=f"{token}") == "accepted"


def commit(
    reducer: ReducerSession,
    token: Token,
    carried: Sequence[int] = (),
    keep: bool = True,
    stored: Token | None = None,
) -> bool:
    """Commit what the round has received, and the state with it if that is to be kept.

    Args:
        stored: the version whose state is the newest; default: that from which the round started.
    """
    event, base, counted = {"version": token.version}, current(reducer), parts(reducer)
    following = PLAN.round(token.version, carried)
    done = reducer.commit(base, counted, token, [b"weights"], following, event, stored=stored)
    if done and keep:
        reducer.store_state(base.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"])
    return done


def events(store: RoundStore, kind: str) -> list[dict[str, Any]]:
    entries: Any = store.redis.xrange(store.keys.events())
    return [json.loads(fields[b"data"]) for _, fields in entries if fields[b"type"].decode() == kind]


def age(store: RoundStore, by_ms: int, runs_out: bool = True) -> None:
    """Make the round and its leases older, as the server's clock would; `runs_out`: nobody extends them meanwhile."""
    for key in (store.keys.leases(), store.keys.backups()):
        held: Any = store.redis.hgetall(key)
        for micro_batch, lease in held.items():
            session, expires, leased, worker = lease.decode().split("|")
            left = int(expires) - by_ms * runs_out
            store.redis.hset(key, micro_batch, f"{session}|{left}|{int(leased) - by_ms}|{worker}")
    speeds: Any = store.redis.hgetall(store.keys.speeds())
    for worker, told in speeds.items():
        unit_ms, at = told.decode().split("|")
        store.redis.hset(store.keys.speeds(), worker, f"{unit_ms}|{int(at) - by_ms}")
    store.redis.hincrby(store.keys.round(), "opened", -by_ms)


def extend(store: RoundStore, by_ms: int, micro_batches: Sequence[int]) -> None:
    """Make the leases on these last so much longer."""
    for micro_batch in micro_batches:
        held: Any = store.redis.hget(store.keys.leases(), str(micro_batch))
        session, expires, rest = held.decode().split("|", 2)
        store.redis.hset(store.keys.leases(), str(micro_batch), f"{session}|{int(expires) + by_ms}|{rest}")


def late(store: RoundStore) -> None:
    """Make the round older than any deadline, though no lease has run out."""
    age(store, 3_600_000, runs_out=False)


def free(store: RoundStore) -> list[bytes]:
    return store.redis.lrange(store.keys.free(), 0, -1)  # type: ignore[return-value]
