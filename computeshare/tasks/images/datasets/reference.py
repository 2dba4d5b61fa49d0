"""`python -m computeshare.tasks.images.datasets.reference` prints the documentation's page docs/datasets.md."""

from computeshare.tasks.images.datasets.definitions import DEFINITIONS, NOT_OFFERED, ImagesDefinition

_HEAD = """# Data sets

A job names one of these, or [your own](#your-own-data): torchvision's class in lower case, with `-` before a variant.
Capitals, hyphens and underscores make no difference (`FashionMNIST` is `fashion-mnist`). Missing files are downloaded
by torchvision to the data folder (`COMPUTESHARE_DATA`) of the machine that needs them, or copied there by you: the
layout is what the class, with the arguments shown, finds in that folder.

MNIST and its relatives of the same files, and CIFAR, are read as they are. All other sets are decoded once on each
machine, to files of raw pixels below `prepared/` in the data folder; they are made again when deleted, and need one
byte per pixel and channel (a gigabyte for 6,600 images of 3x224x224). Where the published images differ in size
("varying"), each is resized and cropped about its centre to the size shown, or to the job's `input`: with
`"input": [3, 64, 64]` the files are twelve times smaller. Delete the prepared files if you change the images.

The numbers are the authors' own. A job is planned with them, and a worker whose files hold another number says so and
does not train. "10 % test": the set is published undivided, and a fixed shuffle takes the test split.
"""


OWN = """
## Your own data

From a folder of pictures to a trained model, on the machine where `computeshare up --workers 1` runs (another needs
`COMPUTESHARE_URL` and `COMPUTESHARE_TOKEN`):

```
computeshare data add birds ~/Pictures/birds
computeshare jobs create --dataset birds --model resnet20 --epochs 5 --augment crop,flip --watch
computeshare predict ID photo.jpg
```

`data add` prepares the data once, with a progress bar, and uploads them in pieces; what an interrupted upload sent is
not sent again. Workers fetch what they lack through the control plane: nothing has to be copied by hand, also to a new
machine. `data list`, `data show NAME` and the page `/datasets`, with samples to look at, tell what there is;
`data remove NAME` deletes the prepared files, unless a job that is not over uses them. A job keeps the data that it was
created with, whatever its name means later. Built-in names cannot be taken.

| kind | what PATH is | a job trains |
|---|---|---|
| `images` | a folder with a folder of images for each class, of any size and mode | any classifier of images |
| `text` | a text file in UTF-8, or a folder of them, which are joined in the order of their names | `gpt` |
| `arrays` | a `.npz` or `.safetensors` file, or a folder with one for `train` and for `test` | `mlp`, or a recipe |
| `files` | anything | a recipe |

The kind is guessed where it is plain; otherwise give `--kind`. `train` and `test` (also `val`, `valid`, `validation`)
below PATH are the splits. Without them a tenth is for the test: of images and arrays, one in ten of each class, chosen
by `--seed`; of a text, its end.

**Images** are turned upright as their EXIF data say, resized and cropped about their centre once, to `--size 96` or
`--size 96x128`. Without it they keep a size that all share, if that is at most 224; otherwise the usual shorter side
decides. They stay grey if all are. What cannot be read is named and left out, up to ten files or 1 % of all, whichever
is more. Transparency is ignored. Names of classes may hold any letters; two that differ in case alone are refused. A
job's `input` may give another size, as above, and `augment` works as with other images. `predict` treats a photo as the
training images were.

**Text** is divided into characters, or by `--tokens bytes`, or by a `tokenizer.json` of the library `tokenizers`
(`--tokens FILE`, which needs `pip install 'computeshare[text]'` here and where the control plane runs). `block_size`
counts these tokens, and `test_loss` is per token.

**Arrays** are called `inputs` and `targets`, or `x` and `y`, with the split in the name (`x_train`, `y_test`) or not.
Whole numbers from 0, or words, as targets are classes. The mean of all training inputs is subtracted, and the result
divided by their standard deviation, one number each: bring columns to a common scale before. Other targets, such as the
numbers of a regression, are for recipes.

A recipe's `data(split, folder)` gets the folder of the prepared files: `train/images.npy` (uint8, samples x channels x
height x width) with `train/images.labels.npy`; `train/tokens.npy`; `train/inputs.npy` with `train/targets.npy`; the
same below `test`; files as they were. `numpy.load(path, mmap_mode="r")` reads them without filling the memory.
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
{OWN}
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


def _row(name: str, one: ImagesDefinition) -> str:
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


def _splits(one: ImagesDefinition) -> str:
    """The class with what selects the training and the test split."""
    if not one.published:
        return "(comes with scikit-learn)"
    found = (one.train_arguments, one.test_arguments or {})
    train, test = (", ".join(f"{key}={value!r}" for key, value in arguments.items()) for arguments in found)
    return f"`{one.published}({train})`" + (f", `({test})`" if test else "")


def _remark(name: str, one: ImagesDefinition) -> str:
    remarks = [
        "10 % test" if one.published and one.test_arguments is None else "",
        "copy the files there yourself" if one.by_hand else "",
        f"needs {' and '.join(one.requires)}: `pip install 'computeshare[data]'`" if one.requires else "",
        "label 0 is not used" if name == "emnist-letters" else "",
    ]
    return "; ".join(filter(None, remarks))


if __name__ == "__main__":
    print(datasets_page(), end="")
