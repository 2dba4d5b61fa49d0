"""Requests made from the OpenAPI document and the router's list, with all kinds of credentials: no answer is a 5xx, and
no secret is in any answer or log.
"""

import logging
import random
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
import structlog
from starlette.testclient import TestClient

from api.access.caller import SCOPES
from api.access.tokens import cookie_of, login_key_of
from api.http import security
from api.http.security import COOKIE, OPEN_FOLDERS, OPEN_PATHS
from api.main import create_app
from computeshare.runtime.processes import configure_logging
from computeshare.settings import Settings
from tests.support.fuzz import RAW, SPEC, TEXTS, VALUES
from tests.support.routes import filled, routes

SEED = 20_261_126
OWNER_TOKEN = "owner-canary-0123456789"
HEADERS = ("Accept", "Content-Type", "Range", "If-None-Match", "Last-Event-ID", "Idempotency-Key", "Origin", "Cookie")
ODD = [b"", b"\xff\xfe", b"a" * 3000, b"-1", b"9" * 40, b"*/*", b"text/html", b"application/json", b"bytes=0-", b"null"]
PATHS = [one for one in TEXTS if len(one) < 100 and "/" not in one and one] + ["latest", "best", "a%0d%0ab", "..", "."]
NOT_UP = {"/readyz": 503, "/v1/jobs/{job_id}/generate": 503}
"""Routes that may answer 503 where no evaluator and no reducer run."""


class Requests:
    """Random requests from a seed."""

    def __init__(self, client: TestClient, seed: int) -> None:
        self.client, self.random = client, random.Random(seed)
        self.routes = list(routes(client.app))  # type: ignore[arg-type]
        document = client.app.openapi()  # type: ignore[attr-defined]
        self.parameters = {
            (method.upper(), path): [one["name"] for one in about.get("parameters", ()) if one["in"] == "query"]
            for path, methods in document["paths"].items()
            for method, about in methods.items()
        }
        jobs = [client.post("/v1/jobs", json=SPEC | {"name": f"n{n}"}).json()["id"] for n in range(3)]
        self.known = {"job_id": jobs, "which": ["latest", "best", "0", "1"], "worker": ["w", "deadbeef0000"]}

    def path(self, template: str) -> str:
        if self.random.random() < 0.03:
            return "/" + "/".join(self.random.choice(PATHS) for _ in range(self.random.randint(1, 4)))
        return filled(template, Places(self))

    def query(self, method: str, template: str) -> str:
        names = [*self.parameters.get((method, template), []), "x"]
        chosen = [self.random.choice(names) for _ in range(self.random.randint(0, 3))]
        return "&".join(f"{name}={quote(self.random.choice(TEXTS), safe='%')}" for name in chosen)

    def body(self) -> bytes:
        kind = self.random.randrange(4)
        if kind == 0:
            return self.random.choice(RAW)[:20_000]
        if kind == 1:
            return self.random.choice(VALUES).encode("utf-8", "replace")
        if kind == 2:
            names = ("name", "scopes", "days", "queue", "minutes", "url", "spec", "version", "prompt", "files", "key")
            pairs = {self.random.choice(names): self.random.choice(VALUES) for _ in range(3)}
            return ("{" + ", ".join(f'"{name}": {value}' for name, value in pairs.items()) + "}").encode()
        return b""

    def send(self, method: str, template: str, credentials: dict[bytes, bytes]) -> tuple[str, Any]:
        path, query = self.path(template), self.query(method, template)
        headers: dict[bytes, bytes] = {b"content-type": b"application/json", **credentials}
        for _ in range(self.random.randint(0, 2)):
            name = self.random.choice(HEADERS).lower().encode()
            if name not in credentials:
                headers[name] = self.random.choice(ODD)
        url = f"{path}?{query}" if query else path
        body = self.body() if method not in ("GET", "HEAD") else b""
        return url, self.client.request(method, url, content=body, headers=headers, follow_redirects=False)


class Places(dict[str, str]):
    """A value for each place of a path: one that is there, or an odd one."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    def get(self, name: str, otherwise: Any = None) -> Any:
        draw = self._requests.random
        known = self._requests.known.get(name, [])
        return draw.choice(known) if known and draw.random() < 0.6 else draw.choice(PATHS)


def logged(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> str:
    """Everything that was printed and logged, but by the test's own HTTP client."""
    others = [record.getMessage() for record in caplog.records if not record.name.startswith("http")]
    return "\n".join([*capfd.readouterr(), *others])


@pytest.fixture
def fuzzed(redis_url: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A control plane that logs as the real process does, and whose background loops stand still."""
    before = structlog.get_config()
    configure_logging()
    structlog.configure(logger_factory=before["logger_factory"])  # to what is standard error by then
    monkeypatch.setattr(security, "REQUEST_S", 1e-9)
    monkeypatch.setattr(security, "TRY_S", 1e-9)
    settings = Settings(home=tmp_path, redis_url=redis_url, token=OWNER_TOKEN)
    headers = {"Authorization": f"Bearer {OWNER_TOKEN}"}
    app = create_app(settings)
    with TestClient(app, base_url="http://localhost", headers=headers, raise_server_exceptions=False) as client:
        app.state.services.control.stop()
        yield client
    structlog.configure(**before)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("round_", range(84))  # 50,400 requests
def test_no_request_is_answered_with_a_fault_and_no_secret_comes_out(
    round_: int, fuzzed: TestClient, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    caplog.set_level(logging.DEBUG)
    requests = Requests(fuzzed, SEED + round_)
    made = [fuzzed.post("/v1/tokens", json={"name": f"t-{s}", "scopes": [s]}).json() for s in SCOPES]
    link = fuzzed.post(f"/v1/jobs/{requests.known['job_id'][0]}/links", json={}).json()["url"].rpartition("/")[2]
    requests.known["code"] = [link]
    keys = [login_key_of(one["token"]) for one in made] + [login_key_of(OWNER_TOKEN)]
    secrets = [OWNER_TOKEN, link, *(one["token"] for one in made), *keys, *map(cookie_of, keys)]
    own = b"same-origin"
    credentials: list[dict[bytes, bytes]] = [
        {b"authorization": b""},
        {b"authorization": b"Bearer wrong"},
        {b"authorization": b"Basic \xff"},
        {b"authorization": b"", b"cookie": f"{COOKIE}={cookie_of(keys[0])}".encode(), b"sec-fetch-site": own},
        {b"authorization": b"", b"cookie": f"{COOKIE}={cookie_of(keys[-1])}".encode()},
        *({b"authorization": f"Bearer {one['token']}".encode()} for one in made if one["scopes"] != ["admin"]),
        {b"authorization": f"Bearer {OWNER_TOKEN}".encode()},
    ]
    own_tokens, streams = "/v1/tokens/{token_id}", ("/events", "/stream")  # revoked here; end with the job alone
    to_fuzz = [route for route in requests.routes if route[1] != own_tokens and not route[1].endswith(streams)]
    answered = set()
    for number in range(600):
        method, template = requests.random.choice(to_fuzz)
        chosen = requests.random.choice(credentials)
        url, answer = requests.send(method, template, chosen)
        told = (number, method, url, chosen, answer.status_code, answer.text[:300])
        assert answer.status_code < 500 or answer.status_code == NOT_UP.get(template), told
        guarded = template not in OPEN_PATHS and not template.startswith(OPEN_FOLDERS)
        if guarded and chosen in credentials[:3] and url.split("?")[0] not in OPEN_PATHS:
            assert answer.status_code in (401, 404) and (answer.status_code == 401 or not url.startswith("/v1")), told
        answered.add(answer.status_code)
        shown = answer.text + str(answer.headers)
        leaked = [one for one in secrets if one in shown and (one != link or not url.startswith("/shared/"))]
        cookie = template == "/login" and "set-cookie" in answer.headers
        assert leaked == [] or cookie, told
    assert {200, 401, 403, 404, 422} <= answered
    output = logged(capfd, caplog)
    assert [one for one in secrets if one in output] == []


def test_a_traceback_tells_no_secret(
    fuzzed: TestClient, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The log of a bug has the route's path, not the address with a link's code; and no parameters of statements."""
    job = fuzzed.post("/v1/jobs", json=SPEC).json()["id"]
    code = fuzzed.post(f"/v1/jobs/{job}/links", json={}).json()["url"].rpartition("/")[2]
    made = fuzzed.post("/v1/tokens", json={"name": "Ada", "scopes": ["jobs:read"]}).json()["token"]

    def broken(*_: object) -> None:
        raise ZeroDivisionError("the views are broken")

    services = fuzzed.app.state.services  # type: ignore[attr-defined]
    services.jobs.show = broken
    for path, token in ((f"/shared/{code}", ""), (f"/v1/jobs/{job}", made)):
        answer = fuzzed.get(path, headers={"Authorization": f"Bearer {token}"})
        assert answer.status_code == 500 and "broken" not in answer.text
    output = logged(capfd, caplog)
    assert "ZeroDivisionError" in output and "/shared/{code}" in output
    assert [one for one in (code, made, OWNER_TOKEN) if one in output] == []
