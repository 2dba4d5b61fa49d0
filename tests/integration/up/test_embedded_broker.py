"""The embedded broker: found again where it was, never an orphan, and no stranger's data lost with a damaged file."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from redis import Redis
from redis.exceptions import RedisError

from computeshare.up.embedded_broker import PUBSUB_BYTES, UNREAD_S, EmbeddedBroker, Place, can_listen
from tests.support.servers import SERVERS, use_server
from tests.support.wait import wait_until


def answers(url: str) -> bool:
    try:
        with Redis.from_url(url) as client:
            return bool(client.ping())
    except RedisError:
        return False


def test_a_kept_place_is_private_and_the_same_again(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    first = Place.kept(path)
    assert Place.kept(path) == first
    assert path.stat().st_mode & 0o777 == 0o600 and first.folder.stat().st_mode & 0o777 == 0o700
    shutil.rmtree(first.folder)  # by a reboot
    assert Place.kept(path) == first and first.folder.is_dir()
    assert len(str(first.folder / "broker.sock")) < 100
    shutil.rmtree(first.folder)


def test_a_kept_place_gives_way_to_strangers(tmp_path: Path) -> None:
    path = tmp_path / "broker.json"
    first = Place.kept(path)
    other = EmbeddedBroker.start(tmp_path / "log", place=Place(Place.new().folder, first.port, "other"))
    try:
        moved = Place.kept(path)
        assert moved.port != first.port and (moved.folder, moved.password) == (first.folder, first.password)
    finally:
        other.stop()
    first.folder.chmod(0o755)
    assert Place.kept(path).folder != first.folder
    copied = tmp_path / "copy" / "broker.json"
    copied.parent.mkdir()
    shutil.copy(path, copied)
    copy, original = Place.kept(copied), Place.kept(path)
    assert copy.folder != original.folder and copy.password != original.password
    for folder in {first.folder, moved.folder, copy.folder, original.folder}:
        shutil.rmtree(folder, ignore_errors=True)


def test_a_broker_started_again_is_at_the_same_place(tmp_path: Path) -> None:
    broker = EmbeddedBroker.start(tmp_path / "log")
    try:
        pid, urls = broker.pid, (broker.url, broker.tcp_url)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: broker.poll() is not None)
        broker.spawn()
        wait_until(lambda: answers(broker.url) and answers(broker.tcp_url))
        assert broker.pid != pid and (broker.url, broker.tcp_url) == urls
    finally:
        broker.stop()
    assert not broker.place.folder.exists() and can_listen("127.0.0.1", broker.place.port)


def test_a_broker_whose_starter_is_killed_ends_by_itself(tmp_path: Path) -> None:
    program = (
        "import sys, time; from pathlib import Path; from computeshare.up.embedded_broker import EmbeddedBroker\n"
        f"print(EmbeddedBroker.start(Path({str(tmp_path / 'log')!r})).pid, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    server = psutil.Process(int(starter.stdout.readline()))
    watchers = [child for child in psutil.Process(starter.pid).children() if child != server]
    starter.kill()
    starter.wait()
    assert psutil.wait_procs([server, *watchers], timeout=8)[1] == []
    assert len(watchers) == 1


def test_a_stopped_broker_leaves_no_watcher(tmp_path: Path) -> None:
    before = set(psutil.Process().children())
    broker = EmbeddedBroker.start(tmp_path / "log")
    assert len(set(psutil.Process().children()) - before) == 2
    broker.stop()
    assert set(psutil.Process().children()) <= before


@pytest.mark.parametrize("running", [True, False], ids=["while it runs", "before it starts"])
def test_damaged_data_is_kept_aside_and_the_broker_starts_empty(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], running: bool
) -> None:
    data, log = tmp_path / "broker", tmp_path / "log"
    broker = EmbeddedBroker.start(log, data)
    with Redis.from_url(broker.url) as client:
        for number in range(2000):
            client.set(f"key {number}", "value")
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: broker.poll() is not None)
    (file,) = data.glob("**/*.incr.aof")
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 20] = b"damaged in the middle"[:20]
    file.write_bytes(content)
    if running:
        broker.spawn()
        wait_until(lambda: broker.poll() is not None)  # it refuses to start
        broker.spawn()
        wait_until(lambda: answers(broker.url))
    else:
        broker.stop()
        broker = EmbeddedBroker.start(log, data)
    try:
        with Redis.from_url(broker.url) as client:
            assert client.dbsize() == 0
        (kept,) = tmp_path.glob("broker-damaged-*")
        assert (kept / file.relative_to(data)).read_bytes() == content
        assert str(kept) in capfd.readouterr().err and str(kept) in log.read_text()
    finally:
        broker.stop()


def test_a_tail_that_was_cut_off_is_no_damage(tmp_path: Path) -> None:
    data, log = tmp_path / "broker", tmp_path / "log"
    broker = EmbeddedBroker.start(log, data)
    with Redis.from_url(broker.url) as client:
        for number in range(100):
            client.set(f"key {number}", "value")
    (file,) = data.glob("**/*.incr.aof")
    wait_until(lambda: b"key 99" in file.read_bytes())  # while it flushes the file, the broker puts off writing
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: broker.poll() is not None)
    os.truncate(file, file.stat().st_size - 150)
    broker.spawn()
    try:
        wait_until(lambda: answers(broker.url))
        with Redis.from_url(broker.url) as client:
            assert 90 < client.dbsize() < 100
        assert list(tmp_path.glob("broker-damaged-*")) == []
    finally:
        broker.stop()


@pytest.mark.parametrize("kind", SERVERS)
def test_a_client_that_does_not_read_is_cut_but_a_large_model_is_not(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_server(kind, monkeypatch)
    for memory, most in ((100 << 20, 1 << 30), (8 << 30, 4 << 30)):
        broker = EmbeddedBroker.start(tmp_path / "log", maxmemory_bytes=memory)
        try:
            with Redis.from_url(broker.url) as redis:
                limits = redis.config_get("client-output-buffer-limit")["client-output-buffer-limit"].split()
            of_kind = {limits[at]: [*map(int, limits[at + 1 : at + 4])] for at in range(0, len(limits), 4)}
            assert of_kind["normal"] == [most, most // 2, UNREAD_S]
            assert of_kind["pubsub"] == [PUBSUB_BYTES, PUBSUB_BYTES // 4, 60]
        finally:
            broker.stop()
