"""Turns events of the timeline into deliveries: selects the webhooks for each event and writes the JSON body.

The timeline serves as the outbox: each event is written in the transaction of its change, and each webhook stores the
id of the last event handled. So code that writes events need not know of webhooks, and no event is lost.
"""

import json
import secrets
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import ColumnElement, func, select, update
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import now_ms
from api.tables import Delivery, Event, Job, Webhook, table
from api.webhooks.schemas import EventName

EVENTS: dict[EventName, str] = {
    "created": "created",
    "paused": "paused",
    "held": "held",
    "resumed": "resumed",
    "retried": "retried",
    "completed": "completed",
    "failed": "failed",
    "cancelled": "cancelled",
    "checkpoint": "checkpoint",
    "scored": "scored",
    "worker_joined": "joined",
    "worker_left": "left",
    "worker_banned": "banned",
}
"""The webhooks' names of events, and the timeline's types."""
PING = "ping"
MOST_PENDING = 1000
"""The most pending deliveries of a webhook; the oldest beyond it are dropped."""
PAUSES_S = (10.0, 60.0, 300.0, 1800.0, 7200.0, 21_600.0)
"""Seconds from each failed attempt to the next; the delivery has failed when the attempt after the last pause fails."""
TEXT_LENGTH = 2000
_FACTS: dict[EventName, tuple[str, ...]] = {
    "held": ("reason",),
    "checkpoint": ("version", "sha256", "bytes"),
    "scored": ("version", "accuracy", "loss"),
    "worker_joined": ("worker", "name", "device"),
    "worker_left": ("worker", "reason"),
    "worker_banned": ("worker", "strikes", "reason"),
}
EVENT, DELIVERY = table(Event), table(Delivery)


def wants(hook: Webhook, name: EventName, job_id: str, queue: str) -> bool:
    """Whether a webhook wants this event of this job: by its events, job and queue."""
    return name in hook.events and hook.job_id in (None, job_id) and hook.queue in (None, queue)


def job_facts(job: Job, address: str | None) -> dict[str, Any]:
    """A notification's facts about its job, as of now; `address` is the control plane's URL, None if not known."""
    return {
        "id": job.id,
        "title": job.title,
        "status": job.status,
        "version": job.version,
        "rounds_total": job.rounds_total,
        "accuracy": job.accuracy,
        "test_loss": job.test_loss,
        "tested": job.tested,
        "reason": _short(job.reason),
        "error": _short(job.error),
        "url": f"{address}/jobs/{job.id}" if address else None,
    }


def body_of(message_id: str, kind: str, at_ms: int, job: Mapping[str, Any] | None, data: Mapping[str, Any]) -> str:
    """A notification's body as JSON. Of the event's `data`, only the fields in `_FACTS` are included."""
    at = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    facts = {name: data.get(name) for name in _FACTS.get(kind, ())}  # type: ignore[call-overload]
    content = {"id": message_id, "type": kind, "at": at, "job": job, "data": facts}
    return json.dumps(content, separators=(",", ":"))


def pause_ms(tries: int, chance: float) -> int | None:
    """Milliseconds to the next attempt after `tries` failed attempts; None: there is none, the delivery has failed.

    Args:
        chance: a random number from 0 to 1, which varies the pause by up to 10 % either way.
    """
    if tries > len(PAUSES_S):
        return None
    return int(1000 * PAUSES_S[tries - 1] * (0.9 + 0.2 * chance))


def newest_event(session: Session) -> int:
    """The newest event's id, of all jobs; 0 if there is none."""
    return session.scalar(select(func.max(EVENT.c.id))) or 0


class Notices:
    """Writes deliveries, within the caller's transaction."""

    def __init__(self, address: Callable[[], str | None] = lambda: None) -> None:
        """`address` returns the control plane's URL, for links; None: it is not known."""
        self._address = address

    def spread(self, session: Session) -> int:
        """Write a delivery for each new event and each active webhook that wants it; returns their number."""
        address = self._address()  # read from a file: once, and before the write lock is held
        newest = newest_event(session)
        hooks = session.scalars(select(Webhook).where(col(Webhook.active), col(Webhook.event_id) < newest)).all()
        if not hooks:
            return 0
        written = [
            _add(session, hook, name, job.id, event.at_ms, job_facts(job, address), event.data)
            for hook, name, event, job in self._wanted(session, hooks)
        ]
        for hook in hooks:
            hook.event_id = newest
        session.flush()
        for hook_id in {delivery.webhook_id for delivery in written}:
            self._drop_oldest(session, hook_id)
        return len(written)

    def ping(self, session: Session, hook: Webhook) -> Delivery:
        """Write a delivery of a `ping`, a notification without content."""
        return _add(session, hook, PING, None, now_ms(), None, {})

    def _wanted(self, session: Session, hooks: Iterable[Webhook]) -> list[tuple[Webhook, EventName, Any, Job]]:
        """The deliveries to write, as (webhook, the event's name for webhooks, event, job)."""
        names = {EVENTS[name]: name for hook in hooks for name in hook.events if name in EVENTS}
        since = min(hook.event_id for hook in hooks)
        news = select(EVENT).where(EVENT.c.id > since, EVENT.c.type.in_(names)).order_by(EVENT.c.id)
        events = session.execute(news).all()
        ids = {event.job_id for event in events}
        jobs = {job.id: job for job in session.scalars(select(Job).where(col(Job.id).in_(ids)))} if ids else {}
        return [
            (hook, names[event.type], event, jobs[event.job_id])
            for event in events
            for hook in hooks
            if event.id > hook.event_id and wants(hook, names[event.type], event.job_id, jobs[event.job_id].queue)
        ]

    @staticmethod
    def _drop_oldest(session: Session, hook_id: str) -> None:
        mine = (DELIVERY.c.webhook_id == hook_id) & (DELIVERY.c.state == "pending")
        surplus = select(DELIVERY.c.number).where(mine).order_by(DELIVERY.c.number.desc()).offset(MOST_PENDING)
        drop(session, hook_id, DELIVERY.c.number.in_(surplus.scalar_subquery()))


def drop(session: Session, hook_id: str, *which: ColumnElement[bool]) -> None:
    """Mark a webhook's pending deliveries as dropped: all, or those that `which` selects."""
    waiting = update(DELIVERY).where(DELIVERY.c.webhook_id == hook_id, DELIVERY.c.state == "pending", *which)
    session.execute(waiting.values(state="dropped"))


def _add(
    session: Session,
    hook: Webhook,
    kind: str,
    job_id: str | None,
    at_ms: int,
    job: Mapping[str, Any] | None,
    data: Mapping[str, Any],
) -> Delivery:
    message_id, now = f"msg_{secrets.token_hex(12)}", now_ms()
    body = body_of(message_id, kind, at_ms, job, data)
    delivery = Delivery(
        id=message_id,
        webhook_id=hook.id,
        event=kind,
        job_id=job_id,
        body=body,
        state="pending",
        created_ms=now,
        due_ms=now,
    )
    session.add(delivery)
    return delivery


def _short(text: str | None) -> str | None:
    return text if text is None or len(text) <= TEXT_LENGTH else text[:TEXT_LENGTH] + "…"
