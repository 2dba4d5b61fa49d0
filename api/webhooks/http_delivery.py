"""Posts one notification to a checked address, within a deadline, without following redirects.

Uses httpcore2, the network layer of httpx2, which uses no proxy, follows no redirect, and connects to given addresses.
"""

import functools
import ssl
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpcore2
import httpx2

from api.webhooks.address_guard import ForbiddenAddress, Networks, Resolve, look_up, reachable

TIMEOUT_S = 10.0
GONE = 410
_SHOWN = 200


@dataclass(frozen=True, slots=True)
class DeliveryOutcome:
    """The outcome of an attempt. `status` is None if there was no answer; `error` is None after a success."""

    status: int | None
    error: str | None
    seconds: float

    @property
    def delivered(self) -> bool:
        return self.error is None


@dataclass(slots=True)
class Poster:
    """Posts to receivers, on a new connection each time."""

    allowed: Networks
    resolve: Resolve = look_up
    timeout_s: float = TIMEOUT_S
    tls: ssl.SSLContext = field(default_factory=functools.cache(httpx2.create_ssl_context))

    def post(self, url: str, headers: Mapping[str, str], body: bytes) -> DeliveryOutcome:
        """Post `body`. Network errors are returned in the outcome, not raised; the answer's body is not read."""
        started = time.monotonic()
        try:
            status = self._status(url, headers, body, started + self.timeout_s)
            error = complaint(status)
        except ForbiddenAddress as refused:
            status, error = None, str(refused)
        except (httpcore2.TimeoutException, TimeoutError):
            status, error = None, f"no answer within {self.timeout_s:g} s"
        except (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.UnsupportedProtocol, OSError) as broken:
            status, error = None, (str(broken) or type(broken).__name__)[:_SHOWN]
        return DeliveryOutcome(status, error, time.monotonic() - started)

    def _status(self, url: str, headers: Mapping[str, str], body: bytes, deadline: float) -> int:
        place = httpx2.URL(url)
        target = httpcore2.URL(scheme=place.raw_scheme, host=place.raw_host, port=place.port, target=place.raw_path)
        backend = _Checked(
            lambda host, port: reachable(host, port, self.allowed, self.resolve, _left(deadline)), deadline
        )
        fields = {"Host": place.netloc.decode(), "Connection": "close", **headers}
        with (
            httpcore2.ConnectionPool(ssl_context=self.tls, network_backend=backend) as pool,
            pool.stream("POST", target, headers=list(fields.items()), content=body) as response,
        ):
            return response.status


def complaint(status: int) -> str | None:
    """The error that an HTTP status means; None for 2xx: the notification was accepted."""
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"answered {status}, and redirects are not followed: give the address that it leads to"
    return "answered 410 Gone: it wants no more" if status == GONE else f"answered {status}"


class _Checked(httpcore2.NetworkBackend):
    """Connects to the checked addresses of a host, one after the other, never to its name."""

    def __init__(self, look_up: Callable[[str, int], Iterable[str]], deadline: float) -> None:
        self._look_up, self._deadline = look_up, deadline
        self._plain = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        addresses = list(self._look_up(host, port))
        while True:
            address = addresses.pop(0)
            try:
                share_s = _left(self._deadline) / (1 + len(addresses))
                return _Timed(self._plain.connect_tcp(address, port, share_s, None, socket_options), self._deadline)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if not addresses:
                    raise


class _Timed(httpcore2.NetworkStream):
    """A connection with one deadline for all its reads and writes, so that a slow receiver cannot extend it."""

    def __init__(self, stream: httpcore2.NetworkStream, deadline: float) -> None:
        self._stream, self._deadline = stream, deadline

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._stream.read(max_bytes, _left(self._deadline))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        self._stream.write(buffer, _left(self._deadline))

    def close(self) -> None:
        self._stream.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore2.NetworkStream:
        return _Timed(self._stream.start_tls(ssl_context, server_hostname, _left(self._deadline)), self._deadline)

    def get_extra_info(self, info: str) -> Any:
        return self._stream.get_extra_info(info)


def _left(deadline: float) -> float:
    """Seconds until the deadline. Raises TimeoutError if it has passed."""
    if (left_s := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left_s
