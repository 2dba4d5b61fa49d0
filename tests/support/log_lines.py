"""Lines of a job's log as a seat would put them there."""

import json
from typing import Any

from redis import Redis

from computeshare.protocol.keys import JobKeys
from computeshare.runtime.log_lines import Writer, line_of

STUDIO, LAPTOP = Writer("aaaaaaaaaaaa", "studio"), Writer("bbbbbbbbbbbb", "laptop")
AT_MS = 1_700_000_000_000


def put(redis: Redis, job_id: str, *texts: str, writer: Writer = STUDIO, level: str = "info", **fields: Any) -> None:
    """Put lines into the stream, nobody minding whether there is such a job."""
    pipeline = redis.pipeline(transaction=False)
    for text in texts:
        data = line_of({"event": text, "level": level, **fields}, writer, AT_MS)
        pipeline.xadd(JobKeys(job_id).logs(), {"data": data})
    pipeline.execute()


def put_raw(redis: Redis, job_id: str, data: Any, name: str = "data", stream_id: str = "*") -> None:
    """Put anything into the stream."""
    raw = data if isinstance(data, bytes | str) else json.dumps(data)
    redis.xadd(JobKeys(job_id).logs(), {name: raw}, id=stream_id)
