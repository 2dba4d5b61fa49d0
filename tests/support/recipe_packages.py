"""A package with a recipe, built and installed into a folder of its own."""

import subprocess
import sys
from pathlib import Path

PROJECT = """
[project]
name = "blob-recipes"
version = "{version}"

[project.entry-points."computeshare.tasks"]
blobs = "blob_recipes.blobs"

[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""
BLOBS = """
import torch
from torch import nn

class Blobs:
    def __init__(self, samples):
        drawn = torch.Generator().manual_seed(samples)
        self.targets = torch.arange(samples) % 4
        self.inputs = nn.functional.one_hot(self.targets, 4) + 0.3 * torch.randn(samples, 4, generator=drawn)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]

def data(split, folder):
    return Blobs(200 if split == "train" else 100)

def model(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))
"""


def install(version: str, root: Path) -> Path:
    """Build the distribution `blob-recipes` and install it; returns the folder for `sys.path`."""
    project, site = root / f"project-{version}", root / f"{version}/site-packages"
    (project / "blob_recipes").mkdir(parents=True)
    (project / "pyproject.toml").write_text(PROJECT.format(version=version))
    (project / "blob_recipes/__init__.py").write_text("")
    (project / "blob_recipes/blobs.py").write_text(BLOBS)
    uv = Path(sys.executable).parent / "uv"
    options = ["--quiet", "--offline", "--no-build-isolation", "--no-deps", "--python", sys.executable]
    subprocess.run([uv, "pip", "install", *options, "--target", site, project], check=True)
    return site
