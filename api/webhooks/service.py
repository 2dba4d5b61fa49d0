"""Webhooks: create, show, change, delete, test; their deliveries."""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import httpx2
from sqlalchemy import ColumnElement, Select, func, select
from sqlalchemy.orm import Session, defer
from sqlmodel import col

from api.access.audit import record
from api.database import Database, now_ms
from api.errors import Conflict, InvalidFields, NotFound
from api.jobs.cursors import next_cursor, page
from api.jobs.service import new_id
from api.tables import Delivery, Job, Webhook
from api.webhooks.address_guard import ForbiddenAddress, Networks, Resolve, look_up, reachable
from api.webhooks.schemas import (
    AttemptPublic,
    DeliveryPage,
    DeliveryPublic,
    WebhookChange,
    WebhookList,
    WebhookPublic,
    WebhookRequest,
    WebhookWithSecret,
)
from api.webhooks.signature import new_secret
from api.webhooks.webhook_events import DELIVERY, Notices, drop, newest_event

MOST = 100
"""The most webhooks of a control plane."""


class WebhookService:
    """Creates, reads, changes and deletes webhooks. Methods about one webhook raise NotFound if it does not exist."""

    def __init__(
        self,
        database: Database,
        notices: Notices,
        allowed: Networks,
        resolve: Resolve = look_up,
        hurry: Callable[[str], None] = lambda hook_id: None,
    ) -> None:
        """`hurry` is called with the id of a webhook whose next delivery must not wait, even after failures."""
        self._database, self._notices, self._hurry = database, notices, hurry
        self._allowed, self._resolve = allowed, resolve

    def create(self, request: WebhookRequest) -> WebhookWithSecret:
        """Create a webhook for events from now on. Raises InvalidFields; Conflict: there are `MOST` already."""
        self._check(request.url)
        with self._database.write() as session:
            if (session.scalar(select(func.count()).select_from(Webhook)) or 0) >= MOST:
                raise Conflict(f"there are already {MOST} webhooks, the maximum: delete a webhook first")
            _check_job(session, request.job_id)
            hook = Webhook(
                id=new_id(),
                url=request.url,
                secret=request.secret or new_secret(),
                events=_once(request.events),
                job_id=request.job_id,
                queue=request.queue,
                event_id=newest_event(session),
                created_ms=now_ms(),
            )
            session.add(hook)
            record(session, "webhook.create", hook.id, host=httpx2.URL(hook.url).host, events=hook.events)
            session.flush()
            return _with_secret(hook, 0, hook.secret)

    def list(self) -> WebhookList:
        """All webhooks, newest first."""
        with self._database.read() as session:
            return WebhookList(items=_all(session))

    def show(self, hook_id: str) -> WebhookPublic:
        """A webhook by its id."""
        with self._database.read() as session:
            return _public(_find(session, hook_id), _waiting(session)[hook_id])

    def change(self, hook_id: str, change: WebhookChange) -> WebhookWithSecret:
        """Change the given fields. Events until now are delivered by the old fields. Raises InvalidFields."""
        if change.url is not None:
            self._check(change.url)
        with self._database.write() as session:
            hook = _find(session, hook_id)
            _check_job(session, change.job_id)
            self._notices.spread(session)
            for name, value in _given(change).items():
                setattr(hook, name, value)
            if not hook.active:
                drop(session, hook_id)
            hook.event_id = max(hook.event_id, newest_event(session))
            record(session, "webhook.edit", hook_id, fields=sorted(change.model_fields_set))
            session.flush()
            changed = _with_secret(hook, _waiting(session)[hook_id], hook.secret if change.new_secret else None)
        self._hurry(hook_id)
        return changed

    def delete(self, hook_id: str) -> None:
        """Delete a webhook and its deliveries."""
        with self._database.write() as session:
            hook = _find(session, hook_id)
            record(session, "webhook.delete", hook_id, host=httpx2.URL(hook.url).host)
            session.delete(hook)

    def ping(self, hook_id: str) -> DeliveryPublic:
        """Send a `ping` without content, as a test. Raises Conflict: the webhook is switched off."""
        with self._database.write() as session:
            row = self._notices.ping(session, _active(session, hook_id))
            record(session, "webhook.test", hook_id)
            session.flush()
            delivery = _delivery(row)
        self._hurry(hook_id)
        return delivery

    def deliveries(self, hook_id: str, cursor: str | None = None, limit: int = 50) -> DeliveryPage:
        """A page of a webhook's deliveries, pending ones included, newest first. Raises BadCursor."""
        with self._database.read() as session:
            _find(session, hook_id)
            return _log(session, hook_id, cursor, limit)

    def overview(self, limit: int) -> Sequence[tuple[WebhookPublic, Sequence[DeliveryPublic]]]:
        """All webhooks, newest first, each with its newest `limit` deliveries."""
        with self._database.read() as session:
            rank = func.row_number().over(partition_by=DELIVERY.c.webhook_id, order_by=DELIVERY.c.number.desc())
            ranked = select(DELIVERY.c.number, rank.label("rank")).subquery()
            newest = select(ranked.c.number).where(ranked.c.rank <= limit)
            found: dict[str, list[DeliveryPublic]] = defaultdict(list)
            for row in session.scalars(_deliveries(col(Delivery.number).in_(newest))):
                found[row.webhook_id].append(_delivery(row))
            return [(hook, found[hook.id]) for hook in _all(session)]

    def delivery(self, hook_id: str, delivery_id: str) -> DeliveryPublic:
        """A delivery of a webhook, by its id. Raises NotFound."""
        with self._database.read() as session:
            return _delivery(_find_delivery(session, hook_id, delivery_id))

    def redeliver(self, hook_id: str, delivery_id: str) -> DeliveryPublic:
        """Make a delivery pending again: send now, with a full series of retries. Raises NotFound; Conflict: the
        webhook is switched off.
        """
        with self._database.write() as session:
            _active(session, hook_id)
            row = _find_delivery(session, hook_id, delivery_id)
            row.state, row.tries, row.due_ms = "pending", 0, now_ms()
            record(session, "webhook.redeliver", hook_id, delivery=delivery_id)
            session.flush()
            delivery = _delivery(row)
        self._hurry(hook_id)
        return delivery

    def _check(self, url: str) -> None:
        """Raise InvalidFields if a webhook must not reach this URL's host, or its name has no address."""
        place = httpx2.URL(url)
        try:
            port = place.port or (443 if place.scheme == "https" else 80)
            reachable(place.raw_host.decode(), port, self._allowed, self._resolve)
        except ForbiddenAddress as refused:
            raise _wrong("url", str(refused)) from refused
        except OSError as unknown:
            raise _wrong("url", f"{place.host} is not known here: {unknown.strerror or unknown}") from unknown


def _given(change: WebhookChange) -> dict[str, Any]:
    """The columns to change, with their new values."""
    values = change.model_dump(exclude_unset=True, exclude={"new_secret"})
    given = {name: value for name, value in values.items() if value is not None or name in ("job_id", "queue")}
    if "events" in given:
        given["events"] = _once(given["events"])
    if "active" in given:
        given["trouble"] = None
    return given | ({"secret": new_secret()} if change.new_secret else {})


def _wrong(field: str, text: str) -> InvalidFields:
    return InvalidFields.at(text, field)


def _check_job(session: Session, job_id: str | None) -> None:
    if job_id is not None and session.get(Job, job_id) is None:
        raise _wrong("job_id", "there is no such job")


def _once(events: Any) -> list[str]:
    return list(dict.fromkeys(events))


def _all(session: Session) -> list[WebhookPublic]:
    hooks = session.scalars(select(Webhook).order_by(col(Webhook.created_ms).desc(), col(Webhook.id))).all()
    waiting = _waiting(session)
    return [_public(hook, waiting[hook.id]) for hook in hooks]


def _log(session: Session, hook_id: str, cursor: str | None, limit: int) -> DeliveryPage:
    query = _deliveries(col(Delivery.webhook_id) == hook_id)
    rows = page(session, query, (int,), cursor, limit)
    return DeliveryPage(items=[_delivery(row[0]) for row in rows], next_cursor=next_cursor(rows))


def _deliveries(which: ColumnElement[bool]) -> Select[Delivery]:
    """A query of deliveries, newest first, without their bodies."""
    without_body = defer(col(Delivery.body))  # type: ignore[arg-type] # it is a column, whatever SQLModel says
    return select(Delivery).options(without_body).where(which).order_by(col(Delivery.number).desc())


def _find(session: Session, hook_id: str) -> Webhook:
    hook = session.get(Webhook, hook_id)
    if hook is None:
        raise NotFound(f"there is no webhook {hook_id}", "computeshare webhooks list")
    return hook


def _active(session: Session, hook_id: str) -> Webhook:
    hook = _find(session, hook_id)
    if not hook.active:
        raise Conflict(f"webhook {hook_id} is switched off: switch it on first")
    return hook


def _find_delivery(session: Session, hook_id: str, delivery_id: str) -> Delivery:
    mine = (col(Delivery.id) == delivery_id) & (col(Delivery.webhook_id) == hook_id)
    row = session.scalars(select(Delivery).where(mine)).one_or_none()
    if row is None:
        _find(session, hook_id)
        raise NotFound(f"webhook {hook_id} has no delivery {delivery_id}: old deliveries are removed")
    return row


def _waiting(session: Session) -> Counter[str]:
    """The number of pending deliveries, by webhook."""
    waiting = select(col(Delivery.webhook_id), func.count()).where(col(Delivery.state) == "pending")
    rows = session.execute(waiting.group_by(col(Delivery.webhook_id)))
    return Counter({hook_id: count for hook_id, count in rows})  # noqa: C416 - rows are no pairs to mypy


def _public(hook: Webhook, pending: int) -> WebhookPublic:
    return WebhookPublic.model_validate(_values(hook, pending))


def _with_secret(hook: Webhook, pending: int, secret: str | None) -> WebhookWithSecret:
    return WebhookWithSecret.model_validate(_values(hook, pending) | {"secret": secret})


def _values(hook: Webhook, pending: int) -> dict[str, Any]:
    same = {name: getattr(hook, name) for name in ("id", "url", "events", "job_id", "queue", "active", "trouble")}
    return same | {"pending": pending, "created_at": hook.created_ms}


def _delivery(row: Delivery) -> DeliveryPublic:
    attempts = [{**attempt, "at": attempt["at_ms"]} for attempt in row.attempts]
    return DeliveryPublic(
        id=row.id,
        event=row.event,
        job_id=row.job_id,
        state=row.state,
        attempts=[AttemptPublic.model_validate(attempt) for attempt in attempts],
        created_at=row.created_ms,
        next_attempt_at=row.due_ms if row.state == "pending" else None,
    )
