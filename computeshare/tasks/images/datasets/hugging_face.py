"""Data sets of Hugging Face's library `datasets`: from its Hub, or from a folder that `save_to_disk` wrote. Does not
import torch; imports `datasets` where a data set is opened, since it takes seconds.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from computeshare.errors import DatasetError
from computeshare.jobspec.catalog import lacking_packages
from computeshare.jobspec.tasks.hugging_face import PREFIX, HubArgs, HubFacts
from computeshare.tasks.images.datasets.definitions import SplitName, undivided
from computeshare.tasks.images.datasets.prepared import Samples

_TEST_SPLITS = ("test", "validation", "valid", "val")
_AT_ONCE = 1000
"""Samples whose bytes are in memory together while a digest is computed."""
_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Rows:
    """A split's samples as pairs of a PIL image and its label."""

    rows: Any
    image: str
    label: str

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        row = self.rows[index]
        return row[self.image], row[self.label]


def folder(name: str, data_dir: Path) -> Path:
    """Where a folder that `save_to_disk` wrote takes the place of the Hub's data set `name` (`hf:...`)."""
    return data_dir / "hf" / name.removeprefix(PREFIX)


def completed(name: str, args: HubArgs, data_dir: Path) -> HubArgs:
    """The arguments of a data set, completed with its columns, splits and facts: the folder's if there is one, else the
    Hub's, which are read without downloading the data.

    Raises: DatasetError: it cannot be found or read, or is not one image and one class per sample.
    """
    _require()
    where = folder(name, data_dir)
    return _of_folder(_loaded(where), args) if where.is_dir() else _of_hub(name, args, where)


def opened(name: str, args: HubArgs, data_dir: Path) -> Mapping[SplitName, Samples]:
    """The splits of a data set whose facts are known, downloaded if need be; an undivided one has `train` alone.

    Raises: DatasetError: it is missing, or is not the data set that the job was created with.
    """
    _require()
    assert args.facts is not None
    where = folder(name, data_dir)
    if args.facts.digest:
        if not where.is_dir():
            raise DatasetError(f"{where} is missing: copy that folder, which save_to_disk wrote, from another machine")
        found = _loaded(where)
        if (here := _of_folder(found, args.model_copy(update={"facts": None}))) != args:
            raise DatasetError(f"{where} holds other data than the job's: {_difference(here, args)}; copy it anew")
    else:
        builder = _builder(name, args.config, args.facts.revision, where)
        if builder.hash != args.facts.revision:
            raise DatasetError(
                f"{name} is here in revision {builder.hash}, the job's is {args.facts.revision}: connect this machine "
                f"to the Hub once"
            )
        try:
            builder.download_and_prepare()
            found = builder.as_dataset()
        except Exception as error:  # of networks, disks, formats: the library wraps few of them
            raise DatasetError(f"{name} cannot be downloaded: {error}. {_remedy(where)}") from error
    named: dict[SplitName, str] = {"train": args.train_split, "test": args.test_split}
    return {split: Rows(found[one], args.image, args.label) for split, one in named.items() if one}


def _require() -> None:
    if lacking := lacking_packages(("datasets",), extra="hf"):
        raise DatasetError(f"a data set of Hugging Face {lacking}, in the control plane and on every worker")


def _loaded(where: Path) -> Mapping[str, Any]:
    """The splits of a folder that `save_to_disk` wrote. Raises DatasetError."""
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(where)
    except Exception as error:  # damaged JSON, damaged Arrow files
        raise DatasetError(f"{where} is not a folder that save_to_disk wrote: {error}") from error
    return found if isinstance(found, DatasetDict) else {str(found.split or "train"): found}


def _builder(name: str, config: str, revision: str, where: Path) -> Any:
    """The library's builder for a data set on the Hub or in its cache. Raises DatasetError."""
    from datasets import load_dataset_builder

    path = f"hf://datasets/{name.removeprefix(PREFIX)}"  # never a folder of that name in the working directory
    try:
        return load_dataset_builder(path, config or None, revision=revision or None)
    except Exception as error:
        raise DatasetError(f"{name} cannot be found: {error}. {_remedy(where)}") from error


def _remedy(where: Path) -> str:
    return (
        "Connect this machine to the Hub; or, where HF_HOME has the data set in its cache, set HF_HUB_OFFLINE=1; or "
        f"copy a folder that save_to_disk wrote to {where}"
    )


def _of_folder(splits: Mapping[str, Any], args: HubArgs) -> HubArgs:
    some = next(iter(splits.values()))
    args = _chosen(args, some.features, list(splits))
    used = {one: splits[one] for one in (args.train_split, args.test_split) if one}
    digest = _digest(used, args.image, args.label)
    return _with_facts(args, {one: len(rows) for one, rows in used.items()}, some.features, lambda: used, digest=digest)


def _of_hub(name: str, args: HubArgs, where: Path) -> HubArgs:
    _reach(name, where)
    builder = _builder(name, args.config, "", where)
    info = builder.info
    if not info.features or not info.splits:
        raise DatasetError(
            f"the Hub does not say how many samples {name} has, or of what form: load it with the library datasets, "
            f"and save it with save_to_disk to {where}"
        )
    args = _chosen(args.model_copy(update={"config": builder.config.name}), info.features, list(info.splits))

    def samples() -> Mapping[str, Any]:
        if Path(builder.cache_dir).is_dir():
            return {args.train_split: builder.as_dataset(args.train_split)}
        return {args.train_split: builder.as_streaming_dataset(args.train_split)}

    sizes = {one: split.num_examples for one, split in info.splits.items()}
    try:
        return _with_facts(args, sizes, info.features, samples, revision=builder.hash)
    except DatasetError:
        raise
    except Exception as error:
        raise DatasetError(f"{name} cannot be read: {error}. {_remedy(where)}") from error


def _reach(name: str, where: Path) -> None:
    """Raises DatasetError: the Hub does not answer, or has no such data set. Asks once, unlike the library."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        HfApi().dataset_info(name.removeprefix(PREFIX), timeout=_TIMEOUT_S)
    except OfflineModeIsEnabled:
        return
    except Exception as error:
        raise DatasetError(f"{name} cannot be found on the Hub: {error}. {_remedy(where)}") from error


def _chosen(args: HubArgs, features: Mapping[str, Any], splits: list[str]) -> HubArgs:
    """With the columns and splits that were left open. Raises DatasetError."""
    from datasets import ClassLabel, Image

    image = _column("image", "images", args.image, features, Image)
    label = _column("label", "classes (ClassLabel)", args.label, features, ClassLabel)
    train = args.train_split or ("train" if len(splits) > 1 or "train" in splits else splits[0])
    test = args.test_split or next((one for one in _TEST_SPLITS if one in splits and one != train), "")
    for field, split in (("train_split", train), ("test_split", test)):
        if split and split not in splits:
            raise DatasetError(f"it has no split {split}: set dataset_args.{field} to one of {', '.join(splits)}")
    if train == test:
        raise DatasetError(f"{train} cannot be both splits: set dataset_args.test_split to another, or leave it out")
    return args.model_copy(update={"image": image, "label": label, "train_split": train, "test_split": test})


def _column(field: str, what: str, wanted: str, features: Mapping[str, Any], kind: type) -> str:
    found = [column for column, feature in features.items() if isinstance(feature, kind)]
    if not found:
        raise DatasetError(f"it has no column of {what}: its columns are {', '.join(features)}")
    if wanted and wanted not in found:
        raise DatasetError(f"{wanted} is no column of {what}: set dataset_args.{field} to one of {', '.join(found)}")
    if not wanted and len(found) > 1:
        raise DatasetError(f"it has several columns of {what}: set dataset_args.{field} to one of {', '.join(found)}")
    return wanted or found[0]


def _with_facts(
    args: HubArgs,
    sizes: Mapping[str, int],
    features: Mapping[str, Any],
    samples: Callable[[], Mapping[str, Any]],
    **identity: str,
) -> HubArgs:
    """Args: samples: the training split, whose first image gives the shape. Raises DatasetError."""
    train = sizes[args.train_split]
    train, test = (train, sizes[args.test_split]) if args.test_split else undivided(train)
    if not train or not test:
        raise DatasetError(f"it has {train} samples for training and {test} for testing: both need some")
    image = next(iter(samples()[args.train_split]))[args.image]
    channels = 1 if image.mode in ("1", "L", "F") or image.mode.startswith("I") else 3
    facts = HubFacts(
        train=train,
        test=test,
        shape=(channels, image.height, image.width),
        classes=tuple(features[args.label].names),
        **identity,
    )
    return args.model_copy(update={"facts": facts})


def _digest(splits: Mapping[str, Any], image: str, label: str) -> str:
    """The sha256 of all labels and encoded images, in order. Raises DatasetError: a sample has none."""
    from datasets import Image

    found = hashlib.sha256()
    for name, rows in splits.items():
        found.update(struct.pack("<q", len(rows)))
        encoded = rows.select_columns([image, label]).cast_column(image, Image(decode=False))
        for table in encoded.with_format("arrow").iter(_AT_ONCE):
            pairs = zip(table[label].to_pylist(), table[image].to_pylist(), strict=True)
            for number, picture in pairs:
                if number is None or number < 0:
                    raise DatasetError(f"split {name} has samples without a class: choose others in dataset_args")
                content = (picture or {}).get("bytes")
                if content is None:
                    raise DatasetError(f"split {name} has samples whose image is not in the folder: save it anew")
                found.update(struct.pack("<qq", number, len(content)))
                found.update(content)
    return found.hexdigest()


def _difference(here: HubArgs, job: HubArgs) -> str:
    """The first difference between a folder's facts and a job's, as text."""
    assert here.facts is not None and job.facts is not None
    for name in ("train", "test", "shape", "classes", "digest"):
        if (mine := getattr(here.facts, name)) != (wanted := getattr(job.facts, name)):
            return f"{name} is {mine}, not {wanted}"
    return "other columns or splits"
