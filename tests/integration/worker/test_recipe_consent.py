"""Recipes run only where the machine's owner agreed, and only what the control plane has signed."""

from pathlib import Path

import pytest
from redis import Redis

from computeshare.confinement import methods
from computeshare.confinement.kinds import LANDLOCK, NONE
from computeshare.errors import RecipeError, SettingsError
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.queue import recipes
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.worker.recipe_consent import Consent
from tests.support.recipe_jobs import FACTS, recipe_spec

KEY = SigningKey.new()
RECIPE, HOSTILE = Bundle({"recipe.py": "def model(): ...\n"}), Bundle({"recipe.py": "import os\n"})


@pytest.fixture
def spec(redis: Redis, job_id: str) -> JobSpec:
    spec = recipe_spec(recipe=RECIPE.digest, recipe_args={"width": 8})
    recipes.publish(redis, job_id, spec, RECIPE, KEY)
    return spec


def home(folder: Path, control_key: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    if control_key:
        (folder / "control.pub").write_text(control_key + "\n")
    return folder


def owners(tmp_path: Path) -> dict[str, Consent]:
    here, there = home(tmp_path / "here", KEY.public), home(tmp_path / "there")
    return {
        "of up": Consent.of(Settings(home=here, recipes=True)),
        "elsewhere": Consent.of(Settings(home=there, recipes=True)),
        "elsewhere, by an invite": Consent.of(Settings(home=there, recipes=True, control_key=KEY.public)),
        "elsewhere, by name": Consent.of(Settings(home=there, recipe=RECIPE.digest)),
        "of another control plane": Consent.of(
            Settings(home=home(tmp_path / "other", SigningKey.new().public), recipes=True)
        ),
        "not agreed": Consent.of(Settings(home=here)),
    }


def test_each_owner_lets_run_what_was_agreed(redis: Redis, job_id: str, spec: JobSpec, tmp_path: Path) -> None:
    found = owners(tmp_path)
    offered = {name: consent.offered() for name, consent in found.items()}
    assert offered == {
        "of up": ("*",),
        "elsewhere": (),
        "elsewhere, by an invite": ("*",),
        "elsewhere, by name": (RECIPE.digest,),
        "of another control plane": ("*",),
        "not agreed": (),
    }
    for name in ("of up", "elsewhere, by an invite", "elsewhere, by name"):
        assert found[name].require(redis, job_id, spec) == RECIPE
    told = {"elsewhere": "cannot tell", "of another control plane": "has not signed", "not agreed": "does not run"}
    for name, words in told.items():
        with pytest.raises(RecipeError, match=f"{words}.*--recipe {RECIPE.digest}"):
            found[name].require(redis, job_id, spec)


def test_a_recipe_that_was_replaced_in_the_broker_runs_nowhere(
    redis: Redis, job_id: str, spec: JobSpec, tmp_path: Path
) -> None:
    """Whoever has the broker's password rewrites files, specification and signature."""
    replaced = JobSpec.model_validate(spec.model_dump(mode="json") | {"recipe": HOSTILE.digest})
    willing = [consent for name, consent in owners(tmp_path).items() if name in ("of up", "elsewhere, by name")]
    rewritten: list[tuple[JobSpec, Bundle]] = [
        (replaced, HOSTILE),
        (spec, HOSTILE),
        (JobSpec.model_validate(spec.model_dump(mode="json") | {"recipe_args": {"width": 9}}), RECIPE),
        (recipe_spec(recipe=RECIPE.digest, recipe_facts={**FACTS, "initial": "sha256:" + "c" * 64}), RECIPE),
    ]
    kept = redis.get(JobKeys(job_id).recipe_signature())
    for number, (document, files) in enumerate(rewritten):
        for signature in (None, kept, b""):
            recipes.publish(redis, job_id, document, files, SigningKey.new())
            if signature is not None:
                redis.set(JobKeys(job_id).recipe_signature(), signature)  # type: ignore[arg-type]
            with pytest.raises(RecipeError, match=r"signed|not those"):
                willing[0].require(redis, job_id, document)
            if number < 2:  # an owner who named a recipe trusts it with any arguments
                with pytest.raises(RecipeError):
                    willing[1].require(redis, job_id, document)


def test_an_owner_is_told_what_consent_means_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = owners(tmp_path)
    assert found["not agreed"].told() == []
    monkeypatch.setattr(methods, "method", lambda: LANDLOCK)
    assert "other people's code, confined by landlock" in found["of up"].told()[0]
    assert found["of up"].told()[1:] == list(LANDLOCK.remarks)
    assert "the recipe that you named" in found["elsewhere, by name"].told()[0]
    assert "only those named with --recipe run here" in found["elsewhere"].told()[-1]


def test_where_nothing_confines_recipes_they_run_only_if_the_owner_insists(
    redis: Redis, job_id: str, spec: JobSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "method", lambda: NONE)
    asked = Consent.of(Settings(home=home(tmp_path, KEY.public), recipes=True))
    insists = Consent.of(Settings(home=tmp_path, recipes=True, unconfined=True))
    assert (asked.offered(), insists.offered()) == ((), ("*",))
    assert "runs no recipes: nothing here can confine them" in asked.told()[0] and "--unconfined" in asked.told()[0]
    assert "not confined" in insists.told()[0] and "your rights" in insists.told()[1]
    with pytest.raises(RecipeError, match="--unconfined"):
        asked.require(redis, job_id, spec)
    assert insists.require(redis, job_id, spec) == RECIPE


@pytest.mark.parametrize("named", ["net.py", "sha256:12", ",".join(["sha256:" + "a" * 64] * 21)])
def test_what_is_no_recipe_is_refused_at_the_start(named: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError):
        Consent.of(Settings(home=tmp_path, recipe=named))


def test_the_control_plane_is_told_by_what_recipes_are_confined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(methods, "method", lambda: LANDLOCK)
    found = {name: consent.confinement for name, consent in owners(tmp_path).items()}
    assert found["of up"] == "landlock" and found["not agreed"] == "", found
    monkeypatch.setattr(methods, "method", lambda: NONE)
    assert owners(tmp_path)["of up"].confinement == "", "it runs none"
    assert Consent(digests=(RECIPE.digest,), unconfined=True).confinement == "none"
