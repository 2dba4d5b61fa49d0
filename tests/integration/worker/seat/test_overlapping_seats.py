"""Seats that compute while updates and versions are on their way: the same bits whether parts go early or not."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from computeshare.codecs import messages
from computeshare.queue import Seat
from computeshare.settings import Settings
from computeshare.tensors import layout
from computeshare.worker.seat.seat import SeatSession
from computeshare.worker.seat.update_sender import UpdateQueue
from tests.support.job_reducer import Job, Worker

JOBS: dict[str, dict[str, Any]] = {
    "sync": {"strategy": {"kind": "sync", "delay": 1}, "codec": {"up": "float16", "down": "float32"}},
    "local": {
        "strategy": {"kind": "local", "inner_steps": 2, "replicas": 4, "delay": 1},
        "codec": {"up": "int4", "down": "int4"},
        "optimizer": None,
    },
}


def versions_of(job: Job) -> list[str]:
    """Have the reducer work until the job ends; the names of the drafts that its versions were."""
    drafts: dict[int, str] = {}
    while (state := job.store.read()) and state.status == "running":
        name: Any = job.redis.hget(job.store.keys.round(), "draft")
        drafts[state.version] = bytes(name or b"").decode()
        job.reducer.advance()
        time.sleep(0.002)
    job.reducer.advance()
    return [*filter(None, drafts.values())]


@pytest.mark.parametrize("name", JOBS)
def test_seats_elsewhere_send_and_read_parts_of_delayed_rounds_early(
    start: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(layout, "BUCKET", 5000)
    monkeypatch.setattr(messages, "NEWS_BYTES", 0)
    plain, job = (start(**JOBS[name], rounds=12) for _ in range(2))
    expected = Worker(plain.hand("solo")).finish(plain)
    monkeypatch.setattr("computeshare.worker.seat.update_sender.OFFERING_S", 0)  # the loopback is fast
    for module in ("device_setup", "drafts.draft_reader"):
        monkeypatch.setattr(f"computeshare.worker.seat.{module}.is_next_door", lambda redis: False)
    submit = UpdateQueue.submit

    def late(self: UpdateQueue, *about: Any, **more: Any) -> Any:
        self._settle()
        time.sleep(0.1)  # what is staged by then is drafted
        return submit(self, *about, **more)

    monkeypatch.setattr(UpdateQueue, "submit", late)
    threads = []
    for number in range(2):
        seat = Seat(f"worker{number:06d}", job.job_id, number, 1)
        job.redis.hset(job.store.keys.seats(), seat.worker, seat.id)
        session = SeatSession(job.redis, seat, job.spec, Settings(home=tmp_path / seat.worker), threading.Event())
        threads.append(threading.Thread(target=session.run, args=("cpu",)))
        threads[-1].start()
    drafts = versions_of(job)
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert job.digest() == expected
    assert len(drafts) >= 3
