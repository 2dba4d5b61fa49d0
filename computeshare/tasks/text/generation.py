"""Text from a language model, symbol by symbol."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn


def continuation(
    module: nn.Module, symbols: Sequence[int], context: int, temperature: float, seed: int
) -> Iterator[int]:
    """Yield the symbols that follow `symbols` (at least one), without end.

    Args:
        module: maps symbols (1, t) to logits (1, t, symbols); in eval mode, on the CPU.
        context: the largest t: each symbol is drawn from the distribution that follows the last so many.
        temperature: the logits are divided by it; 0: the likeliest symbol is taken each time.
        seed: of the draws; the same gives the same symbols.
    """
    source = torch.Generator().manual_seed(seed)
    known = list(symbols)
    while True:
        with torch.inference_mode():
            logits = module(torch.tensor([known[-context:]]))[0, -1]
            if temperature:
                weights = torch.softmax((logits - logits.max()) / temperature, 0)
                known.append(int(torch.multinomial(weights, 1, generator=source)))
            else:
                known.append(int(logits.argmax()))
        yield known[-1]
