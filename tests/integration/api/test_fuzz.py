"""Whatever is sent, the answer is never a 5xx."""

import json
import random
import socket
import time
from contextlib import ExitStack, suppress
from html.parser import HTMLParser
from typing import Any

import httpx2
import pytest
from redis import Redis
from starlette.testclient import TestClient

from api.http.security import MAX_BODY_BYTES
from api.projection.projector import Projector
from computeshare.jobspec.spec import JobSpec
from computeshare.queue import WorkerInfo, register
from computeshare.settings import Settings
from tests.support.event_stream import Feed
from tests.support.fuzz import RAW, SPEC, TEXTS, VALUES, check
from tests.support.served_api import serving

pytestmark = pytest.mark.slow

PLAN = JobSpec(dataset="digits", model="mlp").plan


@pytest.fixture
def settings(settings: Settings, own_url: str, own: Redis) -> Settings:
    """With a part of the broker in which no other test has left workers, which would stay on the pages for a while."""
    return settings.model_copy(update={"redis_url": own_url})


def test_one_hostile_field_at_a_time(client: TestClient) -> None:
    places = [(name,) for name in SPEC] + [(n, m) for n, part in SPEC.items() if isinstance(part, dict) for m in part]
    for place in places:
        for value in VALUES:
            marked: Any = json.loads(json.dumps(SPEC))
            inner = marked
            for name in place[:-1]:
                inner = inner[name]
            inner[place[-1]] = "@@"
            body = json.dumps(marked).replace('"@@"', value)
            answer = client.post("/v1/jobs", content=body.encode(), headers={"Content-Type": "application/json"})
            check(answer, (place, value[:50]))
    assert client.get("/v1/jobs?limit=500").status_code == 200  # what was taken can be shown


def test_hostile_field_names(client: TestClient) -> None:
    for name in VALUES:
        if name.startswith('"'):
            for body in (f"{{{name}: 1}}", f'{{"dataset": "digits", "model": "mlp", "optimizer": {{{name}: 1}}}}'):
                answer = client.post("/v1/jobs", content=body.encode(), headers={"Content-Type": "application/json"})
                check(answer, body[:50])


@pytest.mark.parametrize("kind", ["application/json", "text/plain", "application/json; charset=latin-1", "", "\xff"])
def test_bodies_that_are_no_spec(kind: str, client: TestClient) -> None:
    for body in RAW:
        headers = {"Content-Type": kind.encode("latin-1")} if kind else {}
        answer = client.post("/v1/jobs", content=body, headers=headers)
        check(answer, body[:50])


def test_hostile_queries(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    routes = {
        "/v1/jobs": ("status", "queue", "cursor", "limit"),
        f"/v1/jobs/{job}/metrics": ("since", "until", "points"),
        f"/v1/jobs/{job}/submissions": ("outcome", "worker", "cursor", "limit"),
        "/": ("status", "cursor"),
        "/login": ("key",),
    }
    for route, names in routes.items():
        for name in names:
            for value in TEXTS:
                check(client.get(f"{route}?{name}={value}"), (route, name, value[:50]))


def test_hostile_paths(client: TestClient) -> None:
    for value in TEXTS:
        for path in (
            "{}",
            "{}/metrics",
            "{}/submissions",
            "{}/ledger",
            "{}/workers",
            "{}/checkpoints",
            "{}/events",
            "{}/versions",
        ):
            check(client.get("/v1/jobs/" + path.format(value)), value[:50])
        check(client.get(f"/jobs/{value}"), value[:50])
        check(client.delete(f"/v1/jobs/{value}"), value[:50])
        check(client.post(f"/v1/jobs/{value}/cancel"), value[:50])
        check(client.post(f"/v1/jobs/{value}/fork", json={"version": value, "spec": {value: value}}), value[:50])
        check(client.get(f"/v1/jobs/abcdefgh/checkpoints/{value}/state"), value[:50])
        check(client.get(f"/v1/jobs/abcdefgh/checkpoints/{value}"), value[:50])
        check(client.get(f"/static/{value}"), value[:50])


def test_hostile_headers(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    client.post(f"/v1/jobs/{job}/cancel")
    values = [b"", b"\xff\xfe", b"a" * 5000, b"-1", b"9" * 50, b"a b", b"\x7f", b'"', b"bytes=0-", b"\xc3\xa4"]
    names = ("Idempotency-Key", "Last-Event-ID", "Range", "If-Range", "If-None-Match", "Accept", "Cookie", "Origin")
    for name in (*names, "Authorization", "Host", "Content-Length", "Sec-Fetch-Site"):
        for value in values:
            for method, path in (("POST", "/v1/jobs"), ("GET", f"/v1/jobs/{job}/events"), ("GET", "/v1/jobs")):
                body = json.dumps(SPEC).encode() if method == "POST" and name != "Content-Length" else b""
                headers: Any = {name.encode(): value, b"content-type": b"application/json"}
                check(client.request(method, path, content=body, headers=headers), (name, value))


def test_random_bytes_in_a_spec(client: TestClient) -> None:
    seeded = random.Random(7)
    valid = json.dumps(SPEC).encode()
    for _ in range(300):
        body = bytearray(valid)
        for _ in range(seeded.randint(1, 4)):
            where = seeded.randrange(len(body))
            body[where : where + seeded.randint(0, 3)] = seeded.randbytes(seeded.randint(0, 3))
        answer = client.post("/v1/jobs", content=bytes(body), headers={"Content-Type": "application/json"})
        check(answer, bytes(body))
    assert client.get("/v1/jobs?limit=500").status_code == 200


@pytest.mark.parametrize("method", ["PUT", "PATCH", "OPTIONS", "TRACE", "BREW", "HEAD"])
def test_other_methods_are_refused(method: str, client: TestClient) -> None:
    for path in ("/v1/jobs", "/v1/jobs/abcdefgh/pause", "/healthz", "/metrics", "/"):
        assert client.request(method, path).status_code in (404, 405)


# What was found, and is to stay mended


def test_an_empty_status_asks_for_any(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    for query in ("status=", "status=&status=queued"):
        assert job in [one["id"] for one in client.get(f"/v1/jobs?limit=500&{query}").json()["items"]]


@pytest.mark.parametrize("body", [b"{", b'{"a":}', b'{"dataset" "digits"}', b"{name: 1}", b"[1,"])
def test_a_body_that_is_no_json_is_the_bodys_fault_and_no_fields(body: bytes, client: TestClient) -> None:
    answer = client.post("/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert [(error["field"], error["pointer"]) for error in answer.json()["errors"]] == [("body", "")]


def test_static_files_are_asked_for_again_and_answered_by_their_etag(client: TestClient) -> None:
    first = client.get("/static/style.css")
    assert first.headers["cache-control"] == "no-cache"
    again = client.get("/static/style.css", headers={"If-None-Match": first.headers["etag"]})
    assert again.status_code == 304


# Hostile workers: what they say of themselves is shown, and is text


HOSTILE = [
    "<script>alert(1)</script>", "\"><img src=x onerror=alert(1)>", "'; DROP TABLE job; --", "{{ 7 * 7 }}",
    "\x00\x1b[31m\r\n",
    "\u202egnirts\u202d", "\ud83d\ude00" * 10, "x" * 10_000, "</script>", "javascript:alert(1)", "&lt;b&gt;",
]  # fmt: skip


class Tags(HTMLParser):
    """The elements and attributes of a page, and its text."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, frozenset[str]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, frozenset(name for name, _ in attrs)))


def tags(html: str) -> set[tuple[str, frozenset[str]]]:
    reader = Tags()
    reader.feed(html)
    return set(reader.found)


def project(client: TestClient, redis: Redis) -> None:
    services = client.app.state.services  # type: ignore[attr-defined]
    Projector(services.database).step(redis)


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_worker_puts_no_element_on_a_page(text: str, client: TestClient, own: Redis) -> None:
    text = text.encode("utf-16", "surrogatepass").decode("utf-16")
    client.app.state.services.control.stop()  # type: ignore[attr-defined]
    html = {"Accept": "text/html"}
    pages = {}
    for name in ("harmless", text):
        short = name[:50]  # what is longer is none of ours, and such a registration is passed over
        about = WorkerInfo("deadbeef0000", name, name, (short,), {short: short}, 1, name, 1, name, name)
        register(own, about)
        job = client.post("/v1/jobs", json=SPEC).json()["id"]
        feed = Feed(own, job, PLAN)
        feed.open()
        feed.send("joined", worker=name, session=name, seat=name, name=name, device=name)
        feed.send("refused", worker=name, nonce=name, base=name, micro_batch=0, reason=name)
        feed.send("banned", worker=name, session=name, strikes=5, reason=name)
        feed.send("left", worker=name, session=name, reason=name, freed=[])
        project(client, own)
        paths = (f"/jobs/{job}", f"/jobs/{job}/parts?table=true", "/workers")
        answers = [client.get(path, headers=html) for path in paths]
        assert [answer.status_code for answer in answers] == [200] * 3
        assert all(len(answer.content) < 200_000 for answer in answers)
        pages[name] = [tags(answer.text) for answer in answers]
        for path in ("workers", "events?after=0", "ledger", "submissions"):
            if not path.startswith("events"):
                check(client.get(f"/v1/jobs/{job}/{path}"), path)
        own.delete("cs:worker:deadbeef0000")
    assert pages[text] == pages["harmless"]


@pytest.mark.parametrize("name", ["<b>", "a/b", "x" * 200, "A" * 12, "deadbeef\n", ""])
def test_a_registration_under_an_id_that_is_none_is_passed_over(name: str, client: TestClient, own: Redis) -> None:
    register(own, WorkerInfo(name, "n", "cpu", ("q",), {}, 1, "host", 1))
    assert name not in [worker["id"] for worker in client.get("/v1/workers").json()["items"]]
    assert client.get("/workers", headers={"Accept": "text/html"}).status_code == 200


# Slow and huge requests, over a real socket


def test_headers_that_trickle_in_hold_nobody_up_and_endless_ones_are_cut(settings: Settings) -> None:
    with serving(settings) as (url, _app), ExitStack() as stack:
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        slow = [stack.enter_context(socket.create_connection(address, 5)) for _ in range(100)]
        for one in slow:
            one.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        started = time.monotonic()
        for _ in range(20):
            for one in slow:
                one.sendall(b"x")
            assert httpx2.get(f"{url}/healthz", timeout=5).status_code == 200
        assert time.monotonic() - started < 10
        endless = slow[0]
        with pytest.raises(OSError):
            for _ in range(200):
                endless.sendall(b"x" * 100_000)


def test_a_huge_body_is_cut_off_long_before_it_has_come(settings: Settings) -> None:
    with serving(settings) as (url, _app):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        head = b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret\r\n"
        with socket.create_connection(address, 5) as told:
            told.sendall(head + b"Content-Length: 1000000000000\r\n\r\n")
            assert told.recv(100).startswith(b"HTTP/1.1 413")
        with socket.create_connection(address, 5) as untold:
            untold.sendall(head + b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
            sent, answer = 0, b""
            untold.settimeout(0.01)
            deadline = time.monotonic() + 10
            while not answer and time.monotonic() < deadline:
                with suppress(TimeoutError, BrokenPipeError, ConnectionResetError):
                    untold.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
                    sent += 65536
                with suppress(TimeoutError):
                    answer = untold.recv(100)
            assert answer.startswith(b"HTTP/1.1 413") and sent < 64 * MAX_BODY_BYTES
