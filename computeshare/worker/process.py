"""The command `computeshare-worker`: registers this machine as a worker and runs its seats in child processes."""

import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import structlog
import typer
from redis import Redis
from redis.exceptions import AuthenticationError, RedisError
from rq import Queue
from rq.serializers import JSONSerializer

from computeshare import __version__
from computeshare.errors import SettingsError, Unreachable, VersionError
from computeshare.host import services
from computeshare.host.availability import Minder
from computeshare.host.rest_policy import manners_of
from computeshare.host.sleep_events import watch_sleep
from computeshare.jobspec.documents.fields import listed
from computeshare.jobspec.machine_needs import parse_labels
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.jobspec.spec import check_queue
from computeshare.protocol import handshake
from computeshare.queue import WorkerInfo
from computeshare.queue.roster import HEARTBEAT_S, MOST_PACKAGES
from computeshare.queue.seats import SeatJob
from computeshare.runtime.processes import (
    configure_logging,
    end_soon_after,
    exit_with_parent,
    hostname,
    when_asked_to_end,
)
from computeshare.settings import Settings
from computeshare.tasks.recipes import packages
from computeshare.terminal.command import REMOVED, Version, run
from computeshare.training import devices
from computeshare.transport.addresses import has_secret
from computeshare.transport.connections import connect
from computeshare.transport.forwarder import Forwarder
from computeshare.transport.rate_limit import parse_rate
from computeshare.worker import owner
from computeshare.worker.heartbeat import Heartbeat, Outage
from computeshare.worker.invite import Joined, last_joined, replace_key
from computeshare.worker.invite import join as accept
from computeshare.worker.live_line import shown
from computeshare.worker.recipe_consent import Consent
from computeshare.worker.rq_worker import SeatWorker
from computeshare.worker.seat.progress_pipe import SeatLink
from computeshare.worker.status_file import StatusFile, WorkerLimits, WorkerStatus, began

HASTE_S = 1.0
"""Seconds to wait for the broker's answer when the machine is about to sleep."""
FLEETING = frozenset({".cache", "archive-v0"})
"""Folders in which uvx and `pipx run` make environments."""
TO_KEEP = "install the worker with uv tool install or pipx install, and print the service file with that one"
log = structlog.get_logger()


def worker_info(
    name: str,
    device: str,
    queues: tuple[str, ...],
    max_memory_bytes: int = 0,
    labels: Mapping[str, str] | None = None,
    recipes: tuple[str, ...] = (),
    machine: str = "",
) -> WorkerInfo:
    """A description of this machine as a worker, with a new random id, which begins with the id that the control plane
    gave to this machine.
    """
    found = devices.look(device)
    versions = {package: metadata.version(package) for package in ("torch", "torchvision", "numpy")}
    return WorkerInfo(
        id=machine + secrets.token_hex(6),
        name=name,
        device=found.described,
        queues=queues,
        versions={"computeshare": __version__, "python": ".".join(map(str, sys.version_info[:3])), **versions},
        memory_bytes=found.memory_bytes,
        host=hostname(),
        pid=os.getpid(),
        max_memory_bytes=max_memory_bytes,
        labels=labels or {},
        recipes=recipes,
        packages={name: one.release for name, one in list(packages.installed().items())[:MOST_PACKAGES]},
    )


def status_of(worker: WorkerInfo, joined: Joined, limits: WorkerLimits) -> WorkerStatus:
    """This worker's status at its start, for its machine's owner."""
    return WorkerStatus(
        id=worker.id,
        name=worker.name,
        pid=worker.pid,
        began=began(),
        control_plane=joined.shown,
        invite=joined.gateway.machine if joined.gateway else "",
        queues=list(worker.queues),
        device=worker.device,
        recipes=list(worker.recipes),
        confinement=worker.confinement,
        limits=limits,
    )


def shake_hands(redis: Redis, leaving: threading.Event) -> None:
    """Compare versions with the control plane, waiting for an absent broker; exits if `leaving` is set meanwhile.

    Raises: VersionError: the versions do not fit. SettingsError: the broker does not let this worker in.
    """
    outage = Outage()
    while not leaving.is_set():
        try:
            handshake.check(redis, "worker")
            outage.is_over()
            return
        except AuthenticationError as error:
            raise SettingsError(
                "the broker does not know this user or password: start the worker again, with the broker's present "
                "address, or take up a new invite"
            ) from error
        except RedisError as error:
            outage.lasts(error)
            leaving.wait(HEARTBEAT_S)
    sys.exit(0)


def serve(
    redis_url: str, worker: WorkerInfo, minder: Minder, home: Path, status: WorkerStatus, control_key: str = ""
) -> None:
    """Serve seats until a signal or the control plane ends the process; other errors are logged and retried.

    Args:
        status: kept up to date in a file of `home`.
        control_key: the public key by which seats must be signed; empty: they are not checked.
    Raises: VersionError: the control plane has another version.
    """
    leaving = threading.Event()

    def leave(*_: object) -> None:
        leaving.set()
        sys.exit(0)  # which is lost where it strikes a finalizer

    when_asked_to_end(leave)  # until RQ has handlers of its own
    redis, impatient = connect(redis_url), connect(redis_url, retries=0)
    link = SeatLink()
    file = StatusFile(home, status, lambda: link.moved)
    hasty = connect(redis_url, retries=0, timeout_s=HASTE_S)
    heartbeat = Heartbeat(impatient, hasty, worker, minder, file)
    try:
        file.write()
        shake_hands(impatient, leaving)
        with shown(link, lambda: minder.resting) as face:
            heartbeat.start()
            watch_sleep(heartbeat.sleeper.before, heartbeat.sleeper.after)
            queues = ",".join(worker.queues)
            log.info("worker ready", id=worker.id, name=worker.name, device=worker.device, queues=queues)
            given = {"redis_url": redis_url, "link": link, "face": face, "exit_code": heartbeat.exit_code}
            given["stays"] = lambda: status.upgrades and heartbeat.refusal is not None
            make = partial(_rq_worker, redis, worker, SeatJob.of(worker.id, control_key), **given)
            _take_seats(heartbeat, make, leaving, leave)
    except SystemExit:
        pass  # its code is found below
    except VersionError as error:
        heartbeat.refusal = error
    except Exception as error:
        if not leaving.is_set():
            raise
        log.debug("ended", error=f"{type(error).__name__}: {error}")  # most likely another signal struck meanwhile
    finally:
        refusal = heartbeat.refusal
        if not refusal:
            when_asked_to_end(signal.SIG_IGN)  # another signal would change the exit code
        heartbeat.stop()
        code = heartbeat.exit_code()
        file.remove()
    if refusal:
        raise refusal
    sys.exit(code)


def _rq_worker(redis: Redis, worker: WorkerInfo, seats: type[SeatJob], **named: Any) -> SeatWorker:
    queue = Queue(worker.id, connection=redis, job_class=seats, serializer=JSONSerializer)
    return SeatWorker([queue], worker.id, connection=redis, shown_name=worker.name, job_class=seats, **named)


def _take_seats(
    heartbeat: Heartbeat, make: Callable[[], SeatWorker], leaving: threading.Event, leave: Callable[..., None]
) -> None:
    """Serve seats with an RQ worker, and with a new RQ worker after each error, until the process is asked to leave.

    `leave` handles signals while no RQ worker runs.
    """
    pause_s = 0.5
    while True:
        started = time.monotonic()
        rq_worker = None
        try:
            rq_worker = heartbeat.rq_worker = make()
            rq_worker.work(logging_level="WARNING")
        except Exception as error:  # any error: this machine must serve again afterwards
            log.warning("interrupted", error=f"{type(error).__name__}: {error}")
        finally:
            if rq_worker:
                rq_worker.kill_horse()
        when_asked_to_end(leave)  # in place of the handlers of the RQ worker that has ended
        if rq_worker and rq_worker.leaving:
            return
        pause_s = 0.5 if time.monotonic() - started > 60 else min(30.0, 2 * pause_s)
        log.warning("starting over", in_s=pause_s)
        if leaving.wait(pause_s):
            return


def command(
    context: typer.Context,
    queue: Annotated[list[str] | None, typer.Option(help="Queue to serve; may be given several times.")] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Broker's address. Default: the broker of `computeshare up` here.")
    ] = None,
    join: Annotated[
        str | None, typer.Option(metavar="URL", help="Join by an invite's link instead of a broker's address.")
    ] = None,
    tls_fingerprint: Annotated[
        str, typer.Option(metavar="SHA256", help="With --join: the only certificate that the control plane may have.")
    ] = "",
    rotate_key: Annotated[
        bool, typer.Option("--rotate-key", help="Replace this machine's key at the gateway by a new one, and exit.")
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda, cuda:1, mps, cpu, or several: cuda:0,cuda:1. Default: the fastest here, all GPUs of it."
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of this machine on the pages. Default: its host name.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A label that jobs may ask for, such as room=attic; may be given several times."
        ),
    ] = None,
    home: Annotated[Path | None, typer.Option(help="Folder with run.json and the invites joined.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
    max_up: Annotated[
        str | None, typer.Option(help="Upload limit in bits per second, such as 5mbit or 800kbit.")
    ] = None,
    max_memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Memory that a job may use, such as 8GB or 512MiB."),
    ] = None,
    nice: Annotated[int | None, typer.Option(min=0, max=19, help="CPU priority: 0 normal, 19 lowest.")] = None,
    only_on_power: Annotated[bool, typer.Option("--only-on-power", help="Rest while on battery.")] = False,
    battery_stop: Annotated[
        float | None, typer.Option(min=0, max=100, help="Rest once the battery falls to this percentage ...")
    ] = None,
    battery_start: Annotated[
        float | None, typer.Option(min=0, max=100, help="... until it is charged to this percentage. Default: 10 more.")
    ] = None,
    hours: Annotated[list[str] | None, typer.Option(help="Local hours to work in, such as 22-07,12:30-14.")] = None,
    recipes: Annotated[
        bool, typer.Option("--recipes", help="Run recipes, the code of your control plane's users, confined.")
    ] = False,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECIPE", help="Run this recipe (sha256:... or package:NAME); may be given several times."
        ),
    ] = None,
    unconfined: Annotated[
        bool, typer.Option("--unconfined", help="Run recipes even where nothing here can confine them.")
    ] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Install the control plane's version here when it differs, and restart.")
    ] = False,
    print_service: Annotated[
        str | None,
        typer.Option(
            services.FLAG, metavar="[launchd|systemd]", help="Print a service file with these flags, and exit."
        ),
    ] = None,
    version: Version = False,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="End with the process that started it.")] = False,
) -> None:
    """Train on this machine, for the jobs of the queues it serves."""
    if context.invoked_subcommand:
        return
    if child:
        exit_with_parent()
    for name_of_queue in queue or []:
        check_queue(name_of_queue)
    minder = Minder(manners_of(only_on_power, battery_stop, battery_start, hours or ()))
    given = {"redis_url": redis_url, "home": home, "data": data, "device": device, "name": name or None}
    given |= {"labels": ",".join(label) if label else None, "recipe": ",".join(recipe) if recipe else None}
    agreed = {"recipes": recipes or None, "unconfined": unconfined or None, "upgrade": upgrade or None}
    settings = Settings.given(**given, **agreed, max_up=max_up, max_memory=max_memory, nice=nice)
    settings = settings.model_copy(update={"name": settings.name or hostname()})
    if settings.max_up:
        parse_rate(settings.max_up)
    max_memory_bytes, labels = allowed_bytes(settings.max_memory), parse_labels(listed(settings.labels))
    allowed_bytes(settings.cache)
    Consent.of(settings)  # wrong recipes are told before an invite is used up
    joined = accept(join, str(settings.name), settings.home, tls_fingerprint) if join else None
    if rotate_key:
        _rotate_key(joined or last_joined(settings))
        return
    if print_service:  # an invite has been taken up by now: its link lets nobody in any more
        sys.stdout.write(_service(print_service, context))
        if FLEETING & set(Path(sys.prefix).parts):
            print(f"warning: {sys.prefix} may be removed at any time: {TO_KEEP}", file=sys.stderr)
        if not joined:
            _warn_where_no_broker_is_known(settings)
        return
    joined = joined or last_joined(settings)
    queues = _queues(queue, joined)
    configure_logging()
    settings = settings.model_copy(update={"control_key": settings.control_key or joined.control_key})
    if redis_url and has_secret(redis_url):
        log.warning(
            "other users of this machine can read the password in --redis-url: set COMPUTESHARE_REDIS_URL instead"
        )
    os.environ.update(settings.child_environment())
    os.environ.pop("COMPUTESHARE_REDIS_URL", None)
    if device:
        devices.check(device)
    computing = settings.device or devices.guess()
    consent = Consent.of(settings)
    for sentence in consent.told():
        log.warning(sentence)
    described = worker_info(
        str(settings.name), computing, queues, max_memory_bytes, labels, consent.offered(), joined.machine
    )
    worker = replace(described, confinement=consent.confinement)
    resting = {"only_on_power": only_on_power, "battery_stop": battery_stop, "battery_start": battery_start}
    allowed = {"max_up": settings.max_up, "max_memory": settings.max_memory, "cache": settings.cache}
    limits = WorkerLimits(**allowed, **resting, nice=settings.nice, hours=hours or [])
    status = status_of(worker, joined, limits).model_copy(update={"upgrades": settings.upgrade})
    try:
        with joined.broker_url(_end_refused) as url:
            serve(url, worker, minder, settings.home, status, settings.control_key)
    except VersionError as refusal:
        _upgrade(refusal, joined, settings.upgrade)


def _upgrade(refusal: VersionError, joined: Joined, agreed: bool) -> NoReturn:
    """Become the control plane's version, if the owner has agreed. Raises VersionError: that is impossible."""
    from computeshare.worker import upgrade

    if not agreed:
        hint = ". Or start it with --upgrade, which installs the control plane's version here"
        raise VersionError(f"{refusal}{hint if upgrade.can_upgrade() else ''}") from refusal
    try:
        upgrade.upgrade(joined.gateway, sys.argv[1:])
    except VersionError as error:
        raise VersionError(f"{refusal}. {error}") from error


def _queues(asked: list[str] | None, joined: Joined) -> tuple[str, ...]:
    """The queues to serve. Raises SettingsError: through the gateway, a machine serves its invite's queue only."""
    if joined.gateway and joined.queue and set(asked or ()) - {joined.queue}:
        raise SettingsError(
            f"--queue: this machine's invite is for the queue {joined.queue}: leave out --queue, or ask for an invite "
            "for the other queue"
        )
    return tuple(asked or [joined.queue or "default"])


def _rotate_key(joined: Joined) -> None:
    """Replace this machine's key. Raises SettingsError, Unreachable."""
    if not joined.gateway:
        raise SettingsError("--rotate-key: this machine has no key, because it does not reach the broker by a gateway")
    replace_key(joined.gateway)
    print(f"{joined.gateway.url} accepts this machine's new key; running workers use it from now on")


def _end_refused(forwarder: Forwarder, why: str) -> None:
    """End this process soon, as the gateway refuses this machine: all further calls to the broker would fail."""
    log.error("this machine may not use the gateway any more", reason=why)
    refused = threading.Event()
    refused.set()
    end_soon_after(refused, patience_s=0.5, last=forwarder.stop, code=lambda: REMOVED)


def _service(kind: str, context: typer.Context) -> str:
    """The text of a service file that runs this worker with the given command-line flags. Raises SettingsError."""
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


def _warn_where_no_broker_is_known(settings: Settings) -> None:
    try:
        last_joined(settings)
    except Unreachable as error:
        elsewhere = f"until then the service waits, unless ~/{services.ENVIRONMENT} names one"
        print(f"warning: {error}; {elsewhere}", file=sys.stderr)


def main() -> None:
    """The command `computeshare-worker`."""
    sys.argv[1:] = services.spelled_out(sys.argv[1:])
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback(invoke_without_command=True)(command)
    app.command()(owner.status)
    app.command()(owner.stop)
    sys.exit(run(app))


if __name__ == "__main__":
    main()
