"""Texts by name, downloaded once, checked, and texts that users added, returned as batches of symbols."""

import urllib.request
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from pathlib import Path

import filelock
import numpy as np
import torch
from torch import Tensor

from computeshare.errors import DatasetError
from computeshare.jobspec.sampling_plan import Seeds
from computeshare.jobspec.tasks.language_models import samples, train_characters
from computeshare.tasks.base import Indices, SplitName
from computeshare.tasks.own.files import TOKENS, OwnData
from computeshare.tasks.text import vocabulary
from computeshare.tasks.text.vocabulary import Symbols, Vocabulary

TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class TextDefinition:
    """A text in ASCII: its file relative to the data directory, where it comes from, and its content."""

    file: str
    url: str
    source: str
    sha256: str
    characters: int
    alphabet: str
    """Every character that occurs, ascending: a character's symbol is its place here."""


DEFINITIONS: dict[str, TextDefinition] = {
    "tinyshakespeare": TextDefinition(
        "tinyshakespeare/input.txt",
        "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
        "char-rnn",
        "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
        1_115_394,
        "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    )
}


@dataclass(frozen=True, slots=True)
class TextSplit:
    """Windows of `block_size` symbols, end to end, of a part (n,) of a text."""

    symbols: Symbols
    block_size: int

    def __len__(self) -> int:
        return samples(len(self.symbols), self.block_size)

    def batch(self, indices: Indices, seeds: Seeds | None = None) -> tuple[Tensor, Tensor]:
        """The windows with these indices (n,), and the same windows one symbol later: int64, (n, block_size) each. No
        transformation is random.
        """
        places = indices[:, None] * self.block_size + np.arange(self.block_size + 1)
        windows = torch.from_numpy(self.symbols[places].astype(np.int64))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def open_split(name: str, split: SplitName, data_dir: Path, block_size: int) -> TextSplit:
    """Open a split of a text whose file exists (see `prepare`). Raises DatasetError: it is missing or damaged."""
    symbols = _read(name, data_dir / DEFINITIONS[name].file)
    border = train_characters(len(symbols))
    return TextSplit(symbols[:border] if split == "train" else symbols[border:], block_size)


def prepare(name: str, data_dir: Path) -> None:
    """Make sure that a text's file exists: download it, checked, where it is missing.

    Safe for simultaneous processes, as each file appears in one step. Raises: DatasetError.
    """
    text = DEFINITIONS[name]
    path = data_dir / text.file
    if path.exists():
        return
    partial = path.with_suffix(".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(data_dir / f".{name}.lock"):
            if not path.exists():
                partial.write_bytes(_downloaded(text))
                partial.replace(path)
    except OSError as error:
        raise DatasetError(
            f"{path} is missing, and the download failed: check this machine's connection, or copy the file there "
            f"({error})"
        ) from error


def open_own(own: OwnData, split: SplitName, block_size: int) -> TextSplit:
    """Open a split of a text that a user added. Raises DatasetError: it is missing or damaged."""
    symbols = own.array(split, TOKENS)
    own.check(split, symbols)
    return TextSplit(symbols, block_size)


def vocabulary_of(name: str, own: OwnData | None) -> Vocabulary:
    """The tokens of a text by its name, or of one that a user added. Raises DatasetError, PackageMissing."""
    if own is None:
        return vocabulary.by_characters(DEFINITIONS[name].alphabet)
    return vocabulary.of_own(own)


def _downloaded(text: TextDefinition) -> bytes:
    """Raises OSError, DatasetError: it is another file."""
    with urllib.request.urlopen(text.url, timeout=TIMEOUT_S) as answer:  # noqa: S310 - a constant
        content = answer.read(2 * text.characters)
    return _checked(text, content, text.url)


def _checked(text: TextDefinition, content: bytes, where: str | Path) -> bytes:
    if sha256(content).hexdigest() != text.sha256:
        raise DatasetError(f"{where} is damaged, or another text: delete it, so that it is downloaded again")
    return content


@lru_cache(maxsize=4)
def _read(name: str, path: Path) -> Symbols:
    """A text's symbols, read once. Raises DatasetError."""
    text = DEFINITIONS[name]
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} is missing: connect once so that it is downloaded, or copy it there") from error
    characters = _checked(text, content, path).decode("ascii")
    return vocabulary.by_characters(text.alphabet).encode(characters).astype(np.uint8)
