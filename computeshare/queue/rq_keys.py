"""RQ's keys and channel of one worker. The worker's queue has the worker's id as its name."""

from dataclasses import dataclass

SUSPENDED = "rq:suspended"
"""string: exists while all workers rest."""

WORKERS = "rq:workers"
"""set: the `worker` keys of all workers."""


@dataclass(frozen=True, slots=True)
class RqKeys:
    """RQ's keys of one worker."""

    worker_id: str

    def queue(self) -> str:
        """list: ids of the seats that wait."""
        return f"rq:queue:{self.worker_id}"

    def intermediate(self) -> str:
        """list: the id of the seat that the worker is about to begin."""
        return f"{self.queue()}:intermediate"

    def registries(self) -> tuple[str, ...]:
        """sorted sets: ids of seats that run, that have finished, and that have failed."""
        return tuple(f"rq:{kind}:{self.worker_id}" for kind in ("wip", "finished", "failed"))

    def worker(self) -> str:
        """hash: the worker."""
        return f"rq:worker:{self.worker_id}"

    def executions(self) -> str:
        """set: the executions under way."""
        return f"{self.worker()}:executions"

    def workers(self) -> str:
        """set: the `worker` keys of the queue's workers."""
        return f"{WORKERS}:{self.worker_id}"

    def channel(self) -> str:
        """The channel of orders to stop a seat."""
        return f"rq:pubsub:{self.worker_id}"


@dataclass(frozen=True, slots=True)
class RqSeatKeys:
    """RQ's keys of one seat."""

    seat_id: str

    def job(self) -> str:
        """hash: the seat as an RQ job."""
        return f"rq:job:{self.seat_id}"

    def dependents(self) -> str:
        """set: always empty, since no seat depends on another."""
        return f"{self.job()}:dependents"

    def dependencies(self) -> str:
        """set: always empty."""
        return f"rq:job::{self.seat_id}:dependencies"

    def results(self) -> str:
        """stream: how the seat ended."""
        return f"rq:results:{self.seat_id}"

    def executions(self) -> str:
        """sorted set: ids of the seat's executions."""
        return f"rq:executions:{self.seat_id}"

    def execution(self, execution_id: str) -> str:
        """hash: an execution of the seat."""
        return f"rq:execution:{self.seat_id}:{execution_id}"
