"""The worker of one machine: registers itself, waits for seats, runs each in a process of its own."""

import contextlib
import os
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import psutil
import structlog
import typer
from redis import Redis
from redis.exceptions import RedisError
from rq import Queue
from rq.serializers import JSONSerializer

from computeshare import __version__, handshake
from computeshare.broker import connect
from computeshare.commands.live import shown
from computeshare.commands.run import run_command
from computeshare.errors import SettingsError, VersionError
from computeshare.joining import join as accept
from computeshare.manners import services
from computeshare.manners.minding import Minder
from computeshare.manners.resting import manners_of
from computeshare.manners.sleeping import watch_sleep
from computeshare.manners.telling import SeatLink
from computeshare.pacing import parse_rate
from computeshare.processes import configure_logging, exit_with_parent, hostname
from computeshare.queue import Orders, WorkerInfo, read_orders, register, unregister
from computeshare.queue.roster import HEARTBEAT_S
from computeshare.queue.rq_worker import SeatWorker
from computeshare.queue.seats import SeatJob
from computeshare.settings import Settings
from computeshare.sleeper import Sleeper
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
    """Says that the worker is alive, with the seat it has, until stopped; has it rest when its owner wants that."""

    def __init__(self, redis: Redis, worker: WorkerInfo, minder: Minder | None = None) -> None:
        super().__init__(name="heartbeat", daemon=True)
        self.redis, self.worker, self.minder = redis, worker, minder or Minder()
        self.sleeper = Sleeper(self.minder, lambda: self.rq_worker, self.beat, redis)
        self.rq_worker: SeatWorker | None = None
        self.refusal: VersionError | None = None
        self.obeyed = Orders()
        self._stop_request = threading.Event()

    def run(self) -> None:
        while not self._stop_request.is_set():
            self.sleeper.look()
            self.minder.look()
            try:
                self.beat()
            except RedisError as error:
                log.warning("broker away", error=str(error))
            except VersionError as refusal:  # another control plane has come, or this one was upgraded
                self.refusal = refusal
                os.kill(os.getpid(), signal.SIGTERM)
                return
            if self.minder.resting and self.rq_worker:  # which the control plane knows by now
                self.rq_worker.ask_to_leave()
            self._stop_request.wait(HEARTBEAT_S)

    def beat(self) -> None:
        """Register once. Raises VersionError if the control plane is of another version by now."""
        handshake.check(self.redis, "worker")
        seat, resting = self.rq_worker.current_seat if self.rq_worker else None, self.minder.resting
        state = "resting" if resting else "busy" if seat else "idle"
        power = self.minder.power
        register(self.redis, replace(self.worker, seat=seat, state=state, resting=resting, power=power))
        self._obey(read_orders(self.redis, self.worker.id))

    def _obey(self, orders: Orders) -> None:
        """Do once what the control plane asks; in either case the work unit at hand is finished first."""
        if orders == self.obeyed:
            return
        if orders.dismissed and not self.obeyed.dismissed:
            log.info("leaving for good", reason=orders.dismissed)
            os.kill(os.getpid(), signal.SIGTERM)
        elif orders.leave and self.rq_worker and orders.leave == self.rq_worker.current_seat:
            log.info("leaving a seat", seat=orders.leave)
            self.rq_worker.ask_to_leave()
        else:
            return
        self.obeyed = orders

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


def serve(redis_url: str, worker: WorkerInfo, minder: Minder) -> None:
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
    heartbeat = Heartbeat(impatient, worker, minder)
    link = SeatLink()
    with shown(link, lambda: minder.resting) as face:
        heartbeat.start()
        watch_sleep(heartbeat.sleeper.before, heartbeat.sleeper.after)
        queues = ",".join(worker.queues)
        log.info("worker ready", id=worker.id, name=worker.name, device=worker.device, queues=queues)
        try:
            _take_seats(heartbeat, lambda: _rq_worker(redis, worker, redis_url=redis_url, link=link, face=face))
        finally:
            heartbeat.stop()
    if heartbeat.refusal:
        raise heartbeat.refusal


def _rq_worker(redis: Redis, worker: WorkerInfo, **named: Any) -> SeatWorker:
    queue = Queue(worker.id, connection=redis, job_class=SeatJob, serializer=JSONSerializer)
    return SeatWorker([queue], worker.id, connection=redis, **named)


def _take_seats(heartbeat: Heartbeat, make: Callable[[], SeatWorker]) -> None:
    """Serve seats with one RQ worker after another, until one was told to leave."""
    pause_s = 0.5
    while True:
        started = time.monotonic()
        rq_worker = None
        try:
            rq_worker = heartbeat.rq_worker = make()
            rq_worker.work(logging_level="WARNING")
        except Exception as error:  # whatever it is, this machine is to be there again afterwards
            log.warning("interrupted", error=f"{type(error).__name__}: {error}")
        finally:
            if rq_worker:
                rq_worker.kill_horse()
        if rq_worker and rq_worker.leaving:
            return
        pause_s = 0.5 if time.monotonic() - started > 60 else min(30.0, 2 * pause_s)
        log.warning("starting over", in_s=pause_s)
        time.sleep(pause_s)


def command(
    context: typer.Context,
    queue: Annotated[list[str] | None, typer.Option(help="Queue to serve; may be given several times.")] = None,
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    join: Annotated[
        str | None, typer.Option(metavar="URL", help="An invite's link, from a job's page, instead of the broker.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda, mps or cpu; default: the best there is.")] = None,
    name: Annotated[str | None, typer.Option(help="What the pages call this machine; default: its host name.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of run.json.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
    max_up: Annotated[
        str | None, typer.Option(help="How fast to send at most, in bits per second: 5mbit, 800kbit.")
    ] = None,
    nice: Annotated[
        int | None, typer.Option(min=0, max=19, help="How far the computing stands back behind all else here.")
    ] = None,
    only_on_power: Annotated[bool, typer.Option("--only-on-power", help="Rest while on battery.")] = False,
    battery_stop: Annotated[
        float | None, typer.Option(min=0, max=100, help="Rest from this percentage of the battery down ...")
    ] = None,
    battery_start: Annotated[
        float | None, typer.Option(min=0, max=100, help="... until it is at this one again; default: 10 more.")
    ] = None,
    hours: Annotated[
        list[str] | None, typer.Option(help="Local hours to work in: 22-07, 22:30-07; several by commas.")
    ] = None,
    print_service: Annotated[
        str | None,
        typer.Option(services.FLAG, metavar="[launchd|systemd]", help="Print a service with these flags; start none."),
    ] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="End with the process that started it.")] = False,
) -> None:
    """Train on this machine, for the jobs of the queues it serves."""
    if child:
        exit_with_parent()
    for name_of_queue in queue or []:
        if not re.fullmatch(QUEUE_PATTERN, name_of_queue):
            raise SettingsError(f"queue {name_of_queue!r}: letters, digits, - and _ are allowed, 64 at most")
    minder = Minder(manners_of(only_on_power, battery_stop, battery_start, hours or ()))
    if max_up:
        parse_rate(max_up)
    settings = Settings.given(redis_url=redis_url, home=home, data=data)
    if join:
        settings = settings.model_copy(update={"redis_url": accept(join, name or hostname(), settings.home)})
    if print_service:  # an invite has been taken up by now: its link lets nobody in any more
        sys.stdout.write(_service(print_service, context))
        return
    configure_logging()
    url = settings.resolve_redis_url()
    os.environ.update(settings.child_environment())
    os.environ.pop("COMPUTESHARE_REDIS_URL", None)
    if device:
        devices.check(device)
        os.environ["COMPUTESHARE_DEVICE"] = device
    if max_up:
        os.environ["COMPUTESHARE_MAX_UP"] = max_up
    os.environ["COMPUTESHARE_NICE"] = str(nice or 0)
    worker = describe(name or hostname(), device or devices.guess(), tuple(queue or ["default"]))
    os.environ["COMPUTESHARE_NAME"] = worker.name
    serve(url, worker, minder)


def _service(kind: str, context: typer.Context) -> str:
    """The file of a service that runs this worker with the flags it was given. Raises SettingsError."""
    if kind == "auto":
        kind = "launchd" if sys.platform == "darwin" else "systemd"
    given = {
        parameter.opts[0]: context.params[name]
        for parameter in context.command.params
        if (name := parameter.name) and (source := context.get_parameter_source(name))
        if source.name == "COMMANDLINE" and parameter.opts[0] != services.FLAG
    }
    unsaid = sorted(name for name in os.environ if name.startswith("COMPUTESHARE_"))
    return services.printed(kind, services.flags(given), sys.executable, Path.home(), unsaid)


def main() -> None:
    """The command `computeshare-worker`."""
    sys.argv[1:] = services.spelled_out(sys.argv[1:])
    run_command(command)


if __name__ == "__main__":
    main()
