"""A recipe from a file to a job, from the command line and from Python, with a whole control plane behind it."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from computeshare.bundles.store import BundleStore
from computeshare.cli.main import app
from computeshare.client import ComputeShare, Problem
from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.tasks.recipes import bundle
from computeshare.tasks.recipes.state_files import read_initial
from computeshare.terminal.command import run
from tests.support.recipes import NOISE
from tests.support.served_api import serving

pytestmark = pytest.mark.slow

NET = (
    NOISE
    + """
def model(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(144, width), nn.Linear(width, 10))
"""
)


@pytest.fixture
def url(settings: Settings) -> Iterator[str]:
    with serving(settings) as (url, _):
        yield url


@pytest.fixture
def net(tmp_path: Path) -> Path:
    (tmp_path / "net.py").write_text(NET)
    return tmp_path / "net.py"


@pytest.fixture
def call(url: str, settings: Settings) -> Any:
    """Runs a command that prints JSON."""

    def call(*words: str) -> Any:
        done = CliRunner().invoke(app, [*words, "--url", url, "--home", str(settings.home), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return call


def test_a_job_is_created_from_a_file_which_is_tried_and_uploaded(call: Any, net: Path, settings: Settings) -> None:
    job = call("jobs", "create", "--recipe", str(net), "--arg", "width=3", "--rounds", "2", "--seed", "5")
    spec = JobSpec.model_validate(job["spec"])
    assert (job["title"], spec.recipe, spec.recipe_args) == ("net", bundle.read(net).digest, {"width": 3})
    assert spec.recipe_facts and spec.parameters == 144 * 3 + 3 + 3 * 10 + 10
    folder = BundleStore(settings.bundles_dir).open_files(spec.recipe_facts.initial)
    weights = read_initial(folder, spec.recipe_facts.layout)
    other = call("jobs", "create", "--recipe", str(spec.recipe), "--arg", "width=3", "--seed", "6")
    assert other["spec"]["recipe_facts"]["initial"] != spec.recipe_facts.initial and len(weights.parameters) == 475
    assert [(one["name"], one["jobs"]) for one in call("recipes", "list")["items"]] == [("net", 2)]


def test_a_job_that_would_be_refused_is_not_tried(
    url: str, settings: Settings, net: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net.write_text("raise SystemExit(3)")
    where = ["--url", url, "--home", str(settings.home)]
    done = CliRunner().invoke(app, ["jobs", "create", "--recipe", str(net), "--model", "mlp", *where])
    assert done.exit_code != 0 and "a recipe has a model of its own" in str(done.exception)
    assert run(app, ["jobs", "create", "--recipe", str(net), *where]) == 1
    assert "the import failed: SystemExit: 3" in " ".join(capsys.readouterr().err.split())


def test_a_recipe_that_workers_would_refuse_becomes_no_job(call: Any, url: str, settings: Settings, net: Path) -> None:
    net.write_text(NET + "\nimport os\ndef loss(model, batch):\n    return model(batch[0]).sum() * os.urandom(1)[0]\n")
    where = ["--url", url, "--home", str(settings.home)]
    done = CliRunner().invoke(app, ["jobs", "create", "--recipe", str(net), *where])
    assert isinstance(done.exception, RecipeError) and "the same step gave other bits" in str(done.exception)
    assert "Draw from the global generators" in str(done.exception)
    assert call("jobs", "list")["items"] == [] and call("recipes", "list")["items"] == []
    assert run(app, ["recipes", "check", str(net)]) == 1


def test_recipes_are_shown_and_removed_by_the_beginning_of_their_digest(call: Any, net: Path) -> None:
    job = call("jobs", "create", "--recipe", str(net))
    short = job["spec"]["recipe"][7:15]
    assert call("recipes", "show", short)["files"] == {"recipe.py": NET}
    with pytest.raises(AssertionError, match=job["id"]):
        call("recipes", "remove", short)
    call("jobs", "cancel", job["id"])
    assert call("recipes", "remove", short)["deleted"] and call("recipes", "list")["items"] == []


def test_the_python_client_does_the_same(url: str, net: Path) -> None:
    with ComputeShare(url, "secret") as cs:
        job = cs.jobs.create(recipe=net, recipe_args={"width": 2}, rounds=3)
        assert job.spec["recipe_facts"]["train"] == 100
        assert cs.create_recipe(net) == job.spec["recipe"]
        again = cs.jobs.create(job.spec, name="again")
        assert again.spec["recipe_facts"] == job.spec["recipe_facts"]
        with pytest.raises(Problem, match="jobs create --recipe"):
            cs.jobs.create(recipe=job.spec["recipe"])
        with pytest.raises(RecipeError, match="no file or folder"):
            cs.jobs.create(recipe=str(net) + "x")


def test_a_recipe_reads_the_users_own_data_in_its_trial(call: Any, url: str, tmp_path: Path) -> None:
    (tmp_path / "numbers").mkdir()
    (tmp_path / "numbers" / "count.txt").write_text("30")
    reading = NET.replace("Noise(split, samples)", "Noise(split, int((folder / 'count.txt').read_text()))")
    (tmp_path / "net.py").write_text(reading)
    call("data", "add", "counts", str(tmp_path / "numbers"), "--kind", "files")
    job = call("jobs", "create", "--recipe", str(tmp_path / "net.py"), "--dataset", "counts")
    assert job["spec"]["recipe_facts"]["train"] == 30 and len(JobSpec.model_validate(job["spec"]).bundles) == 2
    with ComputeShare(url, "secret", cache=tmp_path / "cache") as cs:
        again = cs.jobs.create(recipe=tmp_path / "net.py", dataset="counts")
    assert again.spec["recipe_facts"] == job["spec"]["recipe_facts"]
