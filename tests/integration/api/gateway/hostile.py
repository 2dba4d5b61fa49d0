"""What a hostile machine may try at the gateway, by name. Its worker has a seat in one of two jobs."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import LINE_BYTES_KEPT, LINES_KEPT
from computeshare.protocol.scripts import Scripts
from computeshare.protocol.worker_session import EXTENDED_MS, MEASURED_S, STAGED_S
from computeshare.queue.rq_keys import SUSPENDED, RqKeys, RqSeatKeys
from computeshare.transport.commands import Command
from tests.support.rounds import ZERO

OURS, THEIRS, NONCE = "a" * 32, "b" * 32, "c" * 32
"""The session of the hostile machine's worker, the session of the victim, and a submission."""
DIGEST, SECRET = "1" * 64, "2" * 64
"""The bundles of the two jobs."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A machine whose worker has a seat in the job `mine`, as has the `victim`, who has one in the job `other`, too."""

    worker: str
    victim: str
    mine: JobKeys
    other: JobKeys
    scripts: Scripts

    @property
    def seat(self) -> str:
        return f"{self.worker}-{self.mine.job_id}-0-1"

    @property
    def their_seat(self) -> str:
        return f"{self.victim}-{self.mine.job_id}-0-1"

    def call(self, name: str, job: JobKeys | None = None, **values: Any) -> Command:
        """A script called as a worker would, with `values` in place of the right ones."""
        job = job or self.mine
        session = {"worker": self.worker, "session": OURS}
        token = {"token": str(ZERO)}
        staged = [job.staged(f"{self.worker}:{NONCE}:0")]
        about = json.dumps({"worker": self.worker, "session": OURS, "reason": "x"})
        right: dict[str, dict[str, Any]] = {
            "join": {**session, "seat": self.seat, "event": "{}", "frozen": ""},
            "lease": {**session, **token, "and_news": 0, "devices": 1},
            "extend": {
                **session,
                "staged_keys": staged,
                "least_ms": EXTENDED_MS,
                "staged_s": STAGED_S,
                "micro_batches": [0],
            },
            "submit": {
                **session,
                **token,
                "staged_keys": staged,
                "update_keys": [job.update(str(ZERO), 0)],
                "peer_key": job.peer(self.worker),
                "nonce": NONCE,
                "event": "{}",
                "parts": 1,
                "micro_batches": [0],
                "losses": [0.5],
            },
            "doubt": {**session, **token, "again": 0},
            "leave": {**session, "event": about},
            "announce": {"fence": "", "kind": "left", "event": about},
            "log": {"kept": LINES_KEPT, "kept_bytes": LINE_BYTES_KEPT, "lines": [about]},
            "hand_over": session,
            "take_over": {**session, "inner_key": job.inner(f"{self.worker}:{OURS}")},
        }
        return self.scripts.command(name, job, **{**right[name], **values})

    def said(self, worker: str, **more: Any) -> str:
        return json.dumps({"worker": worker, "session": OURS, "reason": "x", **more})


def foreign(name: str, **values: Any) -> Callable[[Scene], list[Command]]:
    """A script of the reducer or the control plane."""
    return lambda s: [s.scripts.command(name, s.mine, **values)]


def reader(worker: str) -> str:
    return f"{worker}-{'0' * 16}"


def want(digest: str) -> str:
    return f"1 sha256:{digest} {'3' * 64}"


Probe = Callable[[Scene], list[Command]]
SERVER = """
FLUSHALL|flushall|FlushAll ASYNC|FLUSHDB|CONFIG GET *|CONFIG SET maxmemory 1|CONFIG REWRITE|KEYS *|SCAN 0|RANDOMKEY
DBSIZE|SCRIPT FLUSH|SCRIPT KILL|SCRIPT EXISTS x|EVAL return 0|EVAL_RO return 0|FUNCTION FLUSH|FUNCTION DUMP|FCALL f 0
DEBUG SLEEP 0|ACL LIST|ACL WHOAMI|ACL SETUSER x on|AUTH x|AUTH default x|HELLO 3 AUTH default x|CLIENT LIST
CLIENT KILL TYPE normal|CLIENT PAUSE 1|CLIENT TRACKING ON|CLIENT REPLY OFF|CLIENT NO-EVICT ON|CLIENT UNBLOCK 1|MONITOR
SUBSCRIBE x|PSUBSCRIBE *|SSUBSCRIBE x|PUBLISH x y|SPUBLISH x y|SELECT 1|SWAPDB 0 1|SHUTDOWN NOSAVE|SAVE|BGSAVE
BGREWRITEAOF|REPLICAOF NO ONE|SLAVEOF h 1|SYNC|PSYNC ? -1|FAILOVER|MIGRATE h 1 k 0 1|MODULE LOAD x|CLUSTER INFO
RESET|QUIT|INFO|INFO clients|INFO memory|INFO server memory|INFO everything
SLOWLOG GET|LATENCY RESET|MEMORY DOCTOR|COMMAND|LOLWUT|WAIT 1 1|ROLE|TIME
LASTSAVE|READONLY|ASKING|OBJECT HELP|REFUSED x
"""
PROBES: dict[str, Probe] = {
    line: (lambda s, line=line: [line.split()]) for line in SERVER.replace("\n", "|").split("|") if line
}
PROBES |= {
    # other jobs, and what no worker reads or writes of its own job
    "read another job": lambda s: [["GET", s.other.spec()]],
    "read another job's weights": lambda s: [["HGET", s.other.weights(str(ZERO)), 0]],
    "read the news of another job": lambda s: [["HMGET", s.other.news(str(ZERO)), 0]],
    "wait for another job": lambda s: [["XREAD", "BLOCK", 1, "STREAMS", s.other.versions(), "0-0"]],
    "wait for two jobs": lambda s: [
        ["XREAD", "BLOCK", 1, "STREAMS", s.mine.versions(), s.other.versions(), "0-0", "0-0"]
    ],
    "read events": lambda s: [["XREAD", "BLOCK", 1, "STREAMS", s.mine.events(), "0-0"]],
    "read the round": lambda s: [["HGETALL", s.mine.round()]],
    "read sessions": lambda s: [["HGETALL", s.mine.sessions()]],
    "read leases": lambda s: [["HGETALL", s.mine.leases()]],
    "read submissions": lambda s: [["HGETALL", s.mine.received()]],
    "read the optimizer's state": lambda s: [["HGET", s.mine.state(str(ZERO)), 0]],
    "read an update": lambda s: [["HGET", s.mine.update(str(ZERO), 0), 0]],
    "read the log": lambda s: [["XRANGE", s.mine.logs(), "-", "+"]],
    "read the whole chain and more": lambda s: [["LRANGE", s.mine.chain(), 0, 1]],
    "read by SORT": lambda s: [["SORT", s.mine.chain(), "GET", s.other.weights("*")]],
    "copy": lambda s: [["COPY", s.other.weights(str(ZERO)), s.mine.staged(f"{s.worker}:{NONCE}:0")]],
    "rename": lambda s: [["RENAME", s.mine.weights(str(ZERO)), s.mine.staged(f"{s.worker}:{NONCE}:0")]],
    "write weights": lambda s: [["HSET", s.mine.weights(str(ZERO)), 0, b"evil"]],
    "write large weights": lambda s: [["HSET", s.mine.weights(str(ZERO)), 0, bytes(3_000_000)]],
    "delete weights": lambda s: [["UNLINK", s.mine.weights(str(ZERO))]],
    "write a draft": lambda s: [["HSET", s.mine.draft(NONCE), 0, b"evil"]],
    "delete a draft": lambda s: [["UNLINK", s.mine.draft(NONCE)]],
    "read another job's draft": lambda s: [["HGET", s.other.draft(NONCE), 0]],
    "wait for another job's drafts": lambda s: [["XREAD", "BLOCK", 1, "STREAMS", s.other.drafts(), "0-0"]],
    "tell of a draft": lambda s: [["XADD", s.mine.drafts(), "*", "token", str(ZERO), "name", NONCE, "part", 0]],
    "read offers": lambda s: [["HGETALL", s.mine.offers()]],
    "offer without a script": lambda s: [["HSET", s.mine.offers(), 0, f"{s.worker}|{NONCE}|,0,"]],
    "write news": lambda s: [["HSET", s.mine.news(str(ZERO)), 0, b"evil"]],
    "write the spec": lambda s: [["SET", s.mine.spec(), "{}"]],
    "write the recipe": lambda s: [["SET", s.mine.recipe(), "{}"]],
    "write the signature": lambda s: [["SET", s.mine.recipe_signature(), "x"]],
    "write the round": lambda s: [["HSET", s.mine.round(), "token", "x"]],
    "write an update": lambda s: [["HSET", s.mine.update(str(ZERO), 0), 0, b"evil"]],
    "write seats": lambda s: [["HSET", s.other.seats(), s.worker, s.seat]],
    "write sessions": lambda s: [["HSET", s.mine.sessions(), s.victim, OURS]],
    "lift a ban": lambda s: [["HDEL", s.mine.banned(), s.worker]],
    "forget strikes": lambda s: [["DEL", s.mine.strikes()]],
    "add an event": lambda s: [["XADD", s.mine.events(), "*", "type", "version", "data", "{}"]],
    "drop events": lambda s: [["XTRIM", s.mine.events(), "MAXLEN", 0]],
    "wake everybody": lambda s: [["XADD", s.mine.versions(), "*", "token", str(ZERO)]],
    "wake the reducer": lambda s: [["RPUSH", s.mine.full(), str(ZERO)]],
    "take the reducer's claim": lambda s: [["SET", s.mine.reducer(), "1|h|1|x"]],
    "take the fence": lambda s: [["INCR", s.mine.fence()]],
    # other workers
    "read another worker": lambda s: [["HGETALL", keys.worker(s.victim)]],
    "read another worker's orders": lambda s: [["GET", keys.orders(s.victim)]],
    "order another worker": lambda s: [["SET", keys.orders(s.victim), "{}"]],
    "order itself": lambda s: [["SET", keys.orders(s.worker), "{}"]],
    "end another worker": lambda s: [["DEL", keys.worker(s.victim)]],
    "end another worker beside itself": lambda s: [["DEL", keys.worker(s.worker), keys.worker(s.victim)]],
    "describe another worker": lambda s: [["HSET", keys.worker(s.victim), "name", "x"]],
    "describe a worker of no machine": lambda s: [["HSET", keys.worker("e" * 12), "name", "x"]],
    "a worker's id too long": lambda s: [["HSET", keys.worker(s.worker[:8] + "x" * 25), "name", "x"]],
    "a worker's id too short": lambda s: [["HSET", keys.worker(s.worker[:8] + "xxx"), "name", "x"]],
    "a field of its own": lambda s: [["HSET", keys.worker(s.worker), "x", "x"]],
    "a large field": lambda s: [["HSET", keys.worker(s.worker), "name", bytes(100_000)]],
    "live for ever": lambda s: [["PEXPIRE", keys.worker(s.worker), 10**12]],
    "register another": lambda s: [["SADD", keys.WORKERS, s.victim]],
    "unregister another": lambda s: [["SREM", keys.WORKERS, s.victim]],
    "list workers": lambda s: [["SMEMBERS", keys.WORKERS]],
    "list jobs": lambda s: [["SMEMBERS", keys.JOBS]],
    "remove a job": lambda s: [["SREM", keys.JOBS, s.mine.job_id]],
    "take the control plane's lock": lambda s: [["SET", keys.CONTROL_LOCK, "x"]],
    "say another release": lambda s: [["SET", keys.RELEASE, "{}"]],
    "read texts": lambda s: [["LRANGE", keys.TEXT_REQUESTS, 0, -1]],
    "answer texts": lambda s: [["RPUSH", keys.text_answer("x"), "{}"]],
    "measure for another": lambda s: [["SET", s.mine.measured(s.victim), "{}", "EX", MEASURED_S]],
    "measure at length": lambda s: [["SET", s.mine.measured(s.worker), "x" * 20_000, "EX", MEASURED_S]],
    "measure for good": lambda s: [["SET", s.mine.measured(s.worker), "{}"]],
    "stage for another": lambda s: [["HSET", s.mine.staged(f"{s.victim}:{NONCE}:0"), 0, b"evil"]],
    "stage for the reducer": lambda s: [["HSET", s.mine.staged("reducer:1:weights"), 0, b"evil"]],
    "stage in another job": lambda s: [["HSET", s.other.staged(f"{s.worker}:{NONCE}:0"), 0, b"evil"]],
    "drop what another staged": lambda s: [["UNLINK", s.mine.staged(f"{s.victim}:{NONCE}:0")]],
    "drop what another staged, too": lambda s: [
        ["UNLINK", s.mine.staged(f"{s.worker}:{NONCE}:0"), s.mine.staged(f"{s.victim}:{NONCE}:0")]
    ],
    "expire what another staged": lambda s: [["EXPIRE", s.mine.staged(f"{s.victim}:{NONCE}:0"), STAGED_S]],
    "keep what it staged": lambda s: [["EXPIRE", s.mine.staged(f"{s.worker}:{NONCE}:0"), 10**9]],
    "send another's probe": lambda s: [["SET", s.mine.probe(s.victim), b"x", "EX", 60]],
    "write another's inner state": lambda s: [["HSET", s.mine.inner(f"{s.victim}:{THEIRS}"), 0, b"evil"]],
    "read another's inner state": lambda s: [["HGET", s.mine.inner(f"{s.victim}:{THEIRS}"), 0]],
    "delete another's inner state": lambda s: [["UNLINK", s.mine.inner(f"{s.victim}:{THEIRS}")]],
    "hand over for another": lambda s: [["RPUSH", s.mine.handed(), f"{s.victim}:{OURS}"]],
    "hand over without a script": lambda s: [["RPUSH", s.mine.handed(), f"{s.worker}:{OURS}"]],
    "take without a script": lambda s: [["LPOP", s.mine.handed()]],
    # RQ
    "give another a seat": lambda s: [["RPUSH", RqKeys(s.victim).queue(), s.their_seat]],
    "give itself a seat": lambda s: [["RPUSH", RqKeys(s.worker).queue(), s.seat]],
    "take another's seat": lambda s: [
        ["LMOVE", RqKeys(s.victim).queue(), RqKeys(s.worker).intermediate(), "LEFT", "RIGHT"]
    ],
    "write another's RQ job": lambda s: [["HSET", RqSeatKeys(s.their_seat).job(), "data", b"x"]],
    "webhooks in its RQ job": lambda s: [["HSET", RqSeatKeys(s.seat).job(), "webhooks", '[{"url": "http://h"}]']],
    "dependencies in its RQ job": lambda s: [["HSET", RqSeatKeys(s.seat).job(), "dependency_ids", '["x"]']],
    "an RQ job that is no seat": lambda s: [["HSET", RqSeatKeys(f"{s.worker}-x").job(), "data", b"x"]],
    "dependents": lambda s: [["SADD", RqSeatKeys(s.seat).dependents(), "x"]],
    "a gigabyte in its RQ job": lambda s: [["HSET", RqSeatKeys(s.seat).job(), "data", bytes(1_000_000)]],
    "stop another's seat": lambda s: [["PUBLISH", RqKeys(s.victim).channel(), "{}"]],
    "listen to another's orders": lambda s: [["SUBSCRIBE", RqKeys(s.victim).channel()]],
    "listen to two": lambda s: [["SUBSCRIBE", RqKeys(s.worker).channel(), RqKeys(s.victim).channel()]],
    "suspend all": lambda s: [["SET", SUSPENDED, 1]],
    "watch another key": lambda s: [["WATCH", s.mine.round()]],
    "end another's RQ worker": lambda s: [["DEL", RqKeys(s.victim).worker()]],
    # bundles
    "want for another": lambda s: [["HSET", keys.BUNDLE_WANTS, reader(s.victim), want(DIGEST)]],
    "want another job's bundle": lambda s: [["HSET", keys.BUNDLE_WANTS, reader(s.worker), want(SECRET)]],
    "list another job's pieces": lambda s: [["SMEMBERS", keys.bundle_offers(SECRET)]],
    "take back for another": lambda s: [["HDEL", keys.BUNDLE_WANTS, reader(s.victim)]],
    "take back all": lambda s: [["DEL", keys.BUNDLE_WANTS]],
    "read all wants": lambda s: [["HGETALL", keys.BUNDLE_WANTS]],
    "end all wants": lambda s: [["EXPIRE", keys.BUNDLE_WANTS, 0]],
    "ask nobody": lambda s: [["LTRIM", keys.BUNDLE_ASKED, 1, 0]],
    "ask often": lambda s: [["LPUSH", keys.BUNDLE_ASKED, *["1"] * 100]],
    "write a piece": lambda s: [["SET", keys.bundle_piece("3" * 64), b"evil"]],
    "delete a piece": lambda s: [["UNLINK", keys.bundle_piece("3" * 64)]],
    "take another's answer": lambda s: [["LPOP", keys.bundle_ready(reader(s.victim))]],
    "answer another": lambda s: [["RPUSH", keys.bundle_ready(reader(s.victim)), "!no"]],
    # scripts with other arguments
    "join as another": lambda s: [s.call("join", worker=s.victim, seat=s.their_seat)],
    "join with another's seat": lambda s: [s.call("join", seat=s.their_seat)],
    "join another job": lambda s: [s.call("join", s.other)],
    "join with any session": lambda s: [s.call("join", session="x|y")],
    "lease as another": lambda s: [s.call("lease", worker=s.victim, session=THEIRS)],
    "lease on another key": lambda s: [[s.mine.spec() if one == s.mine.recent() else one for one in s.call("lease")]],
    "extend as another": lambda s: [s.call("extend", worker=s.victim, session=THEIRS)],
    "extend for ever": lambda s: [s.call("extend", least_ms=10**15)],
    "extend another key": lambda s: [s.call("extend", staged_keys=[s.mine.spec()])],
    "expire with extend": lambda s: [s.call("extend", staged_s=0)],
    "extend what another staged": lambda s: [s.call("extend", staged_keys=[s.mine.staged(f"{s.victim}:{NONCE}:0")])],
    "submit as another": lambda s: [s.call("submit", worker=s.victim, session=THEIRS)],
    "submit over the round": lambda s: [s.call("submit", update_keys=[s.mine.round()])],
    "submit as another peer": lambda s: [s.call("submit", peer_key=s.mine.peer(s.victim))],
    "write a peer's weights": lambda s: [["HSET", s.mine.peer(s.worker), 0, b"evil"]],
    "write who the peers are": lambda s: [["HSET", s.mine.peers(), s.worker, "x"]],
    "read the peers of another job": lambda s: [["HGETALL", s.other.peers()]],
    "read a peer's weights of another job": lambda s: [["HMGET", s.other.peer(s.victim), 0]],
    "submit over weights": lambda s: [s.call("submit", update_keys=[s.mine.weights(str(ZERO))])],
    "submit over another unit": lambda s: [s.call("submit", update_keys=[s.mine.update(str(ZERO), 1)])],
    "submit what another staged": lambda s: [s.call("submit", staged_keys=[s.mine.staged(f"{s.victim}:{NONCE}:0")])],
    "submit weights": lambda s: [s.call("submit", staged_keys=[s.mine.weights(str(ZERO))])],
    "submit a unit twice": lambda s: [
        s.call(
            "submit",
            staged_keys=[s.mine.staged(f"{s.worker}:{NONCE}:0")] * 2,
            update_keys=[s.mine.update(str(ZERO), 0)] * 2,
            micro_batches=[0, 0],
            losses=[0.5, 0.5],
        )
    ],
    "submit with any nonce": lambda s: [s.call("submit", nonce='x","worker":"y')],
    "submit into another job": lambda s: [s.call("submit", s.other)],
    "leave for another": lambda s: [s.call("leave", worker=s.victim, session="*")],
    "doubt as another": lambda s: [s.call("doubt", worker=s.victim, session=THEIRS, again=1)],
    "announce a version": lambda s: [s.call("announce", kind="version", event="{}")],
    "announce a ban": lambda s: [s.call("announce", kind="banned", event=s.said(s.victim, strikes=9))],
    "announce that another left": lambda s: [s.call("announce", event=s.said(s.victim))],
    "announce with two workers": lambda s: [
        s.call("announce", event=f'{{"worker":"{s.worker}","worker":"{s.victim}","session":"x","reason":"x"}}')
    ],
    "announce much": lambda s: [s.call("announce", event=s.said(s.worker, more="x" * 5000))],
    "announce deep JSON": lambda s: [s.call("announce", event="[" * 60_000)],
    "drop the log": lambda s: [s.call("log", kept=0)],
    "drop the log by bytes": lambda s: [s.call("log", kept_bytes=0)],
    "speak as another": lambda s: [s.call("log", lines=[s.said(s.worker), s.said(s.victim)])],
    "speak as the reducer": lambda s: [s.call("log", lines=[s.said("reducer")])],
    "log no JSON": lambda s: [s.call("log", lines=["x"])],
    "log nothing": lambda s: [s.call("log", lines=[])],
    "offer another's state": lambda s: [s.call("hand_over", worker=s.victim, session=THEIRS)],
    "take over as another": lambda s: [s.call("take_over", worker=s.victim, session=THEIRS)],
    "take over an inner state": lambda s: [s.call("take_over")],
    "hand over an inner state": lambda s: [s.call("hand_over")],
    "write an inner state": lambda s: [["HSET", s.mine.inner(f"{s.worker}:{OURS}"), 0, b"1e30"]],
    "see whose inner states are there": lambda s: [["LINDEX", s.mine.handed(), 0]],
    "take over onto another key": lambda s: [s.call("take_over", inner_key=s.mine.round())],
    "take over for another": lambda s: [s.call("take_over", inner_key=s.mine.inner(f"{s.victim}:{OURS}"))],
    "a script on keys of two jobs": lambda s: [_with(s.call("lease"), 4, s.other.sessions())],
    "a script with a key too many": lambda s: [[*s.call("lease"), s.mine.spec()]],
    "a script with fewer keys": lambda s: [_with(s.call("lease"), 2, 10)],
    "a script with keys below zero": lambda s: [_with(s.call("lease"), 2, -1)],
    "a script without keys": lambda s: [[s.call("lease")[0], s.call("lease")[1], 0]],
    "read-only call": lambda s: [["EVALSHA_RO", *s.call("lease")[1:]]],
    "load another script": lambda s: [["SCRIPT", "LOAD", "return redis.call('FLUSHALL')"]],
    # others' scripts
    "commit": lambda s: [["EVALSHA", s.scripts.digest("commit"), 0]],
    "close": foreign("close", token=str(ZERO), fence=1, at_least=0),
    "finish": foreign("finish", status="cancelled"),
    "pause": foreign("pause"),
    "resume": foreign("resume"),
    "pardon": lambda s: [s.scripts.command("pardon", s.mine, worker=s.worker)],
    "claim": foreign("claim", identity="h|1|x", life_ms=1, host="h", pid=1),
    "discard": foreign("discard", token=str(ZERO), fence=1, dropped_keys=[]),
    "take events": foreign("take", position="0-0", most=100),
    # forms
    "a transaction": lambda s: [["MULTI"], ["SET", s.mine.spec(), "x"], ["GET", s.mine.spec()], ["EXEC"]],
    "too many words": lambda s: [["GET", s.mine.spec(), s.other.spec()]],
    "too few words": lambda s: [["GET"]],
    "a name of nothing": lambda s: [[""]],
    "lines in a name": lambda s: [["GET\r\nFLUSHALL\r\n"]],
    "lines in a key": lambda s: [["GET", f"{s.mine.spec()}\r\nFLUSHALL\r\n"]],
    "a key with a longer name": lambda s: [["GET", f"{s.mine.spec()}x"]],
    "braces in a job's id": lambda s: [["GET", "cs:{" + s.mine.job_id + "}:{x}:spec"]],
    "a long command": lambda s: [["GET", bytes(2_000_000)]],
    "many words": lambda s: [["UNLINK", *[s.mine.spec()] * 15_000]],
}


def _with(command: Command, place: int, value: Any) -> Command:
    return [*command[:place], value, *command[place + 1 :]]


def staged_data(redis: Redis, s: Scene) -> None:
    """Things of the victim's and the control plane's, for the machine to reach for."""
    redis.hset(s.mine.staged(f"{s.victim}:{NONCE}:0"), "0", "theirs")
    redis.hset(s.mine.inner(f"{s.victim}:{THEIRS}"), "0", "theirs")
    redis.rpush(s.mine.handed(), f"{s.victim}:{THEIRS}")
    redis.set(keys.orders(s.victim), "{}")
    redis.hset(keys.BUNDLE_WANTS, reader(s.victim), want(SECRET))
    redis.set(keys.bundle_piece("3" * 64), "piece")
    redis.sadd(keys.bundle_offers(SECRET), "3" * 64)
    redis.rpush(keys.bundle_ready(reader(s.victim)), "3" * 64)
    redis.rpush(RqKeys(s.victim).queue(), s.their_seat)
    redis.hset(RqSeatKeys(s.their_seat).job(), "data", "theirs")
    redis.set(s.other.spec(), "secret")
    redis.hset(s.other.weights(str(ZERO)), "0", "secret")
    redis.hset(s.mine.banned(), "gonegonework", "bad")
    redis.xadd(s.mine.logs(), {"data": "line"})
