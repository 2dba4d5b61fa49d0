"""Models by name: their sizes, their seeds, and their weights as vectors."""

import numpy as np
import pytest
import torch
from torch import nn

from computeshare.errors import ShapeError, SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.images.models import OWN, build, construction
from computeshare.tasks.images.small_models import ResidualBlock
from computeshare.tasks.modules import layout_of, load_weights, weights_of
from computeshare.tasks.registry import task_of

MNIST = (1, 28, 28)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize(("name", "count"), [("lenet5", 61_706), ("simplenet", 21_840)])
def test_models_have_the_published_number_of_parameters(name: str, count: int) -> None:
    assert layout_of(build(name, MNIST, 10, 0)).parameters == count


@pytest.mark.parametrize(
    ("depth", "millions", "count"),
    [(20, 0.27, 269_722), (32, 0.46, 464_154), (56, 0.85, 853_018), (110, 1.7, 1_727_962)],
)
def test_small_resnets_have_the_published_layers_and_parameters(depth: int, millions: float, count: int) -> None:
    module = build(f"resnet{depth}", (3, 32, 32), 10, 0)
    assert sum(isinstance(layer, nn.Conv2d | nn.Linear) for layer in module.modules()) == depth
    assert layout_of(module).parameters == count == pytest.approx(millions * 1e6, rel=0.02)


@pytest.mark.parametrize(("dataset", "classes"), [("emnist-byclass", 62), ("usps", 10), ("pcam", 2)])
@pytest.mark.parametrize("model", ["lenet5", "mlp", "resnet20"])
def test_a_job_plans_for_as_many_parameters_as_its_classes_need(model: str, dataset: str, classes: int) -> None:
    spec = JobSpec(dataset=dataset, model=model)
    built = task_of(spec).layout().parameters
    assert task_of(spec).classes == classes
    assert built <= spec.parameters
    assert model != "resnet20" or classes < 10 or built >= spec.parameters - 300  # grey: 288 fewer


def test_a_small_resnets_shortcut_keeps_values_and_has_no_parameters() -> None:
    block = ResidualBlock(2, 4).eval()
    nn.init.zeros_(block.bn2.weight)  # leaves the shortcut alone
    images = torch.rand(1, 2, 5, 5)
    assert torch.equal(block(images), torch.cat([images[:, :, ::2, ::2], torch.zeros(1, 2, 3, 3)], dim=1))


@pytest.mark.parametrize("name", ["mlp", "lenet5", "simplenet", "resnet20"])
@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 16, 40), (3, 17, 16)])
def test_models_take_other_sizes_and_channels(name: str, shape: tuple[int, int, int]) -> None:
    assert build(name, shape, 7, 0)(torch.zeros(2, *shape)).shape == (2, 7)


def test_the_seed_decides_the_initial_weights() -> None:
    first, again, other = (weights_of(m, layout_of(m)) for m in (build("lenet5", MNIST, 10, s) for s in (1, 1, 2)))
    assert first.parameters.tobytes() == again.parameters.tobytes()
    assert not np.array_equal(first.parameters, other.parameters)


def test_initial_weights_are_those_of_a_plainly_seeded_model() -> None:
    torch.manual_seed(5)
    plain = [nn.Conv2d(1, 10, 5), nn.Conv2d(10, 20, 5), nn.Linear(320, 50), nn.Linear(50, 10)]
    expected = torch.cat([p.detach().reshape(-1) for layer in plain for p in layer.parameters()]).numpy()
    module = build("simplenet", MNIST, 10, 5)
    assert weights_of(module, layout_of(module)).parameters.tobytes() == expected.tobytes()


def test_building_leaves_the_global_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build("mlp", MNIST, 10, 0)
    assert torch.equal(torch.rand(4), expected)


@pytest.mark.parametrize(("name", "size"), [("lenet5", 11), ("simplenet", 15)])
def test_a_size_too_small_is_refused_with_the_smallest_allowed(name: str, size: int) -> None:
    with pytest.raises(SpecError, match=f"{size + 1}x{size + 1}"):
        build(name, (1, 28, size), 10, 0)
    build(name, (1, 28, size + 1), 10, 0)


def test_layout_tells_parameters_buffers_and_counters_apart_in_state_dict_order() -> None:
    module = normalised()
    layout = layout_of(module)
    assert [t.name for t in layout.tensors] == list(module.state_dict())
    kinds = {t.name: t.kind for t in layout.tensors}
    assert kinds["1.weight"] == "parameter"
    assert kinds["1.running_mean"] == "buffer"
    assert kinds["1.num_batches_tracked"] == "counter"
    assert (layout.parameters, layout.buffers, layout.counters) == (18 + 2 + 4 + 27, 4, 1)


def test_weights_survive_the_way_into_another_module() -> None:
    source, target = normalised(), normalised()
    source(torch.randn(4, 1, 4, 4))  # moves the running statistics and the counter
    layout = layout_of(source)
    load_weights(target, layout, weights_of(source, layout))
    for (name, a), b in zip(source.state_dict().items(), target.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def test_weights_are_a_copy() -> None:
    module = normalised()
    weights = weights_of(module, layout_of(module))
    before = weights.parameters.copy()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    assert np.array_equal(weights.parameters, before)


def test_weights_of_another_layout_are_refused() -> None:
    module, other = normalised(), nn.Linear(2, 2)
    with pytest.raises(ShapeError):
        load_weights(module, layout_of(module), weights_of(other, layout_of(other)))


def test_buffers_that_are_not_saved_are_not_weights() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scratch", torch.zeros(5), persistent=False)
    assert [t.name for t in layout_of(module).tensors] == ["weight", "bias"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_floating_types_are_refused(dtype: torch.dtype) -> None:
    with pytest.raises(SpecError, match=f"weight is {dtype}"):
        layout_of(nn.Linear(2, 2).to(dtype))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *((name, MNIST) for name in OWN),
        ("squeezenet1_1", (3, 32, 32)),
        ("squeezenet1_1", (1, 32, 32)),
        ("googlenet", (3, 64, 64)),
        ("vit_b_32", (1, 40, 60)),
    ],
    ids=str,
)
def test_the_code_that_is_told_to_users_builds_the_same_module_by_torch_alone(
    name: str, shape: tuple[int, int, int]
) -> None:
    code = construction(name, shape, 7)
    assert "computeshare" not in code
    made: dict[str, nn.Module] = {}
    exec(code, made)
    module, ours, images = made["module"].eval(), build(name, shape, 7, 0).eval(), torch.rand(2, *shape)
    assert layout_of(module) == layout_of(ours)
    module.load_state_dict(ours.state_dict())
    with torch.inference_mode():
        assert torch.equal(module(images), ours(images))
