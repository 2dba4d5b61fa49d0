"""HTTP requests to one control plane: repeatable requests are retried, and failures raise NoServer or Problem."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx2
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from computeshare.client.api.address import checked_url, connection, outages, resumed
from computeshare.client.api.models import Event, items, raise_for_problem
from computeshare.client.api.models import event as read_event

PAGE = 100
_BROKEN = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far, and the total (None if unknown)."""


class Requests:
    """A connection to a control plane. Every method raises NoServer and Problem."""

    def __init__(self, url: str, token: str | None, timeout_s: float) -> None:
        self.url = checked_url(url)
        self.connection = connection(self.url, token, timeout_s)
        self._http = httpx2.Client(**self.connection)
        # For repeatable requests only: the server may have closed a connection that was idle.
        self._retrying = Retrying(
            retry=retry_if_exception_type(_BROKEN),
            stop=stop_after_attempt(3),
            wait=wait_random_exponential(0.1, max=1),
            reraise=True,
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def get(self, path: str) -> httpx2.Response:
        """The response to a GET request, even if it is a refusal. Raises only NoServer."""
        with outages(self.url):
            return self._http.get(path)

    def listed(self, path: str, filters: Mapping[str, Any], limit: int | None) -> Iterator[Any]:
        """Yield the items of a list, `limit` of them or all, page by page."""
        parameters = given(**filters, limit=min(limit or PAGE, PAGE))
        while True:
            found, cursor = items(self.repeatable("GET", path, params=parameters))
            for one in found:
                yield one
                if limit is not None and (limit := limit - 1) <= 0:
                    return
            if cursor is None:
                return
            parameters["cursor"] = cursor

    def repeatable(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """Send a request that may be repeated, and retry it if the connection breaks."""
        with outages(self.url):
            response = self._retrying(self._http.request, method, path, **content)
        raise_for_problem(response)
        return response

    def once(self, method: str, path: str, **content: Any) -> httpx2.Response:
        """Send a request that must not be repeated without the user's knowledge."""
        with outages(self.url):
            response = self._http.request(method, path, **content)
        raise_for_problem(response)
        return response

    def listen(self, path: str, after: int | None, parameters: Mapping[str, Any]) -> Iterator[Event]:
        """Yield the events of a stream above the id `after` until this connection ends."""
        with (
            outages(self.url),
            self._http.sse(path, params=dict(parameters), **resumed(self.connection, after)) as source,
        ):
            if not source.response.is_success:
                source.response.read()
                raise_for_problem(source.response)
            for message in source:
                yield read_event(message)

    def save(self, path: str, target: Path, progress: Progress | None) -> str:
        """Write a response's body to a file, and retry if the connection breaks; returns its ETag."""
        with outages(self.url):
            etag: str = self._retrying(self._stream, path, target, progress)
        return etag

    def _stream(self, path: str, target: Path, progress: Progress | None) -> str:
        """Write a response's body to a file as it arrives; returns its ETag."""
        headers = {"Accept": "application/octet-stream, */*", "Accept-Encoding": "identity"}
        with self._http.stream("GET", path, headers=headers) as response:
            if not response.is_success:
                response.read()
                raise_for_problem(response)
            length = response.headers.get("Content-Length", "")
            total = int(length) if length.isdecimal() else None
            with target.open("wb") as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
                    if progress:
                        progress(file.tell(), total)
            return str(response.headers.get("ETag", ""))


def given(**parameters: Any) -> dict[str, Any]:
    """The parameters that are not None."""
    return {name: value for name, value in parameters.items() if value is not None}
