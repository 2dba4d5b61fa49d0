"""Puts the pieces that somebody wants into the broker: the control plane's side of `exchange`."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, Protocol

import structlog
from redis import Redis

from computeshare.bundles.exchange import AHEAD, KEYS_LIFE_S, REFUSED
from computeshare.bundles.manifest import DIGEST, Manifest
from computeshare.errors import BundleError
from computeshare.protocol import keys
from computeshare.types import machine_of

ROOM_BYTES = 64 << 20
"""The most that pieces take of the broker's memory."""
BYTES_PER_S = 250_000_000
"""The most that is put into the broker in a second: wants that come and go cost the control plane no more."""
WAIT_S = 1
PIECE_LIFE_S = 60
QUIET_S = 60.0
"""Seconds after which a process that has not written again what it wants is taken to be gone."""
SLOW_S = 10.0
"""Seconds after which a piece makes room for others: whoever began to read it reads on, others ask again."""
CHECKED_S = 1.0
"""Seconds before a doubted piece in the broker is compared with its name again."""
MOST_WANTING = 32
"""Processes of one machine that are served at a time: at most 16 workers, each with few that fetch."""
LONGEST_WANT = 1000
DOUBTED = "!"
"""Stands before a piece that arrived damaged."""
log = structlog.get_logger()


class Pieces(Protocol):
    """Where pieces are read, as in a `BundleStore`."""

    def manifest(self, digest: str) -> Manifest:
        """A bundle's manifest. Raises BundleMissing."""

    def piece(self, digest: str, piece: str) -> bytes:
        """A piece's bytes. Raises BundleMissing."""

    def piece_bytes(self, digest: str, piece: str) -> int:
        """A piece's size. Raises BundleMissing."""


@dataclass(frozen=True, slots=True)
class PieceWant:
    """The pieces of a bundle that a process wants next. `raw` is the request as written, different each time;
    `doubted` are the pieces that reached the process damaged.
    """

    raw: bytes
    digest: str
    pieces: tuple[str, ...]
    doubted: frozenset[str] = frozenset()

    @classmethod
    def parse(cls, raw: bytes) -> "PieceWant | None":
        """None: `raw` is not a valid request."""
        _, digest, *pieces = (*raw[:LONGEST_WANT].decode(errors="replace").split(), "", "")
        pieces = [piece for piece in pieces if piece][:AHEAD]
        doubted = frozenset(piece[1:] for piece in pieces if piece.startswith(DOUBTED))
        pieces = [piece.removeprefix(DOUBTED) for piece in pieces]
        is_hex = all(len(piece) == 64 and set(piece) <= set("0123456789abcdef") for piece in pieces)
        return cls(raw, digest, tuple(pieces), doubted) if is_hex and digest.startswith(DIGEST) else None


@dataclass(slots=True)
class _Offer:
    size: int
    since: float
    digests: set[str] = field(default_factory=set)
    """Of the bundles for which the piece was wanted."""
    checked_at: float = -math.inf


@dataclass(slots=True)
class _Process:
    """A process's last request: when it was made, the pieces last announced as ready, when the last piece was sent."""

    raw: bytes
    since: float
    told: tuple[str, ...] = ()
    served_at: float = -math.inf


class PieceServer:
    """Answers wants from a store; for one thread."""

    def __init__(
        self, store: Pieces, room_bytes: int = ROOM_BYTES, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store, self._room_bytes, self._clock = store, room_bytes, clock
        self._offers: dict[str, _Offer] = {}
        self._processes: dict[str, _Process] = {}
        self._served: dict[str, float] = {}
        """When each machine got a piece, for as long as that may still count."""
        self._began = False

    def step(self, redis: Redis) -> None:
        """Wait a second for somebody to want pieces, and put those into the broker that fit. Raises RedisError."""
        redis.blpop([keys.BUNDLE_ASKED], timeout=WAIT_S)
        began = self._clock()
        put = self.serve(redis)
        time.sleep(max(0.0, put / BYTES_PER_S - (self._clock() - began)))

    @staticmethod
    def wake(redis: Redis) -> None:
        """Have a `step` that waits go on at once. Raises RedisError."""
        pipeline = redis.pipeline()
        pipeline.lpush(keys.BUNDLE_ASKED, 1)
        pipeline.expire(keys.BUNDLE_ASKED, KEYS_LIFE_S)
        pipeline.execute()

    def serve(self, redis: Redis) -> int:
        """Put wanted pieces into the broker, and delete those that nobody wants; returns the bytes put there."""
        if not self._began:
            self._clear(redis)
        wants = self._wants(redis)
        wanted = dict(self._in_turn(wants))
        self._refresh(redis, wanted)
        self._check(redis, {piece for want in wants.values() for piece in want.doubted})
        heads = {want.pieces[0] for want in wants.values()}
        put = 0
        for piece, process in wanted.items():
            if piece in self._offers:
                self._show(redis, wants[process].digest, piece)
                continue
            try:
                size = self._size(wants[process].digest, piece)
                if self._make_room(redis, size, heads, piece in heads):
                    self._put(redis, wants[process].digest, piece)
                    self._served[machine_of(process)] = self._processes[process].served_at = self._clock()
                    put += size
            except BundleError as error:
                self._refuse(redis, process, str(error))
                log.warning("cannot send a piece", piece=piece, error=str(error))
        self._tell(redis, wants)
        return put

    def _clear(self, redis: Redis) -> None:
        """Delete the pieces that another control plane has put there."""
        for pattern in (keys.bundle_offers("*"), keys.bundle_piece("*")):
            for key in redis.scan_iter(pattern, count=1000):
                redis.unlink(key)
        self._began = True

    def _check(self, redis: Redis, doubted: Collection[str]) -> None:
        """Delete the doubted pieces that are damaged in the broker."""
        for piece in doubted:
            offer = self._offers.get(piece)
            if offer is None or self._clock() - offer.checked_at < CHECKED_S:
                continue
            offer.checked_at = self._clock()
            found: Any = redis.get(keys.bundle_piece(piece))
            if sha256(found or b"").hexdigest() != piece:
                self._delete(redis, [piece])

    def _wants(self, redis: Redis) -> dict[str, PieceWant]:
        """The wants of each process that is there, for at most `MOST_WANTING` processes of a machine. The wants of
        further processes are deleted; a process that still wants pieces writes its wants again.
        """
        found: Any = redis.hgetall(keys.BUNDLE_WANTS)
        now, wants, gone, before = self._clock(), dict[str, PieceWant](), [], self._processes
        self._processes, counts = {}, Counter[str]()
        self._served = {machine: at for machine, at in self._served.items() if now - at <= QUIET_S}
        named = [(name, name.decode(errors="replace"), raw) for name, raw in found.items()]
        for name, process, raw in sorted(named, key=lambda one: one[1] not in before):  # first those in service
            counts[machine_of(process)] += 1
            if counts[machine_of(process)] > MOST_WANTING:
                gone.append(name)
                continue
            want = PieceWant.parse(raw)
            known = before.get(process) or _Process(raw, now)
            if known.raw != raw:
                known.raw, known.since, known.told = raw, now, ()
            if want is None or now - known.since > QUIET_S:
                gone.append(name)
                continue
            self._processes[process] = known
            if want.pieces:
                wants[process] = want
        if gone:
            redis.hdel(keys.BUNDLE_WANTS, *gone)
        return wants

    def _in_turn(self, wants: dict[str, PieceWant]) -> Iterator[tuple[str, str]]:
        """Pieces, each with a process that wants it: first what each wants first, of those who waited longest.

        A machine's wait counts before a process's: names of processes are free.
        """

        def turn(process: str) -> tuple[float, float, str]:
            return self._served.get(machine_of(process), -math.inf), self._processes[process].served_at, process

        processes = sorted(wants, key=turn)
        for place in range(AHEAD):
            for process in processes:
                if place < len(wants[process].pieces):
                    yield wants[process].pieces[place], process

    def _refresh(self, redis: Redis, wanted: Collection[str]) -> None:
        """Delete the pieces that nobody wants, keep the others alive, and forget those that are gone."""
        self._delete(redis, [piece for piece in self._offers if piece not in wanted])
        pipeline = redis.pipeline(transaction=False)
        for piece in (pieces := list(self._offers)):
            pipeline.expire(keys.bundle_piece(piece), PIECE_LIFE_S)
        for digest in {digest for offer in self._offers.values() for digest in offer.digests}:
            pipeline.expire(keys.bundle_offers(digest), PIECE_LIFE_S)
        for piece, is_there in zip(pieces, pipeline.execute(), strict=False):
            if not is_there:
                self._delete(redis, [piece])

    def _make_room(self, redis: Redis, size: int, heads: Collection[str], is_head: bool) -> bool:
        """Whether there is room for a piece; for one that a process wants first, others make room."""
        before = self._clock() - SLOW_S
        oldest = sorted(self._offers, key=lambda piece: self._offers[piece].since)
        yielding = [piece for piece in oldest if is_head and piece not in heads]
        yielding += [piece for piece in oldest if piece not in yielding and self._offers[piece].since < before]
        while self._offers and sum(offer.size for offer in self._offers.values()) + size > self._room_bytes:
            if not yielding:
                return False
            self._delete(redis, [yielding.pop(0)])
        return True

    def _put(self, redis: Redis, digest: str, piece: str) -> None:
        data = self._read(digest, piece)
        redis.set(keys.bundle_piece(piece), data, ex=PIECE_LIFE_S)
        self._offers[piece] = _Offer(len(data), self._clock())
        self._show(redis, digest, piece)

    def _show(self, redis: Redis, digest: str, piece: str) -> None:
        """Name a piece that is there to all who want the bundle."""
        bundle = digest.removeprefix(DIGEST)
        if bundle not in self._offers[piece].digests:
            self._offers[piece].digests.add(bundle)
            redis.sadd(keys.bundle_offers(bundle), piece)
            redis.expire(keys.bundle_offers(bundle), PIECE_LIFE_S)

    def _delete(self, redis: Redis, pieces: list[str]) -> None:
        if pieces:
            redis.unlink(*map(keys.bundle_piece, pieces))
        for piece in pieces:
            for digest in self._offers.pop(piece).digests:
                redis.srem(keys.bundle_offers(digest), piece)

    def _tell(self, redis: Redis, wants: dict[str, PieceWant]) -> None:
        """Tell each process which of the pieces that it wants are there."""
        for process, want in wants.items():
            ready = tuple(piece for piece in want.pieces if piece in self._offers)
            if ready and self._processes[process].told != ready:
                self._say(redis, process, " ".join(ready).encode())
                self._processes[process].told = ready

    def _refuse(self, redis: Redis, process: str, why: str) -> None:
        redis.hdel(keys.BUNDLE_WANTS, process)
        self._say(redis, process, REFUSED + why.encode())

    def _say(self, redis: Redis, process: str, text: bytes) -> None:
        key = keys.bundle_ready(process)
        pipeline = redis.pipeline()
        pipeline.delete(key)
        pipeline.rpush(key, text)
        pipeline.expire(key, KEYS_LIFE_S)
        pipeline.execute()

    def _size(self, digest: str, piece: str) -> int:
        if piece == digest.removeprefix(DIGEST):
            return len(self._store.manifest(digest).content)
        return self._store.piece_bytes(digest, piece)

    def _read(self, digest: str, piece: str) -> bytes:
        if piece == digest.removeprefix(DIGEST):
            return self._store.manifest(digest).content
        return self._store.piece(digest, piece)
