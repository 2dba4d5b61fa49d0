"""A module's weights as flat vectors: what is shared travels once, what is frozen not at all; tensors in memory."""

import torch
from torch import nn

from computeshare.tasks.modules import ALIGNMENT, aligned, frozen_digest, layout_of, load_weights, weights_of


class Tied(nn.Module):
    """A table that is read, and used again as the matrix of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.hidden, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.table.weight


def test_a_tied_tensor_is_one_entry_and_stays_tied() -> None:
    source, target = Tied(), Tied()
    layout = layout_of(source)
    assert [one.name for one in layout.tensors] == ["table.weight", "hidden.weight", "hidden.bias"]
    assert layout.parameters == sum(p.numel() for p in source.parameters())
    load_weights(target, layout, weights_of(source, layout))
    assert torch.equal(target.head.weight, source.table.weight)
    assert target.head.weight is target.table.weight


def test_a_frozen_parameter_does_not_travel() -> None:
    module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    module[0].requires_grad_(False)
    layout = layout_of(module)
    assert [one.name for one in layout.tensors] == ["1.weight", "1.bias"]
    before = module[0].get_parameter("weight").clone()
    weights = weights_of(module, layout)
    weights.parameters[:] = 7
    load_weights(module, layout, weights)
    assert torch.equal(module[0].get_parameter("weight"), before)
    assert bool((module[1].get_parameter("weight") == 7).all())


def test_the_digest_of_what_is_frozen_tells_every_difference() -> None:
    def built(value: float = 0.5, **more: nn.Module) -> nn.Module:
        module = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
        for name, one in more.items():
            module.add_module(name, one)
        module[0].requires_grad_(False)
        with torch.no_grad():
            module[0].get_parameter("bias").fill_(value)
            module[0].get_parameter("weight").fill_(1)
        return module

    same = frozen_digest(built())
    assert same == frozen_digest(built()) == frozen_digest(built(x=nn.Linear(1, 1))) and len(same) == 64
    others = [built(0.50001), built(x=nn.Linear(1, 1).requires_grad_(False)), built().bfloat16()]
    assert len({same, *map(frozen_digest, others)}) == 4
    assert frozen_digest(nn.Linear(3, 2)) == ""


def test_a_tensor_that_lies_at_an_odd_place_is_copied_to_an_aligned_one() -> None:
    whole = torch.arange(60.0)
    assert aligned(whole) is whole
    for place in (1, 2, 4, 15):
        view = whole[place : place + 12].view(3, 4).T
        copy = aligned(view)
        assert copy.data_ptr() % ALIGNMENT == 0 != view.data_ptr() % ALIGNMENT
        assert torch.equal(copy, view) and copy.stride() == view.stride()
