"""Small data sets of Hugging Face's library: grey images of digits, 8 pixels a side."""

from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image
from PIL import Image as Pillow

from computeshare.tasks.images.datasets.splits import open_split

NAMES = [f"digit {number}" for number in range(10)]
FEATURES = Features({"picture": Image(), "digit": ClassLabel(names=NAMES)})


def digits(first: int, count: int, **features: Any) -> Dataset:
    """Digits from the training split of the data set `digits`, with further columns."""
    found = open_split("digits", "train", Path(), (1, 8, 8))
    images, labels = found.images[first : first + count, 0], found.labels[first : first + count]
    pixels = (images.astype(np.uint16) * 255 // 16).astype(np.uint8)
    columns: dict[str, Any] = {"picture": [Pillow.fromarray(one) for one in pixels]}
    columns["digit"] = labels.tolist()
    for name in features:
        columns[name] = columns["picture" if isinstance(features[name], Image) else "digit"]
    return Dataset.from_dict(columns, Features({**FEATURES, **features}))


def divided(train: int = 300, test: int = 60) -> DatasetDict:
    """Two splits without a sample in common."""
    return DatasetDict(train=digits(0, train), test=digits(train, test))
