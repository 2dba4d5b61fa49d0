"""A simulated control plane: it takes events, counts submissions, and may die between any two of its steps."""

import json
import random
from collections import Counter
from collections.abc import Callable

from redis import Redis

from api.projection.projector import _trim
from computeshare.protocol.round_store import RoundStore

AT_A_TIME = 7


class SimControl:
    """What it has stored, and nothing else, survives its death."""

    def __init__(self, redis: Redis, job_id: str, rng: random.Random) -> None:
        self.redis, self.store, self.rng = redis, RoundStore(redis, job_id), rng
        self.position = "0-0"
        self.rows: dict[str, str] = {}  # stream id to nonce
        self.outcomes: dict[str, tuple[str, str]] = {}  # nonce of what has a row and was accepted: worker, outcome
        self.others: set[str] = set()  # ids of all else
        self.folded: list[tuple[tuple[int, int], tuple[int, int]]] = []
        self.counts: Counter[tuple[str, str]] = Counter()  # worker and outcome

    def step(self, may_die: bool = True) -> str:
        entries = self.store.take(self.position, AT_A_TIME)
        if not entries or (may_die and self.rng.random() < 0.2):
            return f"read {len(entries)}"
        for stream_id, fields in entries:
            self._store(stream_id.decode(), fields[b"type"].decode(), fields[b"data"])
        self.position = entries[-1][0].decode()
        if may_die and self.rng.random() < 0.2:
            return f"stored {len(entries)}"
        _trim(self.redis, {self.store.job_id: entries})
        return f"trimmed {len(entries)}"

    def drain(self) -> str:
        """Take all there is."""
        self.position = "0-0"
        for _ in range(1000):
            if self.step(may_die=False) == "read 0":
                return "drained"
        raise AssertionError("there is no end to what is to be taken")

    def start_over(self) -> None:
        """The broker is another: whatever is there is looked at again."""
        self.position = "0-0"

    def _store(self, stream_id: str, kind: str, raw: bytes) -> None:
        milliseconds, number = map(int, stream_id.split("-"))
        known = stream_id in self.rows or stream_id in self.others
        handler: Callable[[str, dict[str, object]], None] | None = getattr(self, f"_{kind}", None)
        was_folded = kind == "submission" and any(a <= (milliseconds, number) <= b for a, b in self.folded)
        if not known and not was_folded and handler:
            handler(stream_id, json.loads(raw))
        if kind != "submission":
            self.others.add(stream_id)

    def _submission(self, stream_id: str, data: dict[str, object]) -> None:
        nonce, worker, outcome = str(data["nonce"]), str(data["worker"]), str(data["outcome"])
        self.rows[stream_id] = nonce
        self.counts[worker, outcome] += 1
        if outcome == "accepted":
            self.outcomes[nonce] = worker, outcome

    def _folded(self, stream_id: str, data: dict[str, object]) -> None:
        first, last = (tuple(map(int, one.split("-"))) for one in (str(data["first"]), stream_id))
        self.folded.append((first, last))  # type: ignore[arg-type]
        workers: dict[str, dict[str, int]] = data["workers"]  # type: ignore[assignment]
        for worker, of in workers.items():
            for outcome, count in of.items():
                if not outcome.startswith("bytes"):
                    self.counts[worker, outcome] += count

    def _refused(self, _stream_id: str, data: dict[str, object]) -> None:
        if found := self.outcomes.pop(str(data["nonce"]), None):
            self.counts[found] -= 1
            self.counts[found[0], "refused"] += 1
