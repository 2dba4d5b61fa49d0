"""`computeshare doctor` on machines with real faults: what it finds, and what it advises."""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import OutOfMemoryError

from computeshare.doctor import Check, Surroundings, machine_checks, services
from computeshare.protocol import keys
from computeshare.settings import Settings
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.full_disk import small_disk
from tests.support.served_api import serving

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("COMPUTESHARE_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def own_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A broker that may be filled and told what it is not."""
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log")
    yield broker.url
    broker.stop()


@pytest.fixture
def own_redis(own_broker: str) -> Iterator[Redis]:
    with connect(own_broker, retries=0) as redis:
        yield redis
        redis.config_set("maxmemory", 0)
        redis.config_set("maxmemory-policy", "noeviction")
        redis.flushall()


@pytest.fixture(scope="module")
def control_plane(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    settings = Settings(home=tmp_path_factory.mktemp("home"), redis_url=redis_url, token="secret")
    with serving(settings) as (url, _):
        yield settings.model_copy(update={"url": url})


def on(settings: Settings, **changes: Any) -> Surroundings:
    return Surroundings(settings.model_copy(update=changes), 1)


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def fails(check: Check, finding: str, advice: str, status: str = "fail") -> None:
    assert (check.status, finding in check.finding, advice in check.advice) == (status, True, True), check


def test_no_broker(tmp_path: Path) -> None:
    machine = Surroundings(Settings(home=tmp_path, redis_url=f"redis://127.0.0.1:{closed_port()}"), 1)
    fails(services.broker(machine), "refused", "start `computeshare up`, or look at COMPUTESHARE_REDIS_URL")
    assert services.broker_memory(machine).status == "warn"


def test_a_wrong_password_of_the_broker(own_broker: str, tmp_path: Path) -> None:
    url = "unix://:hunter2@" + own_broker.partition("@")[2]
    check = services.broker(Surroundings(Settings(home=tmp_path, redis_url=url), 1))
    fails(check, "invalid username-password pair", "and the password")
    assert "hunter2" not in check.finding


def test_a_broker_out_of_room_and_one_that_evicts(own_broker: str, own_redis: Redis, tmp_path: Path) -> None:
    def memory() -> Check:
        return services.broker_memory(Surroundings(Settings(home=tmp_path, redis_url=own_broker), 1))

    assert memory().status == "ok"
    own_redis.config_set("maxmemory", 3 * int(own_redis.info("memory")["used_memory"]))
    assert memory().status == "ok"
    with pytest.raises(OutOfMemoryError):
        for number in range(10_000):
            own_redis.set(f"ballast:{number}", bytes(10_000))
    fails(memory(), "it refuses whatever takes more", "cancel or delete jobs, or give")
    own_redis.config_set("maxmemory-policy", "allkeys-lru")
    fails(memory(), "used", "set maxmemory-policy noeviction", "warn")


def test_a_control_plane_that_does_not_run(control_plane: Settings) -> None:
    machine = on(control_plane, url=f"http://127.0.0.1:{closed_port()}")
    fails(services.control_plane(machine), "no control plane answers", "start `computeshare up`")
    for check in (services.token(machine), services.clock(machine), services.workers(machine)):
        fails(check, "no control plane answers", "", "warn")


def test_a_wrong_token(control_plane: Settings) -> None:
    fails(services.token(on(control_plane, token="wrong")), "", "set COMPUTESHARE_TOKEN")
    assert services.token(on(control_plane)).status == "ok"


def test_a_healthy_control_plane_has_no_faults(control_plane: Settings) -> None:
    machine = on(control_plane)
    found = [services.broker(machine), services.versions(machine), services.clock(machine), services.workers(machine)]
    assert [check.status for check in found] == ["ok"] * 4, found


def test_jobs_that_wait_for_a_worker(control_plane: Settings) -> None:
    machine = on(control_plane)
    made = machine.client.create({"dataset": "digits", "model": "mlp", "queue": "nobody-here"})
    try:
        fails(services.workers(machine), "queue nobody-here (1)", "computeshare-worker --queue nobody-here", "warn")
    finally:
        machine.client.cancel(made["id"])


def test_a_broker_that_serves_another_release_where_no_control_plane_is_known(
    own_broker: str, own_redis: Redis, tmp_path: Path
) -> None:
    own_redis.set(keys.RELEASE, json.dumps({"version": "9.0.0", "protocol": 99}))
    machine = Surroundings(Settings(home=tmp_path, redis_url=own_broker), 1)
    fails(services.versions(machine), "ComputeShare 9.0.0 (protocol 99)", "upgrade this client's machine")


def test_a_disk_with_no_room_and_a_home_that_takes_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 8) as folder:
        machine = Surroundings(Settings(home=folder / "home"), 1)
        fails(machine_checks.disk(machine), "free", "free some space")
        assert machine_checks.home(machine).status == "ok"
        (folder / "ballast").write_bytes(bytes(1 << 20))
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True, timeout=10)
        fails(machine_checks.home(machine), "Read-only file system", "or set COMPUTESHARE_HOME")


def test_a_disk_that_is_full_fails_the_home(tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", 1) as folder:
        with open(folder / "ballast", "wb", buffering=0) as file, pytest.raises(OSError, match="No space"):
            while True:
                file.write(bytes(65536))
                file.flush()
        machine = Surroundings(Settings(home=folder), 1)
        fails(machine_checks.home(machine), "No space left", "make it writable")
        fails(machine_checks.disk(machine), "0 bytes free", "free some space")


def test_a_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        machine = Surroundings(Settings(home=tmp_path), number)
        fails(machine_checks.port(machine), f"{number} cannot be used", f"computeshare up --port {number + 1}", "warn")


@pytest.mark.parametrize(
    ("module", "source", "status", "finding"),
    [
        ("torch", "raise ImportError('libcudart.so.13: cannot open shared object file')", "fail", "libcudart.so.13"),
        ("torch", "import os; os._exit(7)", "fail", "it ended without any output"),
        ("torchvision", "raise RuntimeError('operator torchvision::nms does not exist')", "warn", "torchvision::nms"),
    ],
    ids=["missing-library", "sudden-end", "torchvision"],
)
def test_a_torch_that_does_not_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, status: str, finding: str
) -> None:
    package = tmp_path / "broken" / module
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    monkeypatch.setattr("computeshare.training.devices.guess", lambda: "cpu")
    fails(machine_checks.device(Surroundings(Settings(home=tmp_path), 1)), finding, "install torch", status)


def test_damaged_data_sets_are_told_from_those_that_are_missing(tmp_path: Path, mnist_dir: Path) -> None:
    cut, garbled, whole = (tmp_path / name / "raw" for name in ("MNIST", "FashionMNIST", "KMNIST"))
    for folder in (cut, garbled, whole):
        folder.mkdir(parents=True)
        for file in (mnist_dir / "MNIST" / "raw").glob("*-ubyte"):
            shutil.copy(file, folder)
    images = "train-images-idx3-ubyte"
    (cut / images).write_bytes((cut / images).read_bytes()[:100_000])
    (garbled / images).write_bytes(b"not an idx file" * 1000)
    machine = Surroundings(Settings(home=tmp_path, data=tmp_path), 1)
    check = machine_checks.data_sets(machine)
    fails(check, "; fashion-mnist: ", "delete the damaged files: they are downloaded again")
    assert check.finding.startswith("mnist: ")
    assert "kmnist" not in check.finding.replace("fashion-mnist", "") and "cifar10" not in check.finding


def test_a_proxy_that_swallows_loopback_is_found_where_curl_fails(
    control_plane: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("no_proxy", "NO_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{closed_port()}")
    machine = on(control_plane)
    assert control_plane.url
    program = f"import urllib.request; urllib.request.urlopen('{control_plane.url}/healthz', timeout=5)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 1
    fails(machine_checks.proxies(machine), "also asked for 127.0.0.1", "export NO_PROXY=127.0.0.1", "warn")
    assert services.control_plane(machine).status == "ok"  # our own client goes past it
    monkeypatch.setenv("no_proxy", "127.0.0.1,localhost")
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, check=False).returncode == 0
    assert machine_checks.proxies(machine).status == "ok"
