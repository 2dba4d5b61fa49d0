"""`python -m computeshare.tasks.images.datasets.reference` prints the documentation's page docs/datasets.md."""

from computeshare.tasks.images.datasets.definitions import DEFINITIONS, NOT_OFFERED, Definition

_HEAD = """# Data sets

A job names one of these: torchvision's class in lower case, with `-` before a variant. Capitals, hyphens and
underscores make no difference (`FashionMNIST` is `fashion-mnist`). Missing files are downloaded by torchvision to the
data folder (`COMPUTESHARE_DATA`) of the machine that needs them, or copied there by you: the layout is what the class,
with the arguments shown, finds in that folder.

MNIST and its relatives of the same files, and CIFAR, are read as they are. All other sets are decoded once on each
machine, to files of raw pixels below `prepared/` in the data folder; they are made again when deleted, and need one
byte per pixel and channel (a gigabyte for 6,600 images of 3x224x224). Where the published images differ in size
("varying"), each is resized and cropped about its centre to the size shown, or to the job's `input`: with
`"input": [3, 64, 64]` the files are twelve times smaller. Delete the prepared files if you change the images.

The numbers are the authors' own. A job is planned with them, and a worker whose files hold another number says so and
does not train. "10 % test": the set is published undivided, and a fixed shuffle takes the test split.
"""


def datasets_page() -> str:
    """The page as text."""
    rows = [_row(name, one) for name, one in DEFINITIONS.items()]
    others = "\n".join(f"| `{name}` | {why} |" for name, why in NOT_OFFERED.items())
    table = "\n".join(rows)
    return f"""{_HEAD}
| name | torchvision | train | test | classes | image | |
|---|---|---|---|---|---|---|
{table}

## Data sets of Hugging Face

`hf:NAME` or `hf:OWNER/NAME` is a data set of Hugging Face with an image and a class (`ClassLabel`) per sample. It needs
`pip install 'computeshare[hf]'` in the control plane and on every worker; in the form for a new job it is given as JSON
in the last field. The control plane finds out sizes, shape and classes when the job is created, and writes them into
the job (`dataset_args.facts`). It looks in two places:

1. The folder `hf/OWNER/NAME` in the data folder (`COMPUTESHARE_DATA`), which `save_to_disk` of the library `datasets`
   wrote. Copy it to every worker's data folder: the job has a digest of its images and labels, and a worker whose
   folder holds others says so and does not train.
2. The Hub, which is asked for the facts alone. Every worker downloads the data, in the revision that stands in the job.
   Without a network, `HF_HUB_OFFLINE=1` uses what an earlier download left in `HF_HOME`.

Columns and splits are found by the set's features; of several candidates, say which in `dataset_args` (`image`,
`label`, `train_split`, `test_split`, `config`). Without a test or validation split, a fixed shuffle takes 10 % of
the samples. Images are resized and cropped to the first one's size, or to the job's `input`, and decoded once, as
above.

```
computeshare jobs create --dataset hf:ylecun/mnist --model lenet5 --epochs 2
computeshare jobs create --dataset hf:lab/cells --model resnet20 --set dataset_args.label=kind --set input=[3,32,32]
```

## What is left out

The classes of `torchvision.datasets` that a job cannot name, and why:

| class | why |
|---|---|
{others}
"""


def _row(name: str, one: Definition) -> str:
    shape = "x".join(map(str, one.shape))
    cells = (
        f"`{name}`",
        _splits(one),
        f"{one.train:,}",
        f"{one.test:,}",
        f"{one.classes:,}",
        f"{shape}, varying" if one.varying else shape,
        _remark(name, one),
    )
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")


def _splits(one: Definition) -> str:
    """The class with what selects the training and the test split."""
    if not one.published:
        return "(comes with scikit-learn)"
    found = (one.train_arguments, one.test_arguments or {})
    train, test = (", ".join(f"{key}={value!r}" for key, value in arguments.items()) for arguments in found)
    return f"`{one.published}({train})`" + (f", `({test})`" if test else "")


def _remark(name: str, one: Definition) -> str:
    remarks = [
        "10 % test" if one.published and one.test_arguments is None else "",
        "copy the files there yourself" if one.by_hand else "",
        f"needs {' and '.join(one.requires)}: `pip install 'computeshare[data]'`" if one.requires else "",
        "label 0 is not used" if name == "emnist-letters" else "",
    ]
    return "; ".join(filter(None, remarks))


if __name__ == "__main__":
    print(datasets_page(), end="")
