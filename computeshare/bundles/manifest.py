"""A bundle's manifest: its files, cut into pieces, each named by its sha256. Pure."""

import hashlib
import json
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from computeshare.errors import BundleError
from computeshare.jobspec.part import plain_errors

PIECE_BYTES = 4 << 20
"""Size of every piece of a file, but the last."""
MOST_FILES, MOST_BYTES = 100_000, 1 << 44
CONTENT_BYTES = 32 << 20
"""The largest manifest: one of about 1.9 TB in large files."""
LONGEST_PATH = 200
DIGEST = "sha256:"
"""The prefix of a digest of files."""

HexName = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
"""A sha256 in hex."""
Digest = Annotated[str, StringConstraints(pattern=r"^sha256:[0-9a-f]{64}$")]
"""The name of a bundle."""


class FileEntry(BaseModel):
    """A file of a bundle: its path with `/` between the parts, its size in bytes, and its pieces in order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    size: int = Field(ge=0, le=MOST_BYTES)
    pieces: tuple[HexName, ...]

    @model_validator(mode="after")
    def _has_its_pieces(self) -> Self:
        if not is_safe_path(self.path):
            raise ValueError(f"{self.path[:LONGEST_PATH]!r} is not a path inside a folder: use plain relative paths")
        if len(self.pieces) != (needed := -(-self.size // PIECE_BYTES)):
            raise ValueError(f"{self.path} has {self.size:,} bytes, so {needed:,} pieces, not {len(self.pieces):,}")
        return self

    def piece_bytes(self, number: int) -> int:
        """Size of the piece at this place."""
        return min(PIECE_BYTES, self.size - number * PIECE_BYTES)


class Manifest(BaseModel):
    """The files of a bundle, sorted by path."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=MOST_FILES)

    @model_validator(mode="after")
    def _is_one_folder(self) -> Self:
        paths = [file.path for file in self.files]
        if any(one >= other for one, other in pairwise(paths)):
            raise ValueError("the files must be sorted by path, each path once")
        folders = {str(parent) for path in paths for parent in PurePosixPath(path).parents}
        alike: dict[str, str] = {}
        for path in paths:
            if path in folders:
                raise ValueError(f"{path} is both a file and a folder")
            if other := alike.get(key := unicodedata.normalize("NFC", path).casefold()):
                raise ValueError(f"{other} and {path} are the same file on some systems: rename one")
            alike[key] = path
        if sum(file.size for file in self.files) > MOST_BYTES:
            raise ValueError(f"a bundle has at most {MOST_BYTES / 1e12:.0f} TB")
        if len(self.content) > CONTENT_BYTES:
            raise ValueError(f"the manifest exceeds {CONTENT_BYTES >> 20} MB: pack small files into larger ones")
        return self

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """The manifest with this content. Raises BundleError: it is none."""
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            told = plain_errors(error.errors(include_url=False))
            raise BundleError(f"this is not a bundle's manifest: {told[0]['msg']}") from error

    @cached_property
    def content(self) -> bytes:
        """The manifest as canonical JSON, in UTF-8."""
        value = {"files": [{"path": f.path, "pieces": f.pieces, "size": f.size} for f in self.files]}
        return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()

    @cached_property
    def digest(self) -> str:
        """`sha256:` and 64 hex digits over `content`: the bundle's name everywhere."""
        return DIGEST + hashlib.sha256(self.content).hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)

    def chosen(self, only: Sequence[str] = ()) -> Iterator[FileEntry]:
        """The files whose paths start with one of `only`; all files if that is empty."""
        return (file for file in self.files if not only or file.path.startswith(tuple(only)))

    def pieces(self, only: Sequence[str] = ()) -> dict[str, int]:
        """The pieces of the `chosen` files, each once and in order, with their sizes in bytes."""
        return {piece: file.piece_bytes(n) for file in self.chosen(only) for n, piece in enumerate(file.pieces)}


def is_safe_path(path: str) -> bool:
    """Whether a path is relative, plain, stays inside its folder, and names a file on every system."""
    parts = PurePosixPath(path)
    plain = str(parts) == path and not parts.is_absolute() and ".." not in parts.parts and "\\" not in path
    return plain and 0 < len(path) <= LONGEST_PATH and path != "." and ":" not in path and path.isprintable()
