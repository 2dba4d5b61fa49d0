"""The tokens of a text and their numbers: characters, bytes, or those of a tokenizer file. Imports no torch."""

import codecs
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.errors import DatasetError, PackageMissing
from computeshare.jobspec.catalog import lacking_packages
from computeshare.tasks.own.files import TOKENIZER, OwnData

Symbols = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A text's division into tokens, whose numbers are below `symbols`.

    Args:
        encode: the numbers (n,) of a text's tokens; characters that the vocabulary has not are left out.
        decode: the text of numbers, in pieces of any length.
    """

    symbols: int
    encode: Callable[[str], Symbols]
    decode: Callable[[Iterable[int]], Iterator[str]]

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds a number."""
        return np.dtype("u1" if self.symbols <= 1 << 8 else "<u2" if self.symbols <= 1 << 16 else "<u4")


def of_own(own: OwnData) -> Vocabulary:
    """The tokens of a text that a user added. Raises: DatasetError, PackageMissing."""
    if own.facts.tokens == "characters":
        return by_characters(own.facts.alphabet)
    return by_bytes() if own.facts.tokens == "bytes" else by_tokenizer(own.path(TOKENIZER))


def by_characters(alphabet: str) -> Vocabulary:
    """Each character is a token: its number is its place in `alphabet`, whose characters ascend."""
    known = _code_points(alphabet)

    def encode(text: str) -> Symbols:
        points = _code_points(text)
        places = np.searchsorted(known, points).clip(max=len(known) - 1)
        found: Symbols = places[known[places] == points]
        return found

    return Vocabulary(len(alphabet), encode, lambda numbers: (alphabet[number] for number in numbers))


def by_bytes() -> Vocabulary:
    """Each byte of the text in UTF-8 is a token."""

    def decode(numbers: Iterable[int]) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return (decoder.decode(bytes([number])) for number in numbers)

    return Vocabulary(256, lambda text: np.frombuffer(text.encode(), np.uint8), decode)


def by_tokenizer(path: Path) -> Vocabulary:
    """The tokens of a file of the library `tokenizers`, without those that it adds around a text.

    Raises: DatasetError: it is no such file. PackageMissing.
    """
    if lacking := lacking_packages(("tokenizers",), extra="text"):
        raise PackageMissing(f"a tokenizer file {lacking}")
    from tokenizers import Tokenizer
    from tokenizers.decoders import DecodeStream

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more precise
        raise DatasetError(
            f"{path} is no tokenizer: give characters, bytes, or a tokenizer.json of the library tokenizers ({error})"
        ) from error

    def decode(numbers: Iterable[int]) -> Iterator[str]:
        stream = DecodeStream(skip_special_tokens=False)
        return (stream.step(tokenizer, number) or "" for number in numbers)

    return Vocabulary(
        tokenizer.get_vocab_size(),
        lambda text: np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32),
        decode,
    )


def _code_points(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
