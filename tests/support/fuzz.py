"""Odd values that an API must withstand, and the check of its answers."""

import json
from typing import Any

import pytest

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


TEXTS = [
    "", "x", "0", "-1", "1e9", "9" * 40, "%00", "%ff", "%ED%A0%80", "..%2f..%2fetc%2fpasswd", "'--", "%22", "a" * 5000,
    "PjE~eA", "PmY6bmFufnM6eA", "Pm46MX5zOng", "PmQ6YX5zOng", "PmR0OjF-czp4", "PA", "Pg", "Pg==", "PmI6_19zOng", "ä",
]  # fmt: skip
