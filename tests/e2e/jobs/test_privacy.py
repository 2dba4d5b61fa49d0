"""A private job: it learns, tells no training loss, and shows what its privacy has come to."""

import pytest

from computeshare.client import Client
from computeshare.errors import SpecError
from computeshare.replay.replay import Replay
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "2", "--queue", "e2e")


def test_a_private_job_learns_and_says_how_private_it_is(plane: ControlPlane) -> None:
    spec = {**DIGITS_MLP, "queue": "e2e", "rounds": 45, "privacy": {"clip": 1.0, "noise": 0.01}, "evaluate_every": 0}
    job = plane.finish(plane.create(**spec))
    assert job["status"] == "completed"
    assert job["accuracy"] > 0.5
    assert job["loss"] is None
    assert job["epsilon"] is None, "so little noise promises nothing"

    strong = plane.finish(plane.create(**{**spec, "privacy": {"clip": 1.0, "noise": 4.0}}))
    assert 1.99 < strong["epsilon"] == strong["epsilon_total"]
    assert strong["weights_sha256"] != plane.finish(plane.create(**strong["spec"]))["weights_sha256"]
    page = plane.http.get(f"/jobs/{strong['id']}").text
    assert f"ε {strong['epsilon']:.3g} so far" in page
    token = (plane.home / "token").read_text().strip()
    with Client(plane.url, token) as client, pytest.raises(SpecError, match="the noise of its workers"):
        Replay(client, strong["id"], plane.home / "data")
