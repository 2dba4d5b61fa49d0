"""Runs an evaluator for each scoring seat, which picks checkpoints and stores the scores that the worker computes."""

import threading
from collections.abc import Collection, Sequence
from pathlib import Path

import structlog
from redis import Redis
from redis.exceptions import RedisError

from computeshare.checkpoints.offers import Offers
from computeshare.errors import ComputeShareError, ScorerGone
from computeshare.evaluator.evaluator import LOOK_S, Evaluator, EvaluatorMemory, ForJob
from computeshare.evaluator.seat_scorer import SeatScorer
from computeshare.queue import Seat

END_S = 2.0
"""How long a seat's thread may take to notice its end."""
log = structlog.get_logger()


class SeatEvaluators:
    """A thread for each scoring seat; a seat's ends with it."""

    def __init__(self, artifacts_dir: Path, offers: Offers) -> None:
        self.memory = EvaluatorMemory()
        self._artifacts_dir, self._offers = artifacts_dir, offers
        self._threads: dict[str, threading.Thread] = {}
        self._stop = threading.Event()
        self._redis: Redis | None = None

    def keep(self, redis: Redis, seats: Sequence[Seat], job_ids: Collection[str]) -> None:
        """Serve these seats; `job_ids` are the jobs that are not over."""
        if redis is not self._redis:  # another broker by now
            self.stop()
            self._redis = redis
        self.memory.keep_only(job_ids)
        self._threads = {seat_id: thread for seat_id, thread in self._threads.items() if thread.is_alive()}
        for seat in seats:
            if seat.id not in self._threads:
                thread = threading.Thread(
                    target=self._serve, args=(redis, seat, self._stop), name="scores", daemon=True
                )
                self._threads[seat.id] = thread
                thread.start()

    def stop(self) -> None:
        """Serve no seats until `keep` is called again: another control plane does."""
        self._stop.set()
        for thread in self._threads.values():
            thread.join(END_S)
        self._stop, self._threads = threading.Event(), {}

    def _serve(self, redis: Redis, seat: Seat, stop: threading.Event) -> None:
        ended = threading.Event()
        scorer = SeatScorer(redis, seat, self._offers, lambda: not stop.is_set())
        evaluator = Evaluator(
            redis,
            self._artifacts_dir,
            Path(),
            ended,
            only=ForJob(seat.job, seat.id, scorer),
            memory=self.memory,
        )
        threading.Thread(target=self._end, args=(scorer, stop, ended), name="scores-end", daemon=True).start()
        try:
            evaluator.run()
        except ScorerGone as error:
            log.info("a scorer is gone", job=seat.job, seat=seat.id, why=str(error))
        except ComputeShareError as error:  # for example of another version
            log.error("cannot have a worker score", job=seat.job, seat=seat.id, error=str(error))
        finally:
            ended.set()

    def _end(self, scorer: SeatScorer, stop: threading.Event, ended: threading.Event) -> None:
        """End the evaluator of a seat that is over while nothing is asked of it."""
        while not ended.wait(LOOK_S):
            try:
                if not scorer.is_there():
                    ended.set()
            except RedisError:  # away: it is asked again
                continue
