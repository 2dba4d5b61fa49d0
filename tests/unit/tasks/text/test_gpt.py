"""The GPT is the one that nanoGPT describes."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.tasks.modules import layout_of
from computeshare.tasks.text.gpt import Gpt

ARGS = GptArgs(n_layer=2, n_head=2, n_embd=8, block_size=6)
SYMBOLS = 11


@pytest.fixture
def model() -> Gpt:
    torch.manual_seed(0)
    return Gpt(SYMBOLS, **ARGS.model_dump()).eval()


def attended(values: Tensor, into: Tensor, out: Tensor, heads: int) -> Tensor:
    """Causal attention written out: each symbol looks at itself and at those before it."""
    t, width = values.shape
    size, outcome = width // heads, torch.empty(t, width)
    query, key, value = (values @ part.T for part in into.split(width))
    for head in range(heads):
        mine = slice(head * size, (head + 1) * size)
        for place in range(t):
            scores = query[place, mine] @ key[: place + 1, mine].T / math.sqrt(size)
            outcome[place, mine] = torch.softmax(scores, 0) @ value[: place + 1, mine]
    return outcome @ out.T


def written_out(model: Gpt, symbols: Tensor) -> Tensor:
    state = model.state_dict()

    def normed(values: Tensor, name: str) -> Tensor:
        spread = values.var(1, correction=0, keepdim=True)
        return (values - values.mean(1, keepdim=True)) / torch.sqrt(spread + 1e-5) * state[f"{name}.weight"]

    values = state["symbols.weight"][symbols] + state["positions.weight"][: len(symbols)]
    for layer in range(ARGS.n_layer):
        block = f"blocks.{layer}"
        into, out = state[f"{block}.attention.into.weight"], state[f"{block}.attention.out.weight"]
        values = values + attended(normed(values, f"{block}.attention_norm"), into, out, ARGS.n_head)
        hidden = normed(values, f"{block}.perceptron_norm") @ state[f"{block}.perceptron.into.weight"].T
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
        values = values + hidden @ state[f"{block}.perceptron.out.weight"].T
    return normed(values, "norm") @ state["symbols.weight"].T


def test_its_logits_are_those_of_the_formulas(model: Gpt) -> None:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    symbols = torch.tensor([3, 0, 10, 10, 7, 1])
    with torch.no_grad():
        torch.testing.assert_close(model(symbols[None])[0], written_out(model, symbols), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(symbols[None, :4])[0], written_out(model, symbols[:4]), rtol=1e-4, atol=1e-4)


def test_a_later_symbol_changes_no_earlier_logit(model: Gpt) -> None:
    first, second = torch.tensor([[1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 8, 7]])
    a, b = model(first[None])[0], model(second[None])[0]
    assert torch.equal(a[:3], b[:3])
    assert not torch.allclose(a[3:], b[3:])


def test_it_has_as_many_parameters_as_its_arguments_say(model: Gpt) -> None:
    assert layout_of(model).parameters == ARGS.parameters(SYMBOLS) == sum(p.numel() for p in model.parameters())


def test_it_begins_as_a_guess_with_small_values() -> None:
    torch.manual_seed(0)
    model = Gpt(65, n_layer=8, n_head=4, n_embd=64, block_size=16)
    deviations = {name: parameter.std().item() for name, parameter in model.named_parameters() if parameter.ndim == 2}
    for name, deviation in deviations.items():
        assert deviation == pytest.approx(0.005 if name.endswith("out.weight") else 0.02, rel=0.1), name
    assert all(bool((p == 1).all()) for p in model.parameters() if p.ndim == 1)
    symbols = torch.randint(65, (8, 17))
    loss = functional.cross_entropy(model(symbols[:, :-1]).flatten(0, 1), symbols[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(65), abs=0.1)


def test_dropout_is_drawn_in_training_alone() -> None:
    model = Gpt(SYMBOLS, **ARGS.model_dump() | {"dropout": 0.5})
    symbols = torch.tensor([[1, 2, 3]])
    assert not torch.equal(model(symbols), model(symbols))
    model.eval()
    assert torch.equal(model(symbols), model(symbols))
