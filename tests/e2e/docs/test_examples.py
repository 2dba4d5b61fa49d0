"""The examples, run as users run them, against a real control plane with workers."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

from tests.support.control_plane import ControlPlane
from tests.support.own_images import make_images

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
pytestmark = pytest.mark.e2e
UP = ("--workers", "1", "--queue", "default")


@pytest.fixture
def environment(plane: ControlPlane, tmp_path: Path) -> dict[str, str]:
    """What a user's shell on the machine of `up` has; caches of its own."""
    ours = ("COMPUTESHARE_URL", "COMPUTESHARE_TOKEN")
    kept = {name: value for name, value in plane.environment.items() if name not in ours}
    return {**kept, "XDG_CACHE_HOME": str(tmp_path / "cache"), "IPYTHONDIR": str(tmp_path / "ipython")}


def outputs(notebook: Any) -> str:
    """All that the cells printed and showed."""
    shown = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(str(one.get("text", "")) + str(one.get("data", {}).get("text/html", "")) for one in shown)


def test_the_notebook_runs_from_its_first_cell_to_its_last(
    plane: ControlPlane, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name in ("COMPUTESHARE_URL", "COMPUTESHARE_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    notebook = nbformat.read(EXAMPLES / "first_job.ipynb", as_version=4)
    client = NotebookClient(notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    client.execute()
    shown = outputs(notebook)
    assert "of the test set, computed here" in shown
    assert "✓ completed" in shown and f'href="{plane.url}/jobs/' in shown


def test_the_notebook_is_kept_without_outputs() -> None:
    cells = [cell for cell in json.loads((EXAMPLES / "first_job.ipynb").read_text())["cells"] if "outputs" in cell]
    assert len(cells) > 5 and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)


def test_the_page_about_python_runs_from_top_to_bottom(environment: dict[str, str], tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "python.md").read_text()
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    program = tmp_path / "page.py"
    program.write_text("\n".join(snippets))
    command = [sys.executable, str(program)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert len(snippets) > 5 and done.returncode == 0, done.stderr
    assert "was cancelled" in done.stdout and "samples counted, each once" in done.stdout


def test_the_script_trains_and_scores_the_weights_as_the_job_did(environment: dict[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "train_mnist.py")]
    flags = ["--dataset", "digits", "--model", "mlp", "--queue", "default", "--epochs", "3"]
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    said, scored = done.stdout.splitlines()[-1].removeprefix("the job says ").split(", scored here ")
    assert said == scored and float(said.rstrip("%")) > 50


def test_a_folder_of_images_is_trained_on_and_a_photo_classified(environment: dict[str, str], tmp_path: Path) -> None:
    images = make_images(tmp_path / "tones", ["dark", "light"], 40, (12, 12))
    command = [
        sys.executable,
        str(EXAMPLES / "image_folder.py"),
        "tones",
        str(images),
        str(images / "dark" / "0000.jpg"),
    ]
    flags = ["--size", "8", "--model", "mlp", "--epochs", "5"]
    done = subprocess.run([*command, *flags], env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "72 images to train on, 8 for the test"
    assert lines[-3] == "100.00% of the test images are classified correctly"
    assert lines[-2].endswith("%  dark")
