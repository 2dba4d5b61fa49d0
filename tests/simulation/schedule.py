"""One seeded schedule: faults in any order first, then none, until the job is finished."""

import random
import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from redis import Redis

from computeshare.protocol.round_store import RoundStore
from computeshare.types import Token
from tests.simulation.control import SimControl
from tests.simulation.journal import Held, Journal
from tests.simulation.model import ROUNDS, Disk
from tests.simulation.reducers import SimReducer
from tests.simulation.workers import SimWorker

FAULTY_STEPS = 120
CALM_TURNS = 12 * ROUNDS
"""Turns, in each of which everyone acts once, within which a job without faults must be finished."""
TOLD = 25
"""How many of the last steps a failure tells of."""

_AGE = """
for _, key in ipairs({KEYS[2], KEYS[3]}) do
  local held = redis.call("HGETALL", key)
  for i = 1, #held, 2 do
    local session, expires, leased, rest = held[i + 1]:match("^(.-)|(.-)|(.-)|(.*)$")
    local older = string.format("%s|%.0f|%.0f|%s", session, expires - ARGV[1], leased - ARGV[1], rest)
    redis.call("HSET", key, held[i], older)
  end
end
if redis.call("HEXISTS", KEYS[1], "opened") == 1 then redis.call("HINCRBY", KEYS[1], "opened", -ARGV[1]) end
"""


class ScheduleFailed(AssertionError):
    """A promise was broken; the message names the seed and the last steps."""


class Schedule:
    """A job, its workers and its reducers, all in one thread; `random.Random(seed)` decides who acts and how."""

    def __init__(self, redis: Redis, seed: int) -> None:
        self.redis, self.seed = redis, seed
        self.rng = random.Random(seed)
        job_id = f"sim-{seed}-{secrets.token_hex(4)}"
        self.store = RoundStore(redis, job_id)
        count = self.rng.randint(1, 5)
        sharers = 3 if count >= 3 and self.rng.random() < 0.5 else 0
        quorum = self.rng.choice((0.5, 0.7, 0.9)) if not sharers and self.rng.random() < 0.5 else 1.0
        delay = not sharers and quorum == 1 and self.rng.random() < 0.5
        self.journal = Journal(redis, self.store.keys, sharers, delay)
        self.disk = Disk()
        self.workers = [SimWorker(redis, job_id, f"w{i}", self.journal, self.rng) for i in range(count)]
        self.reducers = [
            SimReducer(redis, job_id, f"r{i}", self.disk, self.journal, self.rng, quorum) for i in range(2)
        ]
        self.control = SimControl(redis, job_id, self.rng)
        self.steps: list[str] = []
        self.saved: tuple[list[Any], Held] | None = None

    def run(self) -> None:
        """Raises ScheduleFailed."""
        try:
            self.store.publish("{}")
            self._faulty()
            self._calm()
            self._check_end()
        except Exception as error:
            last = "\n  ".join(self.steps[-TOLD:])
            raise ScheduleFailed(
                f"seed {self.seed}: {error!r}\nthe last of {len(self.steps)} steps:\n  {last}"
            ) from error
        finally:
            self.store.purge()

    def _faulty(self) -> None:
        for _ in range(FAULTY_STEPS):
            actor = self.rng.random()
            if actor < 0.58:
                self._worker_acts(self.rng.choice(self.workers))
            elif actor < 0.88:
                self._reducer_acts(self.rng.choice(self.reducers))
            elif actor < 0.93:
                self._tell("broker", self._time_passes)
            elif actor < 0.97:
                self._control_acts()
            else:
                self._tell("broker", self.rng.choice((self._roll_back, self._save, self._go_back, self._go_back)))

    def _worker_acts(self, worker: SimWorker) -> None:
        actions: list[tuple[int, Callable[[], str]]] = [
            (4, worker.lease),
            (25, worker.submit),
            (3, worker.submit_without_reply),
            (3, worker.repeat),
            (3, worker.sleep),
            (4, worker.wake),
            (1, worker.join),
            (1, worker.crash),
            (1, worker.leave),
            (1, worker.reseat),
            (1, partial(worker.removed, self.store)),
            (1, partial(worker.pardoned, self.store)),
        ]
        self._tell(worker.name, self._choose(actions))

    def _control_acts(self) -> None:
        self.journal.drain()  # before what it tells of is trimmed
        self._tell("control", self.control.step)

    def _reducer_acts(self, reducer: SimReducer) -> None:
        actions: list[tuple[int, Callable[[], str]]] = [
            (36, reducer.advance),
            (2, reducer.checkpoint),
            (12, reducer.fold),
            (1, partial(self._crash, reducer)),
            (1, reducer.store),
        ]
        self._tell(reducer.name, self._choose(actions))

    def _choose(self, actions: list[tuple[int, Callable[[], str]]]) -> Callable[[], str]:
        return self.rng.choices([call for _, call in actions], [weight for weight, _ in actions])[0]

    def _crash(self, reducer: SimReducer) -> str:
        reducer.crash()
        return "crashed"

    def _time_passes(self) -> str:
        """Leases run out, or the active reducer's claim does, as neither had been renewed."""
        if self.rng.random() < 0.6:
            return self._age(self.rng.choice((1500, 3_600_000)))
        return self._lapse()

    def _age(self, by_ms: int) -> str:
        k = self.store.keys
        self.redis.eval(_AGE, 3, k.round(), k.leases(), k.backups(), by_ms)
        return f"{by_ms} ms pass"

    def _lapse(self) -> str:
        self.redis.delete(self.store.keys.reducer())
        self.journal.lapsed()
        return "the claim runs out"

    def _roll_back(self) -> str:
        """The broker comes back empty; the control plane publishes the job again."""
        self.control.drain()  # what it has not taken by now is lost, rightly
        self.store.purge()
        self.control.start_over()
        self.journal.forget()
        self.store.publish("{}")
        return "the broker lost everything"

    def _save(self) -> str:
        """The broker's append-only file is written up to here."""
        names = list(self.redis.scan_iter(self.store.keys.pattern(), count=1000))
        pipeline = self.redis.pipeline(transaction=True)
        for name in names:
            pipeline.dump(name)
            pipeline.pttl(name)
        answers = iter(pipeline.execute())
        self.saved = list(zip(names, answers, answers, strict=True)), self.journal.remember()
        return "what the broker holds is on disk"

    def _go_back(self) -> str:
        """The broker is killed and comes back with what its append-only file held."""
        if self.saved is None:
            return self._save()
        entries, held = self.saved
        self.control.drain()  # what it has not taken by now is lost, rightly
        self.store.purge()
        self.control.start_over()
        for name, value, life_ms in entries:
            self.redis.restore(name, max(0, life_ms), value)
        if self.redis.exists(self.store.keys.taken()):
            self.redis.hset(self.store.keys.taken(), "run", "the one before")
        self.journal.go_back(held)
        self.store.publish("{}")
        return "the broker is back as it was before"

    def _calm(self) -> None:
        """Nothing fails any more: the promise is progress."""
        self._tell("broker", self._lapse)
        for reducer in self.reducers:
            self._tell(reducer.name, partial(self._crash, reducer))
        for worker in self.workers:
            self._tell(worker.name, partial(worker.pardoned, self.store))
        for _ in range(CALM_TURNS):
            if self.store.status() == "finished" and not any(r.unsaved for r in self.reducers):
                return
            for reducer in self.reducers:
                self._tell(reducer.name, reducer.advance)
            answers = [self._tell(worker.name, partial(worker.submit, honest=True)) for worker in self.workers]
            if all(answer.startswith("wait") for answer in answers):
                self._tell("broker", partial(self._age, 3_600_000))  # what the dead had leased
        raise AssertionError(f"no progress: {self.store.read()} after {CALM_TURNS} turns without a fault")

    def _check_end(self) -> None:
        """The last version is what its whole branch makes of the version it was restored from."""
        token = self.journal.check_end()
        keys = self.store.keys
        weights = self.journal.history[str(token)]
        assert self.redis.hgetall(keys.weights(str(token))) == {b"0": weights.weights}, (
            "other weights than were committed"
        )
        assert self.redis.hget(keys.state(str(token)), "1") == weights.state, (  # behind the index of its parts
            "another state than goes with the weights"
        )
        self._check_left_behind(token)
        self.control.drain()
        told, stored = +self.journal.told, +self.control.counts
        assert stored == told, f"counted {stored - told} too often, {told - stored} never"

    def _check_left_behind(self, token: Token) -> None:
        """Nothing stays but the last version, the one before, and answers that expire."""
        keys = self.store.keys
        kinds = tuple(name.removesuffix("*") for name in (keys.state("*"), keys.staged("*"), keys.update("*", 0)[:-2]))
        left = {key.decode() for key in self.redis.scan_iter(keys.pattern(), count=1000)}
        found = {key for key in left if key.startswith(kinds)} - {keys.state(str(token))}
        found = {key for key in found if self.redis.ttl(key) < 0}  # what was staged in vain expires by itself
        assert not found, f"left behind: {sorted(found)}"

    def _tell(self, who: str, action: Callable[[], str]) -> str:
        self.steps.append(f"{who} ...")
        name = getattr(action, "__name__", "") or getattr(action.func, "__name__", "")  # type: ignore[attr-defined]
        outcome = action()
        self.steps[-1] = f"{who} {name.strip('_')}: {outcome}"
        return outcome


def run(redis: Redis, seed: int) -> None:
    """Run the schedule of this seed. Raises ScheduleFailed."""
    Schedule(redis, seed).run()
