"""A seat's place among those that hold stages of a job's model, kept by a thread with its own connection."""

import json
import threading
import time
from collections.abc import Sequence

import structlog
from redis import Redis
from redis.client import PubSub
from redis.exceptions import RedisError

from computeshare.jobspec.machine_needs import size_text
from computeshare.pipeline.chains.mail import LIFE_S, wake
from computeshare.pipeline.chains.placement import (
    MALFORMED,
    Placement,
    StageDemand,
    StageWorker,
    circumstances,
    successor,
)
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import Scripts
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom

EVERY_S = 0.25
ASK_S = 20.0
"""Seconds between two questions whether the connection for news is still there."""
log = structlog.get_logger()


class Membership:
    """Keeps a worker listed as a member, and follows the placement of stages. When members come or go, each of them
    makes the new placement; the first to be stored holds for all.
    """

    def __init__(
        self,
        redis: Redis,
        job_id: str,
        own: StageWorker,
        stages: Sequence[StageDemand],
        most_chains: int,
        stop: threading.Event,
    ) -> None:
        """`stop`: set when the seat is to leave."""
        self._redis, self._scripts, self._keys = redis, Scripts(redis), JobKeys(job_id)
        self.own = own
        """This worker with its memory and speed, as last measured."""
        self.stages, self._most_chains, self._stop = stages, most_chains, stop
        self.current = Placement(0), threading.Event()
        """The placement, and an event that is set once it no longer holds, the job no longer runs, or the seat is to
        leave.
        """
        self.status = "running"
        """Of the job, or `gone` or `fenced`."""
        self._weighed: object = None
        """The placement and the members for which no other placement was worth it."""
        self._news: PubSub = redis.pubsub(ignore_subscribe_messages=True)  # type: ignore[no-untyped-call]
        """A connection by which the broker knows that this process has not ended, and that tells of new placements."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="membership", daemon=True)
        self._remarks = Seldom(REMARK_EVERY_S)

    def __enter__(self) -> "Membership":
        self._news.subscribe(self._keys.here(self.own.session))
        self._renew()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(2 * EVERY_S)

    def look(self) -> None:
        """Renew the entry of this member, read the placement, and make a new one where it is due. Extends the life of
        mail that the worker has not read yet. Raises RedisError.
        """
        members, there = self._told()
        self._redis.expire(self._keys.mail(self.own.session), LIFE_S)
        if self.status != "running":
            return
        old = self.current[0]
        about = old.number, circumstances(members)
        if about != self._weighed:
            if new := successor(old, members, self.stages, self._most_chains):
                self._told(old.number, there, new.dump())  # not stored if a member came or went meanwhile
            else:
                self._weighed = about
        if not self.current[0].chains:
            self._remarks.tell(log.warning, "the model does not fit the workers", about=self._lack(members))

    def _told(self, number: int = 0, present: str = "", plan: str = "") -> tuple[list[StageWorker], str]:
        """The members, but those whose entry is malformed, and all sessions in the broker's words; store a placement
        for exactly those sessions.
        """
        own = self.own
        said = {"room_bytes": own.room_bytes, "rate": own.rate, "listens": self._news.subscribed}
        about = json.dumps(said, separators=(",", ":"))
        status, current, plan_there, there, entries = self._scripts.call(
            "place",
            self._keys,
            worker=own.worker,
            session=own.session,
            about=about,
            number=number,
            present=present,
            plan=plan,
        )
        self.status = status.decode()
        if self.status != "running" or self._stop.is_set():
            self._recall(self.current[1])
        elif current != self.current[0].number:
            outdated, new = self.current[1], Placement.parse(current, plan_there, len(self.stages))
            if new is None:
                log.warning("a malformed placement: it will be replaced", number=current)
            self.current = new or Placement(current), threading.Event()
            self._recall(outdated)
        names = there.decode().split()
        told = [(*name.split(":", 1), entry) for name, entry in zip(names, entries, strict=True)]
        found = (StageWorker.parse(worker, session, entry) for worker, session, entry in told)
        return [one for one in found if one], there.decode()

    def _lack(self, members: Sequence[StageWorker]) -> str:
        """The memory that all stages and the largest stage need, the workers' memory, and a remedy, as text."""
        needs, rooms = [one.bytes for one in self.stages], [one.room_bytes for one in members]
        asked = f"the stages need {size_text(sum(needs))}, the largest {size_text(max(needs))}"
        remedy = (
            "raise strategy.stages"
            if max(needs) > max(rooms, default=0) and sum(needs) <= sum(rooms)
            else "add workers"
        )
        return f"{asked}; there are {size_text(sum(rooms))}: {remedy}, or allow them more memory (--max-memory)"

    def _recall(self, outdated: threading.Event) -> None:
        """End the work under a placement, also where it waits for messages."""
        if not outdated.is_set():
            outdated.set()
            wake(self._redis, self._keys.mail(self.own.session))

    def _keep(self) -> None:
        asked = time.monotonic()
        with self._news:
            while not self._over.is_set():
                try:
                    self._news.get_message(timeout=EVERY_S)
                    self._renew()
                    if time.monotonic() > asked + ASK_S:  # or a connection that the broker has lost would go unnoticed
                        asked = time.monotonic()
                        self._news.ping()
                except RedisError as error:
                    log.warning("placement not renewed", error=str(error))
                    self._over.wait(EVERY_S)

    def _renew(self) -> None:
        try:
            self.look()
        except MALFORMED as error:  # what another worker wrote
            log.warning("placement not renewed", error=str(error))
