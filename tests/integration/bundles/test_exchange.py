"""Bundles fetched over a real broker: shared, resumed after SIGKILL, past damage and a broker that comes back empty."""

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from computeshare.bundles import exchange as exchange_module
from computeshare.bundles.exchange import FetchProgress, fetch
from computeshare.bundles.manifest import PIECE_BYTES, Manifest
from computeshare.bundles.piece_server import MOST_WANTING, PieceServer
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError, Interrupted
from computeshare.protocol import keys
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.wait import wait_until


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[EmbeddedBroker]:
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    yield broker
    broker.stop()


@pytest.fixture
def redis(broker: EmbeddedBroker) -> Iterator[Redis]:
    client = connect(broker.url)
    yield client
    client.close()


@pytest.fixture
def origin(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "origin")


@pytest.fixture
def serving(broker: EmbeddedBroker) -> Iterator[Callable[[PieceServer], None]]:
    """Runs piece servers, each in a thread, as the control plane's loop does, until the test ends."""
    over = threading.Event()
    threads: list[threading.Thread] = []

    def run(server: PieceServer) -> None:
        client = connect(broker.url, retries=0)
        while not over.is_set():
            with contextlib.suppress(RedisError):
                server.step(client)
        client.close()

    def start(server: PieceServer) -> None:
        threads.append(threading.Thread(target=run, args=(server,)))
        threads[-1].start()

    yield start
    over.set()
    for thread in threads:
        thread.join()


def made(origin: BundleStore, folder: Path, **sizes: int) -> Manifest:
    """A bundle of files with random bytes, `train__a` becoming train/a."""
    for name, size in sizes.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(size))
    return origin.add(folder)


def same(origin: BundleStore, store: BundleStore, digest: str) -> bool:
    ours, theirs = origin.open_files(digest), store.open_files(digest)
    paths = [path.relative_to(ours) for path in ours.rglob("*") if path.is_file()]
    return bool(paths) and all((ours / path).read_bytes() == (theirs / path).read_bytes() for path in paths)


def test_a_worker_fetches_what_it_needs_first_and_then_the_rest(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", train__a=2 * PIECE_BYTES + 9, train__b=100, test__a=PIECE_BYTES)
    serving(PieceServer(origin))
    store, told = BundleStore(tmp_path / "cache", 10**9), list[FetchProgress]()
    fetch(redis, store, manifest.digest, ("train/",), progress=told.append)
    assert store.has(manifest.digest, ("train/",)) and not store.has(manifest.digest)
    size = 2 * PIECE_BYTES + 109
    assert (told[0].done_bytes, told[0].total_bytes) == (0, size)
    assert (told[-1].done_bytes, told[-1].total_bytes) == (size, size)
    assert size < told[-1].bytes_received + told[-1].bytes_sent < 1.02 * size
    fetch(redis, store, manifest.digest, progress=told.append)
    assert told[-1].bytes_received < 1.02 * PIECE_BYTES
    assert same(origin, store, manifest.digest)
    fetch(redis, store, manifest.digest, progress=lambda _: pytest.fail("fetched again"))
    assert redis.hlen(keys.BUNDLE_WANTS) == 0
    wait_until(lambda: not redis.keys("cs:bundle-piece:*"))


def test_what_was_damaged_in_a_cache_is_fetched_anew(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=2 * PIECE_BYTES + 9)
    serving(PieceServer(origin))
    store, told = BundleStore(tmp_path / "cache", 10**9), list[FetchProgress]()
    fetch(redis, store, manifest.digest)
    with open(store.open_files(manifest.digest) / "a", "r+b") as file:
        file.write(b"\0\0\0\0\0\0\0\0")
    fetch(redis, store, manifest.digest, progress=told.append)
    assert same(origin, store, manifest.digest)
    assert PIECE_BYTES < told[-1].bytes_received < 1.02 * PIECE_BYTES, "the damaged piece alone"


class Counting(BundleStore):
    """Counts the reads of each piece."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads = list[str]()

    def piece(self, digest: str, piece: str) -> bytes:
        self.reads.append(piece)
        return super().piece(digest, piece)


def test_two_workers_that_fetch_together_share_what_is_put_into_the_broker(
    redis: Redis, broker: EmbeddedBroker, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    origin = Counting(tmp_path / "origin")
    manifest = made(origin, tmp_path / "s", a=16 * PIECE_BYTES)
    stores = [BundleStore(tmp_path / name, 10**9) for name in ("one", "two")]
    in_step = threading.Barrier(2, timeout=60)  # a worker that is far ahead leaves pieces that the other does not want

    def fetching(store: BundleStore) -> None:
        fetch(connect(broker.url), store, manifest.digest, progress=lambda _: in_step.wait())

    with ThreadPoolExecutor() as pool:
        done = [pool.submit(fetching, store) for store in stores]
        wait_until(lambda: redis.hlen(keys.BUNDLE_WANTS) == 2)
        serving(PieceServer(origin))
        for each in done:
            each.result(60)
    assert all(same(origin, store, manifest.digest) for store in stores)
    assert len(origin.reads) < 1.5 * 16, "most pieces are put there once for both"


def test_two_workers_of_one_machine_fetch_a_bundle_once(
    broker: EmbeddedBroker, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    origin = Counting(tmp_path / "origin")
    manifest = made(origin, tmp_path / "s", a=6 * PIECE_BYTES)
    serving(PieceServer(origin))
    stores = [BundleStore(tmp_path / "cache", 10**9) for _ in range(2)]
    with ThreadPoolExecutor() as pool:
        for each in [pool.submit(fetch, connect(broker.url), store, manifest.digest) for store in stores]:
            each.result(60)
    assert all(same(origin, store, manifest.digest) for store in stores)
    assert len(origin.reads) == 6


FETCH = """
import sys
from pathlib import Path
from computeshare.bundles.exchange import fetch
from computeshare.bundles.store import BundleStore
from computeshare.transport.connections import connect

url, folder, digest = sys.argv[1:]
fetch(connect(url), BundleStore(Path(folder), 10**10), digest, progress=lambda p: print(p.done_bytes, flush=True))
"""


@pytest.mark.slow
def test_a_killed_worker_resumes_and_loses_a_piece_at_most(
    redis: Redis, broker: EmbeddedBroker, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=55 * PIECE_BYTES + 17)
    serving(PieceServer(origin))
    before = sent_by(redis)
    command = [sys.executable, "-c", FETCH, broker.url, str(tmp_path / "cache"), manifest.digest]
    for _ in range(2):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            first = int(process.stdout.readline())
            while int(process.stdout.readline()) < first + 15 * PIECE_BYTES:
                pass
            process.kill()
    store = BundleStore(tmp_path / "cache", 10**10)
    assert len(store.missing(manifest)) <= 56 - 30
    fetch(redis, store, manifest.digest)
    assert same(origin, store, manifest.digest)
    assert sent_by(redis) - before <= 1.02 * manifest.bytes + 2 * PIECE_BYTES


def sent_by(redis: Redis) -> int:
    """Bytes that the broker has sent so far."""
    info: Any = redis.info("stats")
    return int(info["total_net_output_bytes"])


def test_a_damaged_piece_is_asked_for_again(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=3 * PIECE_BYTES, b=10)
    pieces = list(manifest.pieces())
    server, damaged = PieceServer(origin), set[str]()
    tell = server._tell

    def damage_then_tell(redis: Redis, wants: Any) -> None:
        for piece in pieces[1:]:  # of equal, smaller and larger size
            if piece not in damaged and redis.exists(keys.bundle_piece(piece)):
                size = {pieces[1]: PIECE_BYTES, pieces[2]: PIECE_BYTES + 1}.get(piece, 3)
                redis.set(keys.bundle_piece(piece), bytes(size), ex=60)
                damaged.add(piece)
        tell(redis, wants)

    server._tell = damage_then_tell  # type: ignore[method-assign]
    serving(server)
    store = BundleStore(tmp_path / "cache", 10**9)
    fetch(redis, store, manifest.digest)
    assert damaged == set(pieces[1:]) and same(origin, store, manifest.digest)


def test_a_server_that_always_lies_is_given_up(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=100)

    class Lying(BundleStore):
        def piece(self, digest: str, piece: str) -> bytes:
            return b"x" * 100

    serving(PieceServer(Lying(tmp_path / "origin")))
    store = BundleStore(tmp_path / "cache", 10**9)
    with pytest.raises(BundleError, match="arrived damaged 5 times"):
        fetch(redis, store, manifest.digest)
    assert not store.has(manifest.digest) and store.missing(manifest) == list(manifest.pieces())


def test_a_manifest_of_another_bundle_is_not_taken(redis: Redis, tmp_path: Path) -> None:
    """Somebody with access to the broker answers in the control plane's place."""
    digest = "sha256:" + "5" * 64
    over = threading.Event()

    def lie() -> None:
        while not over.wait(0.01):
            for name in redis.hkeys(keys.BUNDLE_WANTS):  # type: ignore[union-attr]
                redis.set(keys.bundle_piece("5" * 64), b'{"files":[{"path":"a","pieces":[],"size":0}]}')
                redis.rpush(keys.bundle_ready(name.decode()), "5" * 64)

    with ThreadPoolExecutor() as pool:
        pool.submit(lie)
        try:
            with pytest.raises(BundleError, match="arrived damaged 5 times"):
                fetch(redis, BundleStore(tmp_path / "cache", 10**9), digest)
        finally:
            over.set()


def test_a_bundle_that_the_control_plane_does_not_have_is_told(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    serving(PieceServer(origin))
    with pytest.raises(BundleError, match="there is no bundle sha256:555555555555 here: upload it again"):
        fetch(redis, BundleStore(tmp_path / "cache", 10**9), "sha256:" + "5" * 64)


def test_a_broker_that_comes_back_empty_delays_a_worker(
    redis: Redis, broker: EmbeddedBroker, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=12 * PIECE_BYTES)
    serving(PieceServer(origin))
    store, killed = BundleStore(tmp_path / "cache", 10**9), list[int]()

    def kill_once(progress: FetchProgress) -> None:
        if progress.done_bytes >= 4 * PIECE_BYTES and not killed:
            killed.append(progress.done_bytes)
            os.kill(broker.pid, 9)
            wait_until(lambda: broker.poll() is not None)
            broker.spawn()

    fetch(redis, store, manifest.digest, progress=kill_once)
    assert killed and same(origin, store, manifest.digest)


def test_a_worker_that_is_asked_to_leave_stops_and_keeps_what_it_has(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=8 * PIECE_BYTES)
    serving(PieceServer(origin))
    store, told = BundleStore(tmp_path / "cache", 10**9), list[FetchProgress]()
    with pytest.raises(Interrupted):
        fetch(redis, store, manifest.digest, goes_on=lambda: len(told) < 4, progress=told.append)
    assert len(store.missing(manifest)) == 8 - 3
    assert redis.hlen(keys.BUNDLE_WANTS) == 0, "the control plane need not wait to see that it is gone"


def test_a_worker_without_a_control_plane_gives_up(
    redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange_module, "SILENT_S", 0.1)
    with pytest.raises(BundleError, match="has sent no data for 0 s: see that it runs"):
        fetch(redis, BundleStore(tmp_path / "cache", 10**9), "sha256:" + "5" * 64)
    assert redis.llen(keys.BUNDLE_ASKED) == 1 and redis.ttl(keys.BUNDLE_ASKED) > 0


def test_a_bundle_larger_than_the_cache_is_refused_before_it_is_fetched(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "s", a=2 * PIECE_BYTES)
    serving(PieceServer(origin))
    with pytest.raises(BundleError, match="COMPUTESHARE_CACHE"):
        fetch(redis, BundleStore(tmp_path / "cache", PIECE_BYTES), manifest.digest)


def want(redis: Redis, process: str, digest: str, *pieces: str) -> None:
    redis.hset(keys.BUNDLE_WANTS, process, " ".join((str(time.monotonic_ns()), digest, *pieces)))


def ready(redis: Redis, process: str) -> list[str]:
    found: Any = redis.lpop(keys.bundle_ready(process))
    return found.decode().split() if found else []


def in_broker(redis: Redis) -> set[str]:
    return {key.decode().rpartition(":")[2] for key in redis.keys("cs:bundle-piece:*")}  # type: ignore[union-attr]


def test_pieces_take_no_more_of_the_broker_than_they_may_and_everyone_gets_one(
    redis: Redis, origin: BundleStore, tmp_path: Path
) -> None:
    manifest = made(origin, tmp_path / "s", a=20 * PIECE_BYTES)
    pieces = list(manifest.pieces())
    server = PieceServer(origin, room_bytes=5 * PIECE_BYTES)
    for number in range(5):
        want(redis, f"slow{number}", manifest.digest, *pieces[4 * number : 4 * number + 4])
        server.serve(redis)
        assert len(in_broker(redis)) <= 5
    assert in_broker(redis) == {pieces[4 * number] for number in range(5)}, "each has what it wants first"
    assert ready(redis, "slow4") == [pieces[16]]


def test_more_workers_than_there_is_room_for_are_served_in_turn(
    redis: Redis, origin: BundleStore, tmp_path: Path
) -> None:
    pieces = list((manifest := made(origin, tmp_path / "s", a=6 * PIECE_BYTES)).pieces())
    now = [0.0]
    server = PieceServer(origin, room_bytes=2 * PIECE_BYTES, clock=lambda: now[0])
    served = set[str]()
    for number in range(6):
        want(redis, f"slow{number}", manifest.digest, pieces[number])
    for _ in range(12):
        server.serve(redis)
        assert len(in_broker(redis)) <= 2
        served |= in_broker(redis)
        now[0] += 4.0
    assert served == set(pieces)


def test_what_nobody_wants_any_more_leaves_the_broker(redis: Redis, origin: BundleStore, tmp_path: Path) -> None:
    pieces = list((manifest := made(origin, tmp_path / "s", a=2 * PIECE_BYTES)).pieces())
    now = [0.0]
    server = PieceServer(origin, clock=lambda: now[0])
    want(redis, "w", manifest.digest, *pieces)
    server.serve(redis)
    assert in_broker(redis) == set(pieces) and redis.smembers(keys.bundle_offers(manifest.digest[7:])) == {
        one.encode() for one in pieces
    }
    assert all(0 < redis.ttl(keys.bundle_piece(piece)) <= 60 for piece in pieces)  # type: ignore[operator]
    want(redis, "w", manifest.digest, pieces[1])
    server.serve(redis)
    assert in_broker(redis) == {pieces[1]}
    now[0] = 100.0  # the worker was killed
    server.serve(redis)
    assert in_broker(redis) == set() and redis.hlen(keys.BUNDLE_WANTS) == 0
    want(redis, "w", manifest.digest, pieces[0])
    server.serve(redis)
    PieceServer(origin).serve(redis)  # of another control plane that took over
    assert in_broker(redis) == {pieces[0]}


@pytest.mark.parametrize(
    "raw", [b"", b"1", b"\xff\xff", b"1 sha256:../../x y", b"1 sha256:" + b"5" * 64 + b" zz", b"x" * 100_000]
)
def test_wants_that_are_none_are_dropped(raw: bytes, redis: Redis, origin: BundleStore) -> None:
    redis.hset(keys.BUNDLE_WANTS, "w", raw)
    PieceServer(origin).serve(redis)
    assert not redis.hexists(keys.BUNDLE_WANTS, "w") or raw == b""


def test_a_manifest_travels_as_a_piece_of_its_own(redis: Redis, origin: BundleStore, tmp_path: Path) -> None:
    manifest = made(origin, tmp_path / "s", a=10)
    name = manifest.digest.removeprefix("sha256:")
    want(redis, "w", manifest.digest, name)
    PieceServer(origin).serve(redis)
    assert redis.get(keys.bundle_piece(name)) == manifest.content
    assert hashlib.sha256(manifest.content).hexdigest() == name


def test_a_machine_that_wants_without_end_keeps_no_other_waiting(
    redis: Redis, origin: BundleStore, tmp_path: Path, serving: Callable[[PieceServer], None]
) -> None:
    manifest = made(origin, tmp_path / "source", a=100)
    wants = {f"aaaaaaaaevil-{number:016x}": f"1 {manifest.digest}" for number in range(5000)}
    redis.hset(keys.BUNDLE_WANTS, mapping=wants)
    serving(PieceServer(origin))
    store, began = BundleStore(tmp_path / "cache", 10**9), time.monotonic()
    fetch(redis, store, manifest.digest, goes_on=lambda: time.monotonic() - began < 20, worker="bbbbbbbbgood")
    assert store.has(manifest.digest)
    assert redis.hlen(keys.BUNDLE_WANTS) <= MOST_WANTING


def test_a_machine_with_ever_new_processes_is_not_served_before_those_who_waited(
    redis: Redis, origin: BundleStore, tmp_path: Path
) -> None:
    manifest = made(origin, tmp_path / "source", a=100, b=100, c=100, d=100)
    waited, *others = [file.pieces[0] for file in manifest.files]
    server = PieceServer(origin, room_bytes=150)
    redis.hset(keys.BUNDLE_WANTS, "bbbbbbbbgood-1", f"1 {manifest.digest} {waited}")
    for number, piece in enumerate(others[:2]):
        redis.hset(keys.BUNDLE_WANTS, f"aaaaaaaaevil-{number}", f"1 {manifest.digest} {piece}")
        server.serve(redis)
        redis.hdel(keys.BUNDLE_WANTS, f"aaaaaaaaevil-{number}")
    assert redis.exists(keys.bundle_piece(waited))
