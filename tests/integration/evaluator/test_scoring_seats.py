"""Workers score as the evaluator does, any number at once; who dies in between leaves the checkpoint to another."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis

from computeshare.bundles.piece_server import PieceServer
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.offers import Offers
from computeshare.checkpoints.part_score import PartScore, ScoredPart
from computeshare.checkpoints.store import WEIGHTS, Artifacts
from computeshare.errors import RecipeUnfit, ScorerGone
from computeshare.evaluator.evaluator import Evaluator, ForJob
from computeshare.evaluator.seat_scorer import SeatScorer
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import Seat, SeatQueue, WorkerInfo, recipes, register, unregister
from computeshare.queue.seats import SCORING
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.tasks.metrics import score as score_of
from computeshare.training.work_units import SelfTestResult
from computeshare.types import Token
from computeshare.worker.seat import scoring_seat
from computeshare.worker.seat.scoring_seat import ScoringSeat
from tests.support.evaluated_job import save, save_module
from tests.support.recipes import recipe_job
from tests.support.rounds import events
from tests.support.scheduling_clock import set_rq_status
from tests.support.wait import wait_until

SPEC = JobSpec(dataset="digits", model="mlp", rounds=4, evaluate_every=1, eval_batch=7, validation=0.1)


class Plane:
    """A job's checkpoints, with the control plane's side of scoring."""

    def __init__(self, redis: Redis, job_id: str, root: Path) -> None:
        self.redis, self.root, self.store, self.spec = redis, root, RoundStore(redis, job_id), SPEC
        self.artifacts = Artifacts(root / "artifacts", job_id)
        self.offers = Offers(BundleStore(root / "bundles"))
        self.store.publish(SPEC.model_dump_json())

    def seat(self, worker: str) -> Seat:
        """A scoring seat that a live worker has begun."""
        seat = Seat(worker, self.store.job_id, SCORING, 1)
        register(self.redis, WorkerInfo(worker, worker, "cpu", ("q",), {}, 1, "host", 1))
        SeatQueue(self.redis).enqueue(seat)
        set_rq_status(self.redis, seat.id, "started")
        return seat

    def evaluator(self, seat: Seat) -> Evaluator:
        scorer = SeatScorer(self.redis, seat, self.offers, lambda: True)
        return self.scored_by(ForJob(seat.job, seat.id, scorer))

    def scored_by(self, only: ForJob | None) -> Evaluator:
        return Evaluator(self.redis, self.root / "artifacts", self.root / "data", threading.Event(), only=only)

    @contextmanager
    def pieces(self) -> Iterator[None]:
        """The control plane sends pieces."""
        stop, server = threading.Event(), PieceServer(self.offers)

        def serve() -> None:
            while not stop.is_set():
                server.step(self.redis)

        with _running(serve):
            yield
            stop.set()

    @contextmanager
    def worker(self, seat: Seat, **settings: Any) -> Iterator[Path]:
        """What the seat's process does, on a machine with another home; ends with the requests."""
        home = self.root / seat.worker
        session = ScoringSeat(self.redis, seat, self.spec, Settings(home=home, **settings))

        def run() -> None:
            torch.set_num_threads(2)  # of this thread, where an evaluator's has another number
            with suppress(RecipeUnfit):
                session.run()

        with _running(run):
            yield home
            self.store.redis.delete(self.store.keys.score_requests(seat.id))


@contextmanager
def _running(act: Callable[[], Any]) -> Iterator[None]:
    thread = threading.Thread(target=act)
    thread.start()
    try:
        yield
    finally:
        thread.join(120)
        assert not thread.is_alive()


@pytest.fixture
def plane(redis: Redis, job_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plane]:
    monkeypatch.setattr("computeshare.worker.seat.scoring_seat.IDLE_TURNS", 2)
    found = Plane(redis, job_id, tmp_path)
    yield found
    for name in ("worker1aaaaa", "worker2aaaaa"):
        unregister(redis, name)
    found.store.purge()


@pytest.mark.usefixtures("one_thread")
def test_workers_score_each_version_once_and_to_the_same_bits_as_an_evaluator(plane: Plane) -> None:
    tokens = [save(plane.artifacts, SPEC, version) for version in (1, 2, 3, 4)]
    seats = [plane.seat("worker1aaaaa"), plane.seat("worker2aaaaa")]
    with ExitStack() as running:
        running.enter_context(plane.pieces())
        homes = [running.enter_context(plane.worker(seat)) for seat in seats]
        ones = [plane.evaluator(seat) for seat in seats]
        for one in ones:
            running.enter_context(_running(one.run))
        running.callback(lambda: [one.stop.set() for one in ones])
        wait_until(
            lambda: {e["version"] for e in events(plane.store, "scored") if "test" in e} == {1, 4}
        )  # best and last
    scores, classes = [plane.artifacts.score(t) for t in tokens], [plane.artifacts.classes(t) for t in tokens]
    holders = {plane.redis.get(plane.store.keys.scoring(str(token))) for token in tokens}
    assert holders <= {seat.id.encode() for seat in seats}
    assert all(BundleStore(home / "bundles").digests() == [] for home in homes), "fetched checkpoints are removed"
    for token in tokens:
        plane.artifacts.path(token, "score.json").unlink()
        plane.artifacts.path(token, "classes.json").unlink()
        plane.redis.delete(plane.store.keys.scoring(str(token)))
    evaluator = plane.scored_by(None)
    while evaluator._turn():
        pass
    assert scores == [plane.artifacts.score(t) for t in tokens] and None not in scores
    assert classes == [plane.artifacts.classes(t) for t in tokens]


def test_a_dead_scorer_gives_its_claim_up_and_another_scores(plane: Plane) -> None:
    token = save(plane.artifacts, SPEC, 2)
    dead = plane.seat("worker1aaaaa")
    ended = threading.Event()

    def serve() -> None:
        with pytest.raises(ScorerGone, match="worker1aaaaa does not score any more"):
            plane.evaluator(dead)._turn()
        ended.set()

    with _running(serve):
        wait_until(lambda: plane.redis.exists(plane.store.keys.score_requests(dead.id)))
        other = plane.scored_by(None)
        assert not other._turn(), "it is claimed"
        set_rq_status(plane.redis, dead.id, "failed")
        assert ended.wait(10)
    wait_until(other._turn)
    assert plane.artifacts.score(token) and not plane.redis.exists(plane.store.keys.score_requests(dead.id))


def test_the_claim_of_a_control_plane_that_died_expires_and_a_worker_scores(plane: Plane) -> None:
    token, seat = save(plane.artifacts, SPEC, 2), plane.seat("worker1aaaaa")
    plane.redis.set(plane.store.keys.scoring(str(token)), "an older one of this seat", px=200)
    with plane.pieces(), plane.worker(seat):
        wait_until(plane.evaluator(seat)._turn)
    assert [event["version"] for event in events(plane.store, "scored")] == [2]


def test_a_score_counts_only_while_the_claim_holds_for_which_it_was_computed(plane: Plane) -> None:
    token = save(plane.artifacts, SPEC, 2)
    claim = plane.store.keys.scoring(str(token))

    class Late:
        """Scores, while another takes the checkpoint over."""

        def score(self, artifacts: Artifacts, token: Token, part: ScoredPart) -> PartScore:
            plane.redis.set(claim, "another", px=10_000)
            return PartScore(loss=1.0, metrics={"accuracy": 1.0}, samples=144)

        def close(self) -> None:
            pass

    late = plane.scored_by(ForJob(plane.store.job_id, "late", Late()))
    assert not late._turn()
    assert plane.artifacts.score(token) is None and events(plane.store, "scored") == []
    assert events(plane.store, "unscored") == [] and plane.redis.get(claim) == b"another"


def test_an_error_on_the_worker_is_told_and_a_damaged_checkpoint_is_left_out(plane: Plane) -> None:
    first, second = (save(plane.artifacts, SPEC, version) for version in (1, 2))
    plane.artifacts.path(second, WEIGHTS).write_bytes(b"no weights")
    seat = plane.seat("worker1aaaaa")
    evaluator = plane.evaluator(seat)
    with plane.pieces(), plane.worker(seat):
        assert evaluator._turn(), "the newest is damaged, the other is scored"
    assert plane.artifacts.score(first) and not plane.artifacts.score(second)
    assert [event["version"] for event in events(plane.store, "damaged")] == [2]


def test_a_loss_that_is_not_finite_travels(plane: Plane) -> None:
    raw = PartScore(loss=float("nan"), metrics={"accuracy": 0.1}, samples=1).model_dump_json()
    found = PartScore.model_validate_json(raw)
    assert found.loss != found.loss and found.metrics == {"accuracy": 0.1}


RECIPE = """
import torch
from torch import nn

def model():
    return nn.Linear(3, 4)

def data(split, folder):
    inputs = torch.randn(60, 3, generator=torch.Generator().manual_seed(len(split)))
    return torch.utils.data.TensorDataset(inputs, inputs.argmax(dim=1))
"""


@pytest.mark.slow
def test_a_recipe_is_scored_by_workers_whose_owners_agreed_and_by_no_others(plane: Plane, tmp_path: Path) -> None:
    key, job = SigningKey.new(), recipe_job(RECIPE, tmp_path / "recipe", evaluate_every=1, rounds=2)
    document = job.spec.model_dump(mode="json")
    document["recipe_facts"]["initial"] = BundleStore(tmp_path / "bundles").add(job.files.initial).digest
    plane.spec = JobSpec.model_validate(document)
    plane.store.publish(plane.spec.model_dump_json())
    recipes.publish(plane.redis, plane.store.job_id, plane.spec, job.files.bundle, key)
    token = save_module(plane.artifacts, job.task.module(1), 1)
    unwilling, willing = plane.seat("worker1aaaaa"), plane.seat("worker2aaaaa")
    with plane.pieces():
        with plane.worker(unwilling):
            assert not plane.evaluator(unwilling)._turn()
        (told,) = events(plane.store, "unscored")
        assert "this machine does not run this recipe" in told["error"]
        with plane.worker(willing, recipes=True, control_key=key.public):
            assert plane.evaluator(willing)._turn()
    instance = job.task.instance(0, "test", Path())
    expected = score_of(instance, instance.layout.gather(plane.artifacts.tensors(token)))
    score = plane.artifacts.score(token) or {}
    assert (score["samples"], score["accuracy"]) == (60, expected.metrics["accuracy"])
    assert score["loss"] == pytest.approx(expected.loss, rel=1e-6)


def test_a_device_that_fails_its_self_test_scores_nothing(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    session = ScoringSeat(plane.redis, Seat("worker1aaaaa", "job", SCORING, 1), SPEC, Settings(home=plane.root))
    assert session._device().type == "cpu"
    monkeypatch.setattr(scoring_seat, "choose_device", lambda *_: torch.device("mps"))  # this machine has none
    for trouble, scores_on in (("", "mps"), ("it computes wrongly", "cpu")):
        monkeypatch.setattr(scoring_seat, "checked", lambda *_, why=trouble: SelfTestResult(0.0, 0.0, 0, why))
        assert session._device().type == scores_on
