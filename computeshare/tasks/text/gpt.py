"""A GPT as nanoGPT describes it: tied embeddings, no biases, LayerNorm before each part, GELU.

Source: https://github.com/karpathy/nanoGPT; Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019. Model cards repeat this source, so that it imports nothing but torch.
"""

import math

from torch import Tensor, nn
from torch.nn import functional

INITIAL_STD = 0.02


class Gpt(nn.Module):
    """Maps symbols (n, t) int64 to the logits (n, t, symbols) of each symbol's successor; t is the context at most."""

    def __init__(
        self, symbols: int, *, n_layer: int, n_head: int, n_embd: int, block_size: int, dropout: float = 0.0
    ) -> None:
        """Initialised from torch's global generator."""
        super().__init__()
        self.symbols = nn.Embedding(symbols, n_embd)
        self.positions = nn.Embedding(block_size, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(n_head, n_embd, dropout) for _ in range(n_layer)))
        self.norm = nn.LayerNorm(n_embd, bias=False)
        self._initialise(n_layer)

    def forward(self, symbols: Tensor) -> Tensor:
        values = self.symbols(symbols) + self.positions.weight[: symbols.shape[1]]
        values = self.norm(self.blocks(self.dropout(values)))
        return functional.linear(values, self.symbols.weight)  # tied: the same matrix reads symbols and predicts them

    def _initialise(self, layers: int) -> None:
        """Normal values; those that add to the residual stream smaller, since 2 x `layers` of them add up."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                added = name.endswith("out.weight")
                nn.init.normal_(parameter, std=INITIAL_STD / math.sqrt(2 * layers) if added else INITIAL_STD)


class _Block(nn.Module):
    """Attention, then a perceptron, each added to its input."""

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(n_embd, bias=False)
        self.attention = _Attention(n_head, n_embd, dropout)
        self.perceptron_norm = nn.LayerNorm(n_embd, bias=False)
        self.perceptron = _Perceptron(n_embd, dropout)

    def forward(self, values: Tensor) -> Tensor:
        values = values + self.attention(self.attention_norm(values))
        return values + self.perceptron(self.perceptron_norm(values))  # type: ignore[no-any-return]


class _Attention(nn.Module):
    """Causal attention of `n_head` heads, on values (n, t, width)."""

    def __init__(self, n_head: int, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.heads = n_head
        self.into = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.out = nn.Linear(n_embd, n_embd, bias=False)
        self.inner_dropout, self.dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        n, t, width = values.shape
        query, key, value = self.into(values).view(n, t, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        dropped = self.inner_dropout.p if self.inner_dropout.training else 0.0
        seen = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        return self.dropout(self.out(seen.transpose(1, 2).reshape(n, t, width)))  # type: ignore[no-any-return]


class _Perceptron(nn.Module):
    """A hidden layer, four times as wide."""

    def __init__(self, n_embd: int, dropout: float) -> None:
        super().__init__()
        self.into = nn.Linear(n_embd, 4 * n_embd, bias=False)
        self.out = nn.Linear(4 * n_embd, n_embd, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, values: Tensor) -> Tensor:
        return self.dropout(self.out(functional.gelu(self.into(values))))  # type: ignore[no-any-return]
