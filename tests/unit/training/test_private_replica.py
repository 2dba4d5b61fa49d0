"""What a private replica sends: clipped, noisy, never the same, and nothing else."""

import numpy as np
import pytest

from computeshare.jobspec.privacy import Privacy
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training.computation import LocalComputation, choose_device
from computeshare.training.private_replica import PrivateReplica

SPEC = JobSpec.model_validate({"dataset": "digits", "model": "mlp"})


@pytest.fixture
def computation(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> LocalComputation:
    folder = tmp_path_factory.mktemp("data")
    return LocalComputation(task_of(SPEC).instance(0, "train", folder), choose_device(SPEC, "cpu"))


def private(computation: LocalComputation, clip: float, noise: float) -> PrivateReplica:
    weights = weights_of(computation.instance.module, computation.layout)
    replica = PrivateReplica(computation.replica(SPEC), Privacy(clip=clip, noise=noise), computation.layout)
    replica.load(weights)
    return replica


def test_an_update_is_clipped_to_the_norm(computation: LocalComputation) -> None:
    sent = private(computation, clip=0.01, noise=1e-6).compute(0).vector
    assert np.linalg.norm(sent) == pytest.approx(0.01, rel=1e-3)


def test_a_small_update_keeps_its_length(computation: LocalComputation) -> None:
    replica = private(computation, clip=1e6, noise=1e-16)
    assert np.allclose(replica.compute(0).vector, replica._replica.compute(0).vector, atol=1e-8)


def test_the_noise_has_the_asked_deviation_and_never_repeats(computation: LocalComputation) -> None:
    replica = private(computation, clip=0.5, noise=4.0)
    first, second = replica.compute(0).vector, replica.compute(0).vector
    assert np.std(first) == pytest.approx(2.0, rel=0.05)
    assert np.std(first - second) == pytest.approx(2.0 * 2**0.5, rel=0.05)


def test_all_buckets_are_noisy_and_the_loss_stays_here(computation: LocalComputation) -> None:
    taken: dict[int, np.ndarray] = {}
    update = private(computation, clip=1.0, noise=1.0).compute(
        0, take=lambda bucket, values: taken.update({bucket: values.copy()})
    )
    assert np.array_equal(np.concatenate([taken[bucket] for bucket in sorted(taken)]), update.vector)
    assert update.loss == 0.0
