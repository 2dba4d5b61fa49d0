"""The names of classes, for data sets whose authors publish them in words or as digits."""

from collections.abc import Mapping, Sequence

_DIGITS = tuple("0123456789")
_NAMES: Mapping[str, Sequence[str]] = {
    **dict.fromkeys(
        ("digits", "mnist", "qmnist", "emnist-digits", "emnist-mnist", "usps", "semeion", "svhn"), _DIGITS
    ),
    "fashion-mnist": (
        "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
    ),
    "kmnist": ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"),
    "cifar10": ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    "stl10": ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"),
    "eurosat": (
        "AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial", "Pasture", "PermanentCrop",
        "Residential", "River", "SeaLake",
    ),
    "cifar100": (
        "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
        "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
        "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish",
        "forest", "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion",
        "lizard", "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange",
        "orchid", "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine",
        "possum", "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk",
        "skyscraper", "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank",
        "telephone", "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale",
        "willow_tree", "wolf", "woman", "worm",
    ),
}  # fmt: skip


def class_names(dataset: str) -> Sequence[str] | None:
    """The names of a data set's classes in the order of their numbers; None: it has none here."""
    if dataset == "imagenet":
        from torchvision.models import ResNet18_Weights  # seconds to import: only where its names are asked for

        names: Sequence[str] = ResNet18_Weights.DEFAULT.meta["categories"]
        return names
    return _NAMES.get(dataset)
