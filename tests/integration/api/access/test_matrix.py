"""Every route times every scope: who is let in, and what the others hear."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from api.access.caller import SCOPES, Caller, Scope
from api.http import security
from api.http.scopes import needed, refused_with
from api.http.security import OPEN_FOLDERS, OPEN_PATHS
from tests.support.routes import filled, routes


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tokens send as many requests as they like."""
    monkeypatch.setattr(security, "REQUEST_S", 1e-9)


@pytest.fixture
def tokens(unhurried: None, client: TestClient) -> dict[Scope, str]:
    """A token of each scope."""
    made = {s: client.post("/v1/tokens", json={"name": s, "scopes": [s], "days": None}).json() for s in SCOPES}
    return {scope: answer["token"] for scope, answer in made.items()}


def protected(client: TestClient) -> Iterator[tuple[str, str]]:
    for method, path in routes(client.app):  # type: ignore[arg-type]
        if path not in OPEN_PATHS and not path.startswith(OPEN_FOLDERS):
            yield method, filled(path, {})


def ask(client: TestClient, method: str, path: str, token: str, **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {token}" if token else "", **more.pop("headers", {})}
    return client.request(method, path, headers=headers, follow_redirects=False, **more)


@pytest.mark.slow
def test_no_protected_route_answers_without_a_token(client: TestClient) -> None:
    found = list(protected(client))
    assert len(found) > 60
    for method, path in found:
        for token in ("", "wrong", "cst_" + "A" * 43, "Secret", "secre", "secret "[:0] + "secrets"):
            answer = ask(client, method, path, token, content=b"{")
            assert answer.status_code == 401, (method, path, token)
        page = ask(client, method, path, "", headers={"Accept": "text/html"})
        assert (page.status_code, "computeshare login" in page.text or method == "HEAD") == (401, True), (method, path)


@pytest.mark.slow
def test_every_route_lets_in_those_with_its_scope_and_no_others(client: TestClient, tokens: dict[Scope, str]) -> None:
    """A body that is no JSON keeps the routes from doing anything; it must not be read before the scope."""
    seen = set()
    for scope, token in tokens.items():
        caller = Caller(scope, frozenset({scope}), "t")
        for method, path in protected(client):
            expected = refused_with(caller, method, path)
            if expected is None and path == "/metrics":
                continue
            answer = ask(client, method, path, token, content=b"{", headers={"Content-Type": "application/json"})
            seen.add((scope, answer.status_code))
            assert answer.status_code < 500, (scope, method, path, answer.text)
            if expected is None:
                assert answer.status_code not in (401, 403), (scope, method, path)
            else:
                assert answer.status_code == expected, (scope, method, path)
                if method != "HEAD" and expected == 403:
                    assert needed(method, path) in answer.json()["detail"]
    assert {("jobs:read", 403), ("jobs:read", 404), ("workers:join", 404)} <= seen


def test_what_a_token_may_not_know_is_answered_as_if_it_were_not_there(
    client: TestClient, tokens: dict[Scope, str]
) -> None:
    job = client.post("/v1/jobs", json={"dataset": "digits", "model": "mlp"}).json()["id"]

    def heard(path: str, token: str, accept: str) -> str:
        answer = ask(client, "GET", path, token, headers={"Accept": accept})
        assert answer.status_code == 404
        return re.sub(r'data-now="[0-9.]+"', "", answer.text.replace(f"page {path}", "page PATH"))

    for scope, paths in (
        ("workers:join", (f"/v1/jobs/{job}", "/v1/jobs/zzzzzzzz", "/v1/workers", "/v1/webhooks/abcdefgh")),
        ("jobs:read", ("/v1/tokens", "/v1/audit", "/v1/webhooks/abcdefgh", "/v1/invites")),
    ):
        told = {heard(path, tokens[scope], "application/json") for path in paths}
        assert told == {client.get("/v1/nothing").text}
    for scope, paths in (
        ("workers:join", (f"/jobs/{job}", "/jobs/zzzzzzzz", "/", "/tokens")),
        ("jobs:read", ("/audit",)),
    ):
        assert {heard(path, tokens[scope], "text/html") for path in paths} == {heard("/x", tokens[scope], "text/html")}


def test_websockets_are_refused(client: TestClient) -> None:

    for path in ("/", "/v1/jobs", "/join/x", "/static/x"):
        with pytest.raises(WebSocketDisconnect), client.websocket_connect(path):
            pass
