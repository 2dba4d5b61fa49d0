"""The exit code of every command that talks to a control plane."""

import json
import socket
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer.main

from computeshare.cli.main import app
from computeshare.errors import ComputeShareError
from computeshare.settings import Settings
from computeshare.terminal.command import exit_code, run
from computeshare.up import stack
from tests.support.http_answers import Answer, FakeServer, job

CREATE = "create --dataset digits --model mlp"
REQUESTS = {
    CREATE: "POST /v1/jobs",
    "list": "GET /v1/jobs?limit=20",
    "show ab12": "GET /v1/jobs/ab12",
    "watch ab12": "GET /v1/jobs/ab12",
    "pause ab12": "POST /v1/jobs/ab12/pause",
    "priority ab12 10": "PATCH /v1/jobs/ab12",
    "rename ab12 other": "PATCH /v1/jobs/ab12",
    "edit ab12 --name other": "PATCH /v1/jobs/ab12",
    "resume ab12": "POST /v1/jobs/ab12/resume",
    "retry ab12": "POST /v1/jobs/ab12/retry",
    "cancel ab12": "POST /v1/jobs/ab12/cancel",
    "unban ab12 w1": "GET /v1/jobs/ab12/workers",
    "delete ab12 --yes": "DELETE /v1/jobs/ab12",
    "download ab12": "GET /v1/jobs/ab12/checkpoints",
    "compare ab12 cd34": "GET /v1/compare?job=ab12&job=cd34",
    "export csv ab12": "GET /v1/jobs/ab12",
    "logs ab12": "GET /v1/jobs/ab12/logs?limit=100",
    "replay ab12": "GET /v1/jobs/ab12",
    "fork ab12": "POST /v1/jobs/ab12/fork",
    "share ab12": "POST /v1/jobs/ab12/links",
    "links ab12": "GET /v1/jobs/ab12/links",
    "unshare ab12 1": "DELETE /v1/jobs/ab12/links/1",
}
"""Every command of `computeshare jobs`, and the first thing that it asks."""
SILENT_AS_JSON = {"export"}
"""Commands that write documents anyway, and take no `--json`."""


def jobs(command: str, *more: str) -> int:
    return run(app, ["jobs", *command.split(), *more])


def test_every_command_of_jobs_is_tried_here() -> None:
    commands = typer.main.get_command(app).commands["jobs"].commands  # type: ignore[attr-defined]
    assert sorted(commands) == sorted(command.split()[0] for command in REQUESTS)
    options = {name: {flag for option in found.params for flag in option.opts} for name, found in commands.items()}
    assert {name for name, flags in options.items() if "--json" not in flags} == SILENT_AS_JSON


@pytest.mark.parametrize("command", REQUESTS)
def test_no_server_is_3(
    server: FakeServer, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:  # bound and not listening
        taken.bind(("127.0.0.1", 0))
        monkeypatch.setenv("COMPUTESHARE_URL", f"http://127.0.0.1:{taken.getsockname()[1]}")
        assert jobs(command) == 3
    monkeypatch.delenv("COMPUTESHARE_URL")
    assert jobs(command) == 3
    told = capsys.readouterr()
    assert told.out == "" and told.err.count("error: no control plane answers") == 1
    assert "error: Can't find a control plane. Start one: `computeshare up`" in told.err


@pytest.mark.sampled(40)
@pytest.mark.parametrize(("status", "code"), [(401, 4), (403, 4), (404, 2), (409, 2), (500, 3), (503, 3)])
@pytest.mark.parametrize("command", REQUESTS)
def test_a_refusal_is_4_where_it_is_not_allowed_2_where_it_is_wrong_and_3_where_the_server_fails(
    server: FakeServer, command: str, status: int, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(REQUESTS[command], Answer({"detail": "it is so"}, status))
    assert jobs(command) == code
    told = capsys.readouterr()
    assert told.out == "" and ("set COMPUTESHARE_TOKEN" if status == 401 else "it is so") in told.err


@pytest.mark.parametrize("command", REQUESTS)
def test_usage_is_2(server: FakeServer, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs(command, "--no-such-option") == 2
    assert "--no-such-option" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize("command", [one for one in REQUESTS if " ab12" in one])
def test_a_missing_argument_is_2(server: FakeServer, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert jobs(command.split(maxsplit=1)[0]) == 2
    assert "Missing argument" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pause ab12", "resume ab12", "retry ab12", "cancel ab12"])
def test_success_is_0(server: FakeServer, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    server.on(REQUESTS[command], Answer(job(id="ab12"), 202))
    assert jobs(command, "--json") == 0
    assert json.loads(capsys.readouterr().out)["id"] == "ab12"


@pytest.mark.parametrize("command", ["watch ab12", f"{CREATE} --watch"])
@pytest.mark.parametrize(("status", "code"), [("completed", 0), ("failed", 1), ("cancelled", 1)])
def test_a_watched_job_that_did_not_complete_is_1(
    server: FakeServer, command: str, status: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("POST /v1/jobs", Answer(job(id="ab12", status=status), 201))
    server.on("GET /v1/jobs/ab12", Answer(job(id="ab12", status=status)))
    assert jobs(command, "--json") == code
    assert json.loads(capsys.readouterr().out)["status"] == status


def test_the_link_and_the_token_are_printed_or_missing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["token", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"token": "secret"}
    assert run(app, ["login", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["url"].startswith(f"{server.url}/login?key=")
    monkeypatch.delenv("COMPUTESHARE_TOKEN")
    assert run(app, ["token"]) == 4 and run(app, ["login"]) == 4
    assert ": set COMPUTESHARE_TOKEN to what `computeshare token` prints" in capsys.readouterr().err
    monkeypatch.delenv("COMPUTESHARE_URL")
    assert run(app, ["login"]) == 3


def test_a_control_plane_that_does_not_become_ready_is_3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "READY_S", 0.0)
    never = stack.Stack(Settings(home=tmp_path), stack.UpOptions())
    monkeypatch.setattr(stack.Stack, "is_ready", lambda _: False)
    with pytest.raises(ComputeShareError, match="did not become ready; look at") as caught:
        stack.wait_until_ready(never, threading.Event())
    assert exit_code(caught.value) == 3


def test_stopping_what_does_not_run_is_3(server: FakeServer, tmp_path: Path) -> None:
    assert run(app, ["down", "--home", str(tmp_path / "nothing")]) == 3


@pytest.mark.parametrize(
    ("host", "url", "link", "is_hinted"),
    [
        ("127.0.0.1", None, "http://127.0.0.1:8000/login?key=", False),
        ("0.0.0.0", None, "http://127.0.0.1:8000/login?key=", True),
        ("0.0.0.0", "http://studio.local:8000/", "http://studio.local:8000/login?key=", False),
    ],
)
def test_up_prints_a_link_by_the_name_that_browsers_are_to_use(
    host: str,
    url: str | None,
    link: str,
    is_hinted: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = stack.UpOptions(host=host)
    monkeypatch.setattr(stack, "running", lambda _: nullcontext(stack.Stack(Settings(home=tmp_path, url=url), options)))
    monkeypatch.setattr(stack, "wait_until_ready", lambda *_: None)
    monkeypatch.setattr(stack, "can_listen", lambda *_: True)
    monkeypatch.setattr(stack, "stop_event", Ended)
    assert stack.up(options) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"ComputeShare is ready: {link}") and said.out.count("\n") == 1
    assert ("COMPUTESHARE_URL" in said.err) is is_hinted


class Ended(threading.Event):
    """What `up` waits for, which comes as soon as it waits."""

    def wait(self, timeout: float | None = None) -> bool:
        return True
