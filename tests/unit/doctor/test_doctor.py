"""Each check of `computeshare doctor`, against what it is there to find."""

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from computeshare import __version__
from computeshare.cli.main import app
from computeshare.confinement import kinds
from computeshare.doctor import Check, Surroundings, machine_checks, services
from computeshare.doctor import machine as machine_module
from computeshare.protocol.handshake import PROTOCOL
from computeshare.settings import RunFile, Settings
from computeshare.terminal.command import run
from tests.support.http_answers import Answer, FakeServer, serving

READY = {"status": "ready", "dependencies": {"sqlite": {"ok": True, "detail": "readable"}}}
PROBE = {
    "device": "cpu (x86_64)",
    "threads": 2,
    "seconds": 3.2,
    "torchvision": "",
    "data_sets": {"digits": "", "mnist": "missing"},
}


@pytest.fixture
def machine(tmp_path: Path) -> Surroundings:
    """A machine with an empty home, knowing no server."""
    return Surroundings(Settings(home=tmp_path, redis_url=None, url=None, token=None), free_port())


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as fake:
        fake.on("GET /readyz", Answer(READY, headers={}))
        yield fake


def of(server: FakeServer, home: Path, token: str = "secret") -> Surroundings:
    return Surroundings(Settings(home=home, url=server.url, token=token), free_port())


def with_probe(machine: Surroundings, **changes: Any) -> Surroundings:
    machine.__dict__["probe"] = {**PROBE, **changes}  # what the cached property would keep
    return machine


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_installed_python_and_packages_pass(machine: Surroundings) -> None:
    assert machine_checks.python(machine).status == "ok"
    check = machine_checks.packages(machine)
    assert check.status == "ok"
    assert "torch 2." in check.finding and "rq 3.0." in check.finding


def test_a_missing_package_fails(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_checks, "_PACKAGES", ("torch", "no-such-package"))
    check = machine_checks.packages(machine)
    assert (check.status, check.finding) == ("fail", "no-such-package is not installed")


def test_the_device_is_named_with_its_threads(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("computeshare.training.devices.guess", lambda: "cpu")
    assert machine_checks.device(with_probe(machine)).finding == "cpu (x86_64), 2 threads; torch loads in 3 s"


def test_a_card_that_torch_cannot_use_is_a_warning(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("computeshare.training.devices.guess", lambda: "cuda")
    assert machine_checks.device(with_probe(machine)).status == "warn"
    assert machine_checks.device(with_probe(machine, device="cuda (H200)")).status == "ok"
    monkeypatch.setattr("computeshare.training.devices.guess", lambda: "mps")
    assert "this Mac's GPU" in machine_checks.device(with_probe(machine)).advice
    assert machine_checks.device(with_probe(machine, device="mps (arm64)")).status == "ok"


def test_a_python_that_a_mac_translates_is_a_warning(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.is_translated() is False or sys.platform == "darwin"
    monkeypatch.setattr(machine_checks, "is_translated", lambda: True)
    check = machine_checks.python(machine)
    assert (check.status, check.finding.endswith("translated: this is Apple silicon")) == ("warn", True)
    assert "PYTHON=" in check.advice


def test_a_torch_that_does_not_load_fails_with_its_last_words(machine: Surroundings) -> None:
    check = machine_checks.device(with_probe(machine, error="ImportError: libcudart.so"))
    assert (check.status, check.finding) == ("fail", "ImportError: libcudart.so")


def test_a_probe_that_dies_is_reported_and_not_believed(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert machine.probe == {"error": "it ended without any output"}


def test_a_probe_that_cannot_be_started_is_reported(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert machine.probe == {"error": "/no/such/python cannot be run: No such file or directory"}


def test_a_probe_that_hangs_is_given_up(machine: Surroundings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(machine_module, "PROBE_S", 0.1)
    assert "importing torch took longer than" in machine.probe["error"]


def test_a_home_that_is_not_there_yet_can_be_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    check = machine_checks.home(Surroundings(Settings(home=folder), 1))
    assert (check.status, check.finding) == ("ok", f"{folder} can be made")
    assert not folder.exists() and list(tmp_path.iterdir()) == []


def test_a_home_in_the_place_of_a_file_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    check = machine_checks.home(Surroundings(Settings(home=tmp_path / "file" / "home"), 1))
    assert (check.status, check.finding) == ("fail", f"{tmp_path / 'file'} is not a folder")
    assert "COMPUTESHARE_HOME" in check.advice


@pytest.mark.parametrize(
    ("version", "finding"), [((3, 10, 4), "is too old"), ((3, 14, 0), "is newer"), ((2, 7, 18), "is too old")]
)
def test_a_python_that_is_too_old_or_too_new_fails(version: tuple[int, int, int], finding: str) -> None:
    check = machine_checks.judged_python(version)
    assert check.status == "fail" and finding in check.finding
    assert "3.11, 3.12 or 3.13" in check.advice


def bypass(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    """These proxies in the environment, and no others."""
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy", "ftp_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_proxies_that_swallow_this_machine_or_the_control_plane_are_named_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine = Surroundings(Settings(home=tmp_path, url="http://192.168.7.5:8000"), 1)
    bypass(monkeypatch)
    assert machine_checks.proxies(machine).status == "ok"
    bypass(monkeypatch, HTTP_PROXY="http://user:hunter2@proxy:3128")
    check = machine_checks.proxies(machine)
    assert check.status == "warn" and "NO_PROXY=127.0.0.1,localhost,192.168.7.5" in check.advice
    assert "http by http://proxy:3128" in check.finding and "hunter2" not in check.finding + check.advice
    bypass(monkeypatch, http_proxy="http://proxy:3128", no_proxy="127.0.0.1,localhost")
    assert machine_checks.proxies(machine).finding.endswith("also asked for 192.168.7.5")
    bypass(monkeypatch, http_proxy="http://proxy:3128", no_proxy="127.0.0.1,localhost,192.168.7.5")
    assert machine_checks.proxies(machine).status == "ok"


@pytest.mark.parametrize(
    ("release", "status", "advice"),
    [
        ({"version": __version__, "protocol": PROTOCOL}, "ok", ""),
        ({"version": "9.4.0", "protocol": PROTOCOL + 1}, "fail", "upgrade this client's machine"),
        ({"version": "0.0.1", "protocol": PROTOCOL - 1}, "fail", "upgrade the control plane's machine"),
    ],
    ids=["same", "newer", "older"],
)
def test_a_control_plane_of_another_version_is_told_with_the_side_to_upgrade(
    server: FakeServer, tmp_path: Path, release: dict[str, Any], status: str, advice: str
) -> None:
    server.on("GET /v1/version", Answer(release))
    check = services.versions(of(server, tmp_path))
    assert check.status == status and check.advice.startswith(advice)


def test_a_control_plane_that_does_not_say_its_version_is_older(server: FakeServer, tmp_path: Path) -> None:
    check = services.versions(of(server, tmp_path))
    assert (check.status, check.advice) == ("warn", "upgrade the control plane")


def test_queues_with_jobs_and_no_workers_are_named_with_the_command(server: FakeServer, tmp_path: Path) -> None:
    queues = [
        {"name": "mnist", "workers": 0, "queued": 1, "running": 1},
        {"name": "idle", "workers": 0, "queued": 0, "running": 0},
        {"name": "busy", "workers": 2, "queued": 0, "running": 1},
    ]
    server.on("GET /v1/queues", Answer({"items": queues}), Answer({"items": queues[1:]}))
    check = services.workers(of(server, tmp_path))
    assert (check.status, check.finding) == ("warn", "none is online for the jobs of queue mnist (2)")
    assert check.advice.startswith("start some: here computeshare-worker --queue mnist, elsewhere")
    assert "computeshare workers invite --queue mnist" in check.advice
    assert services.workers(of(server, tmp_path)).finding == "2 on busy"


@pytest.mark.parametrize(("free", "status"), [(10**8, "fail"), (10**9, "warn"), (10**10, "ok")])
def test_disk_space_is_judged(machine: Surroundings, monkeypatch: pytest.MonkeyPatch, free: int, status: str) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(10**12, 0, free))
    assert machine_checks.disk(machine).status == status


def test_no_stack_running_here_is_no_fault(machine: Surroundings) -> None:
    assert machine_checks.processes(machine).status == "ok"


def test_processes_of_a_killed_stack_fail_and_single_dead_ones_warn(machine: Surroundings) -> None:
    dead = ended_pid()
    RunFile(url="http://h:1", redis_url="r", pids={"api": [dead]}).write(machine.settings.run_path)
    assert machine_checks.processes(machine).status == "fail"
    RunFile(url="http://h:1", redis_url="r", pids={"api": [os.getpid()], "reducer": [os.getpid(), dead]}).write(
        machine.settings.run_path
    )
    check = machine_checks.processes(Surroundings(machine.settings, 1))
    assert (check.status, check.finding) == ("warn", f"missing: reducer {dead}")
    RunFile(url="http://h:1", redis_url="r", pids={"api": [os.getpid()]}).write(machine.settings.run_path)
    assert machine_checks.processes(Surroundings(machine.settings, 1)).status == "ok"


def test_a_port_in_use_suggests_the_next(machine: Surroundings) -> None:
    assert machine_checks.port(machine).status == "ok"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        number = taken.getsockname()[1]
        check = machine_checks.port(Surroundings(machine.settings, number))
        assert check.status == "warn"
        assert check.advice == f"use another port: computeshare up --port {number + 1}"
        RunFile(url=f"http://127.0.0.1:{number}", redis_url="r", pids={"api": [os.getpid()]}).write(
            machine.settings.run_path
        )
        assert machine_checks.port(Surroundings(machine.settings, number)).status == "ok"


def test_a_machine_that_knows_no_servers_gets_advice_and_no_failure(machine: Surroundings) -> None:
    for check in (services.broker(machine), services.control_plane(machine)):
        assert (check.status, check.finding) == ("warn", "no control plane is configured here")
        assert "computeshare up" in check.advice
    assert services.token(machine).status == services.clock(machine).status == "warn"


@pytest.mark.parametrize("secret", ["hunter2", "hunt/er2", "hunt#er2", "hunt?er2", "hunt@er2"])
def test_a_broker_that_does_not_answer_fails_without_showing_the_password(secret: str, tmp_path: Path) -> None:
    url = f"redis://:{secret}@127.0.0.1:{free_port()}/0"
    check = services.broker(Surroundings(Settings(home=tmp_path, redis_url=url), 1))
    assert check.status == "fail"
    assert "127.0.0.1" in check.finding
    assert "hunt" not in check.finding + check.advice and "er2" not in check.finding


def test_a_broker_is_looked_for_where_this_machine_joined_last(machine: Surroundings) -> None:
    machine.settings.home.joinpath("joined.json").write_text(f'{{"invite": "redis://:x@127.0.0.1:{free_port()}/0"}}')
    check = services.broker(machine)
    assert (check.status, "redis://127.0.0.1:" in check.finding) == ("fail", True)


def test_a_broker_address_that_is_none_fails(tmp_path: Path) -> None:
    assert services.broker(Surroundings(Settings(home=tmp_path, redis_url="nonsense"), 1)).status == "fail"


def test_a_ready_control_plane_that_takes_the_token_passes(server: FakeServer, tmp_path: Path) -> None:
    server.on("GET /v1/jobs?limit=1", Answer({"items": [], "next_cursor": None}))
    machine = of(server, tmp_path)
    assert [check(machine).status for check in (services.control_plane, services.token, services.clock)] == ["ok"] * 3
    assert len(server.asked("GET /readyz")) == 1


def test_a_control_plane_that_is_not_ready_names_what_it_lacks(server: FakeServer, tmp_path: Path) -> None:
    dependencies = {"sqlite": {"ok": True, "detail": "readable"}, "broker": {"ok": False, "detail": "refused"}}
    server.on("GET /readyz", Answer({"status": "not ready", "dependencies": dependencies}, 503))
    check = services.control_plane(of(server, tmp_path))
    assert (check.status, check.finding) == ("fail", "broker: refused")


def test_another_server_at_the_address_fails(server: FakeServer, tmp_path: Path) -> None:
    server.on("GET /readyz", Answer(b"<html>"))
    assert "check COMPUTESHARE_URL" in services.control_plane(of(server, tmp_path)).finding


def test_a_refused_token_fails(server: FakeServer, tmp_path: Path) -> None:
    server.on("GET /v1/jobs?limit=1", Answer({"detail": "Not logged in"}, 401))
    check = services.token(of(server, tmp_path, "wrong"))
    assert check.status == "fail"
    assert "set COMPUTESHARE_TOKEN to what `computeshare token` prints" in check.advice


@pytest.mark.parametrize(("ahead_s", "status"), [(0, "ok"), (3600, "warn"), (-3600, "warn")])
def test_a_clock_that_is_off_is_a_warning(server: FakeServer, tmp_path: Path, ahead_s: int, status: str) -> None:
    server.clock_off_s = -ahead_s
    check = services.clock(of(server, tmp_path))
    assert check.status == status
    assert ("ahead of" in check.finding, "behind" in check.finding) == (ahead_s > 0, ahead_s < 0)


def test_data_sets_that_are_missing_are_fine_and_damaged_ones_are_not(machine: Surroundings) -> None:
    check = machine_checks.data_sets(with_probe(machine))
    assert (check.status, check.finding) == ("ok", "digits here; downloaded when first used: mnist")
    damaged = machine_checks.data_sets(with_probe(machine, data_sets={"mnist": "its header promises more"}))
    assert (damaged.status, damaged.finding) == ("fail", "mnist: its header promises more")


@pytest.fixture
def refusing() -> Iterator[str]:
    """Host and port that refuse connections: bound, and not listening."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{taken.getsockname()[1]}"


@pytest.fixture
def listening() -> Iterator[str]:
    """Host and port that take connections."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"localhost:{server.getsockname()[1]}"


def test_data_sets_that_are_missing_and_can_be_had_are_fine_and_the_others_are_a_warning(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, refusing: str, listening: str
) -> None:
    bypass(monkeypatch)
    closed, opened = f"http://{refusing}/mnist/", f"http://{listening}/mnist/"
    sets = {"digits": "", "mnist": "missing", "kmnist": "missing"}
    with_probe(machine, data_sets=sets, sources={"mnist": [closed, opened], "kmnist": [opened]})
    check = machine_checks.data_sets(machine)
    assert (check.status, check.finding) == ("ok", "digits here; downloaded when first used: mnist, kmnist")
    with_probe(machine, data_sets=sets, sources={"mnist": [closed, opened], "kmnist": [closed]})
    check = machine_checks.data_sets(machine)
    assert check.status == "warn"
    assert check.finding == "digits here; downloaded when first used: mnist; missing, and out of reach: kmnist"
    assert check.advice.startswith(f"copy the files to {machine.settings.data_dir}, in torchvision's layout")
    assert check.advice.endswith("or let this machine reach 127.0.0.1")


def test_a_database_is_whole_or_says_what_to_do(machine: Surroundings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine_checks.database(machine).finding.startswith("no database here yet")
    file = machine.settings.database_file
    with closing(sqlite3.connect(file.path)) as connection:
        connection.execute("CREATE TABLE job (id TEXT)")
    assert machine_checks.database(machine).finding.endswith("no copy yet")
    copy = file.copy(time.time())
    assert (machine_checks.database(machine).status, copy.name in machine_checks.database(machine).finding) == (
        "ok",
        True,
    )
    with monkeypatch.context() as patch, closing(sqlite3.connect(file.path)) as holder:
        holder.execute("BEGIN EXCLUSIVE")  # the check cannot be faster than its time
        patch.setattr(machine_checks, "DATABASE_S", 0.0)
        check = machine_checks.database(machine)
        assert (check.status, "did not end within 0 s" in check.finding) == ("warn", True)
    file.path.write_bytes(bytes(8192))
    check = machine_checks.database(machine)
    assert (check.status, "not a database" in check.finding) == ("fail", True)
    assert f"cp {copy} {file.path}" in check.advice


def test_what_a_proxy_fetches_is_in_reach_where_the_proxy_is(
    monkeypatch: pytest.MonkeyPatch, refusing: str, listening: str
) -> None:
    sources = {"kmnist": ["https://no-such-host.invalid/kmnist/"], "mnist": [f"http://{refusing}/mnist/"]}
    bypass(monkeypatch, https_proxy=f"http://{listening}", http_proxy=listening, no_proxy="127.0.0.1")
    assert machine_checks.out_of_reach(sources) == ["mnist"]
    monkeypatch.delenv("no_proxy")
    assert machine_checks.out_of_reach(sources) == []
    monkeypatch.setenv("https_proxy", f"http://{refusing}")
    assert machine_checks.out_of_reach(sources) == ["kmnist"]
    monkeypatch.setenv("https_proxy", "http://proxy:port")
    assert machine_checks.out_of_reach(sources) == ["kmnist"]


def test_how_recipes_are_confined_is_told_with_what_is_not_promised() -> None:
    assert machine_checks.judged_method(kinds.BUBBLEWRAP) == Check("recipes", "ok", "confined by bubblewrap.")
    check = machine_checks.judged_method(kinds.LANDLOCK)
    assert check.status == "ok" and "cannot start a compiler" in check.finding and check.advice == ""
    check = machine_checks.judged_method(kinds.without("Install bubblewrap."))
    assert (check.status, check.advice) == ("warn", "Install bubblewrap.")
    assert "not confined" in check.finding and "your rights" in check.finding


def test_the_command_reports_every_check_and_fails_with_one(
    machine: Surroundings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(Surroundings, "probe", PROBE)
    monkeypatch.setattr("computeshare.training.devices.guess", lambda: "cpu")
    for name in [name for name in os.environ if name.startswith("COMPUTESHARE_")]:
        monkeypatch.delenv(name)
    arguments = ["doctor", "--home", str(tmp_path), "--port", str(free_port()), "--json"]
    assert run(app, arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["ok"] is True
    assert [check["name"] for check in document["checks"]] == [
        "python", "packages", "device", "home", "disk", "database", "processes", "port", "proxies", "recipes",
        "broker", "broker memory", "control plane", "token", "versions", "clock", "workers", "data sets",
    ]  # fmt: skip
    monkeypatch.setenv("COMPUTESHARE_REDIS_URL", f"redis://127.0.0.1:{free_port()}")
    assert run(app, arguments) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
    assert run(app, arguments[:-1]) == 1
    assert "→ start `computeshare up`" in capsys.readouterr().out
