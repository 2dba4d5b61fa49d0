"""A regression: predicts a number from eight columns of a CSV file, and reports the mean absolute error.

    computeshare data add houses houses.csv --kind files
    computeshare jobs create --recipe examples/recipes/regression.py --arg target=price --dataset houses --epochs 20

The file has a line of column names and numbers below; every fifth line is for the test.
"""

import csv

import torch
from torch import nn
from torch.utils.data import TensorDataset


def model(columns=8, width=64):
    return nn.Sequential(nn.Linear(columns, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))


def data(split, folder, target="target"):
    (file,) = folder.glob("*.csv")
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    values = torch.tensor([[float(row[name]) for name in row if name != target] for row in rows])
    targets = torch.tensor([[float(row[target])] for row in rows])
    is_test = torch.arange(len(rows)) % 5 == 4
    chosen = is_test if split == "test" else ~is_test
    return TensorDataset(
        *((part - part[~is_test].mean(0))[chosen] / part[~is_test].std(0) for part in (values, targets))
    )


def loss(model, batch):
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def metrics(model, batch):
    """Sums over the batch, in standard deviations of the target."""
    inputs, targets = batch
    return {"absolute_error": (model(inputs) - targets).abs().sum()}
