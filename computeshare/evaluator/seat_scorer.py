"""Scores a job's checkpoints on the worker that has a scoring seat."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from redis import Redis

from computeshare.checkpoints.offers import Offers
from computeshare.checkpoints.part_score import PartScore, ScoredPart
from computeshare.checkpoints.store import Artifacts
from computeshare.protocol import keys
from computeshare.queue import Seat, SeatQueue, score_requests
from computeshare.queue.score_requests import ScoreRequest
from computeshare.types import Token


@dataclass(frozen=True)
class SeatScorer:
    """Asks one seat for scores, and waits for as long as its worker is there."""

    redis: Redis
    seat: Seat
    offers: Offers
    goes_on: Callable[[], bool]

    def score(self, artifacts: Artifacts, token: Token, part: ScoredPart) -> PartScore:
        """The score of a checkpoint on a part of the data. Raises ScorerGone; ComputeShareError, as on the worker."""
        with self.offers.offered(artifacts, token) as digest:
            request = ScoreRequest(id=secrets.token_hex(16), token=str(token), part=part, files=digest)
            return score_requests.ask(self.redis, self.seat, request, self.is_there)

    def is_there(self) -> bool:
        """Whether the seat waits or runs, on a worker that is alive. Raises RedisError."""
        states = SeatQueue(self.redis).state([self.seat]).values()
        alive = self.redis.exists(keys.worker(self.seat.worker))
        return bool(self.goes_on() and alive and {"queued", "started"} & set(states))

    def close(self) -> None:
        """Do nothing: the seat ends by itself."""
