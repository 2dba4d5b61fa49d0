"""What becomes of a seat whose process the control plane has killed."""

import subprocess

from redis import Redis
from rq import Queue
from rq.serializers import JSONSerializer

from computeshare.protocol.keys import JobKeys
from computeshare.queue.seats import Seat, SeatJob, SeatQueue
from computeshare.worker.rq_worker import SeatWorker
from tests.support.rounds import ZERO, Join


def test_a_seat_that_is_stopped_hands_its_leases_back(redis: Redis, job_id: str, join: Join) -> None:
    seat = Seat("stopped00", job_id, 1, 1)
    session = join(seat.worker)
    assert session.lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    SeatQueue(redis).enqueue(seat)
    queue = Queue(seat.worker, connection=redis, job_class=SeatJob, serializer=JSONSerializer)
    worker = SeatWorker([queue], seat.worker, connection=redis, prepare_for_work=False)
    job = SeatJob.fetch(seat.id, connection=redis, serializer=JSONSerializer)
    execution = worker.prepare_execution(job)
    with subprocess.Popen(["sleep", "60"]) as process:
        process.kill()
        worker._horse_pid, worker._stopped_job_id = process.pid, seat.id  # as once `SeatQueue.stop` was heard
        worker.monitor_work_horse(job, queue, execution)
    assert join("other").lease(str(ZERO)).micro_batches == (0, 1, 2, 3)
    assert SeatQueue(redis).state([seat]) == {seat.id: "failed"}
    (left,) = (fields for _, fields in redis.xrange(JobKeys(job_id).events()) if fields[b"type"] == b"left")
    assert b"it was stopped" in left[b"data"]
