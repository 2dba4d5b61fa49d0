"""Checkpoints on disk: one folder per version, complete or absent.

`ARTIFACTS/JOB/TOKEN/` holds `weights.safetensors` (the state dict as workers hold it), `state.safetensors` (the
reducer's full-precision parameters, moving average and optimizer state), `manifest.json`, where needed
`average.safetensors` (a state dict with the moving average of the parameters), `before.safetensors` (that of the
version before, which the next round's units begin with in a job with a delay or an overlap) and `ledger.json` (the
events of earlier versions that the control plane may not have stored) and, once scored, `score.json` and a classifier's
`classes.json`. A folder is written in `.unfinished`, flushed to the disk and renamed, so that a folder named by a token
is complete.
Beside these folders, `chosen.json` holds the choices made for a job that left its codecs or precision open, and
`incarnations/N` records at which checkpoint the job was opened for the Nth time and so which checkpoints are valid: the
others belong to abandoned branches.
"""

import contextlib
import hashlib
import json
import os
import shutil
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from computeshare.checkpoints.branch import ALL, Branch
from computeshare.errors import ArtifactError, LostClaim
from computeshare.protocol.versions.ledger import Entry
from computeshare.runtime.durability import flush, flush_open
from computeshare.runtime.failpoints import failpoint
from computeshare.tensors import safetensors_writer
from computeshare.types import JOB_ID, Blob, Token

UNFINISHED_S = 3600
"""Seconds after which an unfinished checkpoint counts as abandoned by its writer."""
RECORDS_KEPT = 10
"""Records of openings to keep; the newest readable record suffices."""
WEIGHTS, STATE, MANIFEST, SCORE = "weights.safetensors", "state.safetensors", "manifest.json", "score.json"
CLASSES = "classes.json"
DAMAGED = "damaged"
"""A file in the folder of a checkpoint that an evaluator could not read."""
AVERAGE, BEFORE, LEDGER = "average.safetensors", "before.safetensors", "ledger.json"
CHOICE, INCARNATIONS, UNFINISHED = "chosen.json", "incarnations", ".unfinished"


Tensors = Mapping[str, npt.NDArray[np.generic]]


class CheckpointManifest(BaseModel):
    """A checkpoint's own description of its contents."""

    model_config = ConfigDict(frozen=True)

    token: str
    version: int
    sha256: str
    """Over the tensors' bytes in `state_dict` order."""
    bytes: int
    """Size of the weights file."""
    epoch: int
    next_micro_batch: int
    carried: tuple[int, ...] = ()
    """Micro-batches that the previous round closed without: they come first in the next round."""
    files: dict[str, str] = {}
    """sha256, in hex, of each file beside the weights, by name."""
    average: str = ""
    """As `sha256`, of the moving average; empty: there is none."""
    before: str = ""
    """As `sha256`, of the version before; empty: the next round is not computed on it."""
    frozen: str = ""
    """Digest of the parameters that are not trained, and not in the checkpoint either; empty: there are none."""
    check: str = ""
    """sha256 of the manifest without this field, and without `average`, `before` and `frozen` where they are empty."""

    def checked(self) -> "CheckpointManifest":
        """This manifest with `check` filled in."""
        empty = {name for name in ("average", "before", "frozen") if not getattr(self, name)}
        content = self.model_dump_json(exclude={"check"} | empty)
        return self.model_copy(update={"check": hashlib.sha256(content.encode()).hexdigest()})


@dataclass(slots=True)
class Staged:
    """A checkpoint's files in a temporary folder."""

    token: Token
    folder: Path
    is_suspect: bool = False
    """Whether a flush failed: a later flush may then succeed although some data never reached the disk."""

    def renew(self) -> None:
        """Write the large files again, from the system's page cache."""
        for name in (WEIGHTS, AVERAGE, BEFORE, STATE):
            with contextlib.suppress(FileNotFoundError):  # a job without a moving average, a delay or an overlap
                shutil.copyfile(self.folder / name, self.folder / "again")
                os.replace(self.folder / "again", self.folder / name)

    def discard(self) -> None:
        """Delete the temporary folder, unless it has been renamed to a checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Artifacts:
    """The checkpoints of one job."""

    def __init__(self, root: Path, job_id: str) -> None:
        """Raises ValueError: `job_id` is malformed; a valid id cannot lead out of `root`."""
        if not JOB_ID.fullmatch(job_id):
            raise ValueError(f"not a job's id: {job_id[:100]!r}")
        self.folder = root / job_id

    @classmethod
    def at(cls, folder: Path) -> Self:
        """Checkpoints in another folder, such as one that was fetched."""
        found = cls.__new__(cls)
        found.folder = folder
        return found

    def path(self, token: Token, name: str = "") -> Path:
        return self.folder / str(token) / name

    def has(self, token: Token) -> bool:
        return self.path(token, MANIFEST).exists()

    def stage(
        self,
        token: Token,
        tensors: Tensors,
        state: Iterable[Blob],
        average: Tensors | None = None,
        before: Tensors | None = None,
    ) -> Staged:
        """Write a checkpoint's large files, without flushing them to the disk; takes as long as copying them.

        Args:
            tensors: the version's state dict.
            average: the same with the moving average of the parameters.
            before: the state dict of the version before, if the next round is computed on it.
        Raises OSError (such as a full disk); no files are left then.
        """
        staged = self._staged(token)
        try:
            metadata = {"token": str(token), "order": json.dumps(list(tensors))}  # the format itself sorts by name
            _write(staged.folder / WEIGHTS, safetensors_writer.pieces(tensors, metadata))
            for name, others in ((AVERAGE, average), (BEFORE, before)):
                if others is not None:
                    _write(staged.folder / name, safetensors_writer.pieces(others, metadata))
            _write(staged.folder / STATE, state)
        except BaseException:
            staged.discard()
            raise
        return staged

    def finish(
        self,
        staged: Staged,
        sha256: str,
        epoch: int,
        next_micro_batch: int,
        carried: Sequence[int] = (),
        ledger: Sequence[Entry] = (),
        frozen: str = "",
    ) -> CheckpointManifest:
        """Make the staged files a durable checkpoint: `seal` and `place`, with their errors."""
        manifest = self.seal(staged, sha256, epoch, next_micro_batch, carried, ledger, frozen)
        self.place(staged)
        return manifest

    def seal(
        self,
        staged: Staged,
        sha256: str,
        epoch: int,
        next_micro_batch: int,
        carried: Sequence[int] = (),
        ledger: Sequence[Entry] = (),
        frozen: str = "",
    ) -> CheckpointManifest:
        """Add ledger and manifest to the staged files and flush all to the disk. Raises OSError; a retry is safe."""
        if self.has(staged.token):  # another reducer wrote the same bytes first, or this is a second attempt
            return self.manifest(staged.token)
        if staged.is_suspect:
            staged.renew()
        if ledger:
            _write(staged.folder / LEDGER, [json.dumps(ledger, separators=(",", ":")).encode()])
        files = {name: file_digest(staged.folder / name) for name in ((STATE, LEDGER) if ledger else (STATE,))}
        average, before = (staged.folder / name for name in (AVERAGE, BEFORE))
        manifest = CheckpointManifest(
            token=str(staged.token),
            version=staged.token.version,
            sha256=sha256,
            bytes=(staged.folder / WEIGHTS).stat().st_size,
            epoch=epoch,
            next_micro_batch=next_micro_batch,
            carried=tuple(carried),
            files=files,
            average=weights_digest(average) if average.exists() else "",
            before=weights_digest(before) if before.exists() else "",
            frozen=frozen,
        ).checked()
        _write(staged.folder / MANIFEST, [manifest.model_dump_json(indent=1).encode()])
        staged.is_suspect = True
        for path in (*staged.folder.iterdir(), staged.folder):
            flush(path)
        staged.is_suspect = False
        return manifest

    def place(self, staged: Staged) -> None:
        """Rename sealed files to a checkpoint.

        Raises OSError; a retry is safe. LostClaim: the job was opened again meanwhile. (If it is opened right after
        that check, the checkpoint belongs to an abandoned branch, and `tokens` leaves it out.)
        """
        failpoint("in_checkpoint")
        if self.has(staged.token):
            staged.discard()
        elif staged.token.incarnation < (newest := self.incarnation()):
            raise LostClaim(f"incarnation {newest} was opened before checkpoint {staged.token} was complete")
        else:
            try:
                os.rename(staged.folder, self.path(staged.token))
            except OSError:
                if not self.has(staged.token):  # another reducer has placed it meanwhile
                    raise
                staged.discard()
        flush(self.folder)

    def adopt(self, checkpoint: Path, sha256: str, with_state: bool) -> Token:
        """Make another job's checkpoint version 0 of this job, in incarnation 0, which precedes the first.

        The files are hard links, or copies on a file system without links, and outlive the other job. Without
        `with_state` the state file is empty: the optimizer starts afresh. Raises OSError: the files are gone, or the
        disk is full. ArtifactError: they are damaged.
        """
        staged = self._staged(Token(0, 0, sha256[:16]))
        try:
            _link(checkpoint / WEIGHTS, staged.folder / WEIGHTS)
            if with_state:
                _link(checkpoint / STATE, staged.folder / STATE)
            else:
                _write(staged.folder / STATE, [])
            parent = _manifest(checkpoint)
            manifest = self.finish(staged, sha256, 0, 0, frozen=parent.frozen)
            if with_state and manifest.files[STATE] != parent.files.get(STATE):
                raise ArtifactError(f"the state of checkpoint {checkpoint.name} is damaged: fork another one")
        finally:
            staged.discard()
        return staged.token

    def _staged(self, token: Token) -> Staged:
        """Create a temporary folder for a checkpoint's files."""
        staged = Staged(token, self.folder / UNFINISHED / f"{token}.{uuid.uuid4().hex[:8]}")
        staged.folder.mkdir(parents=True)
        return staged

    def manifest(self, token: Token) -> CheckpointManifest:
        """A checkpoint's manifest. Raises ArtifactError: the checkpoint is missing or damaged."""
        return _manifest(self.path(token))

    def tensors(self, token: Token, averaged: bool = False) -> dict[str, npt.NDArray[np.generic]]:
        """The state dict of a checkpoint; with `averaged` that of the moving average, if the job keeps one. Raises
        ArtifactError: it is missing, or its digest differs from the manifest's.
        """
        manifest = self.manifest(token)
        if averaged and manifest.average:
            return self._tensors(token, AVERAGE, manifest.average)
        return self._tensors(token, WEIGHTS, manifest.sha256)

    def before(self, token: Token) -> dict[str, npt.NDArray[np.generic]] | None:
        """The state dict of the version before a checkpoint's; None: it has none. Raises ArtifactError."""
        digest = self.manifest(token).before
        return self._tensors(token, BEFORE, digest) if digest else None

    def _tensors(self, token: Token, name: str, digest: str) -> dict[str, npt.NDArray[np.generic]]:
        try:
            tensors, metadata = safetensors_writer.read(_read(self.path(token, name)))
            if _digest(tensors[one] for one in json.loads(metadata["order"])) == digest:
                return tensors
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(f"{name} of checkpoint {token} is missing or damaged: {error}") from error
        raise ArtifactError(f"{name} of checkpoint {token} is damaged: its digest differs from the manifest's")

    def newest_bytes(self) -> int:
        """Bytes of the newest checkpoint's files; 0: there is none."""
        for token in reversed(self.tokens()):
            with contextlib.suppress(FileNotFoundError):  # it is being removed
                return sum(path.stat().st_size for path in self.path(token).iterdir())
        return 0

    def state(self, token: Token) -> memoryview:
        """The reducer's state in a checkpoint, as writable memory. Raises ArtifactError."""
        return self._read(token, STATE)

    def ledger(self, token: Token) -> list[Entry]:
        """The events of earlier versions that a checkpoint stores; empty if it stores none or they cannot be read."""
        try:
            return list(json.loads(bytes(self._read(token, LEDGER))))
        except (ArtifactError, ValueError, TypeError):
            return []

    def _read(self, token: Token, name: str) -> memoryview:
        """A file beside the weights. Raises ArtifactError: it is missing, or its digest differs from the manifest's."""
        expected = self.manifest(token).files.get(name)
        try:
            content = _read(self.path(token, name))
        except OSError as error:
            raise ArtifactError(f"{name} of checkpoint {token} is missing: {error}") from error
        if hashlib.sha256(content).hexdigest() != expected:
            raise ArtifactError(f"{name} of checkpoint {token} is damaged: its digest differs from the manifest's")
        return content

    def ledgers(self) -> list[Entry]:
        """The events that all valid checkpoints store."""
        return [entry for token in self.tokens() for entry in self.ledger(token)]

    def tokens(self) -> list[Token]:
        """The valid checkpoints, on the branch that leads to the job's current state; oldest first."""
        found = self.on_disk()  # listed first: an incarnation is recorded before it has a checkpoint
        branch = self.branch()
        return [token for token in found if branch.holds(token)]

    def on_disk(self) -> list[Token]:
        """All checkpoints on disk, including those of abandoned branches; oldest first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(ValueError):
                found.append(Token.parse(path.name))
        return sorted(found, key=lambda token: (token.version, token.incarnation))

    def score(self, token: Token) -> dict[str, Any] | None:
        """The evaluator's score of a checkpoint; None if there is none."""
        try:
            return dict(json.loads(self.path(token, SCORE).read_bytes()))
        except (OSError, ValueError):
            return None

    def save_score(self, token: Token, score: Mapping[str, Any]) -> None:
        """Write the evaluator's score into the checkpoint's folder."""
        replace_file(self.path(token, SCORE), json.dumps(score).encode())

    def mark_damaged(self, token: Token) -> None:
        """Note that a checkpoint cannot be read, so that nothing waits for its score. Raises OSError."""
        self.path(token, DAMAGED).touch()

    def is_damaged(self, token: Token) -> bool:
        """Whether an evaluator found that the checkpoint cannot be read."""
        return self.path(token, DAMAGED).exists()

    def classes(self, token: Token) -> dict[str, Any]:
        """A classifier's counts by class (`tasks.class_counts`), for each part of the data that the checkpoint was
        scored on; empty without any.
        """
        try:
            return dict(json.loads(self.path(token, CLASSES).read_bytes()))
        except (OSError, ValueError):
            return {}

    def save_classes(self, token: Token, part: str, counts: Mapping[str, Any]) -> None:
        """Add the counts by class on a part of the data to the checkpoint's folder."""
        replace_file(self.path(token, CLASSES), json.dumps(self.classes(token) | {part: counts}).encode())

    def remove(self, token: Token) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(self.path(token), ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove the files that killed writers left behind."""
        for path in (self.folder / UNFINISHED).glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(path)

    def branch(self) -> Branch:
        """The valid branch, from the newest record that can be read."""
        for number in reversed(self._incarnations()):
            try:
                record = json.loads((self.folder / INCARNATIONS / str(number)).read_bytes())
                ends = {int(earlier): int(end) for earlier, end in record["ends"].items()}
                return Branch(number, ends, ALL if record["others"] is None else int(record["others"]))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue  # its writer died, and has opened nothing
        return Branch()

    def incarnation(self) -> int:
        """The highest incarnation on record; 0 if there is none."""
        return max(self._incarnations(), default=0)

    def next_incarnation(self, origin: Token | None) -> int:
        """Durably record a new opening of the job, at checkpoint `origin` or, for None, at the initial weights.

        Returns the incarnation's number, 1 for the first; simultaneous callers get different numbers. Raises OSError.
        """
        folder = self.folder / INCARNATIONS
        folder.mkdir(parents=True, exist_ok=True)
        branch = self.branch()
        number = max(self.incarnation(), *(token.incarnation for token in self.on_disk()), 0) + 1
        while True:
            opened = branch.opened(number, origin)
            record = {"ends": opened.ends, "others": None if opened.others == ALL else opened.others}
            try:
                _create(folder / str(number), json.dumps(record).encode())
                break
            except FileExistsError:
                number += 1
        for each in (folder, self.folder):
            flush(each)
        for old in self._incarnations():
            if old <= number - RECORDS_KEPT:
                (folder / str(old)).unlink(missing_ok=True)
        return number

    def withdraw(self, incarnation: int) -> None:
        """Remove the record of an opening that did not happen, which would end the incarnation before."""
        (self.folder / INCARNATIONS / str(incarnation)).unlink(missing_ok=True)

    def _incarnations(self) -> list[int]:
        """The incarnations on record, ascending."""
        try:
            return sorted(int(path.name) for path in (self.folder / INCARNATIONS).iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []

    def keep_choice(self, choice: dict[str, Any]) -> None:
        """Durably store the choices made for the job, such as its codecs. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        replace_file(self.folder / CHOICE, json.dumps(choice).encode())
        flush(self.folder)

    def choice(self) -> dict[str, Any] | None:
        """The choices stored for the job; None if there are none."""
        try:
            found = json.loads((self.folder / CHOICE).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def delete(self) -> None:
        """Remove all of the job's files."""
        shutil.rmtree(self.folder, ignore_errors=True)


def weights_digest(path: Path) -> str:
    """sha256, in hex, over a weights file's tensors in `state_dict` order. Raises ArtifactError: no such valid file."""
    try:
        with safe_open(path, framework="np") as file:
            return _digest(file.get_tensor(name) for name in json.loads((file.metadata() or {})["order"]))
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"this is not a complete weights file of ComputeShare: {error}") from error


def _digest(tensors: Iterable[npt.NDArray[np.generic]]) -> str:
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.tobytes())
    return sha.hexdigest()


def file_digest(path: Path) -> str:
    """sha256, in hex, of a file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> CheckpointManifest:
    """The manifest in a checkpoint's folder. Raises ArtifactError: it is missing or damaged."""
    try:
        manifest = CheckpointManifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise ArtifactError(f"checkpoint {folder.name} is missing or damaged: {error}") from error
    if manifest != manifest.checked():
        raise ArtifactError(f"checkpoint {folder.name} is damaged: its manifest does not match its own digest")
    return manifest


def _link(source: Path, target: Path) -> None:
    """Hard-link a file, or copy it on a file system without links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)


def _read(path: Path) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        content = np.empty(os.fstat(file.fileno()).st_size, np.uint8).data
        done = 0
        while count := file.readinto(content[done:]):
            done += count
        return content[:done]


def _write(path: Path, content: Iterable[Blob]) -> None:
    with open(path, "wb") as file:
        file.writelines(content)


def _create(path: Path, content: bytes) -> None:
    """Durably write a small new file. Raises FileExistsError, OSError."""
    with open(path, "xb") as file:
        try:
            file.write(content)
            file.flush()
            flush_open(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def replace_file(path: Path, content: bytes) -> None:
    """Replace a small file in one step; after an error the old file is unchanged."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write(temporary, [content])
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
