"""Prepares a text: its tokens' numbers, in one memory-mapped file for each split."""

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Literal

from computeshare.datasets.prepared import Advance, Prepared, is_hidden, listed
from computeshare.errors import DatasetError
from computeshare.jobspec.tasks.language_models import train_characters
from computeshare.jobspec.tasks.own_data import MOST_CHARACTERS, DatasetSizes
from computeshare.tasks.own.files import TOKENIZER, TOKENS
from computeshare.tasks.text.vocabulary import Vocabulary, by_bytes, by_characters, by_tokenizer
from computeshare.tensors.npy_writer import npy_writer

SUFFIXES = (
    ".txt",
    ".text",
    ".md",
    ".rst",
    ".csv",
    ".tex",
    ".html",
    ".xml",
    ".json",
    ".jsonl",
    ".py",
    ".c",
    ".h",
    ".js",
)
TEST_FILES = ("test", "validation", "valid", "val")
CHUNK = 1 << 20
"""Characters that are in memory together."""
Parts = dict[str, list[Path]]


def prepare(source: Path, target: Path, tokens: str, advance: Advance) -> Prepared:
    """Write a text to `target`, as `train/tokens.npy` and `test/tokens.npy`.

    Args:
        source: a file, or a folder of them, which are joined in the order of their names. Its `train` and `test` (a
            folder or a file each) are the splits; else the last 10 % of the characters are for the test.
        tokens: `characters`, `bytes`, or the path of a tokenizer file of the library `tokenizers`.
    Raises: DatasetError: there is no text in UTF-8, or the tokenizer cannot be read. PackageMissing.
    """
    parts, remarks = _parts(source)
    whole = sum(path.stat().st_size for paths in parts.values() for path in paths)
    alphabet = _alphabet(parts, lambda done: advance("reading", done, whole)) if tokens == "characters" else ""
    vocabulary = _vocabulary(tokens, alphabet)
    done = 0

    def step(paths: list[Path]) -> Iterator[str]:
        nonlocal done
        for piece in _pieces(paths):
            yield piece
            done += len(piece.encode())
            advance("text", min(done, whole), whole)

    if "test" in parts:
        counts = {split: _write(target / split / TOKENS, vocabulary, step(paths)) for split, paths in parts.items()}
    else:
        border = train_characters(sum(len(piece) for piece in _pieces(parts["train"])))
        before, after = _at_border(step(parts["train"]), border)
        counts = {"train": _write(target / "train" / TOKENS, vocabulary, before)}
        counts["test"] = _write(target / "test" / TOKENS, vocabulary, after)
    if min(counts.values()) < 2:
        raise DatasetError(
            f"the text is too short: it gives {counts['train']} tokens to train, {counts['test']} to test"
        )
    kind: Literal["characters", "bytes", "tokenizer"] = "characters" if alphabet else "bytes"
    if tokens not in ("characters", "bytes"):
        kind = "tokenizer"
        (target / TOKENIZER).write_bytes(Path(tokens).read_bytes())
    sizes = DatasetSizes(
        train=counts["train"],
        test=counts["test"],
        tokens=kind,
        symbols=vocabulary.symbols,
        alphabet=alphabet,
    )
    return Prepared(target, "text", sizes, remarks)


def is_text(path: Path) -> bool:
    """Whether a file has a text's name."""
    return path.suffix.lower() in SUFFIXES


def _parts(source: Path) -> tuple[Parts, tuple[str, ...]]:
    """The files of each split, of `train` alone where the text is undivided, and remarks. Raises DatasetError."""
    if source.is_file():
        return {"train": [source]}, ()
    beside = {path.stem.lower(): path for path in sorted(source.iterdir()) if path.is_dir() or is_text(path)}
    if "train" not in beside:
        return {"train": _files(source)}, _others(source)
    test = next((beside[name] for name in TEST_FILES if name in beside), None)
    parts = {"train": _files(beside["train"])} | ({"test": _files(test)} if test else {})
    return parts, ()


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    found = sorted(path for path in source.rglob("*") if is_text(path) and path.is_file())
    found = [path for path in found if not is_hidden(path, source)]
    if not found:
        raise DatasetError(f"{source} has no text: files whose names end in {', '.join(SUFFIXES[:3])} or so are read")
    return found


def _others(source: Path) -> tuple[str, ...]:
    below = (path for path in sorted(source.rglob("*")) if path.is_file() and not is_hidden(path, source))
    others = [path.name for path in below if not is_text(path)]
    return (f"Left out {len(others):,} files that are no text by their names: {listed(others)}",) if others else ()


def _pieces(paths: list[Path]) -> Iterator[str]:
    """The text of files, piece by piece, with a line break between files. Raises DatasetError."""
    for number, path in enumerate(paths):
        if number:
            yield "\n"
        try:
            with path.open(encoding="utf-8-sig") as file:
                while piece := file.read(CHUNK):
                    yield piece
        except UnicodeDecodeError as error:
            raise DatasetError(f"{path} is not text in UTF-8 ({error}): convert it, or take it out") from error
        except OSError as error:
            raise DatasetError(f"{path} cannot be read: {error.strerror}") from error


def _at_border(pieces: Iterator[str], border: int) -> tuple[Iterator[str], Iterator[str]]:
    """The text before the character number `border`, and that from there on; to be read in this order."""
    rest: list[str] = []

    def before() -> Iterator[str]:
        left = border
        for piece in pieces:
            yield piece[:left]
            left -= len(piece)
            if left <= 0:
                rest.append(piece[len(piece) + left :])
                return

    def after() -> Iterator[str]:
        yield from rest
        yield from pieces

    return before(), after()


def _vocabulary(tokens: str, alphabet: str) -> Vocabulary:
    if tokens == "characters":
        return by_characters(alphabet)
    return by_bytes() if tokens == "bytes" else by_tokenizer(Path(tokens))


def _write(path: Path, vocabulary: Vocabulary, pieces: Iterator[str]) -> int:
    """Write the tokens of a text; returns their number. Raises DatasetError."""
    try:
        with npy_writer(path, vocabulary.dtype) as writer:
            for piece in pieces:
                writer.append(vocabulary.encode(piece).astype(vocabulary.dtype))
            return writer.count
    except OSError as error:
        raise DatasetError(f"{path} cannot be written ({error}): free some space") from error


def _alphabet(parts: Parts, advance: Callable[[int], object]) -> str:
    """All characters of a text, ascending; empty if they are not the tokens. Raises DatasetError: they are too many."""
    found, done = set[str](), 0
    for piece in chain.from_iterable(map(_pieces, parts.values())):
        found.update(piece)
        done += len(piece.encode())
        advance(done)
    if len(found) > MOST_CHARACTERS:
        raise DatasetError(
            f"the text has {len(found):,} different characters, more than {MOST_CHARACTERS:,}: give --tokens bytes"
        )
    if not found:
        raise DatasetError("the text is empty")
    return "".join(sorted(found))
