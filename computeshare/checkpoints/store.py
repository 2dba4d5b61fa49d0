"""Checkpoints on disk: one folder a version, complete or absent.

`ARTIFACTS/JOB/TOKEN/` holds `weights.safetensors` (the state dict as workers hold it), `state.safetensors` (the
reducer's full-precision parameters and optimizer state), `manifest.json`, `ledger.json` (what led to the version, as
far as the control plane may not know it) where there is need of one, and once scored `score.json`. A folder is written
in `.unfinished`, flushed to the disk, and renamed: what has a token's name is whole. Beside them, `chosen.json` is
what was chosen for a job that left its codecs open, and `incarnations/N` says at which checkpoint the job was opened
the Nth time, and so which of the checkpoints count: the others are left of branches that were given up.
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
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open

from computeshare.checkpoints.branch import ALL, Branch
from computeshare.errors import ArtifactError, LostClaim
from computeshare.protocol.ledger import Entry
from computeshare.runtime.durability import flush, flush_open
from computeshare.runtime.failpoints import failpoint
from computeshare.tensors import safetensors_writer
from computeshare.types import JOB_ID, Blob, Token

UNFINISHED_S = 3600
"""A checkpoint still being written after this long is not being written any more."""
RECORDS_KEPT = 10
"""Records of openings; the newest that can be read says it all."""
WEIGHTS, STATE, MANIFEST, SCORE = "weights.safetensors", "state.safetensors", "manifest.json", "score.json"
LEDGER, CHOICE, INCARNATIONS, UNFINISHED = "ledger.json", "chosen.json", "incarnations", ".unfinished"


class Manifest(BaseModel):
    """What a checkpoint says of itself."""

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
    """Micro-batches that the round before closed without: they come first in the next."""
    files: dict[str, str] = {}
    """sha256 of the files beside the weights, by name."""
    check: str = ""
    """sha256 of the manifest without this line."""

    def checked(self) -> "Manifest":
        """This manifest with its own digest."""
        content = self.model_dump_json(exclude={"check"})
        return self.model_copy(update={"check": hashlib.sha256(content.encode()).hexdigest()})


@dataclass(slots=True)
class Staged:
    """A checkpoint's files under another name than they will have."""

    token: Token
    folder: Path
    is_suspect: bool = False
    """Whether the disk has refused some of it: what it then says it has may not be there."""

    def renew(self) -> None:
        """Write the large files once more, from what the system still holds of them."""
        for name in (WEIGHTS, STATE):
            shutil.copyfile(self.folder / name, self.folder / "again")
            os.replace(self.folder / "again", self.folder / name)

    def discard(self) -> None:
        """Do without it, unless it has become a checkpoint."""
        shutil.rmtree(self.folder, ignore_errors=True)


class Artifacts:
    """The checkpoints of one job."""

    def __init__(self, root: Path, job_id: str) -> None:
        """Raises ValueError: `job_id` is no id, so that it cannot lead out of `root`."""
        if not JOB_ID.fullmatch(job_id):
            raise ValueError(f"not a job's id: {job_id[:100]!r}")
        self.folder = root / job_id

    def path(self, token: Token, name: str = "") -> Path:
        return self.folder / str(token) / name

    def has(self, token: Token) -> bool:
        return self.path(token, MANIFEST).exists()

    def stage(self, token: Token, tensors: Mapping[str, npt.NDArray[np.generic]], state: Iterable[Blob]) -> Staged:
        """Write a checkpoint's large files, which takes as long as copying them: they are not flushed to the disk yet.

        Raises OSError: there is no room, for one; nothing is left then.
        """
        staged = self._staged(token)
        try:
            metadata = {"token": str(token), "order": json.dumps(list(tensors))}  # the format itself sorts by name
            _write(staged.folder / WEIGHTS, safetensors_writer.pieces(tensors, metadata))
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
    ) -> Manifest:
        """Make what was staged a checkpoint, durably. Raises as `seal` and `place`."""
        manifest = self.seal(staged, sha256, epoch, next_micro_batch, carried, ledger)
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
    ) -> Manifest:
        """Complete what was staged and have the disk hold it. Raises OSError; it may be tried again then."""
        if self.has(staged.token):  # another reducer wrote the same bytes first, or this is a second attempt
            return self.manifest(staged.token)
        if staged.is_suspect:
            staged.renew()
        if ledger:
            _write(staged.folder / LEDGER, [json.dumps(ledger, separators=(",", ":")).encode()])
        files = {name: file_digest(staged.folder / name) for name in ((STATE, LEDGER) if ledger else (STATE,))}
        manifest = Manifest(
            token=str(staged.token),
            version=staged.token.version,
            sha256=sha256,
            bytes=(staged.folder / WEIGHTS).stat().st_size,
            epoch=epoch,
            next_micro_batch=next_micro_batch,
            carried=tuple(carried),
            files=files,
        ).checked()
        _write(staged.folder / MANIFEST, [manifest.model_dump_json(indent=1).encode()])
        staged.is_suspect = True
        for path in (*staged.folder.iterdir(), staged.folder):
            flush(path)
        staged.is_suspect = False
        return manifest

    def place(self, staged: Staged) -> None:
        """Make what was sealed a checkpoint.

        Raises OSError; it may be tried again then. LostClaim: the job has been opened again meanwhile. (If that happens
        right after the look, the checkpoint belongs to a branch that was given up, and is none of `tokens`.)
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
                if not self.has(staged.token):  # in the meantime, by another
                    raise
                staged.discard()
        flush(self.folder)

    def adopt(self, checkpoint: Path, sha256: str, with_state: bool) -> Token:
        """Make another job's checkpoint the version 0 of this one, of the incarnation before its first.

        The files are linked, or copied where that cannot be, and outlive the other job. Without its state there is an
        empty one, which says that the optimizer starts afresh. Raises OSError: the files are gone, or the disk is full.
        ArtifactError: they are damaged.
        """
        staged = self._staged(Token(0, 0, sha256[:16]))
        try:
            _link(checkpoint / WEIGHTS, staged.folder / WEIGHTS)
            if with_state:
                _link(checkpoint / STATE, staged.folder / STATE)
            else:
                _write(staged.folder / STATE, [])
            manifest = self.finish(staged, sha256, 0, 0)
            if with_state and manifest.files[STATE] != _manifest(checkpoint).files.get(STATE):
                raise ArtifactError(f"the state of checkpoint {checkpoint.name} is damaged: fork another one")
        finally:
            staged.discard()
        return staged.token

    def _staged(self, token: Token) -> Staged:
        """Room for a checkpoint's files."""
        staged = Staged(token, self.folder / UNFINISHED / f"{token}.{uuid.uuid4().hex[:8]}")
        staged.folder.mkdir(parents=True)
        return staged

    def manifest(self, token: Token) -> Manifest:
        """Raises ArtifactError where the checkpoint is missing or damaged."""
        return _manifest(self.path(token))

    def tensors(self, token: Token) -> dict[str, npt.NDArray[np.generic]]:
        """The state dict of a checkpoint. Raises ArtifactError."""
        try:
            return safetensors_writer.read(_read(self.path(token, WEIGHTS)))[0]
        except (OSError, ValueError) as error:
            raise ArtifactError(f"the weights of checkpoint {token} are missing or damaged: {error}") from error

    def state(self, token: Token) -> memoryview:
        """The reducer's state of a checkpoint, in memory that can be written to. Raises ArtifactError."""
        return self._read(token, STATE)

    def ledger(self, token: Token) -> list[Entry]:
        """What a checkpoint tells of the versions that led to it; nothing where the control plane knew them all."""
        try:
            return list(json.loads(bytes(self._read(token, LEDGER))))
        except (ArtifactError, ValueError, TypeError):
            return []

    def _read(self, token: Token, name: str) -> memoryview:
        """A file beside the weights. Raises ArtifactError: it is missing, or another than the manifest names."""
        expected = self.manifest(token).files.get(name)
        try:
            content = _read(self.path(token, name))
        except OSError as error:
            raise ArtifactError(f"{name} of checkpoint {token} is missing: {error}") from error
        if hashlib.sha256(content).hexdigest() != expected:
            raise ArtifactError(f"{name} of checkpoint {token} is damaged: its digest is not that in the manifest")
        return content

    def ledgers(self) -> list[Entry]:
        """What all the checkpoints tell."""
        return [entry for token in self.tokens() for entry in self.ledger(token)]

    def tokens(self) -> list[Token]:
        """The checkpoints that lead to where the job stands, oldest first."""
        found = self.on_disk()  # looked at first: an incarnation is on record before it has a checkpoint
        branch = self.branch()
        return [token for token in found if branch.holds(token)]

    def on_disk(self) -> list[Token]:
        """All checkpoints that there are, those of branches that were given up among them, oldest first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            with contextlib.suppress(ValueError):
                found.append(Token.parse(path.name))
        return sorted(found, key=lambda token: (token.version, token.incarnation))

    def score(self, token: Token) -> dict[str, Any] | None:
        """The evaluator's verdict on a checkpoint, if it has one."""
        try:
            return dict(json.loads(self.path(token, SCORE).read_bytes()))
        except (OSError, ValueError):
            return None

    def save_score(self, token: Token, score: Mapping[str, Any]) -> None:
        """Keep the evaluator's verdict beside the checkpoint."""
        _replace(self.path(token, SCORE), json.dumps(score).encode())

    def remove(self, token: Token) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(self.path(token), ignore_errors=True)

    def clear_unfinished(self) -> None:
        """Remove what writers that were killed have left behind."""
        for path in (self.folder / UNFINISHED).glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > UNFINISHED_S:
                    shutil.rmtree(path)

    def branch(self) -> Branch:
        """Which checkpoints count, by the newest record that can be read."""
        for number in reversed(self._incarnations()):
            try:
                record = json.loads((self.folder / INCARNATIONS / str(number)).read_bytes())
                ends = {int(earlier): int(end) for earlier, end in record["ends"].items()}
                return Branch(number, ends, ALL if record["others"] is None else int(record["others"]))
            except (OSError, ValueError, TypeError, KeyError, AttributeError):
                continue  # its writer died, and has opened nothing
        return Branch()

    def incarnation(self) -> int:
        """How often the job was opened, or was about to be."""
        return max(self._incarnations(), default=0)

    def next_incarnation(self, origin: Token | None) -> int:
        """Record, durably, that the job is opened once more, at the checkpoint `origin` or at its beginning.

        Returns its number, 1 for the first; two who ask at once get different ones. Raises OSError.
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

    def _incarnations(self) -> list[int]:
        """The numbers of the records, ascending."""
        try:
            return sorted(int(path.name) for path in (self.folder / INCARNATIONS).iterdir() if path.name.isdecimal())
        except FileNotFoundError:
            return []

    def keep_choice(self, choice: dict[str, Any]) -> None:
        """Keep what was chosen for the job, durably."""
        self.folder.mkdir(parents=True, exist_ok=True)
        _replace(self.folder / CHOICE, json.dumps(choice).encode())
        flush(self.folder)

    def choice(self) -> dict[str, Any] | None:
        """What was chosen for the job; None if nothing was."""
        try:
            found = json.loads((self.folder / CHOICE).read_text())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def delete(self) -> None:
        """Remove the job's checkpoints altogether."""
        shutil.rmtree(self.folder, ignore_errors=True)


def weights_digest(path: Path) -> str:
    """sha256, in hex, over the tensors of a weights file in `state_dict` order. Raises ArtifactError: no such file."""
    sha = hashlib.sha256()
    try:
        with safe_open(path, framework="np") as file:
            for name in json.loads((file.metadata() or {})["order"]):
                sha.update(file.get_tensor(name).tobytes())
    except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ArtifactError(f"this is no whole weights file of ComputeShare: {error}") from error
    return sha.hexdigest()


def file_digest(path: Path) -> str:
    """sha256, in hex, of a file's bytes. Raises OSError."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest(folder: Path) -> Manifest:
    """Raises ArtifactError."""
    try:
        manifest = Manifest.model_validate_json((folder / MANIFEST).read_bytes())
    except (OSError, ValidationError) as error:
        raise ArtifactError(f"checkpoint {folder.name} is missing or damaged: {error}") from error
    if manifest != manifest.checked():
        raise ArtifactError(f"checkpoint {folder.name} is damaged: its manifest does not match its own digest")
    return manifest


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy of it on a file system that knows no links."""
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
    """Write a small file that is not there yet, durably. Raises FileExistsError, OSError."""
    with open(path, "xb") as file:
        try:
            file.write(content)
            file.flush()
            flush_open(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _replace(path: Path, content: bytes) -> None:
    """Write a small file in one step; what could not be written whole leaves nothing."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        _write(temporary, [content])
        flush(temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
