"""`jobs logs` and the client's two methods, against a server that says what a test wants."""

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from computeshare.cli.main import app
from computeshare.client import Client
from computeshare.client.api.models import Problem
from computeshare.terminal.command import run
from tests.support.http_answers import Answer, FakeServer, event, stream

LOGS = "/v1/jobs/ab12cd34/logs"
INTERRUPTIBLE = """
import signal
from computeshare.cli.main import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
main()
"""


def line(number: int, **changes: Any) -> dict[str, Any]:
    told = {"id": number, "at": "2026-01-01T12:00:00Z", "worker": "aaaaaaaaaaaa", "name": "studio", "level": "info"}
    return {**told, "text": f"line {number}", "data": {}, **changes}


def page(*numbers: int, previous: int | None = None) -> Answer:
    return Answer({"items": [line(number) for number in numbers], "previous": previous})


END = event("end", {"status": "completed"})


@pytest.fixture
def client(server: FakeServer) -> Iterator[Client]:
    with Client(server.url, "secret", timeout_s=5) as found:
        yield found


def test_more_lines_than_a_page_holds_are_fetched_page_by_page_and_come_ascending(
    server: FakeServer, client: Client
) -> None:
    server.on(f"GET {LOGS}?worker=studio&level=warning&limit=1000", page(7, 8, previous=7))
    server.on(f"GET {LOGS}?worker=studio&level=warning&limit=1000&before=7", page(5, 6, previous=5))
    server.on(f"GET {LOGS}?worker=studio&level=warning&limit=1000&before=5", page(4))
    assert [one["id"] for one in client.logs("ab12cd34", "studio", "warning", 1500)] == [4, 5, 6, 7, 8]
    server.on(f"GET {LOGS}?limit=2", page(7, 8, previous=7))
    assert [one["id"] for one in client.logs("ab12cd34", limit=2)] == [7, 8]


def test_all_lines_are_read_from_the_first_on(server: FakeServer, client: Client) -> None:
    server.on(f"GET {LOGS}?limit=1000&after=0", page(*range(1, 1001)))
    server.on(f"GET {LOGS}?limit=1000&after=1000", page(1001))
    assert [one["id"] for one in client.logs("ab12cd34", limit=None)] == list(range(1, 1002))


def test_following_goes_on_where_the_connection_broke_until_the_job_has_ended(
    server: FakeServer, client: Client
) -> None:
    first = stream(event("line", line(5), 5), event("line", line(6), 6))
    server.on(f"GET {LOGS}/stream?level=error", first, Answer(status=503), stream(event("line", line(7), 7), END))
    reasons: list[str] = []
    lines = client.follow_logs("ab12cd34", level="error", after=4, lost=reasons.append)
    assert [one["id"] for one in lines] == [5, 6, 7]
    asked = server.asked(f"GET {LOGS}/stream?level=error")
    assert [request.headers["Last-Event-ID"] for request in asked] == ["4", "6", "6"]
    assert len(reasons) == 2 and reasons[0] == "the server closed the stream"


def test_following_a_job_that_there_is_not_is_a_problem(server: FakeServer, client: Client) -> None:
    with pytest.raises(Problem, match="nothing at"):
        list(client.follow_logs("ab12cd34"))


def test_lines_are_printed_with_time_worker_level_and_fields(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = "Traceback (most recent call last):\n  File\nValueError: no"
    lines = [line(1, data={"seconds": 2.5}), line(2, level="error", text="crashed", data={"exception": trace})]
    server.on(f"GET {LOGS}?limit=100", Answer({"items": lines, "previous": None}))
    assert run(app, ["jobs", "logs", "ab12cd34"]) == 0
    first, second, *below = capsys.readouterr().out.splitlines()
    assert first.split()[2:] == ["studio", "info", "line", "1", "seconds=2.5"]
    assert second.split()[2:] == ["studio", "error", "crashed"]
    assert [text.strip() for text in below] == trace.replace("\n  ", "\n").split("\n")


def test_what_a_terminal_would_obey_is_not_printed(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b[2J\x1b]0;owned\x07[red]x[/]\u202e\r\x9b"
    fields = {f"f{evil}": evil, "exception": f"Trace{evil}\nend{evil}"}
    hostile = line(1, text=f"a{evil}\nb{evil}", name=evil, level=evil, at=evil, data=fields)
    server.on(f"GET {LOGS}?limit=100", Answer({"items": [hostile], "previous": None}))
    assert run(app, ["jobs", "logs", "ab12cd34"]) == 0
    out = capsys.readouterr().out
    assert "[red]x[/]" in out and [c for c in out if not c.isprintable() and c != "\n"] == []


def test_json_is_one_document_and_with_follow_one_a_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(f"GET {LOGS}?limit=100", page(1, 2))
    server.on(f"GET {LOGS}/stream", stream(event("line", line(3), 3), END))
    assert run(app, ["jobs", "logs", "ab12cd34", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"items": [line(1), line(2)]}
    assert run(app, ["jobs", "logs", "ab12cd34", "--json", "-f"]) == 0
    assert [json.loads(text)["id"] for text in capsys.readouterr().out.splitlines()] == [1, 2, 3]
    assert server.asked(f"GET {LOGS}/stream")[0].headers["Last-Event-ID"] == "2"


def test_a_level_that_there_is_not_is_answered_with_those_there_are(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, ["jobs", "logs", "ab12cd34", "--level", "loud"]) == 2
    assert "give one of debug, info, warning, error" in capsys.readouterr().err
    assert server.requests == []


def test_ctrl_c_stops_reading_and_not_the_job(server: FakeServer) -> None:
    over = threading.Event()
    server.on(f"GET {LOGS}?limit=100", page(1))
    server.on(f"GET {LOGS}/stream", Answer(event("line", line(2), 2).encode(), 200, EVENTS, until=over))
    command = [sys.executable, "-c", INTERRUPTIBLE, "jobs", "logs", "-f", "ab12cd34"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert [process.stdout.readline().split()[-1] for _ in range(2)] == ["1", "2"]
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    over.set()
    assert process.returncode == 130 and "detached, the job continues" in err
    assert [request.method for request in server.requests] == ["GET", "GET"]


EVENTS = {"Content-Type": "text/event-stream"}
