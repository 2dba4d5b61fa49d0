"""Who is told of what, in what words, and when again; which requests are understood."""

import json
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from api.tables import Job, Webhook
from api.webhooks import page_routes
from api.webhooks.http_delivery import complaint
from api.webhooks.schemas import EventName, WebhookChange, WebhookRequest
from api.webhooks.webhook_events import EVENTS, PAUSES_S, body_of, job_facts, pause_ms, wants


def hook(**given: Any) -> Webhook:
    return Webhook(
        **{"id": "h", "url": "u", "secret": "s", "events": ["failed"], "event_id": 0, "created_ms": 0, **given}
    )


def job(**given: Any) -> Job:
    about = {
        "id": "ab12cd34",
        "name": "",
        "queue": "q",
        "status": "failed",
        "rounds_total": 9,
        "created_ms": 0,
        "updated_ms": 0,
    }
    return Job(**{**about, "spec": {"model": "mlp", "dataset": "digits"}, "version": 3, **given})


def test_every_event_has_its_name_in_the_timeline_and_on_the_page() -> None:
    assert EVENTS.keys() == set(get_args(EventName)) == page_routes.EVENTS.keys()
    assert len(set(EVENTS.values())) == len(set(page_routes.EVENTS.values())) == len(EVENTS)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, True),
        ({"events": ["completed"]}, False),
        ({"job_id": "ab12cd34"}, True),
        ({"job_id": "other000"}, False),
        ({"queue": "q"}, True),
        ({"queue": "other"}, False),
        ({"queue": "q", "job_id": "other000"}, False),
    ],
)
def test_a_webhook_is_told_what_it_asked_for(given: dict[str, Any], wanted: bool) -> None:
    assert wants(hook(**given), "failed", "ab12cd34", "q") is wanted


def test_pauses_grow_from_seconds_to_hours_and_then_it_is_given_up() -> None:
    assert [pause_ms(tries, 0.5) for tries in range(1, 8)] == [
        10_000,
        60_000,
        300_000,
        1_800_000,
        7_200_000,
        21_600_000,
        None,
    ]
    assert all(
        0.9 * pause <= (pause_ms(n, c) or 0) / 1000 <= 1.1 * pause
        for n, pause in enumerate(PAUSES_S, 1)
        for c in (0, 1)
    )


def test_a_notification_says_what_is_known_of_its_job_and_no_more() -> None:
    facts = job_facts(job(error="x" * 5000), "http://here:8000")
    assert (facts["title"], facts["url"]) == ("mlp on digits", "http://here:8000/jobs/ab12cd34")
    assert len(facts["error"]) == 2001
    assert job_facts(job(), None)["url"] is None
    body = json.loads(
        body_of("msg_1", "worker_joined", 1_700_000_000_123, facts, {"worker": "w", "name": "n", "kind": {}})
    )
    assert body["data"] == {"worker": "w", "name": "n", "device": None}
    assert (body["id"], body["type"], body["at"]) == ("msg_1", "worker_joined", "2023-11-14T22:13:20.123+00:00")
    assert body["job"] == facts


@pytest.mark.parametrize(
    ("status", "said"), [(200, None), (204, None), (302, "redirects"), (410, "Gone"), (404, "404"), (500, "500")]
)
def test_only_a_2xx_says_that_it_arrived(status: int, said: str | None) -> None:
    found = complaint(status)
    assert found is None if said is None else found is not None and said in found


@pytest.mark.parametrize(
    "url",
    [
        "", "x", "ftp://example.com", "file:///etc/passwd", "http://", "https:///hook", "//example.com", "http://a:b@example.com",
        "http://user@example.com", "http://example.com:0", "http://example.com:99999",
        "http://example.com:x", "http://example.com/#x", "http://exa mple.com", "http://example.com\r\nx: y", "http://[::1",
        "http://" + "a" * 3000, "javascript:alert(1)",
    ],
    ids=repr,
)  # fmt: skip
def test_an_address_that_is_no_receiver_is_refused(url: str) -> None:
    with pytest.raises(ValidationError) as caught:
        WebhookRequest(url=url)
    assert [error["loc"] for error in caught.value.errors()] == [("url",)]


@pytest.mark.parametrize(
    "url", ["http://example.com", "https://example.com:8443/a/b?c=d", "http://[2606:2800::1]:9000/x"]
)
def test_an_address_of_a_receiver_is_taken(url: str) -> None:
    assert WebhookRequest(url=url).url.startswith(url)
    assert WebhookRequest(url=url).events == ["completed", "failed", "held"]


def test_a_change_that_is_left_out_changes_nothing() -> None:
    assert WebhookChange().model_fields_set == set()
    with pytest.raises(ValidationError):
        WebhookChange(events=[])
