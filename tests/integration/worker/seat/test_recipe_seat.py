"""Seats whose recipes compute in processes of their own."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis

from computeshare.bundles.store import BundleStore
from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat, recipes
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.queue.seats import RECIPE_FAILED
from computeshare.reducer.process import Reducer
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.tasks.recipes.bundle import MAIN, Bundle
from computeshare.training.computation import LocalComputation
from computeshare.training.device_group.group import GroupComputation
from computeshare.training.recipe_process.process import RecipeFiles
from computeshare.worker.seat import device_setup
from computeshare.worker.seat.seat import SeatSession
from tests.support.recipes import CONVOLUTIONS, RecipeJob, recipe_job
from tests.support.reducer_process import running, version_of
from tests.support.rounds import events
from tests.support.wait import wait_until

KEY = SigningKey.new()
FIELDS: dict[str, Any] = {"threads": 1, "micro_batch": 10, "rounds": 6, "checkpoint_every": 0, "evaluate_every": 0}


def made(folder: Path, text: str = CONVOLUTIONS, **fields: Any) -> RecipeJob:
    """A job for a recipe, whose initial state is in the bundles below `folder`, which is the home of an `up`."""
    job = recipe_job(text, folder, **FIELDS, **fields)
    initial = BundleStore(folder / "bundles").add(job.files.initial).digest
    (folder / "control.pub").write_text(KEY.public)
    facts = job.spec.recipe_facts
    assert facts
    spec = job.spec.model_copy(update={"recipe_facts": facts.model_copy(update={"initial": initial})})
    return RecipeJob(spec, job.files, job.task)


def seat(redis: Redis, job_id: str, spec: JobSpec, home: Path, number: int = 0) -> SeatSession:
    seat = Seat(f"worker{number:06d}", job_id, number, 1)
    store = RoundStore(redis, job_id)
    redis.hset(store.keys.seats(), seat.worker, seat.id)
    return SeatSession(redis, seat, spec, Settings(home=home, recipes=True), threading.Event())


@contextlib.contextmanager
def published(redis: Redis, job_id: str, job: RecipeJob, home: Path) -> Iterator[RoundStore]:
    """The job in the broker, with a reducer that has opened it."""
    store = RoundStore(redis, job_id)
    recipes.publish(redis, job_id, job.spec, job.files.bundle, KEY)
    store.publish(job.spec.model_dump_json())
    runner = RecipeRunner(BundleStore(home / "bundles"), KEY.public)
    with running(Reducer(redis, home / "artifacts", home / "bundles", threading.Event(), runner)):
        if not job.spec.is_open:
            wait_until(lambda: store.read() is not None)
        yield store
    store.end("completed")


def trained(redis: Redis, job_id: str, job: RecipeJob, home: Path, seats: int) -> str:
    """The digest of the last version."""
    with published(redis, job_id, job, home) as store:
        sessions = [seat(redis, job_id, job.spec, home, number) for number in range(seats)]
        threads = [threading.Thread(target=one.run, args=("cpu",), daemon=True) for one in sessions]
        for thread in threads:
            thread.start()
        wait_until(lambda: version_of(store) == job.spec.rounds_total, 120)
        for thread in threads:
            thread.join(30)
        state = store.read()
        assert state is not None
        return state.token.digest16


@pytest.mark.usefixtures("one_thread")
@pytest.mark.slow
def test_workers_with_recipes_end_with_the_weights_of_a_seat_that_runs_it_itself(
    redis: Redis, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    redis.delete("cs:jobs")
    job = made(tmp_path)
    found = trained(redis, f"{job_id}two", job, tmp_path, 2)

    def here(spec: JobSpec, *_: object) -> GroupComputation:
        own = LocalComputation(job.task.instance(spec.seed, "train", tmp_path), torch.device("cpu"))
        return GroupComputation(own, [], ["cpu"])

    monkeypatch.setattr(device_setup, "open_all", here)
    assert trained(redis, f"{job_id}one", job, tmp_path, 1) == found


@pytest.mark.slow
def test_workers_hold_stages_of_a_recipes_model_in_its_processes(redis: Redis, job_id: str, tmp_path: Path) -> None:
    redis.delete("cs:jobs")
    job = made(tmp_path, strategy={"kind": "pipeline", "stages": 2}, accumulate=2, micro_batches_per_round=2)
    assert trained(redis, f"{job_id}two", job, tmp_path, 2) == trained(redis, f"{job_id}one", job, tmp_path, 1)


@pytest.mark.slow
def test_what_is_open_is_measured_in_the_recipes_process(redis: Redis, job_id: str, tmp_path: Path) -> None:
    redis.delete("cs:jobs")
    job = made(tmp_path, codec="auto", precision="auto", micro_batches_per_round=2)
    assert trained(redis, job_id, job, tmp_path, 1)


def test_a_recipe_that_fails_in_mid_training_ends_the_seat_with_its_own_line(
    redis: Redis, job_id: str, tmp_path: Path
) -> None:
    redis.delete("cs:jobs")
    poisoned = CONVOLUTIONS.replace(
        "        return self.inputs", "        1 / (90 - index)\n        return self.inputs"
    )
    line = 1 + next(n for n, text in enumerate(poisoned.splitlines()) if "90 - index" in text)
    job = made(tmp_path, poisoned)
    with published(redis, job_id, job, tmp_path) as store:
        with pytest.raises(RecipeError):
            seat(redis, job_id, job.spec, tmp_path).run("cpu")
        assert len(events(store, "joined")) == 1
        told = f"{RECIPE_FAILED}recipe.py, line {line}: reading a sample failed: ZeroDivisionError: division by zero"
        assert [event["reason"] for event in events(store, "left")] == [told]


def test_a_recipe_that_the_control_plane_has_not_signed_does_not_run(redis: Redis, job_id: str, tmp_path: Path) -> None:
    redis.delete("cs:jobs")
    trace = tmp_path / "ran"
    job = made(tmp_path, CONVOLUTIONS + f"\nopen({str(trace)!r}, 'w')\n")
    trace.unlink()  # written while the job was made, in this process
    with published(redis, job_id, job, tmp_path) as store:
        recipes.publish(redis, job_id, job.spec, job.files.bundle, SigningKey.new())
        for number in range(3):
            assert "has not signed" in seat(redis, job_id, job.spec, tmp_path, number).run("cpu")
        assert events(store, "joined") == [] and len(events(store, "unfit")) == 3
    assert not trace.exists()


LIES = {
    "samples": ({"train": 101}, "data('train') has 100 samples here, and 101 where the job was created"),
    "classes": ({"classes": 5}, "the recipe's classes are 10 here, and 5 where the job was created"),
    "metrics": ({"metrics": ("top5",)}, "the recipe's metrics are none here, and top5 where the job was created"),
    "metric": ({"metric": "loss"}, "the recipe's metric is accuracy here, and loss where the job was created"),
}


@pytest.mark.parametrize(("lie", "told"), LIES.values(), ids=LIES)
@pytest.mark.slow
def test_a_job_whose_facts_are_not_its_recipes_tells_so_before_it_joins(
    redis: Redis, job_id: str, tmp_path: Path, lie: dict[str, Any], told: str
) -> None:
    redis.delete("cs:jobs")
    job = lying(made(tmp_path), **lie)
    with published(redis, job_id, job, tmp_path) as store:
        with pytest.raises(RecipeError):
            seat(redis, job_id, job.spec, tmp_path).run("cpu")
        (left,) = events(store, "left")
        assert left["reason"].startswith(RECIPE_FAILED + told) and not events(store, "joined")


def lying(job: RecipeJob, **facts: Any) -> RecipeJob:
    """The job with other facts."""
    found = job.spec.recipe_facts
    assert found
    spec = job.spec.model_copy(update={"recipe_facts": found.model_copy(update=facts)})
    return RecipeJob(spec, job.files, job.task)


def test_data_that_no_worker_can_open_is_the_recipes_failure(redis: Redis, job_id: str, tmp_path: Path) -> None:
    redis.delete("cs:jobs")
    (tmp_path / "mine").write_text("x")
    reads = f"def data(split, folder):\n    open({str(tmp_path / 'mine')!r})\n    return Noise(split, 100)\n"
    job = made(tmp_path, CONVOLUTIONS + reads)
    with published(redis, job_id, job, tmp_path) as store:
        with pytest.raises(RecipeError):
            seat(redis, job_id, job.spec, tmp_path).run("cpu")
        (left,) = events(store, "left")
        assert left["reason"].startswith(f"{RECIPE_FAILED}recipe.py, line ")
        assert "uses no files but its own and its data" in left["reason"]


LACKS = {
    "a required package": ("", {"requires": ("no-such-package>=5",)}, "no-such-package>=5 (not installed): install"),
    "an import": (
        "def model():\n    import no_such_package\n",
        {},
        "model() failed: ModuleNotFoundError: No module named 'no_such_package' (install the package that has",
    ),
    "memory": ("def model():\n    bytearray(1 << 50)\n", {}, "MemoryError (more than the memory allowed here)"),
    "torch's memory": ("def model():\n    torch.empty(1 << 50)\n", {}, "(more than the memory allowed here)"),
}


@pytest.mark.parametrize(("text", "facts", "told"), LACKS.values(), ids=LACKS)
@pytest.mark.slow
def test_what_one_machine_lacks_makes_it_unfit_for_the_job(
    redis: Redis, job_id: str, tmp_path: Path, text: str, facts: dict[str, Any], told: str
) -> None:
    redis.delete("cs:jobs")
    job = made(tmp_path)
    bundle = Bundle({MAIN: CONVOLUTIONS + text})
    spec = lying(job, **facts).spec.model_copy(update={"recipe": bundle.digest})
    job = RecipeJob(spec, RecipeFiles(bundle, job.files.initial), job.task)
    with published(redis, job_id, job, tmp_path) as store:
        assert told in seat(redis, job_id, job.spec, tmp_path).run("cpu")
        (unfit,) = events(store, "unfit")
        assert told in unfit["reason"]
