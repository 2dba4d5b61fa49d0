"""Tokens: made once, found by their digests alone, revoked at once; and the browsers that log in with them."""

import json
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from redis import Redis
from sqlalchemy import update
from starlette.testclient import TestClient

from api.access import tokens as tokens_module
from api.access import use
from api.access.tokens import MOST, TOKEN, cookie_of, login_key_of
from api.database import Database, now_ms
from api.http import security
from api.http.security import COOKIE
from api.main import create_app
from api.publication.outbox import Courier
from computeshare.protocol.round_store import RoundStore
from computeshare.settings import Settings

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30}


def make(client: TestClient, name: str = "laptop", *scopes: str, days: int | None = 90) -> dict[str, Any]:
    answer = client.post("/v1/tokens", json={"name": name, "scopes": scopes or ["jobs:read"], "days": days})
    assert (answer.status_code, answer.headers["cache-control"]) == (201, "no-store")
    found: dict[str, Any] = answer.json()
    return found


def status(client: TestClient, token: str, path: str = "/v1/jobs", method: str = "GET", **more: Any) -> int:
    headers = {"Authorization": f"Bearer {token}"}
    return int(client.request(method, path, headers=headers, **more).status_code)


def database(client: TestClient) -> Database:
    found: Database = client.app.state.services.database  # type: ignore[attr-defined]
    return found


def test_a_token_is_shown_once_and_works_until_it_is_revoked(client: TestClient) -> None:
    made = make(client, "Ada's laptop", "jobs:write")
    assert made["token"].startswith("cst_") and len(made["token"]) > 40
    assert status(client, made["token"]) == 200
    assert status(client, made["token"], method="POST", json=SPEC) == 201
    listed = client.get("/v1/tokens")
    assert made["token"] not in listed.text and made["login_url"] not in listed.text
    [shown] = listed.json()["items"]
    assert (shown["name"], shown["scopes"], shown["created_by"]) == ("Ada's laptop", ["jobs:write"], "the owner")
    assert shown["used_at"] is not None and not shown["expired"]
    assert client.delete(f"/v1/tokens/{made['id']}").status_code == 204
    assert status(client, made["token"]) == 401
    assert client.delete(f"/v1/tokens/{made['id']}").status_code == 404


def test_a_token_ends_with_its_time_and_one_without_never(client: TestClient) -> None:
    short, long = make(client, "short", days=1), make(client, "long", days=None)
    assert (short["expires_at"] is None, long["expires_at"]) == (False, None)
    with database(client).writing() as connection:
        connection.execute(update(TOKEN).where(TOKEN.c.id == short["id"]).values(expires_ms=now_ms()))
    assert (status(client, short["token"]), status(client, long["token"])) == (401, 200)
    assert {one["name"]: one["expired"] for one in client.get("/v1/tokens").json()["items"]} == {
        "short": True,
        "long": False,
    }


def test_only_digests_are_stored(client: TestClient, tmp_path: Path) -> None:
    made = make(client)
    key = login_key_of(made["token"])
    secrets = [made["token"], key, cookie_of(key), login_key_of("secret"), cookie_of(login_key_of("secret"))]
    assert client.get(urlsplit(made["login_url"]).path + "?" + urlsplit(made["login_url"]).query).status_code == 200
    with sqlite3.connect(tmp_path / "computeshare.db") as connection:
        dump = "\n".join(connection.iterdump())
    assert made["id"] in dump
    assert [secret for secret in secrets if secret in dump] == []


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"name": "", "scopes": ["jobs:read"]}, "name"),
        ({"name": "  ", "scopes": ["jobs:read"]}, "name"),
        ({"name": "The Owner", "scopes": ["jobs:read"]}, "name"),
        ({"name": "a  USER", "scopes": ["jobs:read"]}, "name"),
        ({"name": "x\u202ey", "scopes": ["jobs:read"]}, "name"),
        ({"name": "x" * 51, "scopes": ["jobs:read"]}, "name"),
        ({"name": "x", "scopes": []}, "scopes"),
        ({"name": "x", "scopes": ["jobs"]}, "scopes.0"),
        ({"name": "x", "scopes": ["jobs:read"], "days": 0}, "days"),
        ({"name": "x", "scopes": ["jobs:read"], "days": 1e9}, "days"),
    ],
)
def test_what_is_no_token_is_said_by_its_field(body: dict[str, Any], field: str, client: TestClient) -> None:
    answer = client.post("/v1/tokens", json=body)
    assert answer.status_code == 422 and [error["field"] for error in answer.json()["errors"]] == [field]


def test_names_are_unique_and_tokens_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    make(client, "laptop")
    assert client.post("/v1/tokens", json={"name": "LAPTOP", "scopes": ["admin"]}).status_code == 409
    assert MOST > 100
    monkeypatch.setattr(tokens_module, "MOST", 1)
    assert client.post("/v1/tokens", json={"name": "other", "scopes": ["admin"]}).status_code == 409


def test_the_timeline_names_the_token(client: TestClient) -> None:
    token = make(client, "Ada", "jobs:write")["token"]
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    headers = {"Authorization": f"Bearer {token}"}
    assert client.post(f"/v1/jobs/{job}/pause", headers=headers).json()["reason"] == "Paused by Ada"
    assert client.post(f"/v1/jobs/{job}/resume").status_code == 202
    assert client.patch(f"/v1/jobs/{job}", json={"priority": 3}, headers=headers).status_code == 200
    assert client.post(f"/v1/jobs/{job}/cancel", headers=headers).json()["reason"] == "Cancelled by Ada"
    page = client.get(f"/jobs/{job}/timeline").text
    for sentence in ("Paused by Ada", "Resumed by the owner", "changed from 0 to 3 by Ada", "Cancelled by Ada"):
        assert sentence in page


def test_the_owners_of_the_machines_that_train_a_job_see_who_created_it(
    client: TestClient, redis: Redis, tmp_path: Path
) -> None:
    token = make(client, "Ada", "jobs:write")["token"]
    job = client.post("/v1/jobs", json=SPEC, headers={"Authorization": f"Bearer {token}"}).json()["id"]
    Courier(database(client), tmp_path).publish(redis, job)
    assert RoundStore(redis, job).creator() == "Ada" and "Created by Ada" in client.get(f"/jobs/{job}/timeline").text
    assert RoundStore(redis, "nobodys1").creator() == ""


def test_a_browser_logs_in_with_a_tokens_link_or_the_token_itself_and_out(settings: Settings) -> None:
    owner = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost") as browser:
        made = browser.post("/v1/tokens", json={"name": "Ada", "scopes": ["jobs:read"]}, headers=owner).json()
        for given in ({"key": made["login_url"]}, {"key": login_key_of(made["token"])}, {"key": made["token"]}):
            answer = browser.get("/login", params=given, follow_redirects=False)
            assert answer.status_code == 303 and made["token"] not in answer.headers["set-cookie"]
            assert browser.get("/v1/jobs").status_code == 200
            assert browser.get("/v1/tokens").status_code == 404
            own = {"Origin": "http://localhost"}
            assert browser.post("/v1/jobs", json=SPEC, headers=own).status_code == 403
            assert browser.post("/logout", follow_redirects=False).status_code == 403  # another site may have sent it
            assert browser.post("/logout", headers=own, follow_redirects=False).headers["location"] == "/login"
            assert browser.get("/v1/jobs").status_code == 401
        browser.get("/login", params={"key": made["token"]})
        assert browser.delete(f"/v1/tokens/{made['id']}", headers=owner).status_code == 204
        assert browser.get("/v1/jobs").status_code == 401
        assert browser.get("/login", params={"key": made["token"]}).status_code == 401


def test_a_cookie_is_secure_where_the_page_is_and_such_answers_ask_for_tls_from_then_on(settings: Settings) -> None:
    hosts = ["train.example"]
    with TestClient(create_app(settings, hosts=hosts), base_url="https://train.example") as browser:
        answer = browser.get(f"/login?key={login_key_of('secret')}", follow_redirects=False)
        assert "Secure" in answer.headers["set-cookie"] and "max-age" in answer.headers["strict-transport-security"]
    for address in ("http://train.example", "https://localhost", "http://localhost"):
        with TestClient(create_app(settings, hosts=hosts), base_url=address) as browser:
            answer = browser.get(f"/login?key={login_key_of('secret')}", follow_redirects=False)
            assert answer.status_code == 303 and "strict-transport-security" not in answer.headers
            assert ("Secure" in answer.headers["set-cookie"]) == address.startswith("https")


def test_a_change_with_a_cookie_needs_a_sign_that_it_comes_from_an_own_page(client: TestClient) -> None:
    cookie = {"Cookie": f"{COOKIE}={cookie_of(login_key_of('secret'))}", "Authorization": ""}
    signs: list[tuple[dict[str, str], int]] = [
        ({}, 403),
        ({"Origin": "http://localhost"}, 201),
        ({"Origin": "http://localhost:81"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 201),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
    ]
    for sign, expected in signs:
        assert client.post("/v1/jobs", json=SPEC, headers=cookie | sign).status_code == expected, sign


def test_too_many_requests_of_one_token_wait_and_those_of_others_do_not(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(security, "REQUEST_S", 100.0)
    monkeypatch.setattr(security, "BURST", 5)
    headers = {"Authorization": "Bearer secret"}
    with TestClient(create_app(settings), base_url="http://localhost", headers=headers) as client:
        busy, other = make(client, "busy")["token"], make(client, "other")["token"]
        assert [status(client, busy) for _ in range(7)] == [200] * 5 + [429] * 2
        assert (status(client, other), client.get("/v1/jobs").status_code) == (200, 200)
        answer = client.get("/v1/jobs", headers={"Authorization": f"Bearer {busy}"})
        assert 1 <= int(answer.headers["retry-after"]) <= 100 and "try again" in answer.json()["detail"]


def test_a_token_has_so_many_requests_open_and_no_more(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    token = make(client)["token"]
    monkeypatch.setattr(security, "AT_ONCE", 0)
    assert (status(client, token), client.get("/v1/jobs").status_code) == (429, 200)


def test_last_use_is_noted_to_the_minute(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(client)
    assert made["used_at"] is None

    def used() -> Any:
        assert status(client, made["token"]) == 200
        return client.get("/v1/tokens").json()["items"][0]["used_at"]

    first = used()
    assert first is not None and used() == first
    monkeypatch.setattr(use, "NOTED_MS", -1)
    assert json.dumps(used()) > json.dumps(first)
