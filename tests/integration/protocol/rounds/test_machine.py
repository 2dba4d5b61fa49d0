"""The scripts beside a small model of a round: whatever order things happen in, both say the same.

COMPUTESHARE_MACHINE_EXAMPLES sets how many runs of up to forty steps there are (40).
"""

import math
import os
import secrets
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from redis import Redis

from computeshare.errors import Banned, Fenced
from computeshare.jobspec.quorum import needed
from computeshare.protocol.lease_policy import TOGETHER_MS
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.refusal import BANNING_STRIKES, Fault
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.terms import Terms
from computeshare.protocol.worker_session import WorkerSession
from computeshare.types import Token
from tests.support.rounds import GONE, PLAN, age, current, extend, free, know, take_seat

EXAMPLES = int(os.environ.get("COMPUTESHARE_MACHINE_EXAMPLES", "40"))
WORKERS = st.sampled_from("abc")
FOREVER_MS = 1_000_000
"""How long leases are made to last: they run out by the rule that says so alone."""
UNIT_MS = st.sampled_from((10.0, 2_000.0))
"""How long a unit takes everyone: several are leased together, or one at a time."""


class Rounds(RuleBasedStateMachine):
    """The job as the model knows it, and as the broker does."""

    redis: Redis

    @initialize(sharers=st.sampled_from((0, 3)), quorum=st.sampled_from((0.5, 0.75)), unit_ms=UNIT_MS)
    def begin(self, sharers: int, quorum: float, unit_ms: float) -> None:
        self.sharers, self.quorum, self.unit_ms = sharers, quorum, unit_ms
        self.store = RoundStore(self.redis, secrets.token_hex(6))
        self.store.publish("{}")
        self.names = iter(range(10_000))
        self.sessions: dict[str, WorkerSession] = {}  # by worker: the last session it began
        self.current_ids: dict[str, str] = {}
        self.strikes: dict[str, int] = {}
        self.banned: set[str] = set()
        self.paused = False
        self.fenced: ReducerSession | None = None
        self.sent: tuple[WorkerSession, Token, str, list[int]] | None = None
        self.struck: set[str] = set()
        self.reducer = self._claim()
        token = Token(1, 0, secrets.token_hex(8))
        assert self.reducer.open(
            token, [b"weights"], [b"state"], PLAN.round(0), {}, terms=Terms(backup=False, sharers=self.sharers)
        )
        self._next(token, ())
        for worker in "abc":
            self.join(worker)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.purge()

    def _claim(self) -> ReducerSession:
        self.redis.delete(self.store.keys.reducer())
        reducer = ReducerSession(self.redis, self.store.job_id, f"reducer {next(self.names)}")
        assert reducer.claim("host", 1, 600_000)
        return reducer

    def _next(self, token: Token, carried: tuple[int, ...]) -> None:
        """The round that starts from `token`."""
        self.token, self.round, self.closed = token, PLAN.round(token.version, carried), False
        self.fresh = list(range(self.round.first, self.round.first + self.round.count))
        self.free = list(carried)
        self.leases: dict[int, tuple[str, bool]] = {}  # to worker, whether it has run out
        self.received: dict[int, tuple[str, str]] = {}  # to worker and nonce

    def _give_back(self, worker: str) -> list[int]:
        mine = [m for m, (holder, _) in self.leases.items() if holder == worker]
        for m in mine:
            del self.leases[m]
        return mine

    # Workers

    @rule(worker=WORKERS)
    def join(self, worker: str) -> None:
        session = WorkerSession(self.redis, self.store.job_id, worker, f"s{next(self.names)}")
        status = take_seat(session)
        if self.paused or worker in self.banned:
            assert status == ("paused" if self.paused else "banned")
            return
        assert status == "running"
        self.free += self._give_back(worker)
        self.sessions[worker], self.current_ids[worker] = session, session.session_id

    @rule(worker=WORKERS)
    def leave(self, worker: str) -> None:
        if worker in self.sessions:
            self.sessions[worker].leave("asked to")
            if self.current_ids.pop(worker, None):
                self.free += self._give_back(worker)

    @rule(worker=WORKERS, stale=st.sampled_from((False,) * 5 + (True,)))
    def lease(self, worker: str, stale: bool) -> None:
        if worker not in self.sessions:
            return
        know(self.store, **dict.fromkeys("abc", self.unit_ms))
        asked = str(Token(1, self.token.version, "0" * 16) if stale else self.token)
        if self.paused:
            assert self.sessions[worker].lease(asked).answer == "paused"
        elif worker not in self.current_ids:
            with pytest.raises(Banned if worker in self.banned else Fenced) as caught:
                self.sessions[worker].lease(asked)
            assert isinstance(caught.value, Banned) == (worker in self.banned)
        elif stale or self.closed:
            grant = self.sessions[worker].lease(asked)
            assert (grant.answer, grant.micro_batches) == ("stale" if stale else "wait", ())
        else:
            granted = list(self.sessions[worker].lease(asked).micro_batches)
            self._check(worker, granted)
            for m in granted:
                self.leases[m] = worker, False
            extend(self.store, FOREVER_MS, granted)

    def _check(self, worker: str, granted: list[int]) -> None:
        """As much as the worker may have, in the right order; how much of that, `test_rounds_shares.py` says."""
        most = self.round.total if self.unit_ms < TOGETHER_MS else 1
        if self.sharers:
            mine = sum(who == worker for who, _ in self.received.values())
            mine += sum(lease == (worker, False) for lease in self.leases.values())
            most = min(most, math.ceil(self.round.total / self.sharers) - mine)
        left = [*self.free, *self.fresh] or [m for m, (_, ran_out) in self.leases.items() if ran_out]
        assert granted == left[: len(granted)]
        assert min(1, most, len(left)) <= len(granted) <= max(0, most)
        self.free = [m for m in self.free if m not in granted]
        self.fresh = [m for m in self.fresh if m not in granted]

    @rule(worker=WORKERS, data=st.data())
    def submit(self, worker: str, data: st.DataObject) -> None:
        if worker not in self.sessions:
            return
        leased = [m for m, (holder, _) in self.leases.items() if holder == worker]
        numbers = data.draw(st.sampled_from((leased, leased[:1], [*leased, *self.received], self.round.units)))
        if numbers:
            self._send(self.sessions[worker], self.token, f"n{next(self.names)}", numbers, again=False)

    @precondition(lambda self: not self.paused and self.current_ids)
    @rule(data=st.data(), damaged=st.sampled_from((False, False, True)))
    def work(self, data: st.DataObject, damaged: bool) -> None:
        """A round's usual course: lease, submit all of it, and have it refused if it is damaged."""
        nonce = self._work(data.draw(st.sampled_from(sorted(self.current_ids))))
        for m in [m for m, (_, sent) in self.received.items() if damaged and sent == nonce]:
            self._refuse(m, "damaged")

    @precondition(lambda self: not self.paused and self.current_ids)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """The round is made, closed early or not, and committed."""
        for worker in data.draw(st.permutations(sorted(self.current_ids))):
            self._work(worker)
        self.close(False)
        if self.closed or len(self.received) == self.round.total:
            self.commit(False)

    def _work(self, worker: str) -> str:
        """Lease, and submit what is leased, under the nonce that is returned."""
        nonce = f"n{next(self.names)}"
        self.lease(worker, False)
        leased = [m for m, (holder, _) in self.leases.items() if holder == worker]
        if leased:
            self._send(self.sessions[worker], self.token, nonce, leased, again=False)
        return nonce

    @precondition(lambda self: self.sent is not None)
    @rule()
    def repeat(self) -> None:
        assert self.sent is not None
        self._send(*self.sent, again=True)

    def _send(self, session: WorkerSession, token: Token, nonce: str, numbers: list[int], again: bool) -> None:
        self.sent = session, token, nonce, numbers
        outcome = session.submit(str(token), nonce, [(m, [b"update"], 0.5) for m in numbers], {}).outcome
        worker, counted = session.worker_id, list[int]()
        if again:
            expected = "duplicate"
        elif self.current_ids.get(worker) != session.session_id:
            expected = "fenced"
        elif token != self.token or self.paused:
            expected = "stale"
            handed_back = [m for m in numbers if self.leases.get(m, ("",))[0] == worker]
            self.free += handed_back
            for m in handed_back:
                del self.leases[m]
        else:
            counted = self._counted(worker, numbers)
            known = "duplicate" if set(numbers) & set(self.received) else "lease_lost"
            expected = "accepted" if counted else known
        assert outcome == expected
        for m in counted:
            self.received[m] = worker, nonce
            del self.leases[m]

    def _counted(self, worker: str, numbers: list[int]) -> list[int]:
        room = 0 if self.closed else self.round.total
        if self.sharers:
            mine = sum(who == worker for who, _ in self.received.values())
            room = min(room, math.ceil(self.round.total / self.sharers) - mine)
        leased = [m for m in numbers if m not in self.received and self.leases.get(m, ("",))[0] == worker]
        return leased[: max(0, room)]

    @rule(worker=WORKERS)
    def pardon(self, worker: str) -> None:
        assert self.store.lift_ban(worker) == (worker in self.banned)
        if worker in self.banned:
            self.banned.discard(worker)
            self.strikes.pop(worker)

    # Time and people

    @rule()
    def leases_run_out(self) -> None:
        age(self.store, 10_000_000_000)
        self.leases = {m: (worker, True) for m, (worker, _) in self.leases.items()}

    @rule(rarely=st.sampled_from((False,) * 5 + (True,)))
    def pause_or_resume(self, rarely: bool) -> None:
        if self.paused or rarely:
            assert self.store.resume() if self.paused else self.store.pause()
            self.paused = not self.paused

    # Reducers

    @rule()
    def take_over(self) -> None:
        self.fenced, self.reducer = self.reducer, self._claim()

    @precondition(lambda self: self.received)
    @rule(data=st.data(), damaged=st.booleans(), late=st.booleans())
    def refuse(self, data: st.DataObject, damaged: bool, late: bool) -> None:
        m = data.draw(st.sampled_from(sorted(self.received)))
        if late and self.fenced:
            part = self.reducer.progress()[1][m]
            assert self.fenced.refuse(self.token, part, "for a test", "damaged") == GONE
            return
        self._refuse(m, "damaged" if damaged else "lost")

    def _refuse(self, m: int, fault: Fault) -> None:
        part = self.reducer.progress()[1][m]
        worker, nonce = self.received[m]
        assert (part.worker, part.nonce) == (worker, nonce)
        assert self.reducer.refuse(self.token, part, "for a test", fault).machines == 0
        del self.received[m]
        self.free = [other for other in self.free if other != m] + [m]
        self.closed = False
        if fault == "damaged" and nonce not in self.struck:
            self.struck.add(nonce)
            self.strikes[worker] = self.strikes.get(worker, 0) + 1
            if self.strikes[worker] >= BANNING_STRIKES and worker not in self.banned:
                self.banned.add(worker)
                self.current_ids.pop(worker, None)
                self.free += self._give_back(worker)

    @rule(late=st.booleans())
    def close(self, late: bool) -> None:
        enough = needed(self.round.total, self.quorum)
        reducer = self.fenced if late and self.fenced else self.reducer
        possible = not (self.closed or self.paused or reducer is self.fenced) and len(self.received) >= enough
        assert reducer.close(self.token, enough) == possible
        self.closed = self.closed or possible

    @precondition(lambda self: self.closed or len(self.received) == self.round.total)
    @rule(late=st.booleans())
    def commit(self, late: bool) -> None:
        base, parts = current(self.reducer), self.reducer.progress()[1]
        counted = [parts[m] for m in sorted(parts)]
        carried = tuple(m for m in base.units if m not in parts)
        token = Token(1, self.token.version + 1, secrets.token_hex(8))
        following = PLAN.round(token.version, carried)
        if late and self.fenced:
            assert not self.fenced.commit(base, counted, token, [b"late"], following, {})
            return
        assert self.reducer.commit(base, counted, token, [b"weights"], following, {})
        assert self.reducer.store_state(
            self.token, [(part.base, part.micro_batch) for part in counted], token, [b"state"]
        )
        self._next(token, carried)

    # What must hold after each step

    @invariant()
    def both_say_the_same(self) -> None:
        if not hasattr(self, "token"):
            return
        state, received = self.reducer.progress()
        assert state is not None and state.status == ("paused" if self.paused else "running")
        assert (state.token, state.closed) == (self.token, self.closed)
        assert state.units == self.round.units
        assert {m: (part.worker, part.nonce) for m, part in received.items()} == self.received
        leases: Any = self.redis.hgetall(self.store.keys.leases())
        assert {int(m): lease.split(b"|")[3].decode() for m, lease in leases.items()} == {
            m: worker for m, (worker, _) in self.leases.items()
        }
        assert list(map(int, free(self.store))) == self.free
        assert {bytes(w).decode() for w in self.redis.hkeys(self.store.keys.banned())} == self.banned  # type: ignore[union-attr]

    @invariant()
    def nothing_of_a_round_is_lost(self) -> None:
        if hasattr(self, "token"):
            known = {*self.received, *self.leases, *self.free, *self.fresh}
            assert known == set(self.round.units)


@pytest.mark.slow
def test_the_scripts_do_what_a_small_model_of_a_round_says(redis: Redis) -> None:
    class Machine(Rounds):
        pass

    Machine.redis = redis
    once = [Phase.generate]  # to make a failure smaller takes longer than a test may
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    how = settings(max_examples=EXAMPLES, stateful_step_count=40, suppress_health_check=slow, phases=once)
    run_state_machine_as_test(Machine, settings=how)
