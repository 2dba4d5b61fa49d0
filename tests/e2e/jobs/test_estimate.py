"""What one more worker would buy, beside what it bought."""

from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

import pytest

from tests.support.control_plane import DIGITS_MLP, ControlPlane, control_plane

pytestmark = [pytest.mark.e2e, pytest.mark.long]

UNIT_S = 0.25
"""What a micro-batch takes a worker longer, on purpose: so that this machine's cores are not what the workers share."""
ROUNDS = 8
"""Versions that a rate is taken from."""


def settled(plane: ControlPlane, job_id: str, workers: int) -> int:
    """The version at which so many workers take part, each with a round behind it."""
    plane.until(f"{workers} workers", lambda: plane.job(job_id)["workers"] == workers)
    version = int(plane.job(job_id)["version"])
    plane.reach(job_id, version + 3)
    return version + 3


def round_s(plane: ControlPlane, job_id: str, since: int) -> float:
    """Seconds a round, of the next versions above `since`."""
    plane.reach(job_id, since + ROUNDS)
    points = plane.get(f"/v1/jobs/{job_id}/metrics", since=since, until=since + ROUNDS)["train_loss"]
    first, last = (datetime.fromisoformat(points[at]["at"]) for at in (0, -1))
    return (last - first).total_seconds() / (points[-1]["version"] - points[0]["version"])


def test_the_gain_of_one_more_worker_is_what_was_estimated_within_15_percent(tmp_path: Path) -> None:
    with control_plane(tmp_path) as plane, ExitStack() as workers:
        plane.environment["COMPUTESHARE_FAILPOINTS"] = f"after_compute=sleep:{UNIT_S}@*"
        for number in (1, 2):
            workers.enter_context(plane.worker("e2e", f"slow-{number}"))
        spec = DIGITS_MLP | {"micro_batches_per_round": 12, "rounds": 5000, "workers": {"min": 2, "max": 4}}
        job_id = plane.create(**spec)
        before_s = round_s(plane, job_id, settled(plane, job_id, 2))
        estimate = plane.get(f"/v1/jobs/{job_id}/estimate")
        assert estimate["likely"], estimate
        workers.enter_context(plane.worker("e2e", "slow-3"))
        gain = before_s / round_s(plane, job_id, settled(plane, job_id, 3))
        assert estimate["likely"] == pytest.approx(gain, rel=0.15), (estimate, gain)
        assert estimate["low"] * 0.85 <= gain <= estimate["high"] * 1.15, (estimate, gain)
        assert gain > 1.2  # it was worth something, or there would have been nothing to estimate
        plane.http.post(f"/v1/jobs/{job_id}/cancel")
