"""Keys in files, and signatures that hold for one purpose."""

import threading
from pathlib import Path

import pytest

from computeshare.errors import SettingsError
from computeshare.runtime.private_files import kept_private, write_private
from computeshare.runtime.signatures import SigningKey, is_signed


def test_a_signature_holds_for_its_key_its_purpose_and_what_it_is_about() -> None:
    key, other = SigningKey.new(), SigningKey.new()
    signature = key.sign("seat", "a", {"n": 1, "m": [None]})
    assert is_signed(key.public, signature, "seat", "a", {"m": [None], "n": 1})
    assert not is_signed(other.public, signature, "seat", "a", {"n": 1, "m": [None]})
    assert not is_signed(key.public, signature, "recipe", "a", {"n": 1, "m": [None]})
    assert not is_signed(key.public, signature, "seat", "a", {"n": 2, "m": [None]})
    assert not is_signed(key.public, signature, "seat", ["a", {"n": 1, "m": [None]}])
    assert not is_signed(key.public, other.sign("seat", "a"), "seat", "a")


@pytest.mark.parametrize("text", ["", "0" * 128, "0" * 127, "g" * 128, "\xff" * 128, "0" * 100_000])
def test_any_text_may_be_given_as_a_signature_or_a_key(text: str) -> None:
    key = SigningKey.new()
    assert not is_signed(key.public, text, "seat", "\ud800")
    assert not is_signed(text[:64], key.sign("seat"), "seat")


def test_a_key_is_made_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "machine.key"
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(SigningKey.kept(path).public)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [SigningKey.kept(path).public] * 8
    assert path.stat().st_mode & 0o777 == 0o600 and list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("text", ["", "00", "zz" * 32])
def test_a_file_that_holds_no_key_is_not_replaced(text: str, tmp_path: Path) -> None:
    path = tmp_path / "machine.key"
    path.write_text(text)
    with pytest.raises(SettingsError, match="holds no key"):
        SigningKey.kept(path)
    assert path.read_text() == text


def test_a_private_file_is_replaced_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert kept_private(path, lambda: "first") == kept_private(path, lambda: "second") == "first"
    write_private(path, "third")
    assert path.read_text() == "third" and path.stat().st_mode & 0o777 == 0o600
    assert list(tmp_path.iterdir()) == [path]
