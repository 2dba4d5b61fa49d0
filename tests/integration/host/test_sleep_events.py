"""A machine's sleep, heard over a real bus from a login manager that speaks as logind does."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

jeepney = pytest.importorskip("jeepney", reason="logind is Linux alone")

from computeshare.host import logind  # noqa: E402
from tests.support.login_manager import LoginManager, login_manager, private_bus  # noqa: E402
from tests.support.wait import wait_until  # noqa: E402

LOCK = "delay sleep"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with private_bus(tmp_path) as address:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", address)
        yield address


class Follower:
    """Follows sleep in a thread; `before` returns once it is let."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.ready, self.go_on = threading.Event(), threading.Event()
        self.failed: list[BaseException] = []
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            logind.follow(self._before, lambda: self.seen.append("after"), self.ready.set)
        except BaseException as error:
            self.failed.append(error)

    def _before(self) -> None:
        self.seen.append("before")
        self.go_on.wait(20)


def test_sleep_waits_for_what_is_to_be_done_before_and_each_time_anew(address: str) -> None:
    with login_manager(address) as manager:
        follower = Follower()
        assert follower.ready.wait(20)
        assert manager.holds(LOCK)
        manager.announce(True)
        wait_until(lambda: follower.seen == ["before"])
        assert manager.holds(LOCK)
        follower.go_on.set()
        wait_until(lambda: not manager.holds(LOCK))
        manager.announce(False)
        wait_until(lambda: follower.seen == ["before", "after"] and manager.holds(LOCK))
        manager.announce(True)
        wait_until(lambda: follower.seen == ["before", "after", "before"] and not manager.holds(LOCK))


def test_nobody_else_can_announce_sleep(address: str) -> None:
    liar = LoginManager(address, named=False)
    liar.start()
    with login_manager(address) as manager:
        follower = Follower()
        assert follower.ready.wait(20)
        follower.go_on.set()
        liar.announce(True)
        liar.stop()  # it has sent what it had by then
        manager.announce(False)
        wait_until(lambda: bool(follower.seen))
        assert follower.seen == ["after"]


@pytest.mark.parametrize("there", [False, True], ids=["no bus", "no logind"])
def test_where_nobody_tells_of_sleep_that_is_an_error_at_once(
    there: bool, address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not there:
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path / 'nobody'}")
    follower = Follower()
    if there:  # it may come yet: there is no lock, and that is no error
        assert follower.ready.wait(20) and not follower.failed
    else:
        wait_until(lambda: bool(follower.failed))
        assert isinstance(follower.failed[0], OSError)
