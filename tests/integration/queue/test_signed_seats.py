"""A real worker process that knows the control plane's key takes signed seats only."""

import os
import subprocess
import sys
from pathlib import Path

from redis import Redis

from computeshare.protocol import handshake
from computeshare.queue import Seat, SeatQueue, list_workers
from computeshare.runtime.signatures import SigningKey
from tests.support.wait import wait_until


def test_a_worker_runs_the_seats_that_its_control_plane_has_signed_and_no_others(
    own: Redis, own_url: str, tmp_path: Path
) -> None:
    handshake.publish(own)
    key = SigningKey.new()
    known = {"COMPUTESHARE_HOME": str(tmp_path), "COMPUTESHARE_REDIS_URL": own_url}
    command = [sys.executable, "-m", "computeshare.worker.process", "--device", "cpu"]
    log = tmp_path / "worker.log"
    with open(log, "wb") as file:
        environment = {**os.environ, **known, "COMPUTESHARE_CONTROL_KEY": key.public}
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        wait_until(lambda: list_workers(own) or process.poll() is not None)
        (worker,) = list_workers(own)
        unsigned, forged, signed = (Seat(worker.id, f"job{number}", 1, 1) for number in range(3))
        SeatQueue(own).enqueue(unsigned)
        SeatQueue(own, SigningKey.new()).enqueue(forged)
        SeatQueue(own, key).enqueue(signed)
        over = {"finished", "failed"}
        wait_until(lambda: SeatQueue(own).state([signed])[signed.id] in over)  # there is no such job: it ends at once
        assert set(SeatQueue(own).state([unsigned, forged]).values()) == {"queued"}
    finally:
        process.kill()
        process.wait()
    told = [line for line in log.read_text().splitlines() if "has not signed for it" in line]
    assert [seat.id in line for seat, line in zip((unsigned, forged), told, strict=True)] == [True, True]
