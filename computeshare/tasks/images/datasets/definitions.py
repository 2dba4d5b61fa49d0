"""The table of image data sets. Imports neither torch nor torchvision.

A set is named after torchvision's class, in lower case. Sizes are those that its authors publish; they are checked when
a worker opens the files.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from computeshare.jobspec.tasks.hugging_face import HubArgs
from computeshare.jobspec.tasks.own_data import DatasetFacts, entry_of

Shape = tuple[int, int, int]
SplitName = Literal["train", "test"]
SPLITS: tuple[SplitName, SplitName] = ("train", "test")
Arguments = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ImagesDefinition:
    """A data set: `shape` of an image; values are divided by `scale`, then normalised as (x - mean) / std by channel.

    Args:
        published: the class in `torchvision.datasets`; empty for the digits, which come with scikit-learn.
        train_arguments: what the class's constructor gets for the training split.
        test_arguments: and for the test split; None: the set is published undivided, and a fixed shuffle divides it.
        files: how the files are read: `decoded` ones by torchvision's class, once, into prepared files;
            `own` ones were prepared by the user.
        folder: of the files, relative to the data directory; empty for `decoded` sets.
        varying: whether the published images differ in size; they are resized once, to a job's `input` or `shape`.
        by_hand: whether torchvision cannot download the files.
        requires: packages that ComputeShare does not install by itself.
    """

    published: str
    train: int
    test: int
    classes: int
    shape: Shape
    mean: tuple[float, ...]
    std: tuple[float, ...]
    train_arguments: Arguments
    test_arguments: Arguments | None
    scale: float = 255.0
    files: Literal["digits", "idx", "cifar", "decoded", "own"] = "decoded"
    folder: str = ""
    varying: bool = False
    by_hand: bool = False
    requires: tuple[str, ...] = ()

    def samples(self, split: SplitName) -> int:
        return self.train if split == "train" else self.test

    def arguments(self, split: SplitName) -> Arguments:
        """The constructor's arguments for a split, or for the undivided set."""
        if split == "test" and self.test_arguments is not None:
            return self.test_arguments
        return self.train_arguments


_Pair = tuple[Arguments, Arguments | None]
_BY_TRAIN: _Pair = ({"train": True}, {"train": False})
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet's, used for every colour set that has no figures of its own here."""


def _by_split(train: str = "train", test: str = "test", name: str = "split", **both: Any) -> _Pair:
    return {name: train, **both}, {name: test, **both}


def _colour(
    published: str,
    sizes: tuple[int, int],
    classes: int,
    side: int,
    arguments: _Pair,
    mean: tuple[float, ...] = _MEAN,
    std: tuple[float, ...] = _STD,
    **more: Any,
) -> ImagesDefinition:
    return ImagesDefinition(published, *sizes, classes, (3, side, side), mean, std, *arguments, **more)


def _photos(
    published: str, sizes: tuple[int, int], classes: int, arguments: _Pair, side: int = 224, **more: Any
) -> ImagesDefinition:
    """Colour images of different sizes."""
    return _colour(published, sizes, classes, side, arguments, varying=True, **more)


def _grey(
    published: str,
    sizes: tuple[int, int],
    classes: int,
    side: int,
    arguments: _Pair,
    mean: float = 0.5,
    std: float = 0.25,
    **more: Any,
) -> ImagesDefinition:
    return ImagesDefinition(published, *sizes, classes, (1, side, side), (mean,), (std,), *arguments, **more)


def _like_mnist(name: str, mean: float, std: float) -> ImagesDefinition:
    return _grey(name, (60_000, 10_000), 10, 28, _BY_TRAIN, mean, std, files="idx", folder=f"{name}/raw")


def _emnist(split: str, sizes: tuple[int, int], classes: int) -> ImagesDefinition:
    arguments = ({"split": split, "train": True}, {"split": split, "train": False})
    return _grey("EMNIST", sizes, classes, 28, arguments, 0.1736, 0.3317)


def _cifar(name: str, folder: str, classes: int, mean: tuple[float, ...], std: tuple[float, ...]) -> ImagesDefinition:
    return _colour(name, (50_000, 10_000), classes, 32, _BY_TRAIN, mean, std, files="cifar", folder=folder)


def undivided(samples: int) -> tuple[int, int]:
    """The sizes of the splits that a fixed shuffle makes: a tenth for the test."""
    return samples - samples // 10, samples // 10


DEFINITIONS: dict[str, ImagesDefinition] = {
    "digits": ImagesDefinition(
        "", 1437, 360, 10, (1, 8, 8), (0.3053,), (0.3760,), {}, None, scale=16.0, files="digits"
    ),
    "mnist": _like_mnist("MNIST", 0.1307, 0.3081),
    "fashion-mnist": _like_mnist("FashionMNIST", 0.2860, 0.3530),
    "kmnist": _like_mnist("KMNIST", 0.1918, 0.3483),
    "qmnist": _grey("QMNIST", (60_000, 60_000), 10, 28, _BY_TRAIN, 0.1307, 0.3081),
    "emnist": _emnist("balanced", (112_800, 18_800), 47),
    "emnist-byclass": _emnist("byclass", (697_932, 116_323), 62),
    "emnist-bymerge": _emnist("bymerge", (697_932, 116_323), 47),
    "emnist-letters": _emnist("letters", (124_800, 20_800), 27),
    "emnist-digits": _emnist("digits", (240_000, 40_000), 10),
    "emnist-mnist": _emnist("mnist", (60_000, 10_000), 10),
    "usps": _grey("USPS", (7_291, 2_007), 10, 16, _BY_TRAIN, 0.2469, 0.2989),
    "semeion": _grey("SEMEION", undivided(1_593), 10, 16, ({}, None)),
    "omniglot": _grey("Omniglot", undivided(19_280), 964, 105, ({"background": True}, None), 0.9221, 0.2681),
    "fer2013": _grey("FER2013", (28_709, 7_178), 7, 48, _by_split(), 0.5077, 0.2550, by_hand=True),
    "cifar10": _cifar("CIFAR10", "cifar-10-batches-py", 10, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": _cifar("CIFAR100", "cifar-100-python", 100, (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": _colour("SVHN", (73_257, 26_032), 10, 32, _by_split(), (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
    "stl10": _colour("STL10", (5_000, 8_000), 10, 96, _by_split(), (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)),
    "eurosat": _colour("EuroSAT", undivided(27_000), 10, 64, ({}, None)),
    "pcam": _colour("PCAM", (262_144, 32_768), 2, 96, _by_split(), requires=("gdown", "h5py")),
    "renderedsst2": _colour("RenderedSST2", (6_920, 1_821), 2, 448, _by_split()),
    "clevrclassification": ImagesDefinition(
        "CLEVRClassification", 70_000, 15_000, 11, (3, 320, 480), _MEAN, _STD, *_by_split(test="val")
    ),
    "gtsrb": _photos("GTSRB", (26_640, 12_630), 43, _by_split(), side=32),
    "caltech101": _photos("Caltech101", undivided(8_677), 101, ({}, None)),
    "caltech256": _photos("Caltech256", undivided(30_607), 257, ({}, None)),
    "country211": _photos("Country211", (31_650, 21_100), 211, _by_split()),
    "dtd": _photos("DTD", (1_880, 1_880), 47, _by_split()),
    "fgvcaircraft": _photos("FGVCAircraft", (6_667, 3_333), 100, _by_split("trainval")),
    "flowers102": _photos("Flowers102", (1_020, 6_149), 102, _by_split()),
    "food101": _photos("Food101", (75_750, 25_250), 101, _by_split()),
    "imagenet": _photos("ImageNet", (1_281_167, 50_000), 1000, _by_split(test="val"), by_hand=True),
    "imagenette": _photos("Imagenette", (9_469, 3_925), 10, _by_split(test="val")),
    "inaturalist": _photos(
        "INaturalist", (2_686_843, 100_000), 10_000, _by_split("2021_train", "2021_valid", name="version")
    ),
    "inaturalist-mini": _photos(
        "INaturalist", (500_000, 100_000), 10_000, _by_split("2021_train_mini", "2021_valid", name="version")
    ),
    "lfwpeople": _photos("LFWPeople", undivided(13_233), 5_749, ({"split": "10fold"}, None), by_hand=True),
    "oxfordiiitpet": _photos("OxfordIIITPet", (3_680, 3_669), 37, _by_split("trainval")),
    "places365": _photos("Places365", (1_803_460, 36_500), 365, _by_split("train-standard", "val", small=True)),
    "stanfordcars": _photos("StanfordCars", (8_144, 8_041), 196, _by_split(), by_hand=True),
    "sun397": _photos("SUN397", undivided(108_754), 397, ({}, None)),
}


def of_hub(name: str, args: HubArgs) -> ImagesDefinition:
    """A data set of Hugging Face whose facts are known."""
    assert args.facts is not None
    facts, told = args.facts, args.model_dump(mode="json")
    mean, std = (_MEAN, _STD) if facts.shape[0] == 3 else ((0.5,), (0.25,))
    sizes, pair = (facts.train, facts.test, len(facts.classes)), (told, told if args.test_split else None)
    return ImagesDefinition(name, *sizes, facts.shape, mean, std, *pair, varying=True)


def of_own(name: str, facts: DatasetFacts) -> ImagesDefinition:
    """A data set that a user added; its images were resized when they were prepared."""
    entry = entry_of(facts)
    sizes = entry.train, entry.test, entry.classes
    return ImagesDefinition(name, *sizes, entry.shape, facts.mean, facts.std, {}, None, files="own")


_FLOW = "it has pairs of images and the motion or depth between them, not one label per image"
_BOXES = "it has boxes, masks or outlines, not one label per image"
_CAPTIONS = "it has captions, not one label per image"
_VIDEO = "it has videos, not images"
_PAIRS = "it has pairs of images, not one label per image"
_FOLDER = "it is a reader of folders, not a data set"

NOT_OFFERED: dict[str, str] = {
    "CelebA": "it has forty attributes per image, not one label",
    "Cityscapes": _BOXES,
    "CocoDetection": _BOXES,
    "Kitti": _BOXES,
    "SBDataset": _BOXES,
    "VOCDetection": _BOXES,
    "VOCSegmentation": _BOXES,
    "WIDERFace": _BOXES,
    "CocoCaptions": _CAPTIONS,
    "Flickr8k": _CAPTIONS,
    "Flickr30k": _CAPTIONS,
    "SBU": _CAPTIONS,
    "HMDB51": _VIDEO,
    "Kinetics": _VIDEO,
    "MovingMNIST": _VIDEO,
    "UCF101": _VIDEO,
    "LFWPairs": _PAIRS,
    "PhotoTour": _PAIRS,
    **dict.fromkeys(("CREStereo", "CarlaStereo", "ETH3DStereo", "FallingThingsStereo", "FlyingChairs"), _FLOW),
    **dict.fromkeys(("FlyingThings3D", "HD1K", "InStereo2k", "Kitti2012Stereo", "Kitti2015Stereo", "KittiFlow"), _FLOW),
    **dict.fromkeys(("Middlebury2014Stereo", "SceneFlowStereo", "Sintel", "SintelStereo"), _FLOW),
    "FakeData": "its images are noise",
    "LSUN": "torchvision's reader (of the package lmdb) unpickles a file of the working directory",
    "LSUNClass": "its images have no label",
    "DatasetFolder": _FOLDER,
    "ImageFolder": _FOLDER,
    "VisionDataset": _FOLDER,
}
"""The other classes in `torchvision.datasets`, and why a job cannot use them."""
