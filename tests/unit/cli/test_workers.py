"""`computeshare workers`, `computeshare queues` and a job's priority as a user meets them."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest

from computeshare.cli.main import app
from computeshare.cli.workers import recipes, state, worker_id
from computeshare.client.api.models import Problem
from computeshare.terminal.command import run
from tests.support.http_answers import Answer, FakeServer, job


def worker(**changes: Any) -> dict[str, Any]:
    document = {
        "id": "ab12cd34ef56",
        "online": True,
        "name": "mac-studio",
        "device": "mps",
        "queues": ["lab"],
        "host": "studio",
        "memory_bytes": 64 * 10**9,
        "job_id": "job00001",
        "samples_per_s": 1234.5,
        "share": 0.25,
        "refused": None,
        "drained": False,
        "leaving": False,
        "last_seen": "2026-01-01T12:00:00Z",
    }
    return document | changes


QUEUES = [
    {
        "name": "lab",
        "workers": 3,
        "queued": 1,
        "running": 0,
        "jobs": [
            {"id": "job1", "title": "first", "status": "queued", "priority": -7, "wanted": 4, "held": 2},
            {"id": "job2", "title": "second", "status": "queued", "priority": -8, "wanted": 1, "held": 0},
        ],
    },
    {"name": "idle", "workers": 1, "queued": 0, "running": 0, "jobs": []},
]


def test_workers_are_listed_with_what_they_do(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/workers?offline=false", Answer({"items": [worker(name="mac\x1b[31m")]}))
    assert run(app, ["workers", "list"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("ab12cd34ef56", "mps", "at work", "job00001", "64.0 GB", "1,23", "25 %"))
    assert "\x1b[31m" not in shown


def test_without_workers_the_list_says_how_to_start_one(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/workers?offline=true", Answer({"items": []}))
    assert run(app, ["workers", "list", "--offline"]) == 0
    told = capsys.readouterr().out
    assert "here computeshare-worker --queue default" in told and "computeshare workers invite --queue default" in told
    server.on("GET /v1/workers?offline=true", Answer({"items": [worker(online=False)]}))
    assert run(app, ["workers", "list", "--offline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"][0]["online"] is False


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "at work"),
        ({"job_id": None}, "idle"),
        ({"drained": True}, "drained"),
        ({"drained": True, "leaving": True}, "leaving"),
        ({"online": False}, "offline"),
        ({"online": False, "drained": True}, "offline, drained"),
        ({"refused": "another version"}, "refused"),
        ({"resting": "on battery\x1b", "job_id": None}, "resting: on battery\N{REPLACEMENT CHARACTER}"),
        ({"power": {"plugged": False, "percent": 54.4}}, "at work, 54 %"),
        ({"power": {"plugged": None, "percent": None}}, "at work"),
    ],
    ids=str,
)
def test_a_workers_state_is_a_word(changes: dict[str, Any], word: str) -> None:
    assert state(worker(**changes)) == word


@pytest.mark.parametrize(("verb", "told"), [("drain", "gets no more work"), ("undrain", "may work again")])
def test_a_worker_is_drained_and_undrained_by_its_name(
    verb: str, told: str, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/workers?offline=true", Answer({"items": [worker()]}))
    server.on(f"POST /v1/workers/ab12cd34ef56/{verb}", Answer(worker(), 202))
    assert run(app, ["workers", verb, "mac-studio"]) == 0
    assert capsys.readouterr().out == f"mac-studio {told}\n"
    assert run(app, ["workers", verb, "ab12cd34ef56", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == "ab12cd34ef56"


def test_a_worker_is_removed(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/workers?offline=true", Answer({"items": [worker()]}))
    server.on("DELETE /v1/workers/ab12cd34ef56", Answer(b"", 204))
    assert run(app, ["workers", "remove", "mac-studio", "--yes"]) == 0
    assert capsys.readouterr().out == "removed mac-studio\n"
    assert run(app, ["workers", "remove", "mac-studio", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": "ab12cd34ef56", "removed": True}


def invited(**changes: Any) -> dict[str, Any]:
    document = {
        "id": "1a2b3c4d",
        "queue": "lab",
        "status": "pending",
        "worker": None,
        "created_at": "2026-01-01T12:00:00Z",
        "expires_at": "2026-01-01T13:00:00Z",
        "url": "http://studio.local:8000/join/code",
        "command": "computeshare-worker --queue lab --join http://studio.local:8000/join/code",
        "new_machine": ["uvx --from the wheel", "pipx run --spec the wheel"],
        "qr": "data:image/svg+xml,",
        "note": None,
        "blocked": False,
    }
    return document | changes


def test_an_invite_is_a_command_to_type_elsewhere_and_says_until_when(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on(
        "POST /v1/invites",
        Answer(invited(), 201),
        Answer(invited(note="nobody reaches\x1b the broker", blocked=True, remedy="computeshare up --lan"), 201),
    )
    assert run(app, ["workers", "invite", "--queue", "lab", "--minutes", "60"]) == 0
    until = datetime(2026, 1, 1, 13, tzinfo=UTC).astimezone()
    assert capsys.readouterr().out.splitlines() == [
        invited()["new_machine"][0],
        "run this on the other machine, which needs uv and nothing else; the link works once until "
        f"{until:%Y-%m-%d %H:%M}",
        f"with pipx: {invited()['new_machine'][1]}",
        f"where ComputeShare is installed: {invited()['command']}",
    ]
    assert json.loads(server.requests[0].body) == {"queue": "lab", "minutes": 60}
    assert run(app, ["workers", "invite"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "no other machine can join yet: nobody reaches\N{REPLACEMENT CHARACTER} the broker",
        "computeshare up --lan",
    ]
    assert json.loads(server.requests[1].body) == {"queue": "default", "minutes": 15}
    assert run(app, ["workers", "invite", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["url"] == invited()["url"]
    assert run(app, ["workers", "invite", "--minutes", "0"]) == 2


def test_an_invite_is_for_a_person_and_its_link_a_qr_code_on_request(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    blocked = invited(note="nobody reaches the broker", blocked=True, remedy=None)
    some = invited(note="other networks do not know the broker's name", remedy=None)
    server.on("POST /v1/invites", Answer(invited(person="Anna"), 201), Answer(blocked, 201), Answer(some, 201))
    assert run(app, ["workers", "invite", "--for", "Anna", "--qr"]) == 0
    assert json.loads(server.requests[0].body) == {"queue": "default", "minutes": 15, "person": "Anna"}
    assert sum("▀" in line or "▄" in line for line in capsys.readouterr().out.splitlines()) > 10
    assert run(app, ["workers", "invite", "--qr"]) == 0
    assert capsys.readouterr().out == "no other machine can join yet: nobody reaches the broker\n"
    assert run(app, ["workers", "invite"]) == 0
    first, *_, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (some["new_machine"][0], f"warning: {some['note']}")


def test_a_worker_is_assigned_to_a_person_and_back(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/workers?offline=true", Answer({"items": [worker()]}))
    server.on("PATCH /v1/workers/ab12cd34ef56", Answer(worker(person="Anna")), Answer(worker(person=None)))
    assert run(app, ["workers", "person", "mac-studio", "Anna"]) == 0
    assert capsys.readouterr().out == "mac-studio belongs to Anna\n"
    assert run(app, ["workers", "person", "mac-studio"]) == 0
    assert capsys.readouterr().out == "mac-studio is nobody's by name\n"
    bodies = [json.loads(request.body) for request in server.requests if request.body]
    assert bodies == [{"person": "Anna"}, {"person": None}]


def test_contributions_stand_by_person_with_their_machines_below(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    def one(person: str | None, samples: int, **more: Any) -> dict[str, Any]:
        return {"person": person, "samples": samples, "share": samples / 1000, "hours": 1.5, "jobs": 2} | more

    items = [one("Anna", 500, name="mac"), one(None, 300, name="mac"), one("Anna", 200, name="lab")]
    found = {"items": items, "people": [one("Anna", 700, machines=2), one(None, 300, machines=1)]}
    server.on("GET /v1/workers/contributions", Answer(found))
    assert run(app, ["workers", "contributions"]) == 0
    rows = [line.split()[:-4] for line in capsys.readouterr().out.splitlines()[1:]]
    assert [" ".join(row[:-1]) for row in rows] == ["Anna", "mac", "lab", "no name given", "mac"]
    assert run(app, ["workers", "contributions", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_name_that_nobody_or_more_than_one_has_is_told(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.on("GET /v1/workers?offline=true", Answer({"items": [worker(), worker(id="other")]}))
    assert run(app, ["workers", "drain", "mac-studio"]) == 2
    assert "give an id: ab12cd34ef56, other" in capsys.readouterr().err
    assert run(app, ["workers", "remove", "nobody"]) == 2
    assert "computeshare workers list --offline" in capsys.readouterr().err
    assert worker_id([worker(name="ab12cd34ef56", id="x"), worker()], "ab12cd34ef56") == "ab12cd34ef56"
    with pytest.raises(Problem):
        worker_id([], "x")


def test_queues_are_listed_with_their_jobs_in_order(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("GET /v1/queues", Answer({"items": QUEUES}))
    assert run(app, ["queues", "list"]) == 0
    _, first, second, idle = capsys.readouterr().out.splitlines()
    assert first.split() == ["lab", "3", "job1", "first", "queued", "-7", "2", "4"]
    assert second.split() == ["job2", "second", "queued", "-8", "0", "1"]
    assert idle.split() == ["idle", "1", "–"]
    assert run(app, ["queues", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["items"] == QUEUES
    server.on("GET /v1/queues", Answer({"items": []}))
    assert run(app, ["queues", "list"]) == 0
    told = capsys.readouterr().out
    assert "computeshare-worker" in told and "computeshare workers invite" in told


@pytest.mark.parametrize("number", ["10", "-10"])
def test_a_job_gets_another_priority(number: str, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.on("PATCH /v1/jobs/ab12cd34", Answer(job(priority=int(number))))
    assert run(app, ["jobs", "priority", "ab12cd34", number]) == 0
    assert json.loads(server.requests[0].body) == {"priority": int(number)}
    assert "ab12cd34" in capsys.readouterr().out
    assert run(app, ["jobs", "priority", "ab12cd34", number, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["priority"] == int(number)


def test_a_priority_out_of_range_is_a_wrong_use(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["jobs", "priority", "ab12cd34", "101"]) == 2
    assert "100" in capsys.readouterr().err
    assert server.requests == []


@pytest.mark.parametrize(
    "arguments", [["workers", "list"], ["queues", "list"], ["workers", "drain", "x"], ["workers", "invite"]], ids=str
)
def test_exit_codes_tell_what_is_wrong(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("/v1/workers?offline=false", "/v1/workers?offline=true", "/v1/queues"):
        server.on(f"GET {path}", Answer({"detail": "no token"}, 401))
    server.on("POST /v1/invites", Answer({"detail": "no token"}, 401))
    assert run(app, arguments) == 4
    monkeypatch.setenv("COMPUTESHARE_URL", "http://127.0.0.1:9")
    assert run(app, arguments) == 3
    capsys.readouterr()


def test_a_worker_shows_which_recipes_it_runs_and_by_what_they_are_confined() -> None:
    assert recipes({"recipes": ["*"], "confinement": "landlock"}) == "all, landlock"
    assert recipes({"recipes": ["sha256:" + "a" * 64], "confinement": "none"}) == "1, not confined"
    assert recipes({"recipes": [], "confinement": None}) == "–"
