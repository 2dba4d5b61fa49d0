from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from computeshare.errors import DatasetError
from computeshare.tasks.text.vocabulary import Vocabulary, by_bytes, by_characters, by_tokenizer

TEXT = "Grüße, 世界 \N{GRINNING FACE}!"


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), Decoder()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(["one two three four"] * 20, trainer)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def decoded(vocabulary: Vocabulary, text: str) -> str:
    return "".join(vocabulary.decode(vocabulary.encode(text).tolist()))


def test_each_kind_gives_the_text_back(tokenizer: Path) -> None:
    for vocabulary in (by_characters("".join(sorted(set(TEXT)))), by_bytes(), by_tokenizer(tokenizer)):
        assert decoded(vocabulary, TEXT) == TEXT
        assert max(vocabulary.encode(TEXT).tolist()) < vocabulary.symbols


def test_unknown_characters_are_left_out() -> None:
    vocabulary = by_characters("ab")
    assert vocabulary.encode("xabz-b\U0010ffff").tolist() == [0, 1, 1]
    assert vocabulary.encode("").tolist() == []


def test_bytes_that_are_no_text_are_replaced_not_raised() -> None:
    assert (
        "".join(by_bytes().decode([0xFF, 0x41, 0xC3, 0x42])) == "\N{REPLACEMENT CHARACTER}A\N{REPLACEMENT CHARACTER}B"
    )


def test_text_without_end_is_decoded_as_it_comes() -> None:
    def numbers():  # type: ignore[no-untyped-def]
        while True:
            yield 65

    assert list(islice(by_bytes().decode(numbers()), 3)) == ["A", "A", "A"]


@pytest.mark.parametrize(("symbols", "kind"), [(256, "uint8"), (257, "uint16"), (70_000, "uint32")])
def test_the_smallest_type_holds_the_numbers(symbols: int, kind: str) -> None:
    nothing = by_bytes()
    assert Vocabulary(symbols, nothing.encode, nothing.decode).dtype.name == kind


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DatasetError, match="is no tokenizer"):
        by_tokenizer(tmp_path / "tokenizer.json")
