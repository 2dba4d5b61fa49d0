"""RQ's SpawnWorker, adapted to machines that sleep, lose the network, or are shared with other users."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

from redis import Redis
from redis.exceptions import RedisError
from rq import Queue, SpawnWorker
from rq.executions import Execution
from rq.job import Job
from rq.serializers import JSONSerializer

from computeshare.protocol.job_log import tell
from computeshare.protocol.round_store import RoundStore
from computeshare.queue.seats import Seat, SeatJob
from computeshare.runtime.log_lines import Writer
from computeshare.runtime.processes import PARENT, end_soon_after, when_asked_to_end
from computeshare.worker.seat.progress_pipe import SeatLink

_URL, _CONTROL_KEY = "COMPUTESHARE_REDIS_URL", "COMPUTESHARE_CONTROL_KEY"


class Face(Protocol):
    """A worker's display (`live_line`)."""

    def say(self, text: str) -> None:
        """Show a message; safe in a signal handler."""

    def close(self) -> None:
        """Restore the terminal."""


class SeatWorker(SpawnWorker):
    """Runs seats, one at a time, each in a child process.

    Differences from SpawnWorker: it runs only seats; the child gets the broker's address by environment (RQ writes the
    address, with its password, into the child's argv) and reports its progress by a pipe; the first signal lets the
    seat finish its work unit, the second signal ends the seat; only the control plane does RQ's maintenance; the worker
    hands back the leases of a seat that dies or is stopped.
    """

    job_class = SeatJob
    leaving = False
    _dropped = ""  # why this worker killed the seat's process, if it did

    def __init__(
        self,
        *arguments: Any,
        redis_url: str = "",
        shown_name: str = "",
        link: SeatLink | None = None,
        face: Face | None = None,
        exit_code: Callable[[], int] = lambda: 0,
        stays: Callable[[], bool] = lambda: False,
        **named: Any,
    ) -> None:
        named = {"job_class": SeatJob} | named | {"serializer": JSONSerializer, "job_monitoring_interval": 5}
        super().__init__(*arguments, **named)
        self.shown_name = shown_name
        self.redis_url, self.link, self.face, self.exit_code = redis_url, link or SeatLink(), face, exit_code
        self.stays = stays

    @property
    def should_run_maintenance_tasks(self) -> bool:
        return False

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:
        return 60

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        with contextlib.suppress(RedisError):  # away, or out of memory: no reason to give the seat up
            super().maintain_heartbeats(job, execution)

    def _dump_worker_config(self) -> bytes:
        return b""  # nothing is pickled: the child is told by its environment

    @property
    def current_seat(self) -> str | None:
        """The id of the running seat; None: no seat runs."""
        return next((execution.job_id for execution in list(self.executions.values())), None)

    def fork_work_horse(self, job: Job, queue: Queue) -> None:
        execution = self.execution
        assert execution is not None
        told = {_URL: self.redis_url, "RQ_WORKER_ID": self.name, "RQ_JOB_ID": job.id, "RQ_EXECUTION_ID": execution.id}
        told[PARENT] = str(os.getpid())
        command = [sys.executable, "-m", "computeshare.worker.horse"]
        own: dict[str, Any] = {"setsid": True} if sys.platform == "linux" else {"setpgroup": 0}  # for `lower_priority`
        with self.link.ends() as (variables, actions):
            self._horse_pid = os.posix_spawn(
                sys.executable,
                command,
                {**os.environ, **told, **variables},
                file_actions=actions,
                setsigmask=[signal.SIGTERM],  # until the seat can be asked politely
                **own,
            )
        if self.leaving:  # the signal came before there was a process to forward it to
            self.kill_horse()

    def execute_job(self, job: Job, queue: Queue) -> None:
        try:
            super().execute_job(job, queue)
        finally:
            self.link.over()
            self._dropped = ""

    def handle_work_horse_killed(self, job: Job, retpid: int, ret_val: int, rusage: Any) -> None:
        seat = Seat.parse(job.id)
        self._hand_back(seat, self._dropped or "its process died")
        about = {"event": f"the seat's process died: {_how(ret_val)}", "level": "error"}
        if self._dropped:
            about = {"event": f"the seat's process was ended: {self._dropped}", "level": "info"}
        tell(self.connection, seat.job, Writer(seat.worker, self.shown_name), **about)

    def _handle_stopped_job(self, job: Job, queue: Queue, execution: Execution) -> None:
        self._hand_back(Seat.parse(job.id), "it was stopped")
        super()._handle_stopped_job(job, queue, execution)

    def _install_signal_handlers(self) -> None:
        when_asked_to_end(self.request_stop)

    def request_stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle the first signal: leave when the seat, if any, has finished its work unit."""
        self.leaving = True
        again = "Ctrl-C again" if signum == signal.SIGINT else "again"
        if not self.horse_pid:
            self._end_soon()
        elif not self.link.is_loading:
            self._say(f"finishing this work unit, {again} to quit now")
        super().request_stop(signum, frame)  # type: ignore[no-untyped-call]

    def request_force_stop(self, signum: int, frame: FrameType | None) -> None:
        """Handle the second signal: kill the seat, hand its leases back, and exit. Raises SystemExit."""
        self._say("quitting now")
        self._end_soon()
        self.kill_horse()
        if self.current_seat:
            self._hand_back(Seat.parse(self.current_seat), "asked to leave at once")
        raise SystemExit

    def _end_soon(self) -> None:
        """End this process soon, even if the broker cannot be reached; not while it `stays`, to be upgraded."""
        asked = threading.Event()
        asked.set()
        end_soon_after(asked, self.stays, last=self.face.close if self.face else None, code=self.exit_code)

    def _say(self, text: str) -> None:
        if self.face:
            self.face.say(text)

    def ask_to_leave(self) -> None:
        """Ask the seat, if any, to finish its work unit, hand its leases back and leave. Callable from any thread."""
        self.kill_horse(signal.SIGTERM)

    def drop_seat(self, reason: str, redis: Redis) -> None:
        """Kill the seat, if any, and hand its leases back over `redis`. Callable from any thread. Raises RedisError."""
        if seat := self.current_seat:
            self._dropped = reason
            self.kill_horse()
            self._hand_back(Seat.parse(seat), reason, redis)

    def _hand_back(self, seat: Seat, reason: str, redis: Redis | None = None) -> None:
        RoundStore(redis or self.connection, seat.job).remove_worker(seat.worker, reason)

    def handle_warm_shutdown_request(self) -> None:
        if self.link.is_loading:  # then there is nothing to finish
            self._dropped = "asked to leave"
        self.kill_horse(signal.SIGKILL if self._dropped else signal.SIGTERM)

    def kill_horse(self, sig: signal.Signals = signal.SIGKILL) -> None:
        if pid := self.horse_pid:  # RQ would signal its own process group for 0
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it has ended just now
                os.killpg(pid, sig)

    def setup_work_horse_signals(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def _how(status: int | None) -> str:
    """How a process ended, in words, from its wait status; None: the status is not known."""
    if status is None:
        return "nobody knows of what"
    code = os.waitstatus_to_exitcode(status)
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def run_horse() -> None:
    """In the child process: run the seat that the environment names, report to RQ, and exit."""
    from computeshare.transport.connections import connect

    redis: Redis = connect(os.environ[_URL])
    worker_id, job_id = os.environ["RQ_WORKER_ID"], os.environ["RQ_JOB_ID"]
    seats = SeatJob.of(worker_id, os.environ.get(_CONTROL_KEY, ""))
    queue = Queue(worker_id, connection=redis, job_class=seats, serializer=JSONSerializer)
    worker = SeatWorker([queue], worker_id, connection=redis, job_class=seats, prepare_for_work=False)
    job = seats.fetch(job_id, connection=redis, serializer=JSONSerializer)
    execution = Execution.fetch(os.environ["RQ_EXECUTION_ID"], job_id, connection=redis)
    execution._job = job
    worker.execution = execution
    worker.main_work_horse(job, queue)
