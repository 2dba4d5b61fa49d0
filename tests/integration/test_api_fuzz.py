"""Whatever is sent, the answer is never a 5xx."""

import json
import random
from typing import Any

import pytest
from starlette.testclient import TestClient

SPEC: dict[str, Any] = {
    "name": "n",
    "queue": "q",
    "dataset": "digits",
    "model": "mlp",
    "input": [1, 8, 8],
    "micro_batch": 32,
    "micro_batches_per_round": 4,
    "rounds": 5,
    "strategy": {"kind": "sync", "backup": True, "combine": "mean", "max_norm": 1.0},
    "optimizer": {"name": "Adam", "lr": 0.1, "betas": [0.9, 0.99]},
    "lr_scaling": "linear",
    "codec": {"up": "float16", "down": "float32"},
    "workers": {"min": 1, "max": 2},
    "seed": 0,
    "threads": 1,
    "checkpoint_every": 10,
    "evaluate_every": 10,
}
VALUES = [
    "null", "true", "-1", "0", "1.5", "1e400", "-1e400", "NaN", "Infinity", "1" * 400, "9" * 5000, str(2**63), '""',
    '"\\u0000"', '"\\ud800"', '"ä\\u2028"', '"' + "x" * 2000 + '"', "[]", "{}", "[[[]]]", '{"a": {"b": []}}',
    '{"\\ud800": 1}', "[1, 8, 8, 8]", "[3, 1e9, 1e9]", "[" * 500 + "]" * 500, '{"name": "SGD", "lr": "fast"}',
]  # fmt: skip
RAW = [
    b"", b"\xff\xfe", b"{", b"null", b"[]", b'"x"', b"\x00", b"{" * 10_000, b"[" * 100_000, b'{"a":' * 50_000,
    b'{"dataset": "\xff"}', b"9" * 10_000, json.dumps(SPEC).encode("utf-16"), json.dumps(SPEC).encode("utf-8-sig"),
]  # fmt: skip


def check(answer: Any, told: object) -> None:
    assert answer.status_code < 500, told
    if answer.status_code >= 400:
        assert answer.headers["content-type"] in ("application/problem+json", "text/html; charset=utf-8"), told
        answer.content.decode()
    if answer.headers["content-type"] == "application/problem+json":
        problem = json.loads(answer.content, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))
        assert problem["status"] == answer.status_code and problem["title"], told


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


TEXTS = [
    "", "x", "0", "-1", "1e9", "9" * 40, "%00", "%ff", "%ED%A0%80", "..%2f..%2fetc%2fpasswd", "'--", "%22", "a" * 5000,
    "PjE~eA", "PmY6bmFufnM6eA", "Pm46MX5zOng", "PmQ6YX5zOng", "PmR0OjF-czp4", "PA", "Pg", "Pg==", "PmI6_19zOng", "ä",
]  # fmt: skip


def test_hostile_queries(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    routes = {
        "/v1/jobs": ("status", "queue", "cursor", "limit"),
        f"/v1/jobs/{job}/metrics": ("since", "points"),
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
    for path in ("/v1/jobs", "/v1/jobs/abcdefgh", "/healthz", "/metrics", "/"):
        assert client.request(method, path).status_code in (404, 405)
