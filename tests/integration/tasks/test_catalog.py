"""The committed table says what the installed torch and torchvision offer."""

import json
import random
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from computeshare.errors import SpecError
from computeshare.jobspec.catalog import ArgumentEntry, catalog
from computeshare.jobspec.optimizer_spec import LARGEST_ARGUMENT, OptimizerSpec
from computeshare.tasks import catalog_table, modules
from computeshare.tasks.images import models

REMEDY = "run `python -m computeshare.tasks.catalog_table`"


@pytest.fixture(scope="module")
def committed() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(catalog_table.path().read_text())
    return table


def test_data_sets_and_optimizers_are_those_installed(committed: dict[str, Any]) -> None:
    assert committed["datasets"] == catalog_table.dataset_entries(), REMEDY
    assert committed["texts"] == catalog_table.text_entries(), REMEDY
    assert committed["optimizers"] == catalog_table.optimizer_entries(), REMEDY


@pytest.mark.slow
def test_models_and_their_facts_are_those_installed(committed: dict[str, Any]) -> None:
    assert list(committed["models"]) == catalog_table.model_names(), REMEDY
    for name, entry in committed["models"].items():
        facts = {key: value for key, value in entry.items() if key != "min_size"}
        assert facts == catalog_table.model_facts(name), f"{name}: {REMEDY}"


def test_the_table_is_of_the_installed_versions(committed: dict[str, Any]) -> None:
    import torchvision

    assert torch.__version__.startswith(committed["torch"]), REMEDY
    assert torchvision.__version__.startswith(committed["torchvision"]), REMEDY


@pytest.mark.parametrize(
    "name", ["mlp", "lenet5", "simplenet", "resnet20", "squeezenet1_1", "googlenet", "vit_b_32", "inception_v3"]
)
@pytest.mark.slow
def test_the_smallest_size_is_found_again(name: str) -> None:
    assert catalog_table.min_size(name) == catalog().models[name].min_size


@pytest.mark.parametrize(
    "name",
    ["lenet5", "simplenet", "resnet18", "squeezenet1_1", "shufflenet_v2_x0_5", "densenet121", "swin_t", "googlenet"],
)
def test_the_smallest_size_holds_where_tensors_have_values(name: str) -> None:
    def logits(size: int) -> torch.Tensor:
        result: torch.Tensor = models.build(name, (1, size, size), 10, 0).train()(torch.zeros(2, 1, size, size))
        return result

    size = catalog().models[name].min_size
    assert logits(size).shape == (2, 10)
    if size > 1:
        with pytest.raises((RuntimeError, ValueError, SpecError)):
            logits(size - 1)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", list(catalog().models))
def test_every_model_takes_grey_images_of_any_allowed_size_and_gives_one_tensor(name: str) -> None:
    size = max(33, catalog().models[name].min_size)
    with modules.ParametersOnMeta(), torch.no_grad():
        module = models.build(name, (1, size, size + 4), 7, 0).to("meta").train()
        assert module(torch.empty(2, 1, size, size + 4, device="meta")).shape == (2, 7)


def test_a_torchvision_model_is_initialised_from_the_seed() -> None:
    first, again, other = (models.build("resnet18", (3, 32, 32), 10, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["layer1.0.conv1.weight"], other["layer1.0.conv1.weight"])


def test_an_untouched_torchvision_model_is_torchvisions_own() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(4)
    expected = resnet18(num_classes=10).state_dict()
    state = models.build("resnet18", (3, 32, 32), 10, 4).state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


def test_the_first_convolution_keeps_all_but_its_channels() -> None:
    grey, colour = (models.build("resnet18", (channels, 32, 32), 10, 0).conv1 for channels in (1, 3))
    assert isinstance(grey, torch.nn.Conv2d)
    assert isinstance(colour, torch.nn.Conv2d)
    for name in ("out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
        assert getattr(grey, name) == getattr(colour, name)
    assert grey.in_channels == 1
    assert (grey.bias is None) == (colour.bias is None)


def test_an_unknown_model_is_refused() -> None:
    with pytest.raises(SpecError, match="unknown model 'fcn_resnet50'"):
        models.build("fcn_resnet50", (3, 32, 32), 10, 0)


# Optimizer arguments that only torch judges


VALUES = (-1.0, -1e-6, 0.0, 1e-6, 0.5, 1.0 - 1e-6, 1.0, 1.0 + 1e-6, 2.0, 50.0)


def sample(seeded: random.Random, entry: ArgumentEntry) -> Any:
    """Any value of the argument's kind, the bounds and their neighbours above all."""
    if entry.kind == "boolean":
        return seeded.random() < 0.5
    if entry.kind == "numbers":
        return [None if r.nullable and seeded.random() < 0.3 else seeded.choice(VALUES) for r in entry.ranges]
    return seeded.choice(VALUES)


def ours(name: str, arguments: dict[str, Any]) -> bool:
    try:
        OptimizerSpec(name=name, **arguments)
    except ValidationError:
        return False
    return True


def torchs(name: str, arguments: dict[str, Any]) -> bool:
    plain = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
    return catalog_table.takes_arguments(getattr(torch.optim, name), plain)


@pytest.mark.parametrize("name", list(catalog().optimizers))
def test_arguments_are_taken_here_exactly_where_torch_takes_them(name: str) -> None:
    seeded, entries = random.Random(name), catalog().optimizers[name].arguments
    verdicts = set()
    for _ in range(300):
        chosen = seeded.sample(sorted(entries), seeded.randint(1, min(3, len(entries))))
        arguments = {argument: sample(seeded, entries[argument]) for argument in chosen}
        verdict = ours(name, arguments)
        assert verdict == torchs(name, arguments), arguments
        verdicts.add(verdict)
    assert verdicts == {True, False}


@pytest.mark.parametrize("name", list(catalog().optimizers))
def test_the_largest_arguments_taken_here_are_taken_by_torch(name: str) -> None:
    for argument, entry in catalog().optimizers[name].arguments.items():
        for value in (LARGEST_ARGUMENT, -LARGEST_ARGUMENT):
            numbers = [value] * len(entry.ranges)
            given = {argument: numbers if entry.kind == "numbers" else value}
            assert not ours(name, given) or torchs(name, given), given
