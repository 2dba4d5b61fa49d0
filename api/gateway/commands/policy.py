"""The commands that a machine may send, as data: everything else is refused. Pure.

Each line is a command with the form of every argument; what follows `|` may come any number of times. `<worker>` is a
worker of this machine, `<job>` a job in which that worker (or, where none is named, one of the machine's workers) has
a seat, `<digest>` a bundle that such a job names. Scripts are in `scripts`.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from computeshare.bundles.exchange import KEYS_LIFE_S, WAIT_S
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.limits import MEASUREMENT_BYTES
from computeshare.protocol.worker_session import MEASURED_S, PROBED_S, STAGED_S
from computeshare.queue.roster import ALIVE_MS
from computeshare.queue.rq_keys import SUSPENDED, WORKERS, RqKeys, RqSeatKeys
from computeshare.runtime.signatures import SIGNATURE_BYTES
from computeshare.tasks.recipes.bundle import MOST_BYTES
from computeshare.types import JOB_ID

JOB, RQ, SEAT = JobKeys("<job>"), RqKeys("<worker>"), RqSeatKeys("<seat>")
STAGED, PROBE, MEASURED = JOB.staged("<staged>"), JOB.probe("<worker>"), JOB.measured("<worker>")
WEIGHTS, DELTA, NEWS = JOB.weights("<token>"), JOB.delta("<token>"), JOB.news("<token>")
DRAFT = JOB.draft("<hex>")
RUNNING, FINISHED, FAILED = RQ.registries()
EXECUTION = SEAT.execution("<hex>")

PERMITTED = f"""
PING
ECHO <text>
HELLO <2-or-3>
CLIENT SETINFO LIB-NAME <word>
CLIENT SETINFO LIB-VER <word>
CLIENT SETNAME <worker>
CLIENT INFO
INFO <section>
MULTI
EXEC
DISCARD
UNWATCH

GET {keys.RELEASE}
GET {keys.orders("<worker>")}
SADD {keys.WORKERS} <worker>
HSET {keys.worker("<worker>")} | <description> <described>
PEXPIRE {keys.worker("<worker>")} {ALIVE_MS}
DEL {keys.worker("<worker>")}

GET {JOB.spec()}
GET {JOB.creator()}
GETRANGE {JOB.recipe()} 0 {MOST_BYTES}
GETRANGE {JOB.recipe_signature()} 0 {2 * SIGNATURE_BYTES}
HGET {JOB.round()} snapshot
HMGET {JOB.round()} token draft
LRANGE {JOB.chain()} 0 -1
XREAD BLOCK <milliseconds> STREAMS {JOB.versions()} <stream-id>
XREAD BLOCK <milliseconds> STREAMS {JOB.drafts()} <stream-id>
HGET {DRAFT} <part>
HGET {WEIGHTS} <part>
HMGET {WEIGHTS} | <part>
HGET {DELTA} <part>
HMGET {DELTA} | <part>
HMGET {NEWS} | <part>
HGETALL {JOB.peers()}
HGET {JOB.peers()} <other-worker>
HMGET {JOB.peer("<other-worker>")} | <part>
SET {MEASURED} <measurement> EX {MEASURED_S}
SET {PROBE} <large> EX {PROBED_S}
GET {PROBE}
UNLINK {PROBE}
UNLINK {STAGED} | {STAGED}
HSET {STAGED} | <number> <large>
EXPIRE {STAGED} {STAGED_S}

HSET {keys.BUNDLE_WANTS} <reader> <want>
HDEL {keys.BUNDLE_WANTS} <reader>
EXPIRE {keys.BUNDLE_WANTS} {KEYS_LIFE_S}
LPUSH {keys.BUNDLE_ASKED} 1
LTRIM {keys.BUNDLE_ASKED} 0 0
EXPIRE {keys.BUNDLE_ASKED} {KEYS_LIFE_S}
SMEMBERS {keys.bundle_offers("<digest>")}
GET {keys.bundle_piece("<piece>")}
LPOP {keys.bundle_ready("<reader>")}
BLPOP {keys.bundle_ready("<reader>")} {WAIT_S}
DEL {keys.bundle_ready("<reader>")}

EXISTS {SUSPENDED}
SUBSCRIBE {RQ.channel()}
UNSUBSCRIBE
UNSUBSCRIBE {RQ.channel()}
SADD {WORKERS} {RQ.worker()}
SREM {WORKERS} {RQ.worker()}
SADD {RQ.workers()} {RQ.worker()}
SREM {RQ.workers()} {RQ.worker()}
EXISTS {RQ.worker()}
HEXISTS {RQ.worker()} <rq-field>
HGET {RQ.worker()} <rq-field>
HGETALL {RQ.worker()}
HSET {RQ.worker()} | <rq-field> <short>
HINCRBY {RQ.worker()} <rq-field> 1
HINCRBYFLOAT {RQ.worker()} <rq-field> <number>
EXPIRE {RQ.worker()} <number>
DEL {RQ.worker()}
SADD {RQ.executions()} <seat>:<hex>
SREM {RQ.executions()} | <seat>:<hex>
SCARD {RQ.executions()}
SMEMBERS {RQ.executions()}
EXPIRE {RQ.executions()} <number>
DEL {RQ.executions()}
BLMOVE {RQ.queue()} {RQ.intermediate()} LEFT RIGHT <number>
LMOVE {RQ.queue()} {RQ.intermediate()} LEFT RIGHT
LREM {RQ.queue()} 1 <word>
LREM {RQ.intermediate()} 1 <word>
EXISTS {SEAT.job()}
HGET {SEAT.job()} <rq-field>
HGETALL {SEAT.job()}
HSET {SEAT.job()} | <rq-field> <short>
PERSIST {SEAT.job()}
EXPIRE {SEAT.job()} <number>
WATCH {SEAT.dependents()}
SMEMBERS {SEAT.dependents()}
EXPIRE {SEAT.dependents()} <number>
EXPIRE {SEAT.dependencies()} <number>
XADD {SEAT.results()} MAXLEN ~ 10 * | <rq-field> <short>
PERSIST {SEAT.results()}
EXPIRE {SEAT.results()} <number>
ZADD {SEAT.executions()} <number> <hex>
ZADD {SEAT.executions()} XX <number> <hex>
ZREM {SEAT.executions()} | <hex>
EXPIRE {SEAT.executions()} <number>
HSET {EXECUTION} | <rq-field> <short>
HGETALL {EXECUTION}
EXPIRE {EXECUTION} <number>
DEL {EXECUTION}
ZADD {RUNNING} <number> <seat>:<hex>
ZADD {RUNNING} XX <number> <seat>:<hex>
ZREM {RUNNING} | <seat>:<hex>
ZADD {FINISHED} <number> <seat>
ZADD {FAILED} <number> <seat>
ZREM {FAILED} <seat>
"""
RECORDED_S = 3600
"""Seconds that RQ's records of a worker or a seat live after they were written last."""


@dataclass(frozen=True, slots=True)
class Own:
    """A kind of key that only one worker writes."""

    life_s: int
    """The longest that such a key may live after it was written last."""
    is_message: bool = False
    """Whether it holds a message, which may be large; else a record."""
    is_renewed: bool = False
    """Whether the worker relies on it for as long as it writes it now and then."""


OWN = {
    STAGED: Own(STAGED_S, is_message=True),
    PROBE: Own(PROBED_S, is_message=True),
    MEASURED: Own(MEASURED_S),
    keys.worker("<worker>"): Own(ALIVE_MS // 1000),
    **dict.fromkeys((SEAT.job(), RQ.workers(), *RQ.registries()), Own(RECORDED_S, is_renewed=True)),
    **dict.fromkeys((RQ.worker(), RQ.executions(), SEAT.results(), SEAT.executions(), EXECUTION), Own(RECORDED_S)),
}
"""The keys that machines write under names of their own."""
WRITING = frozenset(b"HSET SET SADD ZADD XADD HINCRBY HINCRBYFLOAT PERSIST EXPIRE PEXPIRE".split())
ADDING = WRITING - {b"PERSIST", b"EXPIRE", b"PEXPIRE"}
FIELDS = (
    "name|device|queues|versions|memory_bytes|max_memory_bytes|host|pid|seat|state|protocol|resting|labels|recipes"
    "|confinement|packages|power"
)
RQ_FIELDS = (
    "birth|created_at|current_job|current_job_working_time|data|death|description|ended_at|enqueued_at|exc_info"
    "|exc_string|execution_ended_at|execution_id|execution_started_at|failed_job_count|failure_callback_name"
    "|failure_ttl|group_id|hostname|id|ip_address|job_id|last_heartbeat|meta|origin|pid|python_version|queues|result"
    "|result_ttl|return_value|shutdown_requested_date|started_at|state|status|stopped_callback_name"
    "|success_callback_name|successful_job_count|timeout|total_working_time|type|version|worker_name"
)
WORKER = r"(?P<worker>[a-z0-9]{12,32})"
FORMS = {
    "worker": WORKER,
    "other-worker": r"[a-z0-9]{12,32}",
    "job": rf"(?P<job>{JOB_ID.pattern})",
    "seat": rf"{WORKER}-{JOB_ID.pattern}-[0-9]{{1,4}}-[0-9]{{1,9}}",
    "staged": rf"{WORKER}:[0-9a-f]{{32}}:[0-9]{{1,15}}",
    "reader": rf"(?P<reader>{WORKER}-[0-9a-f]{{16}})",
    "want": r"[0-9]{1,15} sha256:(?P<digest>[0-9a-f]{64})(?: !?[0-9a-f]{64}){0,4}",
    "digest": r"(?P<digest>[0-9a-f]{64})",
    "piece": r"[0-9a-f]{64}",
    "hex": r"[0-9a-f]{32}",
    "token": r"[0-9]{1,18}\.[0-9]{1,18}\.[0-9a-f]{16}",
    "part": r"0|[1-9][0-9]{0,3}",
    "number": r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:e[+-]?[0-9]{1,3})?",
    "milliseconds": r"[1-9][0-9]{0,4}",
    "stream-id": r"[0-9]{1,20}-[0-9]{1,20}",
    "2-or-3": r"[23]",
    "section": r"(?i:server)",
    "word": r"[!-~]{1,200}",
    "text": r"[\s\S]{0,1000}",
    "described": r"[\s\S]{0,8192}",  # read of every worker in every turn of the dispatcher
    "short": r"[\s\S]{0,65536}",
    "measurement": rf"[\s\S]{{0,{MEASUREMENT_BYTES}}}",
    "large": r"[\s\S]*",
    "description": FIELDS,
    "rq-field": RQ_FIELDS,
}
LARGE = "<large>"


@dataclass(frozen=True, slots=True)
class CommandNeeds:
    """The needs of a command: workers that must be the machine's, jobs in which it must have a seat, bundles of such
    jobs, and processes of the machine that fetch bundles.
    """

    workers: frozenset[str] = frozenset()
    jobs: frozenset[str] = frozenset()
    digests: frozenset[str] = frozenset()
    readers: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class CommandRule:
    """One line of `PERMITTED`."""

    words: tuple[re.Pattern[bytes], ...]
    tail: tuple[re.Pattern[bytes], ...]
    head: int
    """With how many arguments the command is decided on; all the others may be large. 0: with all."""

    def needs(self, arguments: Sequence[bytes], count: int) -> CommandNeeds | None:
        """The needs of a command with these first arguments, `count` in all; None: the rule does not match."""
        more = count - len(self.words)
        if more < 0 or (more and not self.tail) or (self.tail and more % len(self.tail)):
            return None
        forms = self.words[: self.head] if self.head else self._forms(count)
        if len(arguments) != (self.head or count):
            return None
        if self.tail and arguments[0] == b"HMGET" and len({*arguments}) < count:
            return None  # a part that is named twice is sent twice
        return needs_of(forms, arguments)

    def _forms(self, count: int) -> Iterator[re.Pattern[bytes]]:
        yield from self.words
        for place in range(count - len(self.words)):
            yield self.tail[place % len(self.tail)]


def needs_of(forms: Iterable[re.Pattern[bytes]], arguments: Iterable[bytes]) -> CommandNeeds | None:
    """The needs that follow from arguments of these forms; None: the arguments have other forms."""
    found: dict[str, set[str]] = {"worker": set(), "job": set(), "digest": set(), "reader": set()}
    for form, argument in zip(forms, arguments, strict=True):
        if (match := form.fullmatch(argument)) is None:
            return None
        for name, value in match.groupdict().items():
            found[name].add(value.decode())
    return CommandNeeds(*map(frozenset, found.values()))


@functools.cache
def pattern(word: str) -> re.Pattern[bytes]:
    """The form of an argument in which `<...>` stands for a form of `FORMS`."""
    parts = re.split(r"<([\w-]+)>", word)
    return re.compile(
        "".join(f"(?:{FORMS[part]})" if at % 2 else re.escape(part) for at, part in enumerate(parts)).encode()
    )


@functools.cache
def rules() -> dict[bytes, tuple[CommandRule, ...]]:
    """The rules of `PERMITTED` by the commands' names."""
    found: dict[bytes, list[CommandRule]] = {}
    for line in filter(None, map(str.strip, PERMITTED.splitlines())):
        front, _, behind = line.partition("|")
        words, tail = front.split(), behind.split()
        head = words.index(LARGE) if LARGE in words else len(words) if LARGE in tail else 0
        rule = CommandRule(tuple(map(pattern, words)), tuple(map(pattern, tail)), head)
        found.setdefault(words[0].encode(), []).append(rule)
    return {name: tuple(some) for name, some in found.items()}


def is_enough(arguments: list[bytes]) -> bool:
    """Whether a command can be decided on with these arguments, since large ones follow."""
    some = rules().get(arguments[0].upper(), ())
    return any(rule.head == len(arguments) and needs_of(rule.words[1 : rule.head], arguments[1:]) for rule in some)


ASKING = frozenset(b"GET GETRANGE HGET HMGET HGETALL LRANGE SMEMBERS LPOP EVALSHA INFO CLIENT ECHO HELLO".split())
"""Commands whose replies may be longer than the commands."""


def ending(arguments: Sequence[bytes]) -> tuple[bytes, ...]:
    """The last arguments of a permitted command whose large value is followed by fixed ones."""
    return (b"EX", b"%d" % PROBED_S) if arguments[0].upper() == b"SET" else ()


def parts_asked(arguments: Sequence[bytes]) -> int:
    """About how many parts of messages a permitted command asks for."""
    name = arguments[0].upper()
    if name == b"HMGET" and not arguments[1].rpartition(b":")[0].endswith(b":news"):  # news are small
        return len(arguments) - 2
    return int(name in ASKING)


def own_key(arguments: Sequence[bytes]) -> tuple[str, Own] | None:
    """The key of its own that a permitted command writes or expires, and its kind; None: it does neither."""
    return own(arguments[1]) if arguments[0].upper() in WRITING else None


def own(key: bytes) -> tuple[str, Own] | None:
    """A key that a machine writes under a name of its own, and its kind; None: it is another."""
    return next(((key.decode(), kind) for form, kind in _owned() if form.fullmatch(key)), None)


@functools.cache
def _owned() -> tuple[tuple[re.Pattern[bytes], Own], ...]:
    return tuple((pattern(form), own) for form, own in OWN.items())


def needs(arguments: Sequence[bytes], count: int) -> CommandNeeds | None:
    """The needs of a command; None: no machine may send it."""
    upper = (arguments[0].upper(), *arguments[1:])
    found = (rule.needs(upper, count) for rule in rules().get(upper[0], ()))
    return next((one for one in found if one is not None), None)
