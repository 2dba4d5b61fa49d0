"""The commands as a user meets them: output, JSON, exit codes."""

import hashlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from safetensors.numpy import save

from computeshare import __version__, errors
from computeshare.cli.jobs.fork import parse_source
from computeshare.cli.main import app
from computeshare.client import NoServer
from computeshare.client.api.models import Problem
from computeshare.client.weights import pick
from computeshare.evaluator.process import command as evaluator_command
from computeshare.reducer.process import command as reducer_command
from computeshare.terminal.command import exit_code, run, run_command
from computeshare.types import ENDED
from computeshare.up.embedded_broker import free_port
from computeshare.worker.process import command as worker_command
from tests.support.http_answers import Answer, FakeServer, event, job, stream

INTERRUPTIBLE = """
import signal
from computeshare.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
main()
"""
CLI = [sys.executable, "-m", "computeshare.cli.main"]
TENSOR = np.arange(1000, dtype=np.float32)
WEIGHTS = save({"w": TENSOR}, {"order": '["w"]'})
SHA256 = hashlib.sha256(TENSOR.tobytes()).hexdigest()
CHECKPOINTS = [
    {"version": 100, "sha256": "a" * 64, "bytes": len(WEIGHTS), "accuracy": 0.9, "best": False},
    {"version": 50, "sha256": SHA256, "bytes": len(WEIGHTS), "accuracy": 0.95, "best": True},
]


def test_importing_the_command_line_imports_no_torch_and_no_web_framework() -> None:
    code = "import sys, computeshare.cli.main; print(sorted({m.split('.')[0] for m in sys.modules}))"
    modules = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "'computeshare'" in modules
    assert not [name for name in ("torch", "fastapi", "sqlmodel", "sklearn", "redis") if f"'{name}'" in modules]


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["--version"]) == 0
    assert capsys.readouterr().out == f"computeshare {__version__}\n"


@pytest.mark.parametrize("command", [worker_command, reducer_command, evaluator_command])
def test_each_process_tells_its_version(command: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(SystemExit) as ended,
    ):
        patch.setattr(sys, "argv", ["computeshare-process", "--version"])
        run_command(command)
    assert ended.value.code == 0 and capsys.readouterr().out == f"computeshare {__version__}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (NoServer("x"), 3),
        (errors.BrokerError("x"), 3),
        (errors.ApiError("x", 401), 4),
        (errors.ApiError("x", 403), 4),
        (errors.ApiError("x", 404), 2),
        (errors.ApiError("x", 409), 2),
        (errors.ApiError("x", 422), 2),
        (errors.ApiError("x", 500), 3),
        (errors.ApiError("x", 503), 3),
        (errors.SpecError("x"), 2),
        (errors.SettingsError("x"), 2),
        (errors.Unreachable("x"), 3),
        (errors.NoToken("x"), 4),
        (errors.ArtifactError("x"), 1),
        (errors.DatasetError("x"), 1),
    ],
)
def test_exit_codes_tell_errors_apart(error: errors.ComputeShareError, code: int) -> None:
    assert exit_code(error) == code


def test_an_error_is_one_plain_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise errors.SettingsError("no [bold]broker[/bold] \x1b[31mhere")

    assert run(failing, []) == 2
    captured = capsys.readouterr()
    assert captured.err == "error: no [bold]broker[/bold] \N{REPLACEMENT CHARACTER}[31mhere\n"
    assert captured.out == ""


def test_a_bug_keeps_its_traceback() -> None:
    failing = typer.Typer()

    @failing.command()
    def fail() -> None:
        raise KeyError("bug")

    with pytest.raises(KeyError):
        run(failing, [])


def test_another_entry_point_gets_the_same_error_handling(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "computeshare.worker.process", "--home", str(tmp_path)]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COMPUTESHARE_")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 3
    assert done.stderr.startswith("error: no broker is known: start `computeshare up`")
    assert "computeshare-worker --join LINK" in done.stderr


def test_a_wrong_setting_is_named_as_its_variable(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMPUTESHARE_APPENDONLY", "perhaps")
    assert run(app, ["jobs", "list"]) == 2
    assert capsys.readouterr().err.startswith("error: COMPUTESHARE_APPENDONLY: ")


def test_without_any_server_known_the_exit_code_is_3(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COMPUTESHARE_URL")
    assert run(app, ["jobs", "list", "--json"]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Start one: `computeshare up`" in captured.err


def test_run_json_in_the_home_folder_is_enough(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.delenv("COMPUTESHARE_URL")
    monkeypatch.delenv("COMPUTESHARE_TOKEN")
    (tmp_path / "run.json").write_text(json.dumps({"url": server.url, "redis_url": "redis://x", "pids": {}}))
    (tmp_path / "token").write_text("from-the-file\n")
    server.on("GET /v1/jobs/ab12cd34", Answer(job()))
    assert run(app, ["jobs", "show", "ab12cd34", "--home", str(tmp_path)]) == 0
    assert server.requests[0].headers["Authorization"] == "Bearer from-the-file"


def test_a_failed_job_is_shown_with_its_sentence_and_where_its_traceback_is(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/jobs/ab12cd34", Answer(job(status="failed", error="it diverged\n\nTraceback: line 1\nline 2")))
    assert run(app, ["jobs", "show", "ab12cd34"]) == 0
    told = capsys.readouterr().out
    assert "it diverged" in told and "computeshare jobs logs ab12cd34 --level error" in told and "line 1" not in told


def test_token_prints_what_scripts_send(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["token"]) == 0
    assert capsys.readouterr().out == "secret\n"


def test_without_a_token_the_answer_is_not_allowed_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("COMPUTESHARE_TOKEN")
    server.on("GET /v1/jobs/ab12cd34", Answer({"detail": "Not logged in"}, 401))
    assert run(app, ["jobs", "show", "ab12cd34"]) == 4
    assert "Authorization" not in server.requests[0].headers
    assert "COMPUTESHARE_TOKEN" in capsys.readouterr().err


def test_list_filters_and_limits(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/jobs?status=queued&queue=q&limit=1", Answer({"items": [job(), job()], "next_cursor": "c"}))
    assert run(app, ["jobs", "list", "--status", "queued", "--queue", "q", "--limit", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": [job()]}


def test_an_empty_list_teaches_the_next_command(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/jobs?limit=20", Answer({"items": [], "next_cursor": None}))
    assert run(app, ["jobs", "list"]) == 0
    assert "computeshare jobs create" in capsys.readouterr().out


def test_create_sends_what_was_given_and_prints_id_and_page(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("POST /v1/jobs", Answer(job(), 201))
    arguments = "--dataset digits --model mlp --epochs 2 --lr 0.2 --codec-up float32 --max-workers 3 --set threads=1"
    assert run(app, ["jobs", "create", *arguments.split(), "--idempotency-key", "k"]) == 0
    assert capsys.readouterr().out == f"ab12cd34  {server.url}/jobs/ab12cd34\n"
    assert json.loads(server.requests[0].body) == {
        "dataset": "digits",
        "model": "mlp",
        "epochs": 2,
        "optimizer": {"lr": 0.2},
        "codec": {"up": "float32"},
        "workers": {"max": 3},
        "threads": 1,
    }
    assert server.requests[0].headers["Idempotency-Key"] == "k"


def test_create_takes_the_strategy_and_the_batch_size_by_the_names_that_people_try(server: FakeServer) -> None:
    server.on("POST /v1/jobs", Answer(job(), 201))
    words = ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--strategy", "local", "--batch-size", "64"]
    assert run(app, words) == 0
    sent = {"dataset": "digits", "model": "mlp", "strategy": {"kind": "local"}, "micro_batch": 64}
    assert json.loads(server.requests[0].body) == sent
    assert run(app, [*words, "--micro-batch", "8"]) == 2


@pytest.mark.parametrize("words", [["--help"], ["jobs", "pause", "--help"], ["up", "--help"]], ids=" ".join)
def test_the_help_shows_no_type_beside_a_flag(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, words) == 0
    said = capsys.readouterr().out
    assert "--help" in said and "bool" not in said.lower()


def test_the_status_tells_workers_and_jobs_by_state(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/workers?offline=false", Answer({"items": [{"job_id": "ab12cd34"}, {"job_id": None}]}))
    jobs = [job(status="paused"), job(), job(status="paused")]
    server.on(
        "GET /v1/jobs?status=running&status=queued&status=paused&limit=100",
        Answer({"items": jobs, "next_cursor": None}),
    )
    assert run(app, ["status"]) == 0
    said = capsys.readouterr().out
    for told in (f"{server.url}, running", "2 online, 1 idle", "1 running, 2 paused"):
        assert told in said
    assert run(app, ["status", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {
        "url": server.url,
        "workers": {"online": 2, "at_work": 1},
        "jobs": {"running": 1, "paused": 2},
    }
    assert run(app, ["status", "--url", "http://127.0.0.1:1"]) == 3


def test_open_hands_the_browser_a_private_file_that_leads_to_the_page(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or False)
    assert run(app, ["open", "ab12cd34", "--home", str(tmp_path)]) == 0
    link = capsys.readouterr().out.strip()
    assert link.startswith(f"{server.url}/login?key=") and link.endswith("&next=/jobs/ab12cd34")
    page = tmp_path / "open.html"
    assert opened == [page.as_uri()] and page.stat().st_mode & 0o077 == 0
    assert link.replace("&", "&amp;") in page.read_text()


@pytest.mark.slow
def test_worker_is_the_command_of_the_worker_with_its_options() -> None:
    done = subprocess.run([*CLI, "worker", "--version"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, f"computeshare {__version__}\n")
    asked = subprocess.run([*CLI, "worker", "--help"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert "--only-on-power" in asked and "bool" not in asked.lower()


@pytest.mark.parametrize("source", ["job.json", "-"])
def test_create_reads_a_spec_from_a_file_or_standard_input(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    text = json.dumps({"dataset": "digits", "model": "mlp", "seed": 1})
    Path("job.json").write_text(text)
    monkeypatch.setattr("sys.stdin", io.StringIO(text))
    server.on("POST /v1/jobs", Answer(job(), 201))
    assert run(app, ["jobs", "create", "--spec", source, "--seed", "2", "--json"]) == 0
    assert json.loads(server.requests[0].body) == {"dataset": "digits", "model": "mlp", "seed": 2}
    assert json.loads(capsys.readouterr().out) == job()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dataset digits --model lenet5", "model lenet5 needs an input of at least"),
        ("--dataset digits", "model: must be given"),
        ("--dataset digits --model mlp --rounds 1 --epochs 1", "give rounds or epochs, not both"),
        ("--spec none.json", "--spec none.json cannot be read: No such file or directory\n"),
        ("--dataset digits --model mlp --lr much", "'--lr': must be a number\nFor help: "),
        ("--dataset digits --model mlp --epochs 0", "epochs: must be at least 1\n"),
        ("--dataset digits --model mlp --strategy slow", "strategy.kind: must be 'sync', 'async', 'local'"),
        ("--model mlp", "dataset: must be given\nFor example: computeshare jobs create --dataset digits"),
        ("--dataset digits --modle mlp", "No such option: --modle (Possible options: --codec, --folder, --model)"),
    ],
)
def test_an_impossible_job_is_refused_before_anything_is_sent(
    server: FakeServer, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert run(app, ["jobs", "create", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.startswith("error: ")
    assert "Input should" not in captured.err and captured.out == ""
    assert server.requests == []


def test_every_field_of_the_spec_has_a_flag_or_is_reachable_by_set(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    document = {
        "name": "n", "queue": "q", "dataset": "mnist", "model": "lenet5", "input": [1, 32, 32], "micro_batch": 8,
        "micro_batches_per_round": 2, "rounds": 9, "strategy": {"kind": "sync", "backup": False, "combine": "median"},
        "optimizer": {"name": "Adam", "lr": 0.1, "betas": [0.9, 0.99]}, "lr_scaling": "linear",
        "codec": {"up": "float32", "down": "float16"}, "workers": {"min": 2, "max": 3}, "seed": 4, "threads": 5,
        "checkpoint_every": 6, "evaluate_every": 7, "keep": {"last": 3, "best": 2, "every": 50},
    }  # fmt: skip
    flags = {
        "name": "n", "queue": "q", "dataset": "mnist", "model": "lenet5", "micro-batch": 8, "rounds": 9, "seed": 4,
        "micro-batches-per-round": 2, "optimizer": "Adam", "lr": 0.1, "codec-up": "float32", "codec-down": "float16",
        "min-workers": 2, "max-workers": 3, "threads": 5, "checkpoint-every": 6, "evaluate-every": 7,
        "keep-last": 3, "keep-best": 2, "keep-every": 50,
    }  # fmt: skip
    given = ["input=[1,32,32]", "strategy.kind=sync", "strategy.backup=false", "strategy.combine=median"]
    given += ["optimizer.betas=[0.9, 0.99]", "lr_scaling=linear"]
    arguments = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    server.on("POST /v1/jobs", Answer(job(), 201))
    assert run(app, ["jobs", "create", *arguments, *(part for each in given for part in ("--set", each))]) == 0
    assert json.loads(server.requests[0].body) == document


def test_the_control_planes_own_refusal_is_shown_field_by_field(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = {"detail": "d", "errors": [{"field": "queue", "detail": "is closed"}]}
    server.on("POST /v1/jobs", Answer(problem, 422))
    assert run(app, ["jobs", "create", "--dataset", "digits", "--model", "mlp"]) == 2
    assert capsys.readouterr().err == "error: queue: is closed\n"


@pytest.mark.parametrize("status", sorted(ENDED))
def test_watching_ends_with_the_job_and_tells_success_from_failure(
    server: FakeServer, capsys: pytest.CaptureFixture[str], status: str
) -> None:
    ended = job(status=status, version=100)
    server.on("GET /v1/jobs/ab12cd34", Answer(job()), Answer(ended))
    server.on("GET /v1/jobs/ab12cd34/events", stream(event("job", job()), event("job", ended)))
    assert run(app, ["jobs", "watch", "ab12cd34"]) == (0 if status == "completed" else 1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("running  25/100  loss 0.5000  accuracy 75.00 %  1,198 samples/s  2 workers")
    assert lines[-1].startswith(f"{status}  100/100")


def test_watching_as_json_prints_the_last_state_alone(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    ended = job(status="completed")
    server.on("GET /v1/jobs/ab12cd34", Answer(job()), Answer(ended))
    server.on("GET /v1/jobs/ab12cd34/events", stream(), stream(event("job", ended)))
    assert run(app, ["jobs", "watch", "ab12cd34", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == ended
    assert "reconnecting: the server closed the stream" in captured.err


def test_create_with_watch_shows_the_page_and_follows_the_job(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("POST /v1/jobs", Answer(job(status="queued"), 201))
    server.on("GET /v1/jobs/ab12cd34", Answer(job(status="failed", error="diverged at version 3")))
    assert run(app, ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--watch"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"ab12cd34  {server.url}/jobs/ab12cd34"
    assert lines[1].endswith("diverged at version 3")


def test_watching_an_unknown_job_fails_at_once(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/jobs/nope", Answer({"detail": "there is no job nope"}, 404))
    assert run(app, ["jobs", "watch", "nope"]) == 2
    assert capsys.readouterr().err == "error: there is no job nope\n"


def test_ctrl_c_detaches_from_the_job_and_leaves_it_running(server: FakeServer) -> None:
    over = threading.Event()
    server.on("GET /v1/jobs/ab12cd34", Answer(job()))
    server.on("GET /v1/jobs/ab12cd34/events", stream(event("job", job()), until=over))
    watching = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, "jobs", "watch", "ab12cd34"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert watching.stdout and watching.stdout.readline().startswith("running")
    watching.send_signal(signal.SIGINT)
    _, told = watching.communicate(timeout=10)
    over.set()
    assert watching.returncode == 130
    assert told == "detached, the job continues; come back: computeshare jobs watch ab12cd34\n"
    assert {request.method for request in server.requests} == {"GET"}


def test_a_terminal_gets_a_live_bar(server: FakeServer) -> None:
    ended = job(status="completed", version=100)
    server.on("GET /v1/jobs/ab12cd34", Answer(job()), Answer(ended))
    server.on("GET /v1/jobs/ab12cd34/events", stream(event("job", ended)))
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    watching = subprocess.Popen(
        [*CLI, "jobs", "watch", "ab12cd34"], stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    try:
        while chunk := os.read(ours, 4096):
            shown += chunk
    except OSError:  # how Linux says that the other side closed
        pass
    os.close(ours)
    assert watching.wait(timeout=10) == 0
    assert "100 of 100" in shown.decode()
    assert "✓ completed" in shown.decode()


@pytest.mark.parametrize(
    ("verb", "icon", "state"),
    [("pause", "‖", "paused"), ("resume", "○", "queued"), ("retry", "○", "queued"), ("cancel", "■", "cancelled")],
)
def test_a_change_prints_the_new_state(
    server: FakeServer, capsys: pytest.CaptureFixture[str], verb: str, icon: str, state: str
) -> None:
    server.on(f"POST /v1/jobs/ab12cd34/{verb}", Answer(job(status=state), 202))
    assert run(app, ["jobs", verb, "ab12cd34"]) == 0
    assert capsys.readouterr().out.split() == [icon, state, "ab12cd34"]
    assert run(app, ["jobs", verb, "ab12cd34", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == state


def test_a_watched_job_that_is_paused_is_waited_for(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    paused = job(status="paused", reason="Paused by a user")
    server.on("GET /v1/jobs/ab12cd34", Answer(job()), Answer(job(status="completed", version=100)))
    states = [event("job", paused, 8), event("job", job(version=30), 9), event("job", job(status="completed"), 10)]
    server.on("GET /v1/jobs/ab12cd34/events", stream(states[0]), stream(*states[1:]))
    assert run(app, ["jobs", "watch", "ab12cd34"]) == 0
    lines = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "reconnecting" not in line]
    assert lines == ["running", "paused", "running", "completed"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("arguments", "stdin", "deleted"),
    [
        ([], Terminal("n\n"), False),
        ([], Terminal("y\n"), True),
        (["--yes"], Terminal(""), True),
        ([], io.StringIO(), True),
    ],
)
def test_delete_asks_where_somebody_can_answer(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, arguments: list[str], stdin: io.StringIO, deleted: bool
) -> None:
    monkeypatch.setattr("sys.stdin", stdin)
    server.on("GET /v1/jobs/ab12cd34", Answer(job(status="failed")))
    server.on("DELETE /v1/jobs/ab12cd34", Answer(b"", 204))
    assert run(app, ["jobs", "delete", "ab12cd34", *arguments]) == (0 if deleted else 1)
    assert bool(server.asked("DELETE /v1/jobs/ab12cd34")) == deleted


@pytest.mark.parametrize(("version", "number"), [("latest", 100), ("best", 50), ("50", 50), ("100", 100)])
def test_pick_finds_the_version_meant(version: str, number: int) -> None:
    assert pick(CHECKPOINTS, version, "x")["version"] == number  # type: ignore[arg-type]


@pytest.mark.parametrize(("checkpoints", "there"), [(CHECKPOINTS, "100, 50"), ([], "none yet")])
def test_pick_names_the_versions_that_are_there(checkpoints: list[Any], there: str) -> None:
    with pytest.raises(Problem, match=f"no checkpoint 7; there are: {there}"):
        pick(checkpoints, "7", "x")


def offer_download(server: FakeServer) -> None:
    server.on("GET /v1/jobs/ab12cd34/checkpoints", Answer({"items": CHECKPOINTS}))
    server.on("GET /v1/jobs/ab12cd34/checkpoints/50", Answer(WEIGHTS, headers={"ETag": f'"{SHA256}"'}))


def test_download_names_its_file_after_job_and_version(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    offer_download(server)
    assert run(app, ["jobs", "download", "ab12cd34", "--version", "best", "--json"]) == 0
    path = "ab12cd34-v50.safetensors"
    assert json.loads(capsys.readouterr().out) == {
        "path": path,
        "version": 50,
        "bytes": len(WEIGHTS),
        "sha256": SHA256,
    }
    assert Path(path).read_bytes() == WEIGHTS


def test_download_replaces_a_file_only_by_force(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    offer_download(server)
    Path("w").write_bytes(b"mine")
    assert run(app, ["jobs", "download", "ab12cd34", "--version", "50", "-o", "w"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert Path("w").read_bytes() == b"mine"
    assert run(app, ["jobs", "download", "ab12cd34", "--version", "50", "-o", "w", "--force"]) == 0
    assert Path("w").read_bytes() == WEIGHTS


def test_download_into_a_folder_keeps_the_name(server: FakeServer, tmp_path: Path) -> None:
    offer_download(server)
    (tmp_path / "there").mkdir()
    assert run(app, ["jobs", "download", "ab12cd34", "--version", "best", "-o", "there"]) == 0
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["ab12cd34-v50.safetensors"]


@pytest.mark.parametrize(
    ("text", "found"),
    [("ab12", ("ab12", "latest")), ("ab12@best", ("ab12", "best")), ("ab12@0", ("ab12", 0)), ("a@400", ("a", 400))],
)
def test_the_version_to_fork_stands_behind_the_job(text: str, found: tuple[str, int | str]) -> None:
    assert parse_source(text) == found


@pytest.mark.parametrize("text", ["", "@5", "ab12@", "ab12@newest", "ab12@-1", "ab12@1@2", "ab12@9999999999999999"])
def test_a_version_to_fork_that_is_none_says_what_to_give(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="give JOB@V"):
        parse_source(text)


def test_fork_sends_what_changes_and_prints_id_and_page(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("POST /v1/jobs/ab12cd34/fork", Answer(job(id="new"), 201))
    flags = ["--set", "optimizer.lr=0.01", "--name", "slow", "--fresh-optimizer", "--idempotency-key", "once"]
    assert run(app, ["jobs", "fork", "ab12cd34@40", *flags]) == 0
    assert capsys.readouterr().out == f"new  {server.url}/jobs/new\n"
    (request,) = server.requests
    changes = {"name": "slow", "optimizer": {"lr": 0.01}}
    assert json.loads(request.body) == {"version": 40, "spec": changes, "optimizer": "fresh"}
    assert request.headers["Idempotency-Key"] == "once"


def test_showing_a_fork_names_its_origin(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    origin = {"job_id": "zz99", "version": 40, "sha256": "f" * 64, "optimizer": "kept"}
    server.on("GET /v1/jobs/ab12cd34", Answer(job(forked_from=origin)))
    assert run(app, ["jobs", "show", "ab12cd34"]) == 0
    assert "version 40 of job zz99, with kept optimizer" in capsys.readouterr().out


def test_up_passes_its_flags_on_and_reports_a_port_in_use(
    server: FakeServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    port = server.url.rpartition(":")[2]
    assert run(app, ["up", "--port", port, "--home", str(tmp_path / "other")]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_up_refuses_a_queue_that_no_worker_can_serve(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(app, ["up", "--queue", "a b", "--workers", "1", "--home", str(tmp_path)]) == 2
    assert "queue 'a b': letters, digits" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_up_on_a_home_that_cannot_be_written_says_what_to_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    assert run(app, ["up", "--port", str(free_port()), "--home", str(tmp_path / "file" / "home")]) == 2
    assert "cannot be written (Not a directory): name another folder by --home" in capsys.readouterr().err


def test_a_command_that_is_not_there_is_named_with_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["job", "list"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: No such command 'job'. Did you mean 'jobs'?\nFor help: ") and told.endswith(
        "--help\n"
    )


def test_the_help_names_first_what_a_newcomer_needs_and_is_shown_without_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(app, []) == 2
    shown = capsys.readouterr()
    names = re.findall(r"^\u2502 ([a-z]+)  ", shown.out, re.MULTILINE)
    assert names[:4] == ["up", "status", "open", "worker"] and {"jobs", "workers"} < set(names) and shown.err == ""
    assert run(app, ["export", "--help"]) == 0
    assert "computeshare[onnx]" in capsys.readouterr().out


def test_a_demo_of_an_unknown_data_set_names_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["demo", "--dataset", "nosuch"]) == 2
    assert "allowed: caltech101, caltech256" in capsys.readouterr().err
