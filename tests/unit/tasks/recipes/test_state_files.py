"""A recipe's initial state in files: what is trained, and what is frozen."""

from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipe_facts import FROZEN, INITIAL
from computeshare.tasks.modules import ALIGNMENT, frozen_digest, layout_of, weights_of
from computeshare.tasks.recipes import state_files
from computeshare.tensors import safetensors_writer


def built(frozen: torch.dtype | None = torch.float32, width: int = 4) -> nn.Module:
    """A module with buffers and counters and, unless `frozen` is None, tied parameters of that type that are frozen."""
    module = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
    if frozen:
        module[0].requires_grad_(False).to(frozen)
        module.add_module("again", module[0])
    return module


@pytest.mark.parametrize("frozen", [torch.float32, torch.bfloat16])
def test_a_module_built_elsewhere_gets_the_same_state(tmp_path: Path, frozen: torch.dtype) -> None:
    there, here = built(frozen), built(frozen)
    layout = layout_of(there)
    state_files.write(there, tmp_path)
    state_files.load_frozen(here, tmp_path)
    assert frozen_digest(here) == frozen_digest(there) != ""
    weights = state_files.read_initial(tmp_path, layout)
    assert layout.digest(weights) == layout.digest(weights_of(there, layout)) != layout.digest(weights_of(here, layout))


def test_what_is_frozen_is_mapped_and_the_file_stays_as_it_was(tmp_path: Path) -> None:
    there, here = built(), built()
    state_files.write(there, tmp_path)
    before = (tmp_path / FROZEN).read_bytes()
    state_files.load_frozen(here, tmp_path)
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(tmp_path / FROZEN) in maps.read_text()
    with torch.no_grad():
        here[0].weight.add_(1)
    assert (tmp_path / FROZEN).read_bytes() == before


@pytest.mark.parametrize("letters", range(1, 66, 8))
def test_what_is_frozen_lies_in_memory_as_where_it_was_built(tmp_path: Path, letters: int) -> None:
    """Names of any length: the file's values begin after them."""

    def made(out: int) -> nn.Module:
        return nn.Sequential(OrderedDict({"n" * letters: nn.Linear(17, out).requires_grad_(False)}))

    inputs = torch.randn(1, 17)
    for out in (5, 64):
        there, here = made(out), made(out)
        state_files.write(there, tmp_path)
        state_files.load_frozen(here, tmp_path)
        assert {one.data_ptr() % ALIGNMENT for one in here.parameters()} == {0}
        assert torch.equal(here(inputs), there(inputs))
    content = (tmp_path / FROZEN).read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % ALIGNMENT == 0, "so that large tensors need no copy"


def test_without_frozen_parameters_there_is_one_file(tmp_path: Path) -> None:
    module = built(None)
    state_files.write(module, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [INITIAL]
    state_files.load_frozen(module, tmp_path)


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("2.weight", np.zeros((2, 5), np.float32), "2.weight is missing, unknown, or of another shape or type"),
        ("2.weight", np.zeros((2, 4), np.float64), "2.weight is missing, unknown, or of another shape or type"),
        ("extra", np.zeros(1, np.float32), "extra is missing, unknown"),
        ("2.bias", np.array([0, np.nan], np.float32), "2.bias has values that are not finite"),
        ("1.running_var", np.full(4, np.inf, np.float32), "1.running_var has values that are not finite"),
    ],
)
def test_initial_weights_are_those_of_the_layout(tmp_path: Path, name: str, values: np.ndarray, said: str) -> None:
    module = built()
    layout = layout_of(module)
    tensors = layout.views(weights_of(module, layout)) | {name: values}
    (tmp_path / INITIAL).write_bytes(b"".join(safetensors_writer.pieces(tensors, {})))
    with pytest.raises(RecipeError, match=said):
        state_files.read_initial(tmp_path, layout)


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    module = built()
    layout = layout_of(module)
    tensors = layout.views(weights_of(module, layout))
    del tensors["2.bias"]
    (tmp_path / INITIAL).write_bytes(b"".join(safetensors_writer.pieces(tensors, {})))
    with pytest.raises(RecipeError, match=r"2\.bias is missing"):
        state_files.read_initial(tmp_path, layout)


@pytest.mark.parametrize("content", [None, b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 64])
def test_missing_and_damaged_files_are_told(tmp_path: Path, content: bytes | None) -> None:
    module = built()
    for name in (INITIAL, FROZEN) if content is not None else ():
        (tmp_path / name).write_bytes(content or b"")
    with pytest.raises(RecipeError, match="initial weights cannot be read"):
        state_files.read_initial(tmp_path, layout_of(module))
    with pytest.raises(RecipeError, match="frozen parameters cannot be read"):
        state_files.load_frozen(module, tmp_path)


def test_another_module_does_not_get_what_is_frozen(tmp_path: Path) -> None:
    state_files.write(built(width=5), tmp_path)
    with pytest.raises(RecipeError, match=r"0\.weight, which is frozen, is float32 \(4, 3\) in .* float32 \(5, 3\) in"):
        state_files.load_frozen(built(), tmp_path)
    state_files.write(built(torch.float64), tmp_path)
    with pytest.raises(RecipeError, match=r"0\.weight, which is frozen, is float32 .* float64"):
        state_files.load_frozen(built(), tmp_path)
