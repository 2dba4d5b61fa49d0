"""A control plane copies checkpoints to another address, beside what it does for jobs."""

import time
from pathlib import Path

import pytest
from redis import Redis

from api.system import background
from api.system import copies as copying
from computeshare.checkpoints import copies
from computeshare.client import ComputeShare
from computeshare.settings import Settings
from tests.support.served_api import serving
from tests.support.trained_job import trained_job
from tests.support.wait import wait_until


def test_a_checkpoint_is_copied_once_the_address_is_there(
    settings: Settings, redis: Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copying, "RETRY_S", 1.0)
    tries: list[float] = []
    copy = copies.copy
    monkeypatch.setattr(copies, "copy", lambda *about: (tries.append(time.monotonic()), copy(*about)))
    monkeypatch.setattr(background, "COPY_S", 0.1)
    target = tmp_path / "disk"
    target.write_text("in the way")
    settings = settings.model_copy(update={"copy_to": f"file://{target}/copies"})
    with serving(settings) as (url, _), ComputeShare(url, "secret", cache=tmp_path / "cache") as cs:
        job = trained_job(cs, redis, settings, dataset="digits", model="mlp", queue="nobody")
        address = f"/v1/jobs/{job.id}/checkpoints"
        told = cs.client._requests.repeatable

        def listed() -> dict[str, object]:
            return dict(told("GET", address).json())

        wait_until(lambda: listed()["copy_error"])
        assert "disk" in str(listed()["copy_error"])
        assert "could not be copied" in told("GET", f"/jobs/{job.id}").text
        assert cs.client.show(job.id)["status"] == "running" and not job.checkpoint()["copied"]
        wait_until(lambda: len(tries) == 2)
        assert tries[1] - tries[0] >= 1.0
        target.unlink()
        wait_until(lambda: job.checkpoint()["copied"])
        assert listed()["copy_error"] is None
        (own,) = settings.artifacts_dir.glob(f"{job.id}/*/weights.safetensors")
        (copied,) = target.glob(f"copies/{job.id}/*/weights.safetensors")
        assert copied.parent.name == own.parent.name and copied.read_bytes() == own.read_bytes()
        assert "Copied to COMPUTESHARE_COPY_TO: version 1." in told("GET", f"/jobs/{job.id}").text
