"""The worker of one machine: registers itself, waits for seats, runs each in a process of its own."""

import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated

import psutil
import structlog
import typer
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.serializers import JSONSerializer

from computeshare import __version__, handshake
from computeshare.broker import connect
from computeshare.commands.run import run_command
from computeshare.errors import SettingsError, VersionError
from computeshare.pacing import parse_rate
from computeshare.processes import configure_logging, exit_with_parent, hostname
from computeshare.queue import WorkerInfo, register, unregister
from computeshare.queue.roster import HEARTBEAT_S
from computeshare.queue.rq_worker import SeatWorker
from computeshare.queue.seats import SeatJob
from computeshare.settings import Settings
from computeshare.spec import QUEUE_PATTERN
from computeshare.training import devices

log = structlog.get_logger()


def describe(name: str, device: str, queues: tuple[str, ...]) -> WorkerInfo:
    """This machine as a worker, under a new id."""
    versions = {package: metadata.version(package) for package in ("torch", "torchvision", "numpy")}
    return WorkerInfo(
        id=secrets.token_hex(6),
        name=name,
        device=device,
        queues=queues,
        versions={"computeshare": __version__, "python": ".".join(map(str, sys.version_info[:3])), **versions},
        memory_bytes=psutil.virtual_memory().total,
        host=hostname(),
        pid=os.getpid(),
    )


class Heartbeat(threading.Thread):
    """Says that the worker is alive, with the seat it has, until stopped."""

    def __init__(self, redis: Redis, worker: WorkerInfo) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.redis, self.worker = redis, worker
        self.rq_worker: SeatWorker | None = None
        self.refusal: VersionError | None = None
        self._stop_request = threading.Event()

    def run(self) -> None:
        while not self._stop_request.is_set():
            try:
                self.beat()
            except RedisError as error:
                log.warning("broker away", error=str(error))
            except VersionError as refusal:  # another control plane has come, or this one was upgraded
                self.refusal = refusal
                os.kill(os.getpid(), signal.SIGTERM)
                return
            self._stop_request.wait(HEARTBEAT_S)

    def beat(self) -> None:
        """Register once. Raises VersionError if the control plane is of another version by now."""
        handshake.check(self.redis, "worker")
        seat = self.rq_worker.current_seat if self.rq_worker else None
        state = "busy" if seat else "idle"
        register(self.redis, replace(self.worker, seat=seat, state=state))

    def stop(self) -> None:
        """Stop and say goodbye; a worker that was refused stays to be seen for a moment."""
        self._stop_request.set()
        with contextlib.suppress(RedisError):  # it expires by itself
            if self.refusal:
                register(self.redis, replace(self.worker, state="refused"))
            else:
                unregister(self.redis, self.worker.id)


def shake_hands(redis: Redis, worker: WorkerInfo, leaving: threading.Event) -> None:
    """Compare versions before anything else, however long the broker is away, unless this worker is leaving.

    Raises: VersionError: the control plane's is another; the workers' page says so for a while.
    """
    while not leaving.is_set():
        try:
            handshake.check(redis, "worker")
            return
        except RedisError as error:
            log.warning("broker away", error=str(error))
            leaving.wait(HEARTBEAT_S)
        except VersionError:
            with contextlib.suppress(RedisError):
                register(redis, replace(worker, state="refused"))
            raise
    sys.exit(0)


def serve(redis_url: str, worker: WorkerInfo) -> None:
    """Take seats until a signal ends it; whatever else goes wrong is logged and tried again.

    Raises: VersionError: the control plane is of another version.
    """
    leaving = threading.Event()

    def leave(*_: object) -> None:
        leaving.set()
        sys.exit(0)  # which is lost where it strikes a finalizer

    for number in (signal.SIGTERM, signal.SIGINT):  # until RQ has handlers of its own
        signal.signal(number, leave)
    redis, impatient = connect(redis_url), connect(redis_url, retries=0)
    shake_hands(impatient, worker, leaving)
    heartbeat = Heartbeat(impatient, worker)
    heartbeat.start()
    log.info("worker ready", id=worker.id, name=worker.name, device=worker.device, queues=",".join(worker.queues))
    pause_s = 0.5
    try:
        while True:
            started = time.monotonic()
            rq_worker = None
            try:
                queue = Queue(worker.id, connection=redis, job_class=SeatJob, serializer=JSONSerializer)
                rq_worker = SeatWorker([queue], worker.id, connection=redis, redis_url=redis_url)
                heartbeat.rq_worker = rq_worker
                rq_worker.work(logging_level="WARNING")
            except Exception as error:  # whatever it is, this machine is to be there again afterwards
                log.warning("interrupted", error=f"{type(error).__name__}: {error}")
            finally:
                if rq_worker:
                    rq_worker.kill_horse()
            if rq_worker and rq_worker.leaving:
                break
            pause_s = 0.5 if time.monotonic() - started > 60 else min(30.0, 2 * pause_s)
            log.warning("starting over", in_s=pause_s)
            time.sleep(pause_s)
    finally:
        heartbeat.stop()
    if heartbeat.refusal:
        raise heartbeat.refusal


def command(
    queue: Annotated[list[str] | None, typer.Option(help="Queue to serve; may be given several times.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; default: the best there is.")] = None,
    name: Annotated[str | None, typer.Option(help="What the pages call this machine; default: its host name.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of run.json.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
    max_up: Annotated[
        str | None, typer.Option(help="How fast to send at most, in bits per second: 5mbit, 800kbit.")
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="End with the process that started it.")] = False,
) -> None:
    """Train on this machine, for the jobs of the queues it serves."""
    if child:
        exit_with_parent()
    configure_logging()
    for name_of_queue in queue or []:
        if not re.fullmatch(QUEUE_PATTERN, name_of_queue):
            raise SettingsError(f"queue {name_of_queue!r}: letters, digits, - and _ are allowed, 64 at most")
    settings = Settings.given(redis_url=redis_url, home=home, data=data)
    url = settings.resolve_redis_url()
    os.environ.update(settings.child_environment())
    os.environ.pop("COMPUTESHARE_REDIS_URL", None)
    if device:
        devices.check(device)
        os.environ["COMPUTESHARE_DEVICE"] = device
    if max_up:
        parse_rate(max_up)
        os.environ["COMPUTESHARE_MAX_UP"] = max_up
    worker = describe(name or hostname(), device or devices.guess(), tuple(queue or ["default"]))
    os.environ["COMPUTESHARE_NAME"] = worker.name
    serve(url, worker)


def main() -> None:
    """The command `computeshare-worker`."""
    run_command(command)


if __name__ == "__main__":
    main()
