"""Read-only links: one job, nothing else, until they are revoked."""

import json
import re
import threading
import time
from typing import Any

import httpx2
import pytest
from redis import Redis
from sqlalchemy import update
from starlette.testclient import TestClient

from api.access.links import LINK
from api.database import now_ms
from api.http import security
from api.http.security import TRIES
from api.projection.projector import Projector
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.served_api import serving

SPEC: dict[str, Any] = {
    "name": "the title",
    "notes": "canary-notes",
    "queue": "canary-queue",
    "dataset": "digits",
    "model": "mlp",
    "rounds": 30,
}
CANARIES = ("canary-notes", "canary-queue", "canary-host", "canary-mac", "canary-worker", "canary-error", "canary-ada")
PATHS = ("", "/parts?table=true", "/data", "/events?after=0")


@pytest.fixture
def job(client: TestClient, redis: Redis) -> str:
    """A job that failed, of which machines, people and errors would tell."""
    job_id = str(client.post("/v1/jobs", json=SPEC).json()["id"])
    feed = Feed(redis, job_id, JobSpec(**SPEC).plan)
    feed.open()
    feed.send("reducer", host="canary-host", pid=1)
    about = {"worker": "canary-worker", "session": "s", "seat": "s"}
    feed.send("joined", **about, name="canary-mac", device="canary-host cpu")
    feed.commit()
    feed.send("left", worker="canary-worker", session="s", reason="canary-error", freed=[])
    token = client.post("/v1/tokens", json={"name": "canary-ada", "scopes": ["admin"]}).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    client.post(f"/v1/jobs/{job_id}/pause", headers=headers)
    client.post(f"/v1/jobs/{job_id}/resume", headers=headers)
    feed.send("failed", error="canary-error", detail="canary-host traceback")
    Projector(client.app.state.services.database).step(redis)  # type: ignore[attr-defined]
    assert client.get(f"/v1/jobs/{job_id}").json()["status"] == "failed"
    return job_id


def link(client: TestClient, job: str, **body: Any) -> tuple[str, str]:
    """A new link's path and id."""
    made = client.post(f"/v1/jobs/{job}/links", json=body)
    assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
    path = made.json()["url"].removeprefix("http://localhost")
    assert re.fullmatch(r"/shared/[\w-]{24}", path)
    return path, made.json()["id"]


OF_PLOTS = r'<button (id="reset-zoom"|class="small" type="button" data-(png|whole)\b).*?</button>'
"""Buttons of a reader's own view of the plots, which change nothing."""


def anyone(client: TestClient, path: str, method: str = "GET", **headers: str) -> Any:
    return client.request(method, path, headers={"Authorization": "", **headers})


def test_a_link_shows_the_job_and_none_of_what_it_must_not(client: TestClient, job: str) -> None:
    whole = client.get(f"/jobs/{job}").text + client.get(f"/v1/jobs/{job}/events?after=0").text
    assert [canary for canary in CANARIES if canary not in whole] == []
    path, _ = link(client, job)
    for part in PATHS:
        answer = anyone(client, path + part)
        assert answer.status_code == 200, part
        assert [canary for canary in CANARIES if canary in answer.text] == [], part
        assert job not in answer.text and "<button" not in re.sub(OF_PLOTS, "", answer.text)
        assert answer.headers["x-robots-tag"] == "noindex, nofollow"
        assert answer.headers["referrer-policy"] == "no-referrer"
    page = anyone(client, path).text
    assert (
        "the title" in page
        and 'name="robots" content="noindex' in page
        and "Paused" in page
        and "Version 1" not in page
    )
    assert re.findall(r'href="(/(?!static)[^"]*)"', page) == []
    data = anyone(client, f"{path}/data").json()
    assert data["job"]["version"] == 1 and "1.0" in json.dumps(data["series"])
    events = [
        json.loads(line[6:]) for line in anyone(client, f"{path}/events").text.splitlines() if line[:5] == "data:"
    ]
    assert {"created", "version", "paused", "resumed", "failed"} <= {one.get("type") for one in events}
    assert not {"joined", "left", "reducer"} & {one.get("type") for one in events}


def test_a_link_opens_nothing_else(client: TestClient, job: str) -> None:
    other = client.post("/v1/jobs", json=SPEC).json()["id"]
    path, link_id = link(client, job)
    code = path.rpartition("/")[2]
    for method in ("POST", "DELETE", "PUT", "PATCH"):
        for part in ("", "/data", "/events", "/pause", "/links"):
            assert anyone(client, path + part, method).status_code in (404, 405)
    for part in ("/logs", "/submissions", "/timeline", "/classes", "/links", f"/{other}", "/../../v1/jobs", "/%2e%2e"):
        assert anyone(client, path + part).status_code in (401, 404), part
    for target in ("/", f"/jobs/{job}", f"/v1/jobs/{job}", f"/v1/jobs/{other}", f"/v1/jobs/{job}/links/{link_id}"):
        assert anyone(client, target).status_code == 401
        assert anyone(client, target, Authorization=f"Bearer {code}", Cookie=f"computeshare={code}").status_code == 401


def test_a_link_ends_when_it_is_revoked_expires_or_its_job_goes(client: TestClient, job: str) -> None:
    revoked, revoked_id = link(client, job)
    expired, expired_id = link(client, job, days=1)
    kept, _ = link(client, job, days=None)
    listed = client.get(f"/v1/jobs/{job}/links").json()["items"]
    assert len(listed) == 3 and kept.rpartition("/")[2] not in json.dumps(listed)
    assert client.delete(f"/v1/jobs/{job}/links/{revoked_id}").status_code == 204
    assert client.delete(f"/v1/jobs/{job}/links/{revoked_id}").status_code == 404
    with client.app.state.services.database.writing() as connection:  # type: ignore[attr-defined]
        connection.execute(update(LINK).where(LINK.c.id == expired_id).values(expires_ms=now_ms()))
    assert [anyone(client, path).status_code for path in (revoked, expired, kept)] == [404, 404, 200]
    assert client.delete(f"/v1/jobs/{job}").status_code == 204
    answers = [anyone(client, path) for path in (revoked, expired, kept, f"{kept}/events", "/shared/" + "A" * 24)]
    assert {answer.status_code for answer in answers} == {404} and len({answer.text for answer in answers}) == 1


def test_a_job_that_is_not_there_has_no_links(client: TestClient) -> None:
    for method, path in (("POST", ""), ("GET", ""), ("DELETE", "/abcdefgh")):
        answer = client.request(method, f"/v1/jobs/nosuchid/links{path}", json={} if method == "POST" else None)
        assert answer.status_code == 404


def test_guessing_links_is_slowed_down_and_a_right_link_is_not(client: TestClient, job: str) -> None:
    path, _ = link(client, job)
    for _ in range(3 * TRIES):
        assert anyone(client, f"{path}/nothing").status_code == 404  # no guess: the code is right
    assert anyone(client, path).status_code == 200
    codes = [anyone(client, "/shared/guess").status_code for _ in range(TRIES + 1)]
    assert codes == [404] * TRIES + [429]


@pytest.mark.parametrize("of", ["link", "token"])
def test_an_open_stream_ends_when_what_opened_it_is_revoked(
    of: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "CHECK_S", 0.2)
    owner = {"Authorization": "Bearer secret"}
    with serving(settings) as (url, _), httpx2.Client(base_url=url, headers=owner, timeout=60) as client:
        job = client.post("/v1/jobs", json=SPEC).json()["id"]
        if of == "link":
            made = client.post(f"/v1/jobs/{job}/links", json={}).json()
            address, headers, revoke = f"{made['url']}/events", {}, f"/v1/jobs/{job}/links/{made['id']}"
        else:
            made = client.post("/v1/tokens", json={"name": "Ada", "scopes": ["jobs:read"]}).json()
            address, revoke = f"{url}/v1/jobs/{job}/events", f"/v1/tokens/{made['id']}"
            headers = {"Authorization": f"Bearer {made['token']}"}
        begun = threading.Event()

        def withdraw() -> None:
            assert begun.wait(30)
            assert httpx2.delete(url + revoke, headers=owner, timeout=30).status_code == 204

        thread = threading.Thread(target=withdraw)
        thread.start()
        with httpx2.stream("GET", address, headers=headers, timeout=30) as stream:
            for _ in stream.iter_bytes():
                begun.set()
            revoked = time.monotonic()
        thread.join()
        assert stream.status_code == 200 and revoked
        assert httpx2.get(address, headers=headers, timeout=30).status_code == (404 if of == "link" else 401)
