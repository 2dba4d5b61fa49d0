"""The keys that machines hold in the broker under names of their own: bounded for each machine; all of them expire.

The gateway counts what passes; the broker is asked for true sizes only where a machine seems to hold too much. A key
counts from the moment its command passes, and is looked at once the broker has answered: then it is there, or gone.
Gateways tell one another their counts through the broker, so that limits are those of all of them together.
"""

import math
import secrets
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from redis import Redis
from redis.exceptions import RedisError

from api.gateway.commands.policy import Own
from api.text_format import size
from computeshare.errors import ComputeShareError
from computeshare.protocol.keys import GATEWAYS
from computeshare.protocol.keys import gateway as gateway_key
from computeshare.transport.refusals import for_now

MESSAGE_BYTES, MOST_MESSAGES = 1 << 30, 20_000
"""The most bytes of a machine's messages (staged updates, probes), beyond what its jobs' rounds may take;
and the most keys.
"""
RECORD_BYTES, MOST_RECORDS = 1 << 26, 10_000
"""The same for its workers' descriptions and RQ's records of its workers and seats."""
KEY_BYTES = 200
"""Of memory that a key takes beyond its content, about."""
MEASURED_EVERY_S = 1.0
AGAIN_S = 5.0
"""Seconds after which a refused machine should try again."""
SHARED_S = 15
"""How long a gateway's counts hold for the others after it has told them last."""
FOR_EVER = -1
"""The broker's answer to PTTL for a key without an expiry."""


@dataclass(slots=True)
class _Key:
    """A key that a machine has written."""

    own: Own
    bytes: int = KEY_BYTES
    pending: int = 0
    """Commands on the key that the broker has not answered yet."""
    is_due: bool = False
    """Whether the broker is to be asked for the key's expiry."""
    ends: float = 0.0
    """When the key has expired, by the gateway's clock."""


class _Machine:
    """The keys of one machine, and their sums: of messages (True) and of records (False)."""

    def __init__(self) -> None:
        self.keys: dict[str, _Key] = {}
        self.bytes, self.count = Counter[bool](), Counter[bool]()
        self.measured = -math.inf

    def key(self, name: str, own: Own) -> _Key:
        if (found := self.keys.get(name)) is None:
            found = self.keys[name] = _Key(own)
            self.bytes[own.is_message] += found.bytes
            self.count[own.is_message] += 1
        return found

    def resize(self, key: _Key, count: int) -> None:
        self.bytes[key.own.is_message] += count - key.bytes
        key.bytes = count

    def drop(self, name: str) -> None:
        key = self.keys.pop(name)
        self.bytes[key.own.is_message] -= key.bytes
        self.count[key.own.is_message] -= 1


@dataclass(slots=True)
class _Sums:
    """Sums of a machine's keys at other gateways: of messages (True) and of records (False)."""

    bytes: Counter[bool] = field(default_factory=Counter)
    count: Counter[bool] = field(default_factory=Counter)

    def add(self, numbers: Sequence[int]) -> None:
        """Add what one gateway told: bytes and values of messages, then of records."""
        self.bytes.update({True: numbers[0], False: numbers[2]})
        self.count.update({True: numbers[1], False: numbers[3]})


class Holdings:
    """The keys of all machines at a gateway, from any thread.

    Args:
        broker: returns a client with the control plane's rights.
        rounds: the bytes that a round of each job of a machine may take, in all.
    """

    def __init__(
        self,
        broker: Callable[[], Redis],
        rounds: Callable[[str], int] = lambda machine: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker, self._rounds, self._clock = broker, rounds, clock
        self._machines: defaultdict[str, _Machine] = defaultdict(_Machine)
        self._id = secrets.token_hex(8)
        self._elsewhere: dict[str, _Sums] = {}
        self._lock = threading.Lock()

    def begin(self, machine: str, name: str, own: Own) -> None:
        """Note that a command on a key of a machine's is passed on; `end` must follow."""
        with self._lock:
            self._machines[machine].key(name, own).pending += 1

    def add(self, machine: str, name: str, count: int) -> None:
        """Note that so many bytes for a key whose command has begun are passed on."""
        with self._lock:
            if key := self._machines[machine].keys.get(name):
                self._machines[machine].resize(key, key.bytes + count)

    def keep(self, machine: str, names: Iterable[str]) -> None:
        """Note that these keys, if they are a machine's, live as long again as they may."""
        now = self._clock()
        with self._lock:
            keys = self._machines[machine].keys
            for key in filter(None, map(keys.get, names)):
                key.ends = now + key.own.life_s

    def end(self, machine: str, names: Iterable[str]) -> None:
        """Note that the broker has answered a command on each of these keys, or never will."""
        with self._lock:
            for name in names:
                key = self._machines[machine].keys[name]  # no key is dropped before its commands have ended
                key.pending -= 1
                key.is_due = True

    def has_room(self, machine: str, is_message: bool) -> bool:
        """Whether the machine may hold more, by what was counted."""
        with self._lock:
            return not _is_full(*self._held(machine, is_message), is_message)

    def refusal(self, machine: str, is_message: bool) -> str | None:
        """Why the machine may hold no more at present; None: it may. Asks the broker. Raises RedisError;
        ComputeShareError: no broker is known.
        """
        self._measure(machine)
        with self._lock:
            bytes_held, keys = self._held(machine, is_message)
        if not _is_full(bytes_held, keys, is_message) or (
            is_message and keys < MOST_MESSAGES and bytes_held < self._allowed(machine)
        ):
            return None
        return for_now(f"this machine holds {keys} values of {size(bytes_held)} here, the most it may", AGAIN_S)

    def share(self) -> None:
        """Tell the other gateways what machines hold here, and learn what they hold there. During an outage of the
        broker, or where another has written nonsense, what was learnt before holds.
        """
        with self._lock:
            here = {
                machine: f"{one.bytes[True]} {one.count[True]} {one.bytes[False]} {one.count[False]}"
                for machine, one in self._machines.items()
                if one.keys
            }
        try:
            elsewhere = self._exchange(here)
        except (RedisError, ComputeShareError, ValueError, IndexError):
            return
        with self._lock:
            self._elsewhere = elsewhere

    def _exchange(self, here: dict[str, str]) -> dict[str, _Sums]:
        """Tell what machines hold here; returns what they hold elsewhere. Raises as `refusal`; ValueError, IndexError:
        another gateway's counts make no sense.
        """
        redis, mine, found = self._broker(), gateway_key(self._id), defaultdict[str, _Sums](_Sums)
        with redis.pipeline() as telling:
            telling.delete(mine)
            if here:
                telling.hset(mine, mapping=here)  # type: ignore[arg-type]
                telling.expire(mine, SHARED_S)
                telling.sadd(GATEWAYS, self._id)
            else:
                telling.srem(GATEWAYS, self._id)
            telling.smembers(GATEWAYS)
            ids: set[bytes] = telling.execute()[-1]
        for gateway in ids - {self._id.encode()}:
            told: dict[bytes, bytes] = redis.hgetall(gateway_key(gateway.decode()))  # type: ignore[assignment]
            if not told:
                redis.srem(GATEWAYS, gateway)
            for machine, numbers in told.items():
                found[machine.decode()].add([int(each) for each in numbers.split()])
        return found

    def look(self) -> bool:
        """Give the keys written lately an expiry where they have none, or a longer one than they need, and forget those
        that are gone. Returns whether machines hold anything here.
        """
        due = self._due()
        try:
            left = self._expiring([own for _, _, own in due], [name for _, name, _ in due]) if due else []
        except (RedisError, ComputeShareError):
            left = None
        now = self._clock()
        with self._lock:
            for place, (machine, name, _) in enumerate(due):
                if (key := self._machines[machine].keys.get(name)) is None:
                    continue
                if left is None:
                    key.is_due = True
                elif left[place] > 0:
                    key.ends = now + left[place]
                elif not key.pending and not key.is_due:
                    self._machines[machine].drop(name)
            return any(found.keys for found in self._machines.values())

    def _due(self) -> list[tuple[str, str, Own]]:
        """The keys to ask the broker for, no more noted as such. Forgets those that have expired."""
        now, due = self._clock(), []
        with self._lock:
            for machine, found in list(self._machines.items()):
                for name, key in list(found.keys.items()):
                    if key.is_due:
                        due.append((machine, name, key.own))
                        key.is_due = False
                    elif not key.pending and now >= key.ends:
                        found.drop(name)
                if not found.keys:
                    del self._machines[machine]
        return due

    def _expiring(self, owns: Sequence[Own], names: Sequence[str]) -> list[float]:
        """Seconds until each of these keys expires, from now on; 0 or less: it does not exist. Raises as `refusal`."""
        redis = self._broker()
        asking, telling = redis.pipeline(transaction=False), redis.pipeline(transaction=False)
        for name in names:
            asking.pttl(name)
        left: list[float] = []
        for name, own, ms in zip(names, owns, asking.execute(), strict=True):
            is_endless = ms == FOR_EVER or ms > 1000 * own.life_s
            if is_endless or (own.is_renewed and 0 < ms < 500 * own.life_s):
                telling.expire(name, own.life_s)
                left.append(own.life_s)
            else:
                left.append(ms / 1000)
        telling.execute()
        return left

    def _measure(self, machine: str) -> None:
        """Replace what was counted by what the broker says, once in `MEASURED_EVERY_S` at most. Raises as `refusal`."""
        now = self._clock()
        with self._lock:
            found = self._machines[machine]
            if now - found.measured < MEASURED_EVERY_S:
                return
            found.measured = now
            names = [name for name, key in found.keys.items() if not key.pending]
        asking = self._broker().pipeline(transaction=False)
        for name in names:
            asking.memory_usage(name, samples=0)
        sizes: list[int | None] = asking.execute()
        with self._lock:
            for name, count in zip(names, sizes, strict=True):
                if (key := found.keys.get(name)) is None or key.pending:
                    continue
                if count is None:
                    found.drop(name)
                else:
                    found.resize(key, count)

    def _held(self, machine: str, is_message: bool) -> tuple[int, int]:
        """The bytes and values that a machine holds, here and elsewhere, by what was counted; the lock is held."""
        here, there = self._machines.get(machine), self._elsewhere.get(machine)
        sums = [one for one in (here, there) if one]
        return sum(one.bytes[is_message] for one in sums), sum(one.count[is_message] for one in sums)

    def _allowed(self, machine: str) -> int:
        """Bytes of messages that a machine may hold: its jobs' updates of two rounds, and what else it may send."""
        return MESSAGE_BYTES + 2 * self._rounds(machine)


def _is_full(bytes_held: int, count: int, is_message: bool) -> bool:
    most_bytes, most_keys = (MESSAGE_BYTES, MOST_MESSAGES) if is_message else (RECORD_BYTES, MOST_RECORDS)
    return bytes_held >= most_bytes or count >= most_keys
