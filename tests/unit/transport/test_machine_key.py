"""A machine's key, while it is replaced."""

from pathlib import Path

from computeshare.transport.machine_key import MachineKey


def test_the_next_key_is_tried_after_the_current_one_and_takes_its_place_once_accepted(tmp_path: Path) -> None:
    key = MachineKey(tmp_path / "machine.key")
    old = key.current()
    assert [one.public for one in key.candidates()] == [old.public]
    new = key.next()
    assert new.public != old.public and key.next().public == new.public  # the same in every attempt
    assert [one.public for one in key.candidates()] == [old.public, new.public]
    key.accept(old)
    assert key.current().public == old.public
    key.accept(new)
    assert key.current().public == new.public
    assert [one.public for one in key.candidates()] == [new.public]
    key.accept(new)
    assert [path.name for path in tmp_path.iterdir()] == ["machine.key"]


def test_a_key_that_another_process_replaces_meanwhile_is_tried_too(tmp_path: Path) -> None:
    key = MachineKey(tmp_path / "machine.key")
    old, tries = key.current(), key.candidates()
    assert next(tries).public == old.public
    new = key.next()
    key.accept(new)
    assert [one.public for one in tries] == [new.public]
