"""A job's id becomes part of keys and of a folder's name: what is no id gets no further than the door."""

import threading
import time
from pathlib import Path

import pytest
from redis import Redis

from computeshare.checkpoints.store import Artifacts
from computeshare.evaluator.evaluator import Evaluator
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore, published_jobs
from computeshare.reducer.process import Reducer
from tests.support.evaluated_job import save

SPEC = JobSpec(dataset="digits", model="mlp", rounds=2)


def hostile(folder: Path) -> list[str]:
    """Names of jobs that would lead out of the folder of checkpoints."""
    return ["../../x", str(folder / "absolute"), "..", "", "a/b", "UPPER", "x" * 33, "new\nline", "\x00zero"]


def test_reducer_makes_no_folder_outside_its_home_for_what_is_no_job_id(
    redis: Redis, job_id: str, tmp_path: Path
) -> None:
    home = tmp_path / "home" / "artifacts"
    names = hostile(tmp_path)
    redis.delete(keys.JOBS)  # jobs that other tests left on the broker, which all tests share
    for name in names:
        redis.set(JobKeys(name).spec(), SPEC.model_dump_json())
        redis.sadd(keys.JOBS, name)
    RoundStore(redis, job_id).publish(SPEC.model_dump_json())
    reducer = Reducer(redis, home, home / "bundles", threading.Event())
    reducer.claim_jobs()
    assert job_id in reducer.jobs and not set(names) & set(reducer.jobs)
    deadline = time.monotonic() + 30
    while RoundStore(redis, job_id).read() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert {path.name for path in home.iterdir()} == {job_id}
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
    assert not set(names) & set(published_jobs(redis))
    reducer.stop.set()
    reducer.run()
    RoundStore(redis, job_id).purge()
    for name in names:
        redis.delete(JobKeys(name).spec())


def test_evaluator_passes_over_what_is_no_job_id(redis: Redis, job_id: str, tmp_path: Path) -> None:
    root = tmp_path / "home" / "artifacts"
    for name in hostile(tmp_path):
        redis.sadd(keys.JOBS, name)
    RoundStore(redis, job_id).publish(SPEC.model_dump_json())
    token = save(Artifacts(root, job_id), SPEC, 2)
    assert Evaluator(redis, root, tmp_path / "data", threading.Event())._turn()
    assert Artifacts(root, job_id).score(token) is not None
    RoundStore(redis, job_id).purge()


@pytest.mark.parametrize("name", hostile(Path("/tmp")))
def test_checkpoints_have_no_folder_for_what_is_no_job_id(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a job's id"):
        Artifacts(tmp_path, name)
