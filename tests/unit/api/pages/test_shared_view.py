"""What a link shows of a job: what is listed, and nothing that came later."""

from datetime import UTC, datetime
from typing import Any

from api.pages.shared_view import EVENTS, FIELDS, shared_event, shared_events
from api.schemas import EventPublic, JobPublic
from api.text_format import told

HIDDEN = {
    "id", "name", "queue", "priority", "spec", "reason", "error", "durable_version", "weights_sha256", "parameters",
    "forked_from", "chosen", "reducer", "accepted", "stale", "duplicate", "lease_lost", "fenced", "refused",
    "reassigned", "residual_resets", "audited", "confirmed",
}  # fmt: skip


def event(kind: str, **data: Any) -> EventPublic:
    return EventPublic(id=1, type=kind, at=datetime.now(UTC), data=data)


def test_every_field_that_is_shown_is_one_and_what_names_somebody_is_not() -> None:
    assert JobPublic.model_fields.keys() >= FIELDS
    assert JobPublic.model_fields.keys() >= HIDDEN and not HIDDEN & FIELDS


def test_what_an_event_says_of_machines_and_people_is_left_out() -> None:
    secret = {"worker": "w", "name": "mac", "host": "h", "by": "Ada", "reason": "r", "error": "e", "device": "d"}
    for kind in EVENTS:
        shown = shared_event(event(kind, **secret, version=3))
        assert shown is not None and not shown.data.keys() & secret.keys()
    kinds = ("joined", "left", "reducer", "banned", "refused", "unfit", "recalled", "edited", "unbanned", "held", "new")
    assert shared_events([event(kind, **secret) for kind in kinds]) == []


def test_what_is_left_makes_a_sentence() -> None:
    shown = shared_events(
        [event("paused", by="Ada"), event("failed", error="x"), event("checkpoint", version=3, bytes=9)]
    )
    assert [told(one, {}) for one in shown] == ["Paused", "Failed", "Checkpoint of version 3, 9 B"]
