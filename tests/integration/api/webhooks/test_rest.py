"""Webhooks over REST, on their page and from the command line, with the whole control plane behind them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook
from starlette.testclient import TestClient

from api.main import create_app
from api.webhooks import service
from api.webhooks.signature import new_secret, require_secret
from computeshare.cli.main import app as command_line
from computeshare.settings import Settings
from computeshare.terminal.command import run
from tests.support.fuzz import RAW, TEXTS, VALUES, check
from tests.support.html import HOSTILE, assert_allowed_by_policy
from tests.support.served_api import serving
from tests.support.wait import wait_until
from tests.support.webhook_receiver import Receiver, receiving

SPEC: dict[str, Any] = {"dataset": "digits", "model": "mlp", "rounds": 30, "queue": "hooked"}


@pytest.fixture
def settings(tmp_path: Path, redis_url: str) -> Settings:
    return Settings(
        home=tmp_path, redis_url=redis_url, token="secret", webhook_networks="127.0.0.1", url="http://me.test"
    )


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


def create(client: TestClient, url: str, **given: Any) -> dict[str, Any]:
    answer = client.post("/v1/webhooks", json={"url": url, **given})
    assert answer.status_code == 201, answer.text
    return dict(answer.json())


def delivered(client: TestClient, hook: str) -> list[dict[str, Any]]:
    """The log of a webhook once nothing waits any more."""

    def settled() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = client.get(f"/v1/webhooks/{hook}/deliveries").json()["items"]
        return found if all(one["state"] != "pending" for one in found) else []

    return list(wait_until(settled))


def test_what_happens_in_a_job_reaches_the_receiver_by_itself(client: TestClient, receiver: Receiver) -> None:
    hook = create(client, receiver.url, events=["created", "paused", "cancelled"], queue="hooked")
    wait_until(lambda: client.get("/readyz").json()["dependencies"]["control"]["ok"])
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    for verb in ("pause", "cancel"):
        client.post(f"/v1/jobs/{job}/{verb}")
    wait_until(lambda: len(receiver.heard) == 3)
    contents = [Webhook(hook["secret"]).verify(heard.body, heard.headers) for heard in receiver.heard]
    assert {content["type"] for content in contents} == {"created", "paused", "cancelled"}
    assert {content["job"]["url"] for content in contents} == {f"http://me.test/jobs/{job}"}
    log = delivered(client, hook["id"])
    assert [one["event"] for one in log] == ["cancelled", "paused", "created"]
    assert all(one["attempts"][0]["status"] == 204 and one["attempts"][0]["error"] is None for one in log)


def test_the_secret_is_shown_once_and_stands_in_no_other_answer(client: TestClient, receiver: Receiver) -> None:
    hook = create(client, receiver.url)
    assert require_secret(hook["secret"]) and hook["events"] == ["completed", "failed", "held"]
    own = new_secret()
    given = create(client, receiver.url, secret=own)
    assert given["secret"] == own
    client.post(f"/v1/webhooks/{hook['id']}/test")
    delivered(client, hook["id"])
    place = f"/v1/webhooks/{hook['id']}"
    answers = [client.get(path) for path in ("/v1/webhooks", place, f"{place}/deliveries", "/webhooks", "/metrics")]
    answers.append(client.patch(place, json={"events": ["failed"]}))
    assert all(answer.status_code == 200 for answer in answers)
    assert [text for answer in answers if (text := answer.text) and (hook["secret"] in text or own in text)] == []
    renewed = client.patch(place, json={"new_secret": True}).json()["secret"]
    assert renewed not in (None, hook["secret"])
    client.post(f"{place}/test")
    wait_until(lambda: len(receiver.heard) == 2)
    assert Webhook(renewed).verify(receiver.heard[1].body, receiver.heard[1].headers)["type"] == "ping"


def test_the_database_with_the_secrets_is_its_owners_alone(client: TestClient, tmp_path: Path) -> None:
    assert [oct(path.stat().st_mode & 0o777) for path in tmp_path.glob("computeshare.db*")] == ["0o600"] * 3


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"url": "http://10.0.0.1/x"}, "url", "COMPUTESHARE_WEBHOOK_NETWORKS"),
        ({"url": "http://[::ffff:127.0.0.1]/"}, "url", "not on the public internet"),
        ({"url": "http://169.254.169.254/latest"}, "url", "not on the public internet"),
        ({"url": "http://2130706434/"}, "url", "127.0.0.2"),
        ({"url": "http://nowhere.invalid/"}, "url", "is not known here"),
        ({"url": "gopher://8.8.8.8/"}, "url", "https://example.com/hook"),
        ({"url": "http://u:p@8.8.8.8/"}, "url", "must not contain"),
        ({"url": 5}, "url", "must be a string"),
        ({"events": []}, "events", "at least 1"),
        ({"events": ["exploded"]}, "events.0", "'completed'"),
        ({"job_id": "nosuch00"}, "job_id", "no such job"),
        ({"secret": "short"}, "secret", "whsec_"),
        ({"urls": []}, "urls", "allowed: events, job_id, queue, secret, url"),
    ],
)
def test_a_request_that_cannot_be_carried_out_names_the_field(
    given: dict[str, Any], field: str, said: str, client: TestClient
) -> None:
    answer = client.post("/v1/webhooks", json={"url": "http://127.0.0.1:9/", **given})
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["field"] == field and said in error["detail"], error
    assert client.get("/v1/webhooks").json() == {"items": []}


def test_the_fields_that_a_fork_may_have_are_named_too(client: TestClient) -> None:
    job = client.post("/v1/jobs", json=SPEC).json()["id"]
    (error,) = client.post(f"/v1/jobs/{job}/fork", json={"versoin": 3}).json()["errors"]
    assert error["detail"] == "unknown field; allowed: optimizer, spec, version"


def test_a_change_changes_what_is_given_and_null_lifts_a_condition(client: TestClient, receiver: Receiver) -> None:
    hook = create(client, receiver.url, queue="one")
    place = f"/v1/webhooks/{hook['id']}"
    for change, after in (
        ({"events": ["scored", "scored", "failed"]}, {"events": ["scored", "failed"], "queue": "one"}),
        ({"queue": None}, {"queue": None, "events": ["scored", "failed"]}),
        ({"active": False}, {"active": False}),
        ({"url": receiver.url + "/other"}, {"url": receiver.url + "/other", "active": False}),
        ({"active": True, "url": None}, {"active": True, "url": receiver.url + "/other"}),
    ):
        assert client.patch(place, json=change).status_code == 200
        shown = client.get(place).json()
        assert {name: shown[name] for name in after} == after
    assert client.patch(place, json={"url": "http://10.0.0.1/"}).status_code == 422


def test_one_that_is_switched_off_is_neither_tried_nor_told(client: TestClient, receiver: Receiver) -> None:
    hook = create(client, receiver.url)["id"]
    ping = client.post(f"/v1/webhooks/{hook}/test").json()["id"]
    delivered(client, hook)
    client.patch(f"/v1/webhooks/{hook}", json={"active": False})
    for path in ("test", f"deliveries/{ping}/redeliver"):
        answer = client.post(f"/v1/webhooks/{hook}/{path}")
        assert answer.status_code == 409 and "switched off" in answer.json()["detail"]


def test_the_log_has_pages_and_what_was_sent_can_be_sent_again(client: TestClient, receiver: Receiver) -> None:
    hook = create(client, receiver.url)["id"]
    pings = [client.post(f"/v1/webhooks/{hook}/test").json()["id"] for _ in range(5)]
    delivered(client, hook)
    seen, cursor = [], ""
    while cursor is not None:
        page = client.get(f"/v1/webhooks/{hook}/deliveries?limit=2&cursor={cursor}").json()
        seen += [one["id"] for one in page["items"]]
        cursor = page["next_cursor"]
    assert seen == pings[::-1]
    again = client.post(f"/v1/webhooks/{hook}/deliveries/{pings[0]}/redeliver")
    assert again.status_code == 202 and again.json()["state"] == "pending"
    wait_until(lambda: len(receiver.heard) == 6)
    assert receiver.heard[5].headers["webhook-id"] == pings[0]
    assert client.get(f"/v1/webhooks/{hook}/deliveries?cursor=nonsense").status_code == 422
    assert client.get(f"/v1/webhooks/{hook}/deliveries/{pings[1]}").json()["id"] == pings[1]


def test_what_is_not_there_is_a_404(client: TestClient, receiver: Receiver) -> None:
    hook, other = create(client, receiver.url)["id"], create(client, receiver.url)["id"]
    ping = client.post(f"/v1/webhooks/{hook}/test").json()["id"]
    missing = [
        client.get("/v1/webhooks/nosuch00"),
        client.patch("/v1/webhooks/nosuch00", json={}),
        client.delete("/v1/webhooks/nosuch00"),
        client.post("/v1/webhooks/nosuch00/test"),
        client.get("/v1/webhooks/nosuch00/deliveries"),
        client.get(f"/v1/webhooks/{other}/deliveries/{ping}"),
        client.post(f"/v1/webhooks/{other}/deliveries/{ping}/redeliver"),
    ]
    assert [answer.status_code for answer in missing] == [404] * len(missing)
    assert client.delete(f"/v1/webhooks/{hook}").status_code == 204
    assert client.get(f"/v1/webhooks/{hook}").status_code == 404


def test_there_is_a_most_of_them(client: TestClient, receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "MOST", 2)
    create(client, receiver.url)
    create(client, receiver.url)
    answer = client.post("/v1/webhooks", json={"url": receiver.url})
    assert answer.status_code == 409 and "delete a webhook first" in answer.json()["detail"]


@pytest.mark.slow
def test_hostile_requests_are_refused_and_never_a_5xx(client: TestClient) -> None:
    headers = {"Content-Type": "application/json"}
    hook = create(client, "http://127.0.0.1:9/")["id"]
    for method, path in (("POST", "/v1/webhooks"), ("PATCH", f"/v1/webhooks/{hook}")):
        for field in ("url", "events", "job_id", "queue", "secret", "active", "new_secret"):
            for value in VALUES:
                body = f'{{"url": "http://127.0.0.1:9/", "{field}": {value}}}'
                check(client.request(method, path, content=body.encode(), headers=headers), (field, value[:50]))
        for raw in RAW:
            check(client.request(method, path, content=raw, headers=headers), raw[:50])
    for text in TEXTS:
        for path in ("{}", "{}/deliveries", f"{hook}/deliveries/{{}}", f"{hook}/deliveries?cursor={{}}"):
            check(client.get("/v1/webhooks/" + path.format(text)), text[:50])


# The page


def test_the_page_shows_who_is_told_of_what_and_what_was_delivered(client: TestClient, receiver: Receiver) -> None:
    empty = client.get("/webhooks")
    assert "computeshare webhooks create" in empty.text
    receiver.statuses = [500]
    hook = create(client, receiver.url, queue=HOSTILE[:64], events=["scored"])
    client.post(f"/v1/webhooks/{hook['id']}/test")
    delivered(client, hook["id"])
    off = create(client, receiver.url + "?<b>")["id"]
    client.patch(f"/v1/webhooks/{off}", json={"active": False})
    page = client.get("/webhooks")
    assert page.status_code == 200
    assert_allowed_by_policy(page.text)
    for word in (receiver.url, "Version scored", "Ping", "answered 500", "Switched off", "Send again"):
        assert word in page.text
    for word in (f"webhooks test {hook['id']}", f"webhooks delete {hook['id']}"):
        assert word in page.text
    assert "<script>alert" not in page.text and "<b>" not in page.text


# The command line


def test_a_webhook_from_its_creation_to_its_removal_by_commands(
    settings: Settings, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: str, code: int = 0) -> Any:
        assert run(command_line, ["webhooks", *arguments, "--json"]) == code
        return json.loads(capsys.readouterr().out)

    def shown(*arguments: str) -> str:
        assert run(command_line, ["webhooks", *arguments]) == 0
        return capsys.readouterr().out

    with serving(settings) as (url, _app):
        monkeypatch.setenv("COMPUTESHARE_URL", url)
        monkeypatch.setenv("COMPUTESHARE_TOKEN", "secret")
        assert "no webhooks here" in shown("list")
        hook = command("create", receiver.url, "--event", "failed", "--event", "held", "--queue", "q")
        assert (hook["events"], hook["queue"]) == (["failed", "held"], "q") and hook["secret"]
        assert "secret  whsec_" in shown("create", receiver.url)
        assert "nothing has been sent yet" in shown("deliveries", hook["id"])
        ping = command("test", hook["id"])
        assert ping["state"] == "delivered" and len(receiver.heard) == 1
        receiver.statuses = [500]
        assert command("test", hook["id"], code=1)["attempts"][0]["error"] == "answered 500"
        assert command("redeliver", hook["id"], ping["id"], code=1)["attempts"][1]["status"] == 500
        assert [one["event"] for one in command("deliveries", hook["id"])["items"]] == ["ping", "ping"]
        assert command("disable", hook["id"])["active"] is False and command("enable", hook["id"])["active"] is True
        for text in (shown("list"), shown("show", hook["id"])):
            assert hook["id"] in text and receiver.url in text
        assert "answered 500" in shown("deliveries", hook["id"])
        assert command("delete", hook["id"], "--yes") == {"id": hook["id"], "deleted": True}
        assert run(command_line, ["webhooks", "show", hook["id"]]) == 2
        assert "there is no webhook" in capsys.readouterr().err
        assert run(command_line, ["webhooks", "create", "http://10.1.2.3/"]) == 2
        assert "url: " in capsys.readouterr().err


def test_a_setting_that_names_no_network_stops_the_control_plane_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="COMPUTESHARE_WEBHOOK_NETWORKS"):
        create_app(Settings(home=tmp_path, webhook_networks="everywhere"))
