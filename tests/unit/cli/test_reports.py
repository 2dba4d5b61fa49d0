"""`jobs compare`, `jobs export`, `jobs create --show` and completion, as a user meets them."""

import csv
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from computeshare.cli.main import app
from computeshare.terminal.command import run
from tests.support.http_answers import Answer, FakeServer, job

pytestmark = pytest.mark.slow

AT = "2026-01-01T12:00:00Z"


def two_jobs(server: FakeServer) -> None:
    """Two jobs that differ in their rates."""
    common = {"status": "completed", "version": 20, "rounds_total": 20, "accuracy": 0.76, "loss": 0.5, "accepted": 100}
    common |= {"best_version": 20, "bytes_up": 4_200_000, "bytes_down": 9_000_000, "seconds": 90.0}
    slow = {"id": "a", "title": "slow", "best_accuracy": 0.76, "lowest_test_loss": None, "dropped": 4}
    fast = {"id": "b", "title": "[red]fast", "best_accuracy": 0.9, "lowest_test_loss": 0.25, "dropped": 6}
    document = {"items": [slow | common, fast | common], "differences": {"optimizer.lr": [0.1, 0.2]}}
    server.on("GET /v1/compare?job=a&job=b", Answer(document))


def test_compare_shows_what_differs_and_what_came_of_it(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    two_jobs(server)
    assert run(app, ["jobs", "compare", "a", "b"]) == 0
    rows = {name: cells for name, *cells in map(columns, capsys.readouterr().out.splitlines()[1:])}
    assert rows["Name"] == ["slow", "[red]fast"]
    assert rows["Best"] == ["76.00 % at 20", "90.00 % at 20"]
    assert rows["Lowest test loss"] == ["–", "0.2500"]
    assert rows["Dropped"] == ["4 of 104", "6 of 106"]
    assert rows["Time"] == ["1 min 30 s"] * 2
    assert rows["optimizer.lr"] == ["0.1", "0.2"]
    assert len(rows) == 12


def columns(line: str) -> list[str]:
    """The cells of a table's line."""
    return re.split(r"\s{2,}", line.strip())


def test_compare_as_json_is_what_rest_answers(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    two_jobs(server)
    assert run(app, ["jobs", "compare", "a", "b", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["differences"] == {"optimizer.lr": [0.1, 0.2]}
    assert [(one["id"], one["lowest_test_loss"], one["seconds"]) for one in document["items"]] == [
        ("a", None, 90.0),
        ("b", 0.25, 90.0),
    ]


@pytest.mark.parametrize("jobs", ["a", "a a", "a b c d e f g"])
def test_compare_takes_two_to_six_different_jobs(
    server: FakeServer, capsys: pytest.CaptureFixture[str], jobs: str
) -> None:
    assert run(app, ["jobs", "compare", *jobs.split()]) == 2
    assert "give the ids of 2 to 6 jobs, each once" in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert server.requests == []


def point(version: int, value: float) -> dict[str, Any]:
    return {"version": version, "value": value, "at": AT}


def offer_series(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three versions, two of them at a time."""
    monkeypatch.setattr("computeshare.cli.jobs.export.VERSIONS_AT_ONCE", 2)
    server.on("GET /v1/jobs/ab12cd34", Answer(job(version=3)))
    first = {"train_loss": [point(1, 3.0), point(2, 2.0)], "test_accuracy": [point(2, 0.5)]}
    server.on("GET /v1/jobs/ab12cd34/metrics?since=0&until=2&points=2", Answer(first))
    server.on("GET /v1/jobs/ab12cd34/metrics?since=2&until=3&points=2", Answer({"train_loss": [point(3, 1.0)]}))


def test_export_writes_a_row_a_version_page_by_page(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_series(server, monkeypatch)
    assert run(app, ["jobs", "export", "json", "ab12cd34"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["version"] for row in found] == [1, 2, 3]
    assert found[0]["test_accuracy"] is None and found[0]["at"] == "2026-01-01T12:00:00+00:00"


def test_the_series_are_exported_as_the_csv_of_the_pages(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/jobs/ab12cd34", Answer(job()))
    server.on("GET /v1/jobs/ab12cd34/metrics.csv", Answer(b"version,at\n1,x\n"))
    assert run(app, ["jobs", "export", "csv", "ab12cd34"]) == 0
    assert capsys.readouterr().out == "version,at\n1,x\n"
    assert run(app, ["jobs", "export", "csv", "ab12cd34", "-o", "out.csv"]) == 0
    assert Path("out.csv").read_bytes() == b"version,at\n1,x\n"


def test_export_into_a_file_replaces_one_only_by_force(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_series(server, monkeypatch)
    Path("out.json").write_text("mine")
    assert run(app, ["jobs", "export", "json", "ab12cd34", "-o", "out.json"]) == 2
    assert Path("out.json").read_text() == "mine"
    assert run(app, ["jobs", "export", "json", "ab12cd34", "-o", "out.json", "--force"]) == 0
    assert run(app, ["jobs", "export", "json", "ab12cd34", "-o", "."]) == 0
    assert len(json.loads(Path("ab12cd34.json").read_text())) == len(json.loads(Path("out.json").read_text())) == 3
    assert capsys.readouterr().out == ""


def test_an_export_that_breaks_off_leaves_no_file(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer_series(server, monkeypatch)
    server.on("GET /v1/jobs/ab12cd34/metrics?since=2&until=3&points=2", Answer({"detail": "busy"}, 503))
    assert run(app, ["jobs", "export", "json", "ab12cd34", "-o", "out.json"]) == 3
    assert not list(Path.cwd().glob("*out.json*"))
    assert run(app, ["jobs", "export", "json", "ab12cd34", "-o", "missing/out.json"]) == 1
    assert "cannot write missing/out.json: No such file" in capsys.readouterr().err


def submission(number: int, **changes: Any) -> dict[str, Any]:
    seconds = {"waiting": 0.1, "computing": 0.2, "encoding": 0.3, "uploading": 0.4}
    row = {
        "id": number, "at": AT, "worker": "w1", "nonce": "n", "outcome": "accepted", "reason": None, "base_version": 1,
        "current_version": 1, "micro_batches": [4, 5], "samples": 64, "bytes_up": 10, "bytes_down": 20,
        "seconds": seconds, "voided": False,
    }  # fmt: skip
    return {**row, **changes}


def test_submissions_are_exported_all_of_them_and_no_cell_is_a_formula(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/jobs/ab12cd34", Answer(job()))
    path = "GET /v1/jobs/ab12cd34/submissions?limit=100"
    evil = submission(1, worker='=HYPERLINK("http://evil")', reason='-2+3, a "quote"\nand a line')
    server.on(path, Answer({"items": [submission(2)], "next_cursor": "c"}))
    server.on(f"{path}&cursor=c", Answer({"items": [evil], "next_cursor": None}))
    assert run(app, ["jobs", "export", "csv", "ab12cd34", "--submissions"]) == 0
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["id"], first["micro_batches"], first["uploading_s"]) == ("2", "4 5", "0.4")
    assert second["worker"] == '\'=HYPERLINK("http://evil")'
    assert second["reason"] == '\'-2+3, a "quote"\nand a line'
    assert run(app, ["jobs", "export", "json", "ab12cd34", "--submissions"]) == 0
    assert [row["worker"] for row in json.loads(capsys.readouterr().out)] == ["w1", evil["worker"]]


def test_a_job_without_versions_exports_no_rows(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/jobs/ab12cd34", Answer(job(version=0)))
    assert run(app, ["jobs", "export", "json", "ab12cd34"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_showing_a_job_sends_nothing(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    create = ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--epochs", "2"]
    assert run(app, [*create, "--show", "curl"]) == 0
    assert capsys.readouterr().out.endswith(f"    {server.url}/v1/jobs\n")
    assert run(app, [*create, "--show", "cli"]) == 0
    assert capsys.readouterr().out == "computeshare jobs create --dataset digits --model mlp --epochs 2\n"
    assert run(app, [*create, "--show", "python"]) == 0
    assert "    epochs=2,\n" in capsys.readouterr().out
    assert run(app, [*create, "--show", "json", "--lr", "much"]) == 2
    assert run(app, ["jobs", "create", "--dataset", "digits", "--show", "json"]) == 2
    assert server.requests == []


def test_a_job_can_be_shown_where_no_control_plane_is_known(
    server: FakeServer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPUTESHARE_URL")
    assert run(app, ["jobs", "create", "--dataset", "digits", "--model", "mlp", "--show", "curl"]) == 0
    assert "http://127.0.0.1:8000/v1/jobs" in capsys.readouterr().out


def complete(words: str) -> list[str]:
    """What the shell would offer for the last of these words."""
    program = words.partition(" ")[0]
    environment = {
        **os.environ,
        f"_{program.replace('-', '_').upper()}_COMPLETE": "complete_bash",
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    module = {"computeshare": "cli.main", "computeshare-worker": "worker.process"}[program]
    code = f"import sys; from computeshare.{module} import main; sys.argv[0] = '{program}'; main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_the_shell_completes_jobs_data_sets_and_models(server: FakeServer) -> None:
    server.on("GET /v1/jobs?limit=100", Answer({"items": [job(id="ab12"), job(id="cd34")], "next_cursor": None}))
    assert complete("computeshare jobs show ") == ["ab12", "cd34"]
    assert complete("computeshare jobs compare c") == ["cd34"]
    assert complete("computeshare jobs create --dataset fash") == ["fashion-mnist"]
    assert complete("computeshare jobs create --model lene") == ["lenet5"]
    assert complete("computeshare jobs exp") == ["export"]


def test_the_shell_completes_workers_webhooks_and_queues(server: FakeServer) -> None:
    fleet = [("1a", "studio"), ("2b", "mac"), ("3c", "mac"), ("4d", "$(reboot)"), ("5e", "-rf")]
    known = [{"id": number, "name": name, "device": "cpu"} for number, name in fleet]
    server.on("GET /v1/workers?offline=true", Answer({"items": known}))
    server.on("GET /v1/webhooks", Answer({"items": [{"id": "hook1", "url": "http://h"}]}))
    server.on("GET /v1/queues", Answer({"items": [{"name": "lab", "workers": 2}, {"name": "mnist", "workers": 0}]}))
    odd = [job(id="ab12"), job(id="a;reboot")]
    server.on("GET /v1/jobs?limit=100", Answer({"items": odd, "next_cursor": None}))
    assert complete("computeshare workers drain ") == ["studio", "2b", "3c", "4d", "5e"]
    assert complete("computeshare jobs unban ab12 s") == ["studio"]
    assert complete("computeshare jobs logs ab12 --worker st") == ["studio"]
    assert complete("computeshare webhooks show ") == ["hook1"]
    assert complete("computeshare webhooks create http://h --job a") == ["ab12"]
    for command in ("jobs create", "jobs list", "workers invite", "webhooks create http://h"):
        assert complete(f"computeshare {command} --queue l") == ["lab"]


def test_the_shell_completes_the_flags_of_a_worker(server: FakeServer) -> None:
    assert complete("computeshare-worker --only") == ["--only-on-power"]
    assert complete("computeshare-worker --battery-st") == ["--battery-stop", "--battery-start"]


def test_completion_is_silent_where_nobody_answers(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.on("GET /v1/jobs?limit=100", Answer({"detail": "no"}, 401))
    assert complete("computeshare jobs show ") == []
    monkeypatch.setenv("COMPUTESHARE_URL", "http://127.0.0.1:9")
    assert complete("computeshare jobs show ") == []
    monkeypatch.setenv("COMPUTESHARE_APPENDONLY", "perhaps")
    assert complete("computeshare jobs show ") == []
