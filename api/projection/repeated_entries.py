"""Stream entries that were read before, left out."""

import json
from collections.abc import Sequence
from zlib import crc32

from sqlalchemy import Connection

from api.projection.events.job_projection import JobState
from api.projection.events.parser import RawEntry, stream_position

_KNOWN = " UNION ALL ".join(
    f"SELECT stream_id, {kind}, {what} FROM {name} "
    "WHERE job_id = :job AND stream_id IN (SELECT value FROM json_each(:ids))"
    for name, kind, what in (
        ("submission", "'submission'", "nonce"),
        ("event", "type", "json_extract(data, '$.token')"),
    )
)
_FOLDED = """SELECT json_extract(data, '$.first'), stream_id FROM event
WHERE job_id = :job AND stream_id >= :since AND type = 'folded'"""


def without_stored(connection: Connection, job_id: str, raw: Sequence[RawEntry]) -> list[RawEntry]:
    """Leave out the entries that are stored.

    A broker that lost entries and whose clock went back may issue their ids again: such an entry is recognized by its
    content, and is stored under an id of its own.
    """
    own = {stream_id: b"%s~%08x" % (stream_id, crc32(fields.get(b"data", b""))) for stream_id, fields in raw}
    ids = json.dumps([each.decode() for pair in own.items() for each in pair])
    rows = connection.exec_driver_sql(_KNOWN, {"job": job_id, "ids": ids})
    known = {stream_id.encode(): (kind, what) for stream_id, kind, what in rows}
    taken = []
    for stream_id, fields in raw:
        if stream_id not in known:
            taken.append((stream_id, fields))
        elif own[stream_id] not in known and _identity(fields) not in (None, known[stream_id]):
            taken.append((own[stream_id], fields))
    return taken


def without_summarized(connection: Connection, state: JobState, raw: Sequence[RawEntry]) -> Sequence[RawEntry]:
    """Leave out submissions that a `folded` event has counted: a rollback of the broker brings their entries back."""
    if not state["folded"]:
        return raw
    since = raw[0][0].decode().partition("-")[0]  # milliseconds of as many digits as all others
    rows = connection.exec_driver_sql(_FOLDED, {"job": state.id, "since": since})
    ranges = [(stream_position(first), stream_position(last.partition("~")[0])) for first, last in rows]
    return [
        (stream_id, fields)
        for stream_id, fields in raw
        if fields.get(b"type") != b"submission"
        or not any(first <= stream_position(stream_id.decode()) <= last for first, last in ranges)
    ]


def _identity(fields: dict[bytes, bytes]) -> tuple[str, str | None] | None:
    """An entry's type, and its nonce or token, which together tell entries of one id apart; None if unreadable."""
    try:
        kind, data = fields[b"type"].decode(), json.loads(fields[b"data"])
        return kind, data.get({"submission": "nonce", "version": "token"}.get(kind, ""))
    except (KeyError, ValueError, AttributeError):
        return None
