"""A broker that sets its clock back keeps whatever expires for longer: bounded by the life its holder asked for."""

import threading
from pathlib import Path

from redis import Redis

from api.main import create_app
from api.system.background import LOCK_S
from computeshare.checkpoints.store import Artifacts
from computeshare.evaluator.evaluator import CLAIM_MS, Evaluator
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import keys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import list_workers
from computeshare.queue.roster import ALIVE_MS
from computeshare.settings import Settings
from tests.support.evaluated_job import save
from tests.support.scheduling_clock import online

HOUR_MS = 3_600_000
SPEC = JobSpec(dataset="digits", model="mlp", rounds=2)


def test_a_dead_worker_is_forgotten_after_its_registrations_life(redis: Redis, queue: str) -> None:
    worker = online(redis, queue)
    redis.pexpire(keys.worker(worker), HOUR_MS)
    assert worker in [found.id for found in list_workers(redis)]
    assert redis.pttl(keys.worker(worker)) <= ALIVE_MS


def test_a_dead_evaluators_claim_ends_after_its_life(redis: Redis, job_id: str, tmp_path: Path) -> None:
    RoundStore(redis, job_id).publish(SPEC.model_dump_json())
    token = save(Artifacts(tmp_path, job_id), SPEC, 2)
    claim = RoundStore(redis, job_id).keys.scoring(str(token))
    redis.set(claim, "a dead evaluator's", px=HOUR_MS)
    assert not Evaluator(redis, tmp_path, tmp_path / "data", threading.Event())._settle(
        Artifacts(tmp_path, job_id), job_id, SPEC, token
    )
    assert redis.pttl(claim) <= CLAIM_MS
    RoundStore(redis, job_id).purge()


def test_a_dead_control_planes_lock_ends_after_its_life(redis: Redis, settings: Settings) -> None:
    redis.set(keys.CONTROL_LOCK, "a dead control plane's", px=HOUR_MS)
    control = create_app(settings).state.services.control
    assert not control._lead(redis)
    assert redis.pttl(keys.CONTROL_LOCK) <= LOCK_S * 1000
    redis.delete(keys.CONTROL_LOCK)
