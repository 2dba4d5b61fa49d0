"""Reads parts of the next version in a thread with connections of its own, while this worker computes and sends."""

import threading
from collections.abc import Sequence
from dataclasses import replace

import structlog
from redis.exceptions import RedisError

from computeshare.errors import Interrupted
from computeshare.protocol.worker_session import NO_DRAFT, Draft, WorkerSession
from computeshare.tensors.layout import Layout
from computeshare.transport.connections import is_next_door
from computeshare.types import Blob
from computeshare.worker.seat.seat_context import SeatContext

WAIT_MS = 1000
TOLD = 512
"""How many parts to remember of drafts that are not wanted, or not yet."""
log = structlog.get_logger()


def drafts_of(seat: SeatContext, layout: Layout) -> "DraftReader | None":
    """A reader of parts of the next version, which reads them while this worker sends, over a connection of its own.
    None: the job has no such parts, or the broker is on this machine, where they would save nothing.
    """
    if not seat.spec.has_drafts or len(layout.buckets) == 1 or is_next_door(seat.redis):
        return None
    reader: DraftReader
    wires = seat.connections.open(lambda: reader.is_over or seat.stop.is_set())
    reader = DraftReader(seat.session_over(wires))
    return reader


class DraftReader:
    """Holds the parts of the newest draft that it has read. They count only if the version is committed as this draft,
    which whoever takes them has to check.
    """

    def __init__(self, session: WorkerSession) -> None:
        """`session`: for the thread alone."""
        self._session = session
        self._lock = threading.Lock()  # of the draft, and held while parts are read
        self._wanted, self._over = threading.Event(), threading.Event()
        self._token, self._room = "", list[Blob]()
        self._name, self._parts = "", dict[int, Blob]()
        self._told: list[tuple[str, str, int]] = []
        """Of the thread: version before, draft's name and index of parts that were not wanted when they were told."""
        self._bytes = 0
        """Bytes read since the last `take`."""
        self._thread = threading.Thread(target=self._run, name="drafts", daemon=True)

    @property
    def is_over(self) -> bool:
        """Whether the thread is to end; interrupts its connections."""
        return self._over.is_set()

    def __enter__(self) -> "DraftReader":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._wanted.set()
        self._thread.join()

    def begin(self, token: str, room: Sequence[Blob]) -> None:
        """Begin to read drafts of the version after `token`, unless that has begun.

        Args:
            room: a buffer for each part; nothing else may use it until `take`.
        """
        if token != self._token:  # else the lock may be held for long
            with self._lock:
                self._token, self._room, self._name, self._parts = token, [*room], "", {}
        self._wanted.set()

    def take(self) -> Draft:
        """Stop, once the parts being read are there, and return what was read, in the buffers passed to `begin`."""
        self._wanted.clear()
        with self._lock:
            draft = Draft(self._token, self._name, self._parts) if self._parts else NO_DRAFT
            draft = replace(draft, bytes=self._bytes)
            self._token, self._name, self._parts, self._bytes = "", "", {}, 0
            return draft

    def _run(self) -> None:
        while not self.is_over:
            self._wanted.wait()
            try:
                self._read(())
                self._read(self._session.drafted(WAIT_MS))
            except Interrupted:
                return
            except (RedisError, ValueError) as error:  # the version is read as a whole
                log.info("draft not read", job=self._session.keys.job_id, error=str(error))
                self._over.wait(WAIT_MS / 1000)

    def _read(self, told: Sequence[tuple[str, str, int]]) -> None:
        """Read the parts of the newest draft of the version that is wanted, of those told now or before."""
        told = [*self._told, *told]
        with self._lock:
            mine = [(name, part) for token, name, part in told if token == self._token and part < len(self._room)]
            self._told = [one for one in told if one[0] != self._token][-TOLD:]
            if not mine:
                return
            if mine[-1][0] != self._name:
                self._name, self._parts = mine[-1][0], {}
            parts = sorted({part for name, part in mine if name == self._name} - self._parts.keys(), reverse=True)
            found = self._session.read_draft(self._name, parts, [self._room[part] for part in parts])
            there = {part: blob for part, blob in zip(parts, found, strict=True) if blob is not None}
            self._parts |= there
            self._bytes += sum(map(len, there.values()))
