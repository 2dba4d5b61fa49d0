"""Jobs whose workers compile the model: beside the same job without the compiler, and where there is none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.training import devices, replica
from computeshare.training.computation import kind_of, replica_of
from computeshare.training.server_step import ServerStep
from computeshare.training.work_units import AnyReplica
from computeshare.types import Vector

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="torch.compile needs a C++ compiler, and there is none"
)
JOB: dict[str, Any] = {
    "dataset": "mnist",
    "model": "simplenet",  # with dropout
    "micro_batch": 32,
    "codec": {"up": "float32", "down": "float32"},
    "compile": True,
}
SYNC = {"micro_batches_per_round": 1, "rounds": 20}
LOCAL = {"strategy": {"kind": "local", "inner_steps": 4, "replicas": 1}, "rounds": 5}
ON_NOISE = """
import hashlib, sys
import torch
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.registry import task_of
from computeshare.training.computation import replica_of
torch.set_num_threads(1)
spec = JobSpec(dataset="digits", model="mlp", micro_batch=100, compile=sys.argv[1] == "compile")
replica = replica_of(spec, task_of(spec).on_noise(spec.plan.samples), torch.device("cpu"))
digests = {m: hashlib.sha256(replica.compute(m).vector.tobytes()).hexdigest() for m in map(int, sys.argv[2:])}
print(*map(digests.get, sorted(digests)), "by", replica.compilation)
"""


def trained(spec: JobSpec) -> tuple[Vector, AnyReplica]:
    """The parameters that a job on noise ends with, without its processes."""
    instance = task_of(spec).on_noise(spec.plan.samples)
    step, worker = ServerStep(spec, instance.layout), replica_of(spec, instance, CPU)
    model = step.load(weights_of(instance.module, instance.layout), b"")
    for version in range(1, spec.rounds_total + 1):
        worker.load(model.published)
        units = spec.plan.round(version - 1).units
        updates = [worker.compute(unit) for unit in units]
        parts = [(update.vector, update.buffers) for update in updates]
        model = step.step(version, model, parts, [spec.plan.unit_size(unit) for unit in units])
    return model.master, worker


def on_noise(*arguments: str, **environment: str) -> list[str]:
    """What a process of its own prints for micro-batches on noise: their digests, and the compiler."""
    command = [sys.executable, "-c", ON_NOISE, *arguments]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=True)
    return done.stdout.split(" by ")


@needs_compiler
@pytest.mark.long
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("changes", [SYNC, LOCAL], ids=["sync", "local"])
def test_a_compiled_job_ends_with_the_weights_of_a_plain_one(changes: dict[str, Any]) -> None:
    spec = JobSpec.model_validate({**JOB, **changes})
    compiled, worker = trained(spec)
    assert worker.compilation.compiler and not worker.compilation.trouble
    assert kind_of(CPU, worker) == devices.kind(CPU) | {"compiler": worker.compilation.compiler}
    plain, plainly = trained(spec.model_copy(update={"compile": False}))
    assert kind_of(CPU, plainly) == devices.kind(CPU)
    np.testing.assert_allclose(compiled, plain, rtol=0, atol=1e-5)


@needs_compiler
@pytest.mark.long
def test_bits_depend_neither_on_the_process_nor_on_the_order_of_the_sizes(tmp_path: Path) -> None:
    first, second = (
        on_noise("compile", *order, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / order[0]))
        for order in (("0", "5", "14"), ("14", "5", "0"))  # the last of an epoch is short
    )
    assert first == second and "compiler=''" not in first[1]


def test_a_worker_without_a_compiler_trains_as_without_the_option(tmp_path: Path) -> None:
    without, told = on_noise("compile", "0", "14", CXX="nowhere", TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    assert "compiler=''" in told and "No working C++ compiler found" in told
    assert without == on_noise("plain", "0", "14")[0]


def test_a_compiler_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrongly(module: torch.nn.Module) -> None:
        module._compiled_call_impl = lambda *args: 1.5 * module._call_impl(*args)  # type: ignore[assignment]

    monkeypatch.setattr(replica, "compile_module", wrongly)
    spec = JobSpec(dataset="digits", model="mlp", compile=True)
    instance = task_of(spec).on_noise(spec.plan.samples)
    worker = replica_of(spec, instance, CPU)
    assert not worker.compilation.compiler and "% from those without it" in worker.compilation.trouble
    plain = replica_of(JobSpec(dataset="digits", model="mlp"), task_of(spec).on_noise(spec.plan.samples), CPU)
    assert np.array_equal(worker.compute(3).vector, plain.compute(3).vector)
