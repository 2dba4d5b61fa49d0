"""What a job's events and answers take of the broker's memory."""

import uuid

from redis import Redis

from computeshare.jobspec.spec import RECORD_BYTES, JobSpec
from computeshare.protocol.reducer_session import EVENTS_FOLDED, EVENTS_KEPT, ReducerSession
from tests.support.event_stream import WORKERS, Feed
from tests.support.rounds import Join


def test_events_and_answers_fit_into_what_a_job_is_let_in_with(
    redis: Redis, reducer: ReducerSession, join: Join
) -> None:
    spec = JobSpec(dataset="digits", model="mlp")
    feed = Feed(redis, reducer.job_id, spec.plan)
    for number in range(EVENTS_KEPT + EVENTS_FOLDED):
        feed.submit(number, WORKERS[0], nonce=uuid.uuid4().hex)
    key = reducer.keys.answers()
    redis.hset(key, mapping={f"{place:040x}": f"{10**9 + place}|lease_lost" for place in range(4096)})
    taken = sum(int(redis.memory_usage(name, samples=0)) for name in (key, feed.keys.events()))  # type: ignore[arg-type]
    assert RECORD_BYTES / 4 < taken < RECORD_BYTES < spec.broker_bytes
