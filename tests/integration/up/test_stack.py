"""The processes that `computeshare up` keeps running: how soon one that ended is there again."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from computeshare.reducer.process import CLAIM_MS
from computeshare.settings import BrokerUser, Settings
from computeshare.up.stack import FORKS, WATCH_S, Child, Stack, UpOptions


@dataclass
class Killed:
    """A process that has been killed."""

    pid: int = 1

    def poll(self) -> int:
        return -9


def longest_absence_s(child: Child, life_s: float) -> float:
    """The longest time between end and start of a process that is killed again and again, always after `life_s`."""
    child.start = Killed
    now, longest_s = 1000.0, 0.0
    assert child.ensure(now)
    for _ in range(20):
        ended = now = now + life_s
        while not child.ensure(now):
            now += WATCH_S
        longest_s = max(longest_s, now - ended)
    return longest_s


def test_every_process_logs_in_to_the_broker_as_its_role(tmp_path: Path) -> None:
    users: tuple[BrokerUser, ...] = ("owner", "api", "reducer", "evaluator", "worker")
    urls = {one: f"redis://{one}@x" for one in users}
    children = Stack(Settings(home=tmp_path), UpOptions(home=tmp_path, workers=1), redis_urls=urls)._describe_children()
    for child in children:
        assert isinstance(child.start, partial)
        (environment,) = (one for one in child.start.args if isinstance(one, dict))
        assert environment["COMPUTESHARE_REDIS_URL"] == f"redis://{child.role}@x"
        behind = environment.get("COMPUTESHARE_GATEWAY_REDIS_URL")
        assert behind == ("redis://worker@x" if child.role == "api" else None)
    assert {child.role for child in children} == {*users} - {"owner"}


@pytest.mark.skipif(not FORKS, reason="on macOS, reducers are spawned, which takes seconds")
@pytest.mark.parametrize("life_s", [0.1, 2.5, 5.0])
def test_a_reducer_is_there_again_before_a_claim_runs_out_however_often_it_is_killed(
    tmp_path: Path, life_s: float
) -> None:
    children = Stack(
        Settings(home=tmp_path), UpOptions(home=tmp_path), redis_urls={"owner": "redis://nowhere"}
    )._describe_children()
    reducers = [child for child in children if child.role == "reducer"]
    assert len(reducers) == 2
    assert max(longest_absence_s(child, life_s) for child in reducers) < CLAIM_MS / 1000 - 2 * WATCH_S
    (api,) = [child for child in children if child.role == "api"]
    assert longest_absence_s(api, life_s) > 4  # what takes seconds to start is not tried all the time
