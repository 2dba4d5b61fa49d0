"""Delivers notifications with retries: at least once, also across a crash, until a retry succeeds or none is left.

Each webhook is served by one thread at a time, so that a slow receiver delays no other webhook.
"""

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import structlog
from sqlalchemy import delete, func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.database import Database, now_ms
from api.tables import JOB, Delivery, Webhook, table
from api.webhooks.http_delivery import GONE, DeliveryOutcome, Poster
from api.webhooks.signature import signed
from api.webhooks.webhook_events import DELIVERY, EVENT, EVENTS, PING, Notices, drop, newest_event, pause_ms
from computeshare import __version__
from computeshare.runtime.failpoints import failpoint

MOST_AT_ONCE = 16
"""The most webhooks served at the same time."""
TURN_S = 20.0
"""Seconds after which a webhook's thread ends, so that other webhooks get their turn."""
REST_MS = 60_000
"""The longest pause of a webhook after failures in a row: 0.5 s after the first, doubled after each further failure."""
TIDY_S = 600.0
KEPT = 500
"""Deliveries kept per webhook, besides pending ones."""
ATTEMPTS_KEPT = 20
CLOSING_S = 2.0
WEBHOOK = table(Webhook)

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class DueNotification:
    """A notification to send now, with its webhook's URL and secret."""

    number: int
    id: str
    body: str
    url: str
    secret: str


class Notifier:
    """Turns events into deliveries and sends them; a background loop calls `step`."""

    def __init__(self, database: Database, notices: Notices, poster: Poster) -> None:
        self._database, self._notices, self._poster = database, notices, poster
        self._stop = threading.Event()
        self._serving: dict[str, threading.Thread] = {}
        self._failures: Counter[str] = Counter()
        self._resting: dict[str, int] = {}
        self._seen = -1
        self._tidied = time.monotonic()

    def step(self) -> None:
        """Write deliveries for new events, and start a thread for each webhook with a due delivery."""
        if self._is_news():
            with self._database.write() as session:
                self._notices.spread(session)
        failpoint("before_notice")
        self._serving = {hook: thread for hook, thread in self._serving.items() if thread.is_alive()}
        for hook in self._due():
            if len(self._serving) >= MOST_AT_ONCE:
                break
            if hook not in self._serving and self._resting.get(hook, 0) <= now_ms():
                self._serving[hook] = threading.Thread(target=self._serve, args=(hook,), name="webhook", daemon=True)
                self._serving[hook].start()
        if time.monotonic() - self._tidied > TIDY_S:
            self._tidied = time.monotonic()
            self.tidy()

    def hurry(self, hook: str) -> None:
        """End a webhook's pause after failures: a delivery succeeded, or a user asked for one."""
        self._failures.pop(hook, None)
        self._resting.pop(hook, None)

    def close(self) -> None:
        """Start no further delivery, and wait up to `CLOSING_S` for deliveries under way. A delivery cut off is sent
        again later.
        """
        self._stop.set()
        until = time.monotonic() + CLOSING_S
        for thread in self._serving.values():
            thread.join(max(0.0, until - time.monotonic()))

    def tidy(self) -> int:
        """Delete all but the newest `KEPT` finished deliveries of each webhook, and webhooks of deleted jobs without a
        pending delivery. Returns the number of deliveries deleted.
        """
        ranked = select(
            DELIVERY.c.number,
            func.row_number().over(partition_by=DELIVERY.c.webhook_id, order_by=DELIVERY.c.number.desc()).label("rank"),
        ).where(DELIVERY.c.state != "pending")
        rows = ranked.subquery()
        old = select(rows.c.number).where(rows.c.rank > KEPT).scalar_subquery()
        jobless = WEBHOOK.c.job_id.is_not(None) & WEBHOOK.c.job_id.not_in(select(JOB.c.id))
        waiting = select(DELIVERY.c.webhook_id).where(DELIVERY.c.state == "pending")
        with self._database.writing() as connection:
            connection.execute(delete(WEBHOOK).where(jobless, WEBHOOK.c.id.not_in(waiting)))
            return connection.execute(delete(DELIVERY).where(DELIVERY.c.number.in_(old))).rowcount

    def _is_news(self) -> bool:
        """Whether there are new events of a type that a webhook wants. (Most are not; this check writes nothing.)"""
        with self._database.read() as session:
            newest = newest_event(session)
            if newest == self._seen:
                return False
            hooks = session.scalars(select(Webhook).where(col(Webhook.active))).all()
            kinds = {EVENTS[name] for hook in hooks for name in hook.events if name in EVENTS}
            since = max(self._seen, min((hook.event_id for hook in hooks), default=newest))
            wanted = select(EVENT.c.id).where(EVENT.c.id > since, EVENT.c.type.in_(kinds)).limit(1)
            found = bool(kinds) and session.execute(wanted).first() is not None
        if not found:
            self._seen = newest
        return found

    def _due(self) -> list[str]:
        """The webhooks with a due delivery, longest overdue first."""
        due = (DELIVERY.c.state == "pending") & (DELIVERY.c.due_ms <= now_ms())
        first = func.min(DELIVERY.c.due_ms)
        with self._database.engine.connect() as connection:
            query = select(DELIVERY.c.webhook_id).where(due).group_by(DELIVERY.c.webhook_id).order_by(first)
            return list(connection.scalars(query))

    def _serve(self, hook: str) -> None:
        """Send a webhook's due deliveries until an attempt fails or `TURN_S` is over."""
        until = time.monotonic() + TURN_S
        try:
            while not self._stop.is_set() and time.monotonic() < until and (due := self._next(hook)):
                outcome = self._send(due)
                failpoint("after_notice")
                self._note(due, outcome)
                if not outcome.delivered:
                    self._rest(hook)
                    return
                self.hurry(hook)
        except Exception as error:  # retried later: without a pause, it might send endlessly
            self._resting[hook] = now_ms() + REST_MS
            log.warning("notifications rest", webhook=hook, error=str(error)[:300], exc_info=error)

    def _rest(self, hook: str) -> None:
        self._failures[hook] += 1
        self._resting[hook] = now_ms() + min(REST_MS, 500 * 2 ** min(self._failures[hook] - 1, 10))

    def _next(self, hook: str) -> DueNotification | None:
        mine = (col(Webhook.id) == hook) & col(Webhook.active) & (col(Delivery.state) == "pending")
        columns = (DELIVERY.c.number, DELIVERY.c.id, DELIVERY.c.body, col(Webhook.url), col(Webhook.secret))
        query = select(*columns).join(Webhook, col(Webhook.id) == col(Delivery.webhook_id))
        query = query.where(mine, col(Delivery.due_ms) <= now_ms())
        with self._database.read() as session:
            row = session.execute(query.order_by(col(Delivery.due_ms), col(Delivery.number)).limit(1)).one_or_none()
        return DueNotification(*row) if row else None

    def _send(self, due: DueNotification) -> DeliveryOutcome:
        headers = {"Content-Type": "application/json", "User-Agent": f"computeshare/{__version__}"}
        headers |= signed(due.id, int(time.time()), due.body, due.secret)
        return self._poster.post(due.url, headers, due.body.encode())

    def _note(self, due: DueNotification, outcome: DeliveryOutcome) -> None:
        with self._database.write() as session:
            if row := session.get(Delivery, due.number):  # else it was deleted meanwhile
                note(session, row, due.url, outcome, now_ms(), random.random())


def note(session: Session, row: Delivery, url: str, outcome: DeliveryOutcome, now: int, chance: float) -> None:
    """Store an attempt to deliver to `url`, the delivery's new state and the webhook's trouble."""
    attempt: dict[str, Any] = {"status": outcome.status, "error": outcome.error, "seconds": round(outcome.seconds, 3)}
    row.attempts = [*row.attempts, {"at_ms": now, **attempt}][-ATTEMPTS_KEPT:]
    row.tries += 1
    pause = None if row.event == PING else pause_ms(row.tries, chance)
    if outcome.delivered:
        row.state = "delivered"
    elif row.state == "pending" and pause is None:
        row.state = "failed"
    elif row.state == "pending":
        row.due_ms = now + (pause or 0)
    hook = session.get(Webhook, row.webhook_id)
    if hook is None or hook.url != url:  # the address was changed meanwhile: the outcome does not concern the new one
        return
    hook.trouble = outcome.error
    if outcome.status == GONE:
        hook.active = False
        session.flush()
        drop(session, hook.id)
