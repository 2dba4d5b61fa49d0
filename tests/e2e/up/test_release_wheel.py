"""The wheel that `make wheel` builds has all that the control plane needs, and runs without a checkout."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from computeshare import __version__
from tests.support.bare_venv import bare_venv, install

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ("api", "computeshare", "migrations", "pyproject.toml", "README.md", "LICENSE")
pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources by the backend that pyproject.toml names."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", str(folder / "dist"), str(folder)], check=True, timeout=120)
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_holds_every_file_of_the_packages(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert wheel.name == f"computeshare-{__version__}-py3-none-any.whl"
    tracked = subprocess.run(
        ["git", "ls-files", "api", "computeshare", "migrations"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.splitlines()
    sources = tracked or [str(path.relative_to(ROOT)) for path in (ROOT / "api").rglob("*.py")]
    assert len(sources) > 300 and sorted(set(sources) - held) == []


def test_the_demo_runs_from_the_wheel_alone(wheel: Path, tmp_path: Path) -> None:
    python = bare_venv(tmp_path / "venv", metadata.requires("computeshare") or [])
    install(python, wheel)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COMPUTESHARE_", "PYTHON"))}
    kept["COMPUTESHARE_HOME"] = str(tmp_path / "home")
    command = [str(python.with_name("computeshare")), "demo", "--workers", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=kept, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["status"] == "completed" and told["accuracy"] > 0.9
