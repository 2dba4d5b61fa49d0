"""Checkpoints: whole or absent, and numbered so that an incarnation never comes back."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from computeshare.checkpoints.store import BEFORE, Artifacts, weights_digest
from computeshare.errors import ArtifactError
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint

TENSORS: dict[str, np.ndarray] = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "seen": np.array(3, np.int64)}

DIGEST = hashlib.sha256(b"".join(values.tobytes() for values in TENSORS.values())).hexdigest()


def save(artifacts: Artifacts, version: int, incarnation: int = 1) -> Token:
    token = Token(incarnation, version, f"{version:016x}")
    write_checkpoint(artifacts, token, TENSORS, b"state", DIGEST, 0, 4 * version)
    return token


def no_space(*_: object) -> None:
    raise OSError("no space left on device")


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    token = save(artifacts, 7)
    got = artifacts.tensors(token)
    assert {name: (a.dtype, a.tolist()) for name, a in got.items()} == {
        name: (a.dtype, a.tolist()) for name, a in TENSORS.items()
    }
    assert artifacts.state(token) == b"state"
    manifest = artifacts.manifest(token)
    assert (manifest.version, manifest.next_micro_batch) == (7, 28)
    assert manifest.bytes == artifacts.path(token, "weights.safetensors").stat().st_size


def test_a_second_writer_changes_nothing(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    token = save(artifacts, 1)
    written = artifacts.path(token, "weights.safetensors").stat().st_mtime_ns
    write_checkpoint(artifacts, token, {}, b"other", "cd" * 32, 0, 0)
    assert artifacts.state(token) == b"state"
    assert artifacts.path(token, "weights.safetensors").stat().st_mtime_ns == written


def test_a_half_written_checkpoint_does_not_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(tmp_path, "job")
    monkeypatch.setattr("computeshare.checkpoints.store.flush", no_space)
    with pytest.raises(OSError, match="no space left"):
        save(artifacts, 1)
    assert artifacts.tokens() == []
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_was_staged_can_be_finished_once_the_disk_lets_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, token = Artifacts(tmp_path, "job"), Token(1, 3, "3" * 16)
    staged = artifacts.stage(token, TENSORS, [b"sta", b"te"])
    with monkeypatch.context() as patch:
        patch.setattr("computeshare.checkpoints.store.flush", no_space)
        with pytest.raises(OSError, match="no space left"):
            artifacts.finish(staged, DIGEST, 0, 12)
    assert artifacts.tokens() == []
    artifacts.finish(staged, DIGEST, 0, 12)
    assert artifacts.tokens() == [token] and artifacts.state(token) == b"state"
    staged.discard()
    assert artifacts.has(token)


def test_a_moving_average_lies_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, token = Artifacts(tmp_path, "job"), Token(1, 3, "3" * 16)
    average = {name: values + 1 for name, values in TENSORS.items()}
    staged = artifacts.stage(token, TENSORS, [b"state"], average)
    with monkeypatch.context() as patch:
        patch.setattr("computeshare.checkpoints.store.flush", no_space)
        with pytest.raises(OSError, match="no space left"):
            artifacts.finish(staged, DIGEST, 0, 12)
    manifest = artifacts.finish(staged, DIGEST, 0, 12)  # all files are written again
    assert manifest.average == weights_digest(artifacts.path(token, "average.safetensors"))
    for averaged, expected in ((True, average), (False, TENSORS)):
        found = artifacts.tensors(token, averaged)
        assert all(np.array_equal(found[name], expected[name]) for name in TENSORS)
    without = save(artifacts, 7)
    assert artifacts.manifest(without).average == ""
    assert all(np.array_equal(artifacts.tensors(without, averaged=True)[name], TENSORS[name]) for name in TENSORS)


def test_the_version_before_lies_beside_the_weights_if_it_is_given(tmp_path: Path) -> None:
    artifacts, token = Artifacts(tmp_path, "job"), Token(1, 3, "3" * 16)
    before = {name: values + 1 for name, values in TENSORS.items()}
    artifacts.finish(artifacts.stage(token, TENSORS, [b"state"], before=before), DIGEST, 0, 12)
    found = artifacts.before(token)
    assert found is not None and all(np.array_equal(found[name], before[name]) for name in TENSORS)
    assert artifacts.before(save(artifacts, 7)) is None
    path = artifacts.path(token, BEFORE)
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"before\.safetensors of checkpoint 1\.3\.3+ is damaged"):
        artifacts.before(token)


def test_two_who_stage_the_same_checkpoint_do_not_disturb_each_other(tmp_path: Path) -> None:
    artifacts, token = Artifacts(tmp_path, "job"), Token(1, 3, "3" * 16)
    staged = [artifacts.stage(token, TENSORS, [b"state"]) for _ in range(2)]
    assert artifacts.tokens() == []
    for one in staged:
        assert artifacts.finish(one, DIGEST, 0, 12).version == 3
    assert not list((tmp_path / "job" / ".unfinished").iterdir())
    assert artifacts.on_disk() == [token]


def test_checkpoints_are_listed_by_version_then_incarnation(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    saved = [save(artifacts, v, i) for v, i in [(10, 1), (2, 1), (10, 2)]]
    assert artifacts.tokens() == [saved[1], saved[0], saved[2]]
    assert Artifacts(tmp_path, "other").tokens() == []


def test_missing_and_damaged_checkpoints_say_so(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    with pytest.raises(ArtifactError, match="missing or damaged"):
        artifacts.manifest(Token(1, 1, "0" * 16))
    token = save(artifacts, 1)
    artifacts.path(token, "weights.safetensors").write_bytes(b"garbage")
    with pytest.raises(ArtifactError, match="damaged"):
        artifacts.tensors(token)


def test_incarnations_grow_whatever_is_left_on_disk(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    assert [artifacts.next_incarnation(None) for _ in range(3)] == [1, 2, 3]
    (tmp_path / "job" / "incarnations" / "3").write_text("garbage")
    save(artifacts, 5, incarnation=9)
    assert artifacts.next_incarnation(None) == 10


def test_two_who_open_a_job_at_once_get_different_incarnations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts, look = Artifacts(tmp_path, "job"), Artifacts.incarnation

    def meanwhile(self: Artifacts) -> int:
        seen = look(self)
        monkeypatch.setattr(Artifacts, "incarnation", look)
        assert artifacts.next_incarnation(None) == 1
        return seen

    monkeypatch.setattr(Artifacts, "incarnation", meanwhile)
    assert artifacts.next_incarnation(None) == 2


def test_a_record_that_was_only_begun_is_passed_over(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    saved = [save(artifacts, version) for version in (1, 2, 3)]
    artifacts.next_incarnation(saved[1])
    (tmp_path / "job" / "incarnations" / "3").touch()
    assert artifacts.tokens() == saved[:2]
    assert artifacts.on_disk() == saved
    assert artifacts.next_incarnation(saved[0]) == 4
    assert artifacts.tokens() == saved[:1]


def test_records_do_not_pile_up(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    for _ in range(30):
        artifacts.next_incarnation(None)
    assert len(list((tmp_path / "job" / "incarnations").iterdir())) == 10


def test_a_score_lies_beside_its_checkpoint(tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, "job")
    token = save(artifacts, 1)
    assert artifacts.score(token) is None
    artifacts.save_score(token, {"accuracy": 0.5})
    assert artifacts.score(token) == {"accuracy": 0.5}
    assert json.loads(artifacts.path(token, "score.json").read_text()) == {"accuracy": 0.5}


def test_a_small_file_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifacts = Artifacts(tmp_path, "job")
    token = save(artifacts, 1)

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space left"):
        artifacts.save_score(token, {"accuracy": 0.5})
    assert sorted(tmp_path.rglob("*")) == before
