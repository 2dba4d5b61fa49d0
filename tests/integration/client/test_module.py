"""A job's model, ready to use, from a real control plane."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from redis import Redis

from computeshare.client import ComputeShare, Problem
from computeshare.errors import InputError
from computeshare.settings import Settings
from computeshare.tasks.images import models
from computeshare.tasks.trained import task_of_job
from tests.support.served_api import serving
from tests.support.trained_job import trained_job


@pytest.mark.parametrize(("model", "shape"), [("lenet5", (3, 20, 20)), ("shufflenet_v2_x0_5", (3, 32, 32))])
def test_the_module_of_a_job_is_its_model_with_its_weights(
    settings: Settings, redis: Redis, tmp_path: Path, model: str, shape: tuple[int, int, int]
) -> None:
    spec = {"dataset": "digits", "model": model, "input": shape, "queue": "after"}
    with serving(settings) as (url, _), ComputeShare(url, "secret", cache=tmp_path / "cache") as cs:
        job = trained_job(cs, redis, settings, **spec)
        module = job.module()
        assert torch.equal(job.module("best")(torch.ones(2, *shape)), module(torch.ones(2, *shape)))
        with pytest.raises(Problem, match="there are: 1"):
            job.module(2)
        with pytest.raises(InputError, match="No such file"):
            job.predict(tmp_path / "missing.png")
        Image.new("RGB", (60, 40), "red").save(tmp_path / "red.png")
        first, second = job.predict(tmp_path / "red.png", str(tmp_path / "red.png"), top=2)
        assert first == second == task_of_job(job.spec).guess(module, tmp_path / "red.png", 2)
    assert [guess.name for guess in first] == [str(guess.index) for guess in first]
    expected = models.build(model, shape, 10, seed=1).eval()
    images = torch.rand(3, *shape)
    assert not module.training and torch.equal(module(images), expected(images))
