"""Round exactness and progress under seeded schedules of faults.

COMPUTESHARE_SCHEDULES sets how many (150), COMPUTESHARE_SEED the first one (another for each commit): to repeat a
failure, set the seed it names and one schedule.
"""

import os

import pytest
from redis import Redis

from computeshare.protocol import reducer_session
from tests.simulation.schedule import run
from tests.support import sample

SCHEDULES = int(os.environ.get("COMPUTESHARE_SCHEDULES", "150"))
FIRST_SEED = sample.seed()


def test_whatever_fails_each_version_is_the_function_of_its_base_and_its_round(
    sim_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reducer_session, "EVENTS_KEPT", 2)
    monkeypatch.setattr(reducer_session, "EVENTS_FOLDED", 3)
    for seed in range(FIRST_SEED, FIRST_SEED + SCHEDULES):
        run(sim_redis, seed)
