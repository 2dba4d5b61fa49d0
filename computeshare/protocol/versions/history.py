"""The events of versions that the broker holds, for a checkpoint's ledger."""

import json
from collections import deque

from redis import Redis

from computeshare.protocol.keys import JobKeys
from computeshare.protocol.versions.ledger import LONGEST, Entry

Event = tuple[bytes, dict[bytes, bytes]]
"""Stream id and fields."""
EVENTS_PER_READ = 2000
NO_EVENT, AFTER_ALL_EVENTS = b"0-0", b"%d-0" % 2**63


class VersionHistory:
    """Reads one job's `version` events. Each call reads only events added since, so only one thread may use it."""

    def __init__(self, redis: Redis, keys: JobKeys) -> None:
        self._redis, self._keys = redis, keys
        self._versions: deque[Event] = deque(maxlen=LONGEST)
        self._opened: tuple[bytes, int | None] | None = None
        """Stream id and incarnation of the newest `opened` event."""
        self._last_read = NO_EVENT

    def commits(self, incarnation: int) -> tuple[list[Entry], bool]:
        """The `version` events still in the event stream, oldest first, and whether the stream still holds the `opened`
        event of this incarnation.

        The control plane has stored all events that left the stream.
        """
        oldest, newest = self._bounds()
        if _order(newest) < _order(self._last_read):  # the broker lost events that were read
            self._versions.clear()
            self._opened, self._last_read = None, NO_EVENT
        while events := self._read_after(self._last_read):
            for event in events:
                self._add(*event)
        while self._versions and _order(self._versions[0][0]) < _order(oldest):
            self._versions.popleft()
        is_opened = self._opened and _order(self._opened[0]) >= _order(oldest) and self._opened[1] == incarnation
        entries = [{"at": int(float(f[b"at"])), "data": json.loads(f[b"data"])} for _, f in self._versions]
        return entries, bool(is_opened)

    def _add(self, stream_id: bytes, fields: dict[bytes, bytes]) -> None:
        self._last_read = stream_id
        if fields[b"type"] == b"version":
            self._versions.append((stream_id, fields))
        elif fields[b"type"] == b"opened":
            self._opened = stream_id, json.loads(fields[b"data"]).get("incarnation")

    def _bounds(self) -> tuple[bytes, bytes]:
        """Ids of the oldest event that the control plane has not stored, and of the newest event ever appended."""
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xrange(self._keys.backlog(), count=1)
        pipeline.xrange(self._keys.events(), count=1)
        pipeline.xinfo_stream(self._keys.events())
        *firsts, info = pipeline.execute(raise_on_error=False)
        newest = info["last-generated-id"] if isinstance(info, dict) else NO_EVENT
        return min((events[0][0] for events in firsts if events), key=_order, default=AFTER_ALL_EVENTS), newest

    def _read_after(self, stream_id: bytes) -> list[Event]:
        """About `EVENTS_PER_READ` events after an id, from the backlog first, then from the stream."""
        start = "(" + stream_id.decode()
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.xrange(self._keys.backlog(), min=start, count=EVENTS_PER_READ)
        pipeline.xrange(self._keys.events(), min=start, count=EVENTS_PER_READ)
        backlog, events = pipeline.execute()
        return backlog if len(backlog) == EVENTS_PER_READ else [*backlog, *events]


def _order(stream_id: bytes) -> tuple[int, int]:
    milliseconds, number = stream_id.split(b"-")
    return int(milliseconds), int(number)
