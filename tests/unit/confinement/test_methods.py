"""The choice of a method, and what is said where none works."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from computeshare.confinement import methods
from computeshare.confinement.kinds import BUBBLEWRAP, LANDLOCK, Method
from computeshare.confinement.process import start
from computeshare.errors import Unconfined


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    methods.method.cache_clear()
    yield
    methods.method.cache_clear()


def machine(monkeypatch: pytest.MonkeyPatch, *present: Method, **troubles: str) -> None:
    monkeypatch.setattr(methods, "_present", lambda: present)
    monkeypatch.setattr(methods, "_trouble", lambda by: troubles.get(by.name, ""))


def test_the_first_method_that_works_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, BUBBLEWRAP, LANDLOCK)
    assert methods.method() == BUBBLEWRAP
    methods.method.cache_clear()
    machine(monkeypatch, BUBBLEWRAP, LANDLOCK, bubblewrap="setting up uid map: Permission denied")
    assert methods.method().name == "landlock" and methods.available() == (LANDLOCK,)
    assert methods.method().remarks[-1] == "bubblewrap does not work here: setting up uid map: Permission denied."


def test_where_none_works_the_reason_is_told_and_nothing_is_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine(monkeypatch, BUBBLEWRAP, bubblewrap="setting up uid map: Permission denied")
    assert not methods.method().confines
    with pytest.raises(Unconfined, match=r"your rights.*bubblewrap does not work here: setting up uid map"):
        start(["/bin/sh", "-c", "echo > ran"], scratch=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_where_there_is_no_means_the_advice_is_to_install_one(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch)
    monkeypatch.setattr("sys.platform", "linux")
    assert "apt install bubblewrap" in methods.method().remarks[-1]
