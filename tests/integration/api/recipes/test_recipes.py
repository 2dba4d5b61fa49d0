"""Recipes over REST: kept by digest, and jobs that train them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from starlette.testclient import TestClient

from api.deps import Services
from api.main import create_app
from api.publication.outbox import Courier
from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipe_facts import MOST_TENSORS
from computeshare.protocol.keys import JobKeys
from computeshare.queue.recipes import is_signed
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import Bundle
from tests.support.recipe_jobs import FACTS
from tests.support.recipes import NOISE

FILES = {
    "recipe.py": NOISE
    + "def model(width=4):\n    return nn.Sequential(nn.Flatten(), nn.Linear(144, width), nn.Linear(width, 10))\n"
}
DIGEST = Bundle(FILES).digest


@pytest.fixture
def added(client: TestClient) -> str:
    return str(client.post("/v1/recipes", json={"files": FILES, "name": "noise"}).json()["digest"])


@pytest.fixture
def initial(settings: Settings, tmp_path: Path) -> str:
    """The digest of files that the control plane has."""
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "initial.safetensors").write_bytes(b"weights")
    return BundleStore(settings.bundles_dir).add(tmp_path / "state").digest


@pytest.fixture
def trying(settings: Settings) -> Iterator[TestClient]:
    """A client of a control plane that runs recipes."""
    app = create_app(settings.model_copy(update={"recipes": True}))
    headers = {"Authorization": "Bearer secret"}
    with TestClient(app, base_url="http://localhost", headers=headers) as client:
        yield client


def services_of(client: TestClient) -> Services:
    found: Services = client.app.state.services  # type: ignore[attr-defined]
    return found


def errors(answer: Any) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {one["field"]: one["detail"] for one in answer.json()["errors"]}


def create(client: TestClient, **fields: Any) -> Any:
    return client.post("/v1/jobs", json={"recipe": DIGEST, "rounds": 2, **fields})


def test_a_recipe_is_kept_once_by_its_digest(client: TestClient) -> None:
    first = client.post("/v1/recipes", json={"files": FILES, "name": "noise"})
    again = client.post("/v1/recipes", json={"files": FILES, "name": "other"})
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json() | {"created_at": first.json()["created_at"]}
    assert first.headers["Location"] == f"/v1/recipes/{DIGEST}"
    assert client.get("/v1/recipes").json()["items"] == [first.json()]
    assert client.get(f"/v1/recipes/{DIGEST}").json()["files"] == FILES
    assert client.delete(f"/v1/recipes/{DIGEST}").status_code == 204
    assert client.get(f"/v1/recipes/{DIGEST}").status_code == 404 == client.delete(f"/v1/recipes/{DIGEST}").status_code


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "has no recipe.py"),
        ({"recipe.py": "", "../x.py": ""}, "not a path inside"),
        ({"recipe.py": "x" * 1_000_001}, "at most 1,000,000 bytes"),
        ({"recipe.py": "# requires: !"}, "not understood"),
    ],
)
def test_what_is_no_recipe_is_refused(client: TestClient, files: dict[str, str], told: str) -> None:
    assert told in errors(client.post("/v1/recipes", json={"files": files}))["files"]


def test_a_job_needs_the_recipe_and_its_initial_state(client: TestClient, initial: str) -> None:
    assert "there is no recipe" in errors(create(client, recipe_facts=FACTS | {"initial": initial}))["recipe"]
    client.post("/v1/recipes", json={"files": FILES})
    assert "are not here" in errors(create(client, recipe_facts=FACTS))["recipe_facts.initial"]
    wrong = FACTS | {"initial": initial, "requires": ["numpy>=2", "; rm -rf /"]}
    assert "names no package" in errors(create(client, recipe_facts=wrong))["recipe_facts.requires.1"]
    assert "computeshare jobs create --recipe" in errors(create(client))["recipe"]
    made = create(client, recipe_facts=FACTS | {"initial": initial}).json()
    assert (made["title"], made["metric"], made["perplexity"]) == (f"recipe {DIGEST[7:15]}", "loss", None)
    found = client.get("/v1/jobs", params={"search": made["title"].upper()}).json()["items"]
    assert [one["id"] for one in found] == [made["id"]]


def test_as_many_tensors_as_facts_may_name_fit_into_a_request(client: TestClient, added: str, initial: str) -> None:
    name = "model.layers.{}.mlp.experts.{}.gate_projection_of_the_mixture.weight"
    tensors = [
        {"name": name.format(n % 100, n), "shape": [1, 1, 1, 1], "kind": "parameter"} for n in range(MOST_TENSORS)
    ]
    made = create(client, recipe_facts=FACTS | {"initial": initial, "tensors": tensors})
    assert made.status_code == 201 and len(made.request.content) > 2_000_000


def test_a_recipe_is_published_with_its_job_and_kept_while_the_job_lasts(
    client: TestClient, redis: Redis, added: str, initial: str, tmp_path: Path
) -> None:
    job_id = create(client, recipe_facts=FACTS | {"initial": initial}).json()["id"]
    keys, key = JobKeys(job_id), SigningKey.new()
    Courier(services_of(client).database, tmp_path / "artifacts", key).publish(redis, job_id)
    assert redis.get(keys.recipe()) == Bundle(FILES).content
    assert is_signed(redis, job_id, JobSpec.model_validate_json(redis.get(keys.spec()) or b""), key.public)
    refused = client.delete(f"/v1/recipes/{added}")
    assert refused.status_code == 409 and job_id in refused.json()["detail"]
    assert client.get("/v1/recipes").json()["items"][0]["jobs"] == 1
    client.post(f"/v1/jobs/{job_id}/cancel")
    assert client.delete(f"/v1/recipes/{added}").status_code == 204


@pytest.mark.slow
def test_a_control_plane_that_runs_recipes_tries_them_itself(trying: TestClient, settings: Settings) -> None:
    trying.post("/v1/recipes", json={"files": FILES})
    made = create(trying, recipe_args={"width": 3}).json()
    facts = made["spec"]["recipe_facts"]
    assert (facts["train"], facts["test"], facts["metric"], facts["classes"]) == (100, 100, "accuracy", 10)
    assert BundleStore(settings.bundles_dir).has(facts["initial"])
    assert "takes an argument height" in errors(create(trying, recipe_args={"height": 3}))["recipe"]
    chance = (
        FILES["recipe.py"]
        + "\nimport os\ndef loss(model, batch):\n    return model(batch[0]).sum() * os.urandom(1)[0]\n"
    )
    digest = trying.post("/v1/recipes", json={"files": {"recipe.py": chance}}).json()["digest"]
    assert "the same step gave other bits" in errors(create(trying, recipe=digest))["recipe"]
