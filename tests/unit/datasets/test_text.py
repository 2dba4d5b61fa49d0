from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from computeshare.datasets import text
from computeshare.datasets.prepared import Prepared, quiet
from computeshare.errors import DatasetError
from computeshare.tasks.own.files import TOKENIZER, TOKENS
from computeshare.tasks.text.vocabulary import by_tokenizer


def prepare(source: Path, target: Path, tokens: str = "characters") -> Prepared:
    return text.prepare(source, target, tokens, quiet)


def read(target: Path, split: str) -> list[int]:
    found: list[int] = np.load(target / split / TOKENS, mmap_mode="r").tolist()
    return found


def test_characters_are_numbered_in_their_order_and_the_end_is_for_the_test(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("bañana日" * 10, encoding="utf-8-sig")
    sizes = prepare(tmp_path / "in.txt", tmp_path / "out").sizes
    assert (sizes.train, sizes.test, sizes.symbols, sizes.alphabet) == (63, 7, 5, "abnñ日")
    assert read(tmp_path / "out", "train")[:7] == [1, 0, 3, 0, 2, 0, 4]
    assert read(tmp_path / "out", "test") == [1, 0, 3, 0, 2, 0, 4]


def test_the_border_of_the_splits_may_lie_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "CHUNK", 4)
    content = "".join(chr(97 + number % 26) for number in range(101))
    (tmp_path / "in.txt").write_text(content)
    alphabet = prepare(tmp_path / "in.txt", tmp_path / "out").sizes.alphabet
    splits = ["".join(alphabet[one] for one in read(tmp_path / "out", split)) for split in ("train", "test")]
    assert splits == [content[:90], content[90:]]


def test_bytes_need_no_alphabet(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("é" * 10)
    sizes = prepare(tmp_path / "in.txt", tmp_path / "out", "bytes").sizes
    assert (sizes.train, sizes.test, sizes.symbols, sizes.tokens, sizes.alphabet) == (18, 2, 256, "bytes", "")
    assert read(tmp_path / "out", "test") == [0xC3, 0xA9]


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    source = tmp_path / "in"
    (source / "b").mkdir(parents=True)
    (source / "b" / "two.txt").write_text("cd" * 10)
    (source / "a.txt").write_text("ab" * 10)
    (source / "picture.png").touch()
    found = prepare(source, tmp_path / "out")
    assert found.sizes.train + found.sizes.test == 41  # a line break between the files
    assert read(tmp_path / "out", "train")[20] == 0
    assert "picture.png" in found.remarks[0]


def test_train_and_test_are_the_splits(tmp_path: Path) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "train.txt").write_text("abcd")
    (source / "test.txt").write_text("xyz")
    sizes = prepare(source, tmp_path / "out").sizes
    assert (sizes.train, sizes.test, sizes.alphabet) == (4, 3, "abcdxyz")


def test_many_symbols_take_two_bytes(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(chr(0x4E00 + number) for number in range(400)))
    prepare(tmp_path / "in.txt", tmp_path / "out")
    tokens = np.load(tmp_path / "out" / "train" / TOKENS, mmap_mode="r")
    assert tokens.dtype == np.dtype("<u2")
    assert tokens.tolist() == list(range(360))


def test_too_many_characters_point_at_bytes(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("".join(chr(0x4E00 + number) for number in range(20_001)))
    with pytest.raises(DatasetError, match="give --tokens bytes"):
        prepare(tmp_path / "in.txt", tmp_path / "out")


def test_other_encodings_are_named(tmp_path: Path) -> None:
    (tmp_path / "old.txt").write_bytes("Käse".encode("latin-1") * 10)
    with pytest.raises(DatasetError, match=r"old\.txt is not text in UTF-8"):
        prepare(tmp_path / "old.txt", tmp_path / "out")


def test_a_short_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("short")
    with pytest.raises(DatasetError, match="too short"):
        prepare(tmp_path / "in.txt", tmp_path / "out")


def test_a_tokenizer_file_divides_the_text(tmp_path: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0, "one": 1, "two": 2}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "words.json"))
    (tmp_path / "in.txt").write_text("one two three two " * 10)
    sizes = prepare(tmp_path / "in.txt", tmp_path / "out", str(tmp_path / "words.json")).sizes
    assert (sizes.tokens, sizes.symbols) == ("tokenizer", 3)
    assert read(tmp_path / "out", "train")[:4] == [1, 2, 0, 2]
    assert by_tokenizer(tmp_path / "out" / TOKENIZER).symbols == 3


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("{}")
    with pytest.raises(DatasetError, match="is no tokenizer"):
        prepare(tmp_path / "in.txt", tmp_path / "out", str(tmp_path / "in.txt"))
