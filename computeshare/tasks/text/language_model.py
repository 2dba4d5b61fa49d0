"""A language model as a task: symbols in, logits of the next symbol out, the cross-entropy per symbol in nats."""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.nn import functional

from computeshare.errors import InputError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.tasks import modules
from computeshare.tasks.base import Batch, Better, SplitName, Task
from computeshare.tasks.own.files import OwnData
from computeshare.tasks.source import source_of
from computeshare.tasks.text import texts
from computeshare.tasks.text.generation import continuation
from computeshare.tasks.text.gpt import Gpt
from computeshare.tasks.text.texts import TextSplit
from computeshare.tasks.text.vocabulary import Vocabulary
from computeshare.tasks.usage import Usage

SYMBOLS_AT_ONCE = 16_384
"""Symbols that are scored together: a batch's activations fit a small machine's memory whatever the context."""
SAMPLE_PROMPT, SAMPLE_TEMPERATURE, SAMPLE_CHARACTERS = "\n", 0.8, 200
"""Defaults of `computeshare generate`; a sample costs about a sixth of scoring the test set of `tinyshakespeare`."""


@dataclass(frozen=True, slots=True)
class LanguageModel(Task):
    """A `gpt` on a text of `tasks.text.texts`.

    Batches are pairs of int64 symbols (n, block_size): a window of the text, and the same window one symbol later.

    Args:
        label_smoothing: share of each target that the training loss spreads evenly over all symbols.
        validation: as `Task.validation`.
        own: the text, where a user added it.
    """

    dataset: str
    args: GptArgs
    label_smoothing: float = 0.0
    validation: float = 0.0
    own: OwnData | None = None

    @property
    def metrics(self) -> Mapping[str, Better]:
        return {}

    @property
    def name(self) -> str:
        return "gpt"

    @property
    def symbols(self) -> int:
        """The size of the vocabulary."""
        return self.own.facts.symbols if self.own else catalog().texts[self.dataset].symbols

    @property
    def identity(self) -> Mapping[str, Any]:
        return {"model": self.name, "args": self.args.model_dump(), "symbols": self.symbols}

    @property
    def usage(self) -> Usage:
        return Usage(
            "text-generation",
            f"Symbols (n, t) int64, t at most {self.args.block_size}, to the logits (n, t, {self.symbols}) of each "
            f"symbol's successor. {self._tokens}.",
            f"{source_of(Gpt)}\n\n\nmodule = Gpt({self.symbols}, "
            + ", ".join(f"{name}={value}" for name, value in self.args.model_dump().items())
            + ")",
            is_plain=True,
        )

    @property
    def _tokens(self) -> str:
        """The meaning of the symbols, in a sentence."""
        if self.own and self.own.facts.tokens != "characters":
            return "A symbol is a byte of UTF-8" if self.own.facts.tokens == "bytes" else "They are the tokenizer's"
        alphabet = self.own.facts.alphabet if self.own else texts.DEFINITIONS[self.dataset].alphabet
        return f"A character's symbol is its place in {alphabet!r}"

    @property
    def scored_at_once(self) -> int:
        return max(1, SYMBOLS_AT_ONCE // self.args.block_size)

    def module(self, seed: int) -> nn.Module:
        with modules.drawn_from(seed):
            return Gpt(self.symbols, **self.args.model_dump())

    def prepare(self, data_dir: Path) -> None:
        if not self.own:
            texts.prepare(self.dataset, data_dir)

    def open(self, split: SplitName, data_dir: Path) -> TextSplit:
        if self.own:
            return texts.open_own(self.own, split, self.args.block_size)
        return texts.open_split(self.dataset, split, data_dir, self.args.block_size)

    def noise(self, samples: int, seed: int) -> TextSplit:
        source = np.random.Generator(np.random.PCG64(seed))
        kind = np.uint8 if self.symbols <= 256 else np.int64
        symbols = source.integers(0, self.symbols, samples * self.args.block_size + 1, kind)
        return TextSplit(symbols, self.args.block_size)

    def generate(self, module: nn.Module, prompt: str, temperature: float, seed: int) -> Iterator[str]:
        vocabulary = texts.vocabulary_of(self.dataset, self.own)
        symbols = vocabulary.encode(prompt).tolist()
        if not symbols:
            raise InputError(f"the prompt has no character of {self.dataset}: give for example a word or a line break")
        return self._following(module, vocabulary, symbols, temperature, seed)

    def sample(self, module: nn.Module, seed: int) -> str:
        vocabulary = texts.vocabulary_of(self.dataset, self.own)
        prompt = vocabulary.encode(SAMPLE_PROMPT).tolist() or [0]
        following = self._following(module, vocabulary, prompt, SAMPLE_TEMPERATURE, seed)
        return "".join(itertools.islice(following, SAMPLE_CHARACTERS))

    def _following(
        self, module: nn.Module, vocabulary: Vocabulary, symbols: list[int], temperature: float, seed: int
    ) -> Iterator[str]:
        """Yield the characters that follow `symbols`, without end."""
        following = continuation(module, symbols, self.args.block_size, temperature, seed)
        return itertools.chain.from_iterable(vocabulary.decode(following))

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        symbols, targets = batch
        logits = module(symbols).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten(), label_smoothing=self.label_smoothing)

    def sums(self, module: nn.Module, batch: Batch) -> dict[str, Tensor]:
        symbols, targets = batch
        loss = functional.cross_entropy(module(symbols).flatten(0, 1), targets.flatten(), reduction="sum")
        return {"loss": loss / self.args.block_size}  # a sample's loss is the mean over its symbols
