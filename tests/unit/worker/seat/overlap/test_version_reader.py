"""A version that is still to come is waited for as long as it may come."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from computeshare.errors import Interrupted
from computeshare.worker.seat.overlap import version_reader
from computeshare.worker.seat.overlap.version_reader import VersionReader

BEFORE, WANTED, LATER, RESTORED = (f"{one}.{'0' * 16}" for one in ("1.4", "1.5", "1.6", "2.5"))


class Announcing:
    """Announces these versions one after another, each once it may."""

    keys: Any = SimpleNamespace(job_id="job")

    def __init__(self, *tokens: str) -> None:
        self._tokens, self.may = list(tokens), threading.Semaphore(1)

    def announced(self, timeout_ms: int) -> list[str]:
        return [self._tokens.pop(0)] if self.may.acquire(timeout=0.01) and self._tokens else []


def reader(session: Announcing) -> VersionReader:
    inbox: Any = SimpleNamespace(chained=False, fetch=lambda session, token: None, look_out=lambda token: None)
    return VersionReader(session, inbox)  # type: ignore[arg-type]


def wait(versions: VersionReader, goes_on: bool = True, current: str = BEFORE, patience_s: float = 10) -> str:
    return versions.wait_for(1, 5, lambda: goes_on, lambda: current, patience_s)


def test_a_version_is_waited_for_until_it_is_announced() -> None:
    session = Announcing(BEFORE, WANTED)
    with reader(session) as versions:
        threading.Timer(0.2, session.may.release).start()
        assert wait(versions) == WANTED
        assert wait(versions, goes_on=False) == WANTED


@pytest.mark.parametrize("announced", [LATER, RESTORED])
def test_a_version_that_others_have_left_behind_is_not_waited_for(announced: str) -> None:
    with reader(Announcing(announced)) as versions, pytest.raises(Interrupted, match="outdated"):
        wait(versions)


def test_a_version_that_was_announced_too_early_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version_reader, "CURRENT_S", 0.1)
    with reader(Announcing(BEFORE)) as versions:
        assert wait(versions, current=WANTED) == WANTED


def test_without_hope_the_version_is_given_up() -> None:
    with reader(Announcing(BEFORE)) as versions:
        with pytest.raises(Interrupted, match="version 5 does not come"):
            wait(versions, goes_on=False)
        with pytest.raises(Interrupted, match="version 5 does not come"):
            wait(versions, patience_s=0.05)
