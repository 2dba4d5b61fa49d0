"""The names of classes are as many as the classes, and torchvision's where it has them."""

import pytest
from torchvision import datasets

from computeshare.jobspec.catalog import catalog
from computeshare.tasks.images.datasets.class_names import class_names


def test_every_class_has_one_name() -> None:
    named = {name: found for name in catalog().datasets if (found := class_names(name))}
    assert {"mnist", "cifar10", "cifar100", "imagenet"} <= named.keys()
    assert {name: len(set(found)) for name, found in named.items() if name != "imagenet"} == {
        name: catalog().datasets[name].classes for name in named if name != "imagenet"
    }
    assert len(named["imagenet"]) == catalog().datasets["imagenet"].classes  # two pairs of them share a name


@pytest.mark.parametrize(("name", "published"), [("fashion-mnist", "FashionMNIST"), ("kmnist", "KMNIST")])
def test_the_names_are_torchvisions(name: str, published: str) -> None:
    assert list(class_names(name) or ()) == getattr(datasets, published).classes
