"""What a recipe does to its process ends in words for the job, and this process lives."""

import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from computeshare.errors import Interrupted, RecipeError, RecipeUnfit
from computeshare.tasks.recipes.bundle import MAIN, Bundle
from computeshare.tensors.layout import Weights
from computeshare.training.recipe_process.process import ProcessLimits, RecipeFiles, RecipeProcess
from tests.support.recipes import NOISE, recipe_job

SWITCHED = (
    NOISE
    + """
import os, sys, time

class Switched(nn.Linear):
    def forward(self, inputs):
        if self.training and self.act:
            self.act()
        return super().forward(inputs.flatten(1))

def model(act=None):
    module = Switched(144, 10)
    module.act = ACTS.get(act)
    return module

def wrong():
    raise ValueError("no such thing")

def quit():
    sys.stdout.write("so long\\n")
    sys.stdout.flush()
    os._exit(3)

def sleep():
    time.sleep(1000)

ACTS = {"wrong": wrong, "quit": quit, "sleep": sleep, "allocate": lambda: bytearray(8 << 30), "exit": sys.exit}
"""
)
LINE = 1 + next(number for number, line in enumerate(SWITCHED.splitlines()) if "no such thing" in line)
TOLD = {
    "wrong": f"{MAIN}, line {LINE}: training failed: ValueError: no such thing",
    "quit": "the recipe's process ended with exit code 3; the last that it printed: so long",
    "sleep": "a step of the recipe took more than 3 s and was ended",
    "allocate": "MemoryError|killed: it took",
    "exit": "training failed: SystemExit",
}


@pytest.mark.parametrize("act", TOLD)
@pytest.mark.slow
def test_a_recipe_that_fails_in_mid_training_says_why(act: str, tmp_path: Path) -> None:
    job = recipe_job(SWITCHED, tmp_path, threads=1, rounds=3)  # the facts are those of the harmless one
    spec = job.spec.model_copy(update={"recipe_args": {"act": act}})
    process = RecipeProcess(
        spec, job.files, "cpu", ProcessLimits(memory_bytes=2_000_000_000, step_s=3 if act == "sleep" else 60)
    )
    try:
        replica = process.open().replica(spec)
        replica.load(recipe_weights(process))
        with pytest.raises(RecipeError, match=TOLD[act]) as first:
            replica.compute(0)
        assert isinstance(first.value, RecipeUnfit) == (act == "allocate"), "another machine may have the memory"
        if act not in ("wrong", "exit", "allocate"):  # the process is gone: it says so again
            with pytest.raises(RecipeError, match=re.escape(str(first.value))):
                replica.compute(0)
    finally:
        process.close()
    assert not [one for one in psutil.Process().children(recursive=True) if "recipe_process" in " ".join(one.cmdline())]


def recipe_weights(process: RecipeProcess) -> Weights:
    layout = process.layout
    zeros = np.zeros(layout.parameters, np.float32), np.zeros(layout.buffers, np.float32)
    return Weights(*zeros, np.zeros(layout.counters, np.int64))


def test_work_that_is_called_off_ends_between_steps(tmp_path: Path) -> None:
    slow = SWITCHED.replace("time.sleep(1000)", "time.sleep(0.5)")
    job = recipe_job(slow, tmp_path, threads=1, rounds=3, strategy={"kind": "local", "inner_steps": 20})
    spec = job.spec.model_copy(update={"recipe_args": {"act": "sleep"}})
    process = RecipeProcess(spec, job.files, "cpu")
    try:
        replica = process.open().replica(spec)
        weights = recipe_weights(process)
        replica.load(weights)
        started = time.monotonic()
        with pytest.raises(Interrupted):
            replica.compute(0, lambda: time.monotonic() - started < 1)
        assert time.monotonic() - started < 9, "not all of the steps"
        with pytest.raises(Interrupted):
            replica.compute(0, lambda: False)
        assert replica.dump() is None, "the process serves on"
    finally:
        process.close()


COUNTING = (
    NOISE
    + """
class Counting(nn.Linear):
    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return super().forward(inputs.flatten(1)) * self.calls

def model():
    return Counting(144, 10)
"""
)


def test_a_failed_self_test_names_the_recipe_as_a_possible_cause(tmp_path: Path) -> None:
    job = recipe_job(COUNTING, tmp_path)
    process = RecipeProcess(job.spec, job.files, "cpu")
    try:
        trouble = process.open().test().trouble
        assert "wrongly: gradient 2" in trouble and "or the recipe has randomness of its own" in trouble
    finally:
        process.close()


def test_other_files_than_the_job_names_are_not_run(tmp_path: Path) -> None:
    job = recipe_job(SWITCHED, tmp_path, rounds=3)
    changed = RecipeFiles(Bundle({MAIN: SWITCHED + "\n"}), job.files.initial)
    with pytest.raises(RecipeError, match="changed on their way"):
        RecipeProcess(job.spec, changed, "cpu")


@pytest.mark.slow
def test_a_recipe_that_is_another_here_than_where_the_job_was_created_says_so(tmp_path: Path) -> None:
    job = recipe_job(NOISE + "def model(width=10): return nn.Sequential(nn.Flatten(), nn.Linear(144, width))", tmp_path)
    for arguments, told in (({"width": 11}, "other parameters"), ({"samples": 101}, "has 101 samples here, and 100")):
        process = RecipeProcess(job.spec.model_copy(update={"recipe_args": arguments}), job.files, "cpu")
        try:
            with pytest.raises(RecipeError, match=told):
                process.open()
        finally:
            process.close()


def test_the_folder_of_a_process_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"recipe-process-{dead.pid}-x"
    (left / "scratch").mkdir(parents=True)
    (mine := tmp_path / f"recipe-process-{os.getpid()}-y").mkdir()
    job = recipe_job(SWITCHED, tmp_path / "job", rounds=3)
    RecipeProcess(job.spec, job.files, "cpu").close()
    assert (left.exists(), mine.exists()) == (False, True)
    assert [path.name for path in tmp_path.glob("recipe-process-*")] == [mine.name]
