"""The audit log: no change without an entry, no entry without a change, nothing secret, nothing old."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.access import audit
from api.access.audit import ACTIONS, AUDIT, record
from api.access.caller import OWNER, current
from api.database import Database, now_ms
from api.tables import WorkerStat
from computeshare.queue import WorkerInfo, register
from computeshare.runtime.signatures import SigningKey
from computeshare.worker.invite import introduction
from tests.support.routes import filled, routes
from tests.support.webhook_receiver import receiving

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30}
HARMLESS = {
    "POST /new/check": "shows the form again",
    "POST /v1/jobs/{job_id}/generate": "asks an evaluator for text",
    "POST /logout": "removes a cookie of the browser",
    "PUT /v1/bundles/{digest}/pieces/{piece}": "sends what the bundle's manifest, an entry of its own, named",
}
"""Routes that are no changes, and why."""


def services(client: TestClient) -> Any:
    return client.app.state.services  # type: ignore[attr-defined]


def entries(client: TestClient, **filters: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = client.get("/v1/audit", params={"limit": 500, **filters}).json()["items"]
    return found


class Story:
    """Everything that can be changed, in an order in which it succeeds."""

    def __init__(self, client: TestClient, redis: Redis, hook_url: str) -> None:
        self.client, self.redis, self.hook_url = client, redis, hook_url
        self.told: set[str] = set()
        self.values: dict[str, str] = {}

    def does(self, route: str, *actions: str, keep: str = "", **request: Any) -> Any:
        """Send a request, which has to succeed and to add these entries."""
        method, path = route.split(" ")
        before = entries(self.client)
        answer = self.client.request(method, filled(path, self.values), follow_redirects=False, **request)
        assert answer.status_code < 400, (route, answer.text)
        added = entries(self.client)[: len(entries(self.client)) - len(before)]
        assert [one["action"] for one in added] == list(actions), route
        assert all(one["actor"] == "the owner" or route.startswith("POST /join") for one in added)
        self.told.add(route)
        if keep:
            self.values[keep] = str(answer.json()["id"])
        return answer

    def new_job(self) -> None:
        self.values["job_id"] = self.client.post("/v1/jobs", json=SPEC).json()["id"]

    def job_status(self, status: str) -> None:
        with services(self.client).database.writing() as connection:
            connection.exec_driver_sql(f"UPDATE job SET status='{status}' WHERE id='{self.values['job_id']}'")

    def banned(self) -> None:
        with services(self.client).database.write() as session:
            session.add(WorkerStat(job_id=self.values["job_id"], worker="deadbeef0000", banned="lies"))

    def tell(self) -> None:
        worker = WorkerInfo("deadbeef0000", "mac", "cpu", ("q",), {}, 1, "host", 1)
        self.values["worker"] = worker.id
        self.does("POST /v1/jobs", "job.create", keep="job_id", json=SPEC)
        self.does("POST /new", "job.create", data={"dataset": "digits", "model": "mlp", "rounds": "3"})
        self.does("POST /v1/jobs/{job_id}/links", "link.create", keep="link_id", json={})
        self.does("DELETE /v1/jobs/{job_id}/links/{link_id}", "link.revoke")
        self.does("PATCH /v1/jobs/{job_id}", "job.edit", json={"name": "other", "priority": 4})
        self.does("POST /v1/jobs/{job_id}/pause", "job.pause", params={"hours": 2})
        self.does("POST /v1/jobs/{job_id}/resume", "job.resume")
        self.job_status("failed")
        self.does("POST /v1/jobs/{job_id}/retry", "job.retry")
        self.banned()
        self.does("POST /v1/jobs/{job_id}/workers/{worker}/unban", "worker.unban")
        self.does("POST /v1/jobs/{job_id}/cancel", "job.cancel")
        self.does("DELETE /v1/jobs/{job_id}", "job.delete")
        self.new_job()
        register(self.redis, worker)
        self.does("POST /v1/workers/{worker}/drain", "worker.drain")
        self.does("POST /v1/workers/{worker}/undrain", "worker.undrain")
        self.does("PATCH /v1/workers/{worker}", "worker.person", json={"person": "Anna"})
        self.does("DELETE /v1/workers/{worker}", "worker.remove")
        made = self.does("POST /v1/invites", "invite.create", keep="invite_id", json={"queue": "q"}).json()
        self.values["code"] = made["url"].rpartition("/")[2]
        services(self.client).invites.public_url = "https://home.example"
        key, new = SigningKey.new(), SigningKey.new().public
        self.does("POST /join/{code}", "invite.use", json=introduction("mac", self.values["code"], key))
        self.values["machine_id"] = made["id"]
        change = {"public_key": new, "signature": key.sign("rotate", made["id"], new)}
        self.does("POST /join/machines/{machine_id}/key", "machine.key", json=change)
        self.does("POST /join/machines/{machine_id}/key", json=change)
        self.does("DELETE /v1/invites/{invite_id}", "invite.withdraw")
        self.does("POST /v1/webhooks", "webhook.create", keep="webhook_id", json={"url": self.hook_url})
        self.does("PATCH /v1/webhooks/{webhook_id}", "webhook.edit", json={"new_secret": True})
        self.does("POST /v1/webhooks/{webhook_id}/test", "webhook.test", keep="delivery_id")
        self.does("POST /v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver", "webhook.redeliver")
        self.does("DELETE /v1/webhooks/{webhook_id}", "webhook.delete")
        files = [{"path": "a", "size": 0, "pieces": []}]
        self.does("POST /v1/bundles", "bundle.create", json={"files": files})
        bundle = self.does("POST /v1/bundles", json={"files": files}).json()["digest"]
        data = {"name": "birds", "kind": "files", "bundle": bundle, "facts": {"train": 1, "test": 0}}
        self.values["name"] = self.does("POST /v1/datasets", "dataset.create", json=data).json()["name"]
        self.does("POST /v1/datasets", json=data)
        self.does("DELETE /v1/datasets/{name}", "dataset.delete")
        recipe = {"files": {"recipe.py": ""}}
        made = self.does("POST /v1/recipes", "recipe.create", json=recipe).json()
        self.values["digest"] = made["digest"]
        self.does("POST /v1/recipes", json=recipe)
        self.does("DELETE /v1/recipes/{digest}", "recipe.delete")
        self.does("POST /v1/tokens", "token.create", keep="token_id", json={"name": "Ada", "scopes": ["admin"]})
        self.does("DELETE /v1/tokens/{token_id}", "token.revoke")


NOT_OVER_HTTP_ALONE = {"job.fork", "login"}
"""Actions whose requests need more than this test has; other tests tell them."""


@pytest.mark.slow
def test_every_route_that_changes_something_adds_its_entry(client: TestClient, redis: Redis) -> None:
    with receiving() as receiver:
        services(client).webhooks._check = lambda _url: None
        story = Story(client, redis, receiver.url)
        story.tell()
    redis.delete("cs:worker:deadbeef0000")
    changing = {f"{m} {path}" for m, path in routes(client.app) if m not in ("GET", "HEAD", "OPTIONS")}  # type: ignore[arg-type]
    untold = changing - story.told - HARMLESS.keys() - {"POST /v1/jobs/{job_id}/fork"}
    assert untold == set(), "add it to Story, and record() to the transaction of its change"
    assert {one["action"] for one in entries(client)} == set(ACTIONS) - NOT_OVER_HTTP_ALONE


def test_a_login_is_an_entry_of_whoever_logs_in(client: TestClient) -> None:
    token = client.post("/v1/tokens", json={"name": "Ada", "scopes": ["jobs:read"]}).json()
    client.get("/login", params={"key": token["token"]})
    client.get("/login", params={"key": "wrong"})
    [entry] = entries(client, action="login")
    assert (entry["actor"], entry["token_id"]) == ("Ada", token["id"])


def test_an_entry_and_its_change_stand_or_fall_together(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    assert client.post(f"/v1/jobs/{job}/resume").status_code == 409  # refused: no change
    assert client.delete("/v1/tokens/unknown1").status_code == 404
    assert [one["action"] for one in entries(client)] == ["job.create"]

    def broken(*_: object) -> None:
        raise OSError("the disk is gone")

    monkeypatch.setattr(audit, "AUDIT", type("Broken", (), {"delete": broken, "c": AUDIT.c})())
    assert client.post(f"/v1/jobs/{job}/pause").status_code == 500
    monkeypatch.undo()
    assert client.get(f"/v1/jobs/{job}").json()["status"] == "queued"
    assert [one["action"] for one in entries(client)] == ["job.create"]


def test_nothing_is_told_twice_or_of_nothing(client: TestClient) -> None:
    headers = {"Idempotency-Key": "k1"}
    for _ in range(2):
        assert client.post("/v1/jobs", json=SPEC, headers=headers).status_code == 201
    job = client.get("/v1/jobs").json()["items"][0]["id"]
    assert client.patch(f"/v1/jobs/{job}", json={"priority": 0}).status_code == 200
    assert [one["action"] for one in entries(client)] == ["job.create"]


def test_what_the_control_plane_does_by_itself_is_nobodys(database: Database) -> None:
    with database.writing() as connection:
        record(connection, "job.resume", "abcdefgh")
    with database.engine.connect() as connection:
        assert connection.execute(select(AUDIT)).all() == []


def test_the_log_is_filtered_and_paged(client: TestClient) -> None:
    token = client.post("/v1/tokens", json={"name": "Ada", "scopes": ["jobs:write"]}).json()["token"]
    headers = {"Authorization": f"Bearer {token}"}
    jobs = [client.post("/v1/jobs", json=SPEC, headers=headers).json()["id"] for _ in range(3)]
    client.post(f"/v1/jobs/{jobs[1]}/cancel")
    assert [one["subject"] for one in entries(client, actor="Ada")] == jobs[::-1]
    assert [one["action"] for one in entries(client, subject=jobs[1])] == ["job.cancel", "job.create"]
    assert [one["actor"] for one in entries(client, action="job.cancel")] == ["the owner"]
    assert client.get("/v1/audit", params={"action": "job.other"}).status_code == 422
    first = client.get("/v1/audit", params={"limit": 3}).json()
    second = client.get("/v1/audit", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    ids = [one["id"] for one in first["items"] + second["items"]]
    assert ids == sorted(ids, reverse=True) and len(ids) == 5
    page = client.get("/audit", params={"actor": "Ada"}).text
    assert page.count("<code>job.create</code>") == 3 and "<code>job.cancel</code>" not in page
    assert client.get("/audit?cursor=x").status_code == 404


def test_old_entries_go(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    told: Callable[..., None] = record
    mark = current.set((OWNER, "10.0.0.1"))
    try:
        with database.writing() as connection:
            told(connection, "job.pause", "first")
            connection.execute(update(AUDIT).values(at_ms=now_ms() - audit.KEPT_MS - 1))
        assert audit.AuditLog(database).list().items == []
        with database.writing() as connection:
            told(connection, "job.pause", "second")
        with database.engine.connect() as connection:
            assert [row.subject for row in connection.execute(select(AUDIT))] == ["second"]
    finally:
        current.reset(mark)


def test_no_secret_is_in_the_log(client: TestClient) -> None:
    made = client.post("/v1/tokens", json={"name": "Ada", "scopes": ["admin"]}).json()
    invite = client.post("/v1/invites", json={}).json()
    told = json.dumps(entries(client))
    assert made["id"] in told and invite["id"] in told
    assert made["token"] not in told and invite["url"].rpartition("/")[2] not in told and "secret" not in told
