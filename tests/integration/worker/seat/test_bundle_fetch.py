"""A seat fetches the files that its job names before it loads the job."""

import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from structlog.testing import capture_logs

from computeshare.bundles.exchange import FetchProgress
from computeshare.bundles.manifest import PIECE_BYTES, Manifest
from computeshare.bundles.piece_server import PieceServer
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError
from computeshare.queue import Seat, recipes
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from computeshare.worker.seat.bundle_fetch import fetched
from computeshare.worker.seat.seat import SeatSession
from computeshare.worker.seat.seat_context import SeatContext
from computeshare.worker.seat.seat_loop import ASKED
from tests.support.recipe_jobs import FACTS, recipe_spec


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    """A broker of its own: what is wanted is no job's."""
    broker = EmbeddedBroker.start(tmp_path / "broker.log")
    with connect(broker.url) as client:
        yield client
    broker.stop()


@pytest.fixture
def origin(tmp_path: Path) -> BundleStore:
    return BundleStore(tmp_path / "origin")


def added(origin: BundleStore, folder: Path, size: int) -> Manifest:
    folder.mkdir()
    (folder / "data.bin").write_bytes(os.urandom(size))
    return origin.add(folder)


@contextmanager
def serving(redis: Redis, origin: BundleStore) -> Iterator[None]:
    over = threading.Event()

    def serve() -> None:
        server = PieceServer(origin)
        while not over.is_set():
            server.step(redis)

    thread = threading.Thread(target=serve)
    thread.start()
    yield
    over.set()
    thread.join()


def test_a_seat_has_all_bundles_of_its_job_and_counts_their_bytes(
    redis: Redis, origin: BundleStore, tmp_path: Path
) -> None:
    manifests = [added(origin, tmp_path / "a", PIECE_BYTES + 5), added(origin, tmp_path / "b", 1000)]
    settings, told = Settings(home=tmp_path / "home"), list[FetchProgress]()
    digests = tuple(manifest.digest for manifest in manifests)
    cache = BundleStore(settings.bundles_dir, limit_bytes=1)
    with capture_logs() as logs, serving(redis, origin):
        with fetched(redis, digests, settings, lambda: True, told.append):
            assert all(cache.has(digest) for digest in digests)
            assert not any(cache.remove(digest) for digest in digests), "no other seat removes them meanwhile"
        assert all(cache.remove(digest) for digest in digests)
    size = sum(manifest.bytes for manifest in manifests)
    assert size < told[-1].bytes_received < 1.02 * size
    assert [line["event"] for line in logs if "MB" in line["event"]] == ["fetching data: 0 of 4 MB"]


def test_a_job_without_bundles_asks_for_nothing(redis: Redis, tmp_path: Path) -> None:
    with fetched(redis, (), Settings(home=tmp_path / "home"), lambda: True, lambda _: None):
        assert not (tmp_path / "home").exists() and redis.dbsize() == 0


def test_the_owners_limit_holds(redis: Redis, origin: BundleStore, tmp_path: Path) -> None:
    manifest = added(origin, tmp_path / "a", 101_000_000)
    settings = Settings(home=tmp_path / "home", cache="100MB")
    context = fetched(redis, (manifest.digest,), settings, lambda: True, lambda _: None)
    with serving(redis, origin), pytest.raises(BundleError, match="Raise COMPUTESHARE_CACHE"), context:
        pass


def test_a_seat_that_is_asked_to_leave_while_it_fetches_leaves(
    redis: Redis, origin: BundleStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = added(origin, tmp_path / "a", 6 * PIECE_BYTES)
    recipe = Bundle({"recipe.py": "never run: the seat leaves before"})
    spec = recipe_spec(recipe=recipe.digest, recipe_facts=FACTS | {"initial": manifest.digest})
    stop, settings = threading.Event(), Settings(home=tmp_path / "home", recipe=recipe.digest)
    seat = SeatSession(redis, Seat("a" * 12, secrets.token_hex(4), 1, 1), spec, settings, stop)
    recipes.publish(redis, seat.context.seat.job, spec, recipe, SigningKey.new())
    shown = []
    note = SeatContext.note_fetched

    def note_and_stop(self: SeatContext, now: FetchProgress) -> None:
        note(self, now)
        shown.append(self.progress())
        if now.done_bytes >= 2 * PIECE_BYTES:
            stop.set()

    monkeypatch.setattr(SeatContext, "note_fetched", note_and_stop)
    with serving(redis, origin):
        assert seat.run("cpu") == ASKED
    assert [(one.state, one.fetched, one.wanted) for one in shown] == [
        ("loading", count * PIECE_BYTES, 6 * PIECE_BYTES) for count in range(3)
    ]
    assert shown[-1].bytes_down > 2 * PIECE_BYTES
    assert len(BundleStore(tmp_path / "home" / "bundles", 1).missing(manifest)) == 4
