"""Copies of checkpoints at the address of a file system of fsspec."""

from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from computeshare.checkpoints.copies import Record, copy
from computeshare.checkpoints.store import MANIFEST, SCORE, WEIGHTS, Artifacts
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint


@pytest.fixture
def artifacts(tmp_path: Path) -> Artifacts:
    """Those of a job with three checkpoints."""
    artifacts = Artifacts(tmp_path / "artifacts", "job")
    for version in (1, 2, 3):
        tensors = {"w": np.full(100, version, np.float32)}
        write_checkpoint(artifacts, Token(1, version, "0" * 16), tensors, b"state", f"{version:064x}", 0, 0)
    return artifacts


@pytest.fixture(params=["file", "memory"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"file://{tmp_path}/there/copies" if request.param == "file" else f"memory://{tmp_path.name}/copies/"


def there(address: str) -> dict[str, bytes]:
    """What the files at the address hold, by their paths below it."""
    files, root = fsspec.url_to_fs(address)
    root = root.rstrip("/")
    return {path.removeprefix(root + "/"): files.cat_file(path) for path in files.find(root)}


def names(artifacts: Artifacts) -> list[str]:
    return [str(token) for token in artifacts.tokens()]


def test_a_copy_holds_what_the_checkpoint_holds(artifacts: Artifacts, address: str) -> None:
    first, _, last = names(artifacts)
    copy(artifacts.folder, [last, first], address)
    own = {f"job/{path.parent.name}/{path.name}": path.read_bytes() for path in artifacts.folder.glob("*/*")}
    expected = {name: content for name, content in own.items() if name.split("/")[1] in (first, last)}
    assert there(address) == expected and len(expected) == 6
    assert Record.read(artifacts.folder).files.keys() == {first, last}


def test_what_is_new_is_copied_and_what_is_superseded_goes(
    artifacts: Artifacts, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, last = names(artifacts)
    copy(artifacts.folder, [second, first], address)
    files, root = fsspec.url_to_fs(address)
    files.pipe_file(f"{root.rstrip('/')}/job/mine", b"of somebody else")
    sent: list[str] = []
    real = type(files).put_file

    def put(self: Any, local: str, remote: str, *args: Any, **options: Any) -> Any:
        sent.append("/".join(local.split("/")[-2:]))
        return real(self, local, remote, *args, **options)

    monkeypatch.setattr(type(files), "put_file", put)
    artifacts.save_score(Token.parse(first), {"accuracy": 0.9})
    copy(artifacts.folder, [last, first], address)
    assert sent[:-1] == [f"{last}/state.safetensors", f"{last}/{WEIGHTS}", f"{last}/{MANIFEST}"]
    assert sent[-1] == f"{first}/{SCORE}"
    assert {name.split("/")[1] for name in there(address)} == {first, last, "mine"}
    sent.clear()
    copy(artifacts.folder, [last, first], address)
    assert sent == []


def test_a_copy_that_failed_is_no_copy_and_is_made_again(
    artifacts: Artifacts, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    *_, last = names(artifacts)
    address = f"memory://user:secret@{tmp_path.name}"
    real = MemoryFileSystem.put_file

    def put(self: Any, local: str, *args: Any, **options: Any) -> Any:
        if local.endswith(MANIFEST):
            raise ConnectionError(f"{address} has gone away")
        return real(self, local, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFileSystem, "put_file", put)
        with pytest.raises(ConnectionError):
            copy(artifacts.folder, [last], address)
    record = Record.read(artifacts.folder)
    assert record.error == "ConnectionError: the address has gone away" and not record.files
    assert "secret" not in record.model_dump_json()
    assert not any(name.endswith(MANIFEST) for name in there(address))
    copy(artifacts.folder, [last], address)
    assert Record.read(artifacts.folder).error == "" and len(there(address)) == 3


def test_another_address_gets_copies_of_its_own(artifacts: Artifacts, tmp_path: Path) -> None:
    *_, last = names(artifacts)
    for name in ("one", "two"):
        copy(artifacts.folder, [last], f"file://{tmp_path}/{name}")
    assert there(f"file://{tmp_path}/one") == there(f"file://{tmp_path}/two") != {}


def test_a_checkpoint_removed_meanwhile_is_left_out(artifacts: Artifacts, address: str) -> None:
    first, _, last = names(artifacts)
    artifacts.remove(Token.parse(first))
    copy(artifacts.folder, [last, first], address)
    assert Record.read(artifacts.folder).files.keys() == {last}


def test_an_address_of_a_file_system_that_is_not_installed_says_so(artifacts: Artifacts) -> None:
    for address, word in (("nosuch://here", "nosuch"), ("dropbox://here", "dropboxdrivefs")):
        with pytest.raises((ValueError, ImportError)):
            copy(artifacts.folder, names(artifacts), address)
        assert word in Record.read(artifacts.folder).error
