"""A model of half a gigabyte trains, on a machine that has room for it several times over."""

from pathlib import Path

import psutil
import pytest
from control_plane import control_plane

pytestmark = pytest.mark.e2e
ROOM_BYTES = 10e9
"""What the processes take together, generously: the broker alone holds three versions and two updates."""


@pytest.mark.skipif(psutil.virtual_memory().available < ROOM_BYTES, reason="takes 10 GB of memory")
def test_vgg16_trains(tmp_path: Path) -> None:
    with control_plane(tmp_path, "--workers", "1", "--queue", "e2e") as plane:
        spec = {"dataset": "digits", "model": "vgg16", "input": [3, 32, 32], "micro_batch": 2, "queue": "e2e"}
        spec |= {"micro_batches_per_round": 1, "rounds": 3, "checkpoint_every": 0, "evaluate_every": 0}
        job = plane.finish(plane.create(**spec, optimizer={"name": "SGD", "lr": 0.001}))
        assert (job["version"], job["status"]) == (3, "completed")
        (worker,) = plane.get(f"/v1/jobs/{job['id']}/workers")["items"]
        assert (worker["accepted"], worker["refused"]) == (3, 0)
        (checkpoint, *_) = plane.get(f"/v1/jobs/{job['id']}/checkpoints")["items"]
        assert checkpoint["version"] == 3 and checkpoint["bytes"] > 500e6
        assert job["bytes_down"] > 3 * 500e6
