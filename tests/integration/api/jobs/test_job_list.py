"""Jobs found by their name, in every order, page by page; and given other names."""

from typing import Any, get_args

import pytest
from sqlalchemy import update
from starlette.testclient import TestClient

from api.jobs.service import new_id
from api.tables import Job, table
from computeshare.jobspec.spec import JobSpec
from computeshare.types import JobSort

PROBLEM = "application/problem+json"


def create(client: TestClient, name: str, **columns: Any) -> str:
    """A job with some of its columns as they would have become."""
    spec = {"dataset": "digits", "model": "mlp", "rounds": 5, "name": name}
    job_id = str(client.post("/v1/jobs", json=spec).json()["id"])
    if columns:
        with client.app.state.services.database.writing() as connection:  # type: ignore[attr-defined]
            connection.execute(update(table(Job)).where(table(Job).c.id == job_id).values(**columns))
    return job_id


def pages(client: TestClient, limit: int, **query: Any) -> list[str]:
    """The names on all pages, one after another."""
    names: list[str] = []
    cursor: dict[str, str] = {}
    while True:
        answer = client.get("/v1/jobs", params={"limit": limit, **query, **cursor})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        names += [job["name"] for job in found["items"]]
        if found["next_cursor"] is None:
            return names
        assert len(found["items"]) == limit
        cursor = {"cursor": found["next_cursor"]}


@pytest.fixture
def five(client: TestClient) -> list[str]:
    """Five jobs: some without an accuracy, some with the same, two with the same moment of creation."""
    base, spec = 1_800_000_000_000, {"dataset": "digits", "model": "mlp"}
    rows = [
        ("Übung", 0.5, 1, 9),
        ("beta", None, 2, 5),
        ("Alpha", 0.9, 3, 7),
        ("übung 2", 0.9, 3, 8),
        ("gamma", None, 5, 6),
    ]
    with client.app.state.services.database.write() as session:  # type: ignore[attr-defined]
        for name, accuracy, created, updated in rows:
            times = {"created_ms": base + created, "updated_ms": base + updated}
            about = {
                "id": new_id(),
                "queue": "q",
                "status": "completed",
                "spec": JobSpec(**spec).model_dump(mode="json"),
            }
            session.add(Job(name=name, accuracy=accuracy, rounds_total=5, **about, **times))
    return [row[0] for row in rows]


EXPECTED: dict[JobSort, Any] = {
    "oldest": lambda n: n[:2] == ["Übung", "beta"] and n[-1] == "gamma",
    "newest": lambda n: n[0] == "gamma" and n[-2:] == ["beta", "Übung"],
    "name": lambda n: n == ["Alpha", "beta", "gamma", "Übung", "übung 2"],
    "accuracy": lambda n: {*n[:2]} == {"Alpha", "übung 2"} and n[2:] == ["Übung", "gamma", "beta"],
    "updated": lambda n: n == ["Übung", "übung 2", "Alpha", "gamma", "beta"],
}


@pytest.mark.usefixtures("five")
@pytest.mark.parametrize("sort", get_args(JobSort))
def test_every_order_is_the_same_however_it_is_cut_into_pages(client: TestClient, sort: JobSort) -> None:
    whole = pages(client, 50, sort=sort)
    assert EXPECTED[sort](whole), whole
    assert all(pages(client, limit, sort=sort) == whole for limit in (1, 2, 3))


@pytest.mark.usefixtures("five")
@pytest.mark.parametrize("other", [one for one in get_args(JobSort) if one != "newest"])
def test_a_cursor_of_another_order_is_refused(client: TestClient, other: JobSort) -> None:
    cursor = client.get("/v1/jobs", params={"limit": 2}).json()["next_cursor"]
    answer = client.get("/v1/jobs", params={"sort": other, "cursor": cursor})
    assert answer.status_code == 422 and "cursor" in answer.json()["detail"]


def test_an_unknown_order_names_those_there_are(client: TestClient) -> None:
    answer = client.get("/v1/jobs", params={"sort": "colour"})
    assert answer.status_code == 422 and "'accuracy'" in answer.json()["errors"][0]["allowed"]


@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("ÜBUNG", ["Übung", "übung 2"]),
        ("  a  ", ["Alpha", "beta", "gamma"]),
        ("100%", []),
        ("_", []),
        ("mlp on dig", []),
    ],
)
def test_jobs_are_found_by_a_part_of_their_name(
    client: TestClient, five: list[str], search: str, found: list[str]
) -> None:
    assert pages(client, 2, search=search, sort="name") == found


def test_a_job_without_a_name_is_found_by_what_it_trains_and_any_job_by_its_id(client: TestClient) -> None:
    unnamed, named = create(client, ""), create(client, "50% _off_")
    found = [job["id"] for job in client.get("/v1/jobs", params={"search": "MLP on dig"}).json()["items"]]
    assert found == [unnamed]
    assert pages(client, 5, search="% _") == ["50% _off_"]
    assert [job["id"] for job in client.get("/v1/jobs", params={"search": named}).json()["items"]] == [named]


def test_a_search_goes_with_the_other_filters(client: TestClient) -> None:
    create(client, "one try", status="failed")
    create(client, "another try", status="completed")
    assert pages(client, 5, search="try", status="failed") == ["one try"]


def test_a_job_is_renamed_whatever_its_state_and_its_timeline_says_so(client: TestClient) -> None:
    job = create(client, "", status="completed")
    answer = client.patch(f"/v1/jobs/{job}", json={"name": "  the good one "})
    assert (answer.status_code, answer.json()["name"], answer.json()["title"]) == (200, "the good one", "the good one")
    assert answer.json()["spec"]["name"] == "the good one"
    client.patch(f"/v1/jobs/{job}", json={"name": "better"})
    client.patch(f"/v1/jobs/{job}", json={"name": "better"})  # changes nothing
    assert client.patch(f"/v1/jobs/{job}", json={"name": ""}).json()["title"] == "mlp on digits"
    timeline = client.app.state.services.history.timeline(job)  # type: ignore[attr-defined]
    told = [(event.data["before"], event.data["after"]) for event in timeline if event.type == "edited"]
    assert sorted(told) == [("", "the good one"), ("better", ""), ("the good one", "better")]


def test_notes_are_shown_and_changed_after_the_job_has_ended(client: TestClient) -> None:
    job = create(client, "noted", status="completed")
    answer = client.patch(f"/v1/jobs/{job}", json={"notes": "lower <rate> next"})
    assert (answer.status_code, answer.json()["spec"]["notes"]) == (200, "lower <rate> next")
    assert client.patch(f"/v1/jobs/{job}", json={"notes": "x" * 2001}).status_code == 422
    timeline = client.app.state.services.history.timeline(job)  # type: ignore[attr-defined]
    assert [event.data["after"] for event in timeline if event.type == "edited"] == ["lower <rate> next"]


def test_name_and_priority_change_together_or_not_at_all(client: TestClient) -> None:
    job = create(client, "before")
    changed = client.patch(f"/v1/jobs/{job}", json={"name": "after", "priority": 7}).json()
    assert (changed["name"], changed["priority"]) == ("after", 7)
    client.post(f"/v1/jobs/{job}/cancel")
    assert client.patch(f"/v1/jobs/{job}", json={"name": "later", "priority": 8}).status_code == 409
    assert client.get(f"/v1/jobs/{job}").json()["name"] == "after"


@pytest.mark.parametrize("change", [{}, {"name": 5}, {"name": "x" * 101}, {"name": "a\nb"}, {"title": "x"}])
def test_a_change_that_is_none_names_its_field(client: TestClient, change: dict[str, Any]) -> None:
    answer = client.patch(f"/v1/jobs/{create(client, 'a')}", json=change)
    assert (answer.status_code, answer.headers["content-type"]) == (422, PROBLEM)
    assert next(iter(change), "name") in str(answer.json()["errors"])
