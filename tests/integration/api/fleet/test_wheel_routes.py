"""The worker's wheel over HTTP."""

import hashlib

from starlette.testclient import TestClient

from api.fleet.worker_wheel import FILE, PATH, wheel
from computeshare import __version__
from computeshare.protocol.handshake import PROTOCOL


def test_anybody_may_fetch_the_wheel_whose_digest_the_release_names(client: TestClient) -> None:
    nobody = {"Authorization": "Bearer wrong", "Accept-Encoding": "gzip"}
    told = client.get("/v1/worker/release", headers=nobody)
    assert told.json() == {
        "version": __version__,
        "protocol": PROTOCOL,
        "file": FILE,
        "sha256": wheel().sha256,
        "size": len(wheel().content),
    }
    fetched = client.get(PATH, headers=nobody)
    assert hashlib.sha256(fetched.content).hexdigest() == wheel().sha256
    assert "content-encoding" not in fetched.headers and fetched.headers["etag"] == f'"{wheel().sha256}"'
    asked = client.head(PATH, headers=nobody)
    assert (asked.status_code, asked.content, asked.headers["content-length"]) == (200, b"", str(len(wheel().content)))


def test_another_version_is_not_there_and_the_answer_names_the_one_that_is(client: TestClient) -> None:
    answer = client.get("/v1/worker/computeshare_worker-0.0.1-py3-none-any.whl")
    assert answer.status_code == 404 and FILE in answer.json()["detail"]
    assert client.post(PATH).status_code == 405
    assert client.get("/v1/worker/../workers", headers={"Authorization": ""}).status_code == 401
