"""Fetches bundles over the broker, the only thing that a worker is sure to reach; `piece_server` answers.

A process that fetches writes which pieces it wants next, a few at a time. The control plane puts wanted pieces into the
broker, each under its own key while somebody wants it, and tells who wants it. Processes that fetch the same bundle ask
for pieces first that are there already, so that each is put there about once for all of them.
"""

import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import chain, islice
from typing import Any

import structlog
from redis import Redis
from redis.exceptions import BusyLoadingError, OutOfMemoryError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from computeshare.bundles.manifest import CONTENT_BYTES, DIGEST, Manifest
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, BundleMissing, Interrupted, PieceDamaged
from computeshare.protocol import keys
from computeshare.transport.wire import Wire
from computeshare.types import plain

AHEAD = 4
"""Pieces that a process wants at a time, beside the one that it is reading."""
KEYS_LIFE_S, WAIT_S = 120, 2
SILENT_S = 120.0
"""Seconds without a piece, with the broker there, after which a process gives up."""
MOST_DAMAGED = 5
"""Damaged copies of one piece after which a process gives up."""
LONGEST_PAUSE_S = 2.0
REFUSED = b"!"
"""First byte of the control plane's reply if it cannot send a piece."""
_AWAY = (RedisConnectionError, RedisTimeoutError, BusyLoadingError, OutOfMemoryError)
log = structlog.get_logger()

Put = Callable[[str, memoryview], object]


@dataclass(frozen=True, slots=True)
class FetchProgress:
    """How far a process has come: bytes of the files that it wants, and all bytes over the wire."""

    done_bytes: int
    total_bytes: int
    bytes_sent: int
    bytes_received: int


def fetch(
    redis: Redis,
    store: BundleStore,
    digest: str,
    only: Sequence[str] = (),
    goes_on: Callable[[], bool] = lambda: True,
    progress: Callable[[FetchProgress], object] = lambda _: None,
    worker: str = "",
) -> None:
    """Fetch the files of a bundle, or those whose paths start with one of `only`, as far as they are not in the store.

    Waits while the broker is away, and while another process on this machine fetches the bundle. `progress` is called
    at the beginning and after each piece. `worker` is the id of the worker that fetches, if one does: machines may
    fetch for their own workers alone.

    Raises: Interrupted: `goes_on` returned False; what was fetched stays. BundleError: the control plane has no such
        bundle, sends nothing for `SILENT_S` or damaged pieces, or the files cannot be stored here.
    """
    with store.using(digest):
        store.read_back(digest)
        while not store.has(digest, only):
            if not goes_on():
                raise Interrupted("the files are not wanted any more")
            try:
                with store.fetching(digest), closing(PieceExchange(redis, digest, goes_on, worker)) as exchange:
                    _fetch(exchange, store, only, progress)
            except BlockingIOError:
                time.sleep(LONGEST_PAUSE_S / 4)


def _fetch(
    exchange: "PieceExchange", store: BundleStore, only: Sequence[str], progress: Callable[[FetchProgress], object]
) -> None:
    digest = exchange.digest
    try:
        manifest = store.manifest(digest)
    except BundleMissing:
        manifest = exchange.manifest()
        store.adopt(manifest)
    sizes = manifest.pieces(only)
    missing = {piece: sizes[piece] for piece in store.missing(manifest, only)}
    total, left = sum(sizes.values()), sum(missing.values())
    store.make_room(left)

    def tell() -> None:
        progress(FetchProgress(total - left, total, exchange.wire.bytes_sent, exchange.wire.bytes_received))

    def put(piece: str, data: memoryview) -> None:
        nonlocal left
        store.put(digest, piece, data)
        left -= len(data)
        tell()

    tell()
    exchange.get(missing, put)


@dataclass(slots=True)
class _Answers:
    """Pieces that the control plane has announced: `ready` for this process, `offers` for any process."""

    ready: set[str] = field(default_factory=set)
    offers: set[str] = field(default_factory=set)

    def hear(self, reply: bytes) -> None:
        """Raises BundleError: the control plane cannot send a piece; its reply says why."""
        if reply.startswith(REFUSED):
            raise BundleError(plain(reply[1:1000].decode(errors="replace")))
        self.ready |= _names(reply.split())


class PieceExchange:
    """Reads pieces of one bundle from the broker."""

    def __init__(self, redis: Redis, digest: str, goes_on: Callable[[], bool], worker: str = "") -> None:
        self.digest = digest
        self.wire = Wire(redis, interrupt=lambda: not self._is_over and not goes_on())
        self._is_over = self._is_linked = False
        self._name = f"{worker}-{secrets.token_hex(8)}"
        self._turn = 0
        self._damaged: Counter[str] = Counter()

    def close(self) -> None:
        """Take back what this process wants, and close the connection."""
        self._is_over = True
        if self._is_linked:  # else what it wants expires
            with suppress(RedisError):
                self.wire.exchange([("HDEL", keys.BUNDLE_WANTS, self._name), ("DEL", keys.bundle_ready(self._name))])
        self.wire.close()

    def manifest(self) -> Manifest:
        """The bundle's manifest. Raises the same errors as `get`."""
        found: list[Manifest] = []

        def put(piece: str, data: memoryview) -> None:
            if sha256(data).hexdigest() != piece:
                raise PieceDamaged("the manifest arrived damaged")
            found.append(Manifest.parse(bytes(data)))

        self.get({self.digest.removeprefix(DIGEST): CONTENT_BYTES}, put)
        return found[0]

    def get(self, pieces: Mapping[str, int], put: Put) -> None:
        """Read pieces, by their names and largest sizes, and `put` each. Raises Interrupted, BundleError."""
        left, answers = dict(pieces), _Answers()
        self._damaged = Counter[str]()
        room = memoryview(bytearray(max(left.values(), default=0)))
        heard_at = time.monotonic()
        while left:
            piece = next((piece for piece in answers.ready if piece in left), None)
            first = (offered for offered in answers.offers if offered in left)
            wanted = [each for each in islice(dict.fromkeys(chain(first, left)), AHEAD + 1) if each != piece][:AHEAD]
            try:
                data = self._exchange(piece, wanted, room, answers)
            except _AWAY as error:
                log.warning("the broker is away, or out of memory", error=str(error))
                time.sleep(random.uniform(0.1, LONGEST_PAUSE_S))
                answers, heard_at, self._is_linked = _Answers(), time.monotonic(), False
                continue
            if piece and isinstance(data, memoryview):
                try:
                    put(piece, data)
                    del left[piece]
                    heard_at = time.monotonic()
                except PieceDamaged as error:
                    data = error
            if piece and isinstance(data, Exception):
                self._doubt(piece, data)
            if time.monotonic() - heard_at > SILENT_S:
                raise BundleError(
                    f"the control plane has sent no data for {SILENT_S:.0f} s: see that it runs (computeshare up)"
                )

    def _exchange(self, piece: str | None, wanted: Collection[str], room: memoryview, answers: _Answers) -> Any:
        """Say what is wanted, and read a piece that is ready, or else wait for one; returns the piece's bytes, an
        error, or None.
        """
        self._turn += 1
        value = " ".join((str(self._turn), self.digest, *("!" * bool(self._damaged[one]) + one for one in wanted)))
        ready = keys.bundle_ready(self._name)
        read: list[Any] = [("GET", keys.bundle_piece(piece))] if piece else []
        ask: list[Any] = [
            ("HSET", keys.BUNDLE_WANTS, self._name, value),
            ("EXPIRE", keys.BUNDLE_WANTS, KEYS_LIFE_S),
            ("LPUSH", keys.BUNDLE_ASKED, 1),
            ("LTRIM", keys.BUNDLE_ASKED, 0, 0),
            ("EXPIRE", keys.BUNDLE_ASKED, KEYS_LIFE_S),
            ("SMEMBERS", keys.bundle_offers(self.digest.removeprefix(DIGEST))),
            ("LPOP", ready) if piece else ("BLPOP", ready, WAIT_S),
        ]
        commands = [*read, *ask]
        into = [room if piece else None, *[None] * (len(commands) - 1)]
        replies = self.wire.exchange(commands, into, raise_errors=False)
        self._is_linked = True
        *_, offers, told = replies
        for reply in replies[len(read) :]:
            if isinstance(reply, Exception):
                raise reply
        answers.offers = _names(offers)
        answers.ready.discard(piece or "")
        if told:
            answers.hear(told if piece else told[1])
        return replies[0] if piece else None

    def _doubt(self, piece: str, error: Exception) -> None:
        """Want a damaged piece again. Raises BundleError: it was damaged too often."""
        self._damaged[piece] += 1
        log.warning("a damaged piece is fetched again", piece=piece, error=str(error))
        if self._damaged[piece] == MOST_DAMAGED:
            raise BundleError(
                f"piece {piece[:12]} of bundle {self.digest[:19]} arrived damaged {MOST_DAMAGED} times: somebody with "
                "access to the broker changes what is sent, or its memory is faulty"
            )


def _names(values: Collection[bytes]) -> set[str]:
    return {value.decode(errors="replace") for value in values}
