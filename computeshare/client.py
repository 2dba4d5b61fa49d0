"""The REST API from Python: a small synchronous client."""

import ipaddress
import os
import random
import secrets
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, cast
from urllib.parse import quote, urlsplit

import httpx2
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from computeshare import __version__
from computeshare.answers import Checkpoint, Event, Job, Problem, Version, document, items, raise_for_problem
from computeshare.answers import event as read_event
from computeshare.artifacts import weights_digest
from computeshare.errors import ArtifactError, ComputeShareError, SettingsError
from computeshare.types import ENDED

SILENCE_S = 45.0
"""An event stream that is silent for this long is taken for lost; the server pings every 15 s."""
_PAGE = 100
_LONGEST_PAUSE_S = 5.0
_BROKEN = (httpx2.ReadError, httpx2.WriteError, httpx2.RemoteProtocolError)

Progress = Callable[[int, int | None], None]
"""Told the bytes received so far, and in all where that is known."""


class NoServer(ComputeShareError):
    """No control plane answers at this address."""


class Client:
    """Talks to one control plane; usable as a context manager.

    Every method raises NoServer where nothing answers, and Problem (an ApiError) where the answer is a refusal.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 15.0) -> None:
        self.url = _checked_url(url)
        headers = {"Accept": "application/json", "User-Agent": f"computeshare/{__version__}"}
        if token:
            headers["Authorization"] = f"Bearer {_checked_token(token)}"
        self._timeout_s = timeout_s
        # A proxy from the environment cannot reach this machine's loopback.
        self._http = httpx2.Client(
            base_url=self.url, headers=headers, timeout=timeout_s, trust_env=not _is_loopback(self.url)
        )
        # Only what may be repeated goes through this: a connection that the server has closed meanwhile.
        self._retrying = Retrying(
            retry=retry_if_exception_type(_BROKEN),
            stop=stop_after_attempt(3),
            wait=wait_random_exponential(0.1, max=1),
            reraise=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def create(self, spec: Mapping[str, Any], idempotency_key: str | None = None) -> Job:
        """Create a job from a JobSpec's document; the key makes it one job however often it is sent."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return cast(Job, document(self._repeatable("POST", "/v1/jobs", json=dict(spec), headers=headers)))

    def fork(
        self,
        job_id: str,
        version: int | str = "latest",
        spec: Mapping[str, Any] | None = None,
        optimizer: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Create a job that starts from a version of another; the key makes it one job however often it is sent.

        Args:
            version: its number, `latest` or `best`.
            spec: fields of the JobSpec that change; the others are the parent's.
            optimizer: `kept` or `fresh`; by default its state is kept where its settings stay the same.
        """
        document_sent = {"version": version, "spec": dict(spec or {}), "optimizer": optimizer}
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        response = self._repeatable("POST", _path(job_id, "fork"), json=document_sent, headers=headers)
        return cast(Job, document(response))

    def jobs(self, statuses: Sequence[str] = (), queue: str | None = None, limit: int | None = None) -> Iterator[Job]:
        """Jobs newest first, `limit` of them or all; further pages are fetched as they are needed."""
        given = {"status": list(statuses) or None, "queue": queue, "limit": min(limit or _PAGE, _PAGE)}
        parameters: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        while True:
            jobs, cursor = items(self._repeatable("GET", "/v1/jobs", params=parameters))
            for job in jobs:
                yield job
                if limit is not None and (limit := limit - 1) <= 0:
                    return
            if cursor is None:
                return
            parameters["cursor"] = cursor

    def show(self, job_id: str) -> Job:
        """One job."""
        return cast(Job, document(self._repeatable("GET", _path(job_id))))

    def pause(self, job_id: str) -> Job:
        """Let a queued or running job rest; its workers leave, what they did stays."""
        return cast(Job, document(self._once("POST", _path(job_id, "pause"))))

    def resume(self, job_id: str) -> Job:
        """Let a paused job go on where it was."""
        return cast(Job, document(self._once("POST", _path(job_id, "resume"))))

    def retry(self, job_id: str) -> Job:
        """Let a failed job go on from its last checkpoint."""
        return cast(Job, document(self._once("POST", _path(job_id, "retry"))))

    def workers(self, job_id: str) -> list[dict[str, Any]]:
        """Who takes or took part in a job."""
        return items(self._repeatable("GET", _path(job_id, "workers")))[0]

    def unban(self, job_id: str, worker_id: str) -> dict[str, Any]:
        """Let a worker that was banned from a job take part again; returns its part in the job."""
        return document(self._once("POST", _path(job_id, "workers", quote(worker_id, safe=""), "unban")))

    def cancel(self, job_id: str) -> Job:
        """Stop a job for good."""
        return cast(Job, document(self._once("POST", _path(job_id, "cancel"))))

    def delete(self, job_id: str) -> None:
        """Forget a job that has ended, and its checkpoints."""
        self._once("DELETE", _path(job_id))

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """The versions that can be downloaded, newest first."""
        return items(self._repeatable("GET", _path(job_id, "checkpoints")))[0]

    def versions(self, job_id: str, first: int, last: int) -> Iterator[Version]:
        """The versions that stand from `first` to `last`, each with what it was made of; fetched as they are needed."""
        since: int | None = first - 1
        while since is not None and since < last:
            parameters = {"since": since, "limit": min(_PAGE, last - since)}
            page = document(self._repeatable("GET", _path(job_id, "versions"), params=parameters))
            yield from cast(list[Version], page["items"])
            since = page["next_since"]

    def state(self, job_id: str, version: int) -> bytes:
        """The reducer's state that goes with a checkpoint's weights: optimizer, full-precision parameters."""
        return self._repeatable("GET", _path(job_id, "checkpoints", str(version), "state")).content

    def metrics(self, job_id: str) -> dict[str, list[dict[str, Any]]]:
        """A job's series by name, each a list of points by version."""
        return cast(dict[str, list[dict[str, Any]]], document(self._repeatable("GET", _path(job_id, "metrics"))))

    def submissions(self, job_id: str, limit: int = _PAGE) -> list[dict[str, Any]]:
        """The newest submissions of a job, with where each one's time went."""
        parameters = {"limit": limit}
        return items(self._repeatable("GET", _path(job_id, "submissions"), params=parameters))[0]

    def ready(self) -> tuple[dict[str, Any], Mapping[str, str]]:
        """What `/readyz` says, ready or not, and the answer's headers."""
        with _outages(self.url):
            response = self._http.get("/readyz")
        if response.status_code != 503:
            raise_for_problem(response)
        return document(response), response.headers

    def events(self, job_id: str, after: int | None = None) -> Iterator[Event]:
        """A job's events above the id `after`, until this one connection ends (see `follow`)."""
        headers = {} if after is None else {"Last-Event-ID": str(after)}
        timeout = httpx2.Timeout(self._timeout_s, read=SILENCE_S)
        with (
            _outages(self.url),
            self._http.sse(_path(job_id, "events"), headers=headers, timeout=timeout) as source,
        ):
            if not source.response.is_success:
                source.response.read()
                raise_for_problem(source.response)
            for message in source:
                yield read_event(message)

    def follow(self, job: Job, stop: threading.Event | None = None) -> Iterator[Event]:
        """Events from now until the job has ended, over as many connections as it takes.

        A lost connection yields an event `lost` and is reopened, later and later up to 5 s, where it broke off.
        `stop` ends it at the next event or pause.
        """
        stop = stop or threading.Event()
        last, status, pause_s = job.get("last_event_id"), job["status"], 0.25
        while status not in ENDED:
            lost = "the server closed the stream"
            try:
                for event in self.events(job["id"], last):
                    last, pause_s = event.id or last, 0.25
                    status = event.data.get("status", status) if event.type == "job" else status
                    yield event
                    if stop.is_set():
                        return
            except NoServer as error:
                lost = str(error)
            except Problem as problem:
                if problem.status < 500:
                    raise
                lost = str(problem)
            if status not in ENDED:
                yield Event(last or 0, "lost", {"reason": lost})
                if stop.wait(random.uniform(0.5, 1) * pause_s):
                    return
                pause_s = min(_LONGEST_PAUSE_S, 2 * pause_s)

    def download(self, job_id: str, version: int, path: Path, progress: Progress | None = None) -> str:
        """Write a version's weights (safetensors) to `path`, which is complete or untouched; returns their sha256.

        Raises: ArtifactError: `path` cannot be written, or what came has not the sha256 that the answer names.
        """
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            with _outages(self.url):
                address = _path(job_id, "checkpoints", str(version))
                etag = self._retrying(self._stream, address, partial, progress)
            sha256 = etag.removeprefix("W/").strip('"')
            _check_weights(partial, sha256)
            os.replace(partial, path)
        except OSError as error:
            raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return sha256

    def _stream(self, path: str, target: Path, progress: Progress | None) -> str:
        """Stream an answer's body into a new file; returns its ETag."""
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

    def _repeatable(self, method: str, path: str, **content: Any) -> httpx2.Response:
        with _outages(self.url):
            response = self._retrying(self._http.request, method, path, **content)
        raise_for_problem(response)
        return response

    def _once(self, method: str, path: str, **content: Any) -> httpx2.Response:
        with _outages(self.url):
            response = self._http.request(method, path, **content)
        raise_for_problem(response)
        return response


def _path(job_id: str, *parts: str) -> str:
    return "/".join(["/v1/jobs", quote(job_id, safe=""), *parts])


@contextmanager
def _outages(url: str) -> Iterator[None]:
    """Turns a connection's failures into NoServer."""
    try:
        yield
    except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
        raise NoServer(
            f"no control plane answers at {url} ({error}): start `computeshare up` there, "
            "or set COMPUTESHARE_URL to where it runs"
        ) from error
    except httpx2.TimeoutException as error:
        raise NoServer(f"{url} did not answer in time: try again, or see `computeshare doctor`") from error
    except httpx2.RequestError as error:
        raise NoServer(f"the connection to {url} broke ({error}): try again") from error


def _check_weights(path: Path, sha256: str) -> None:
    """Raises ArtifactError unless the file is whole and holds the weights that the control plane announced."""
    if weights_digest(path) != sha256:
        raise ArtifactError("the weights are not those the control plane announced: download them again")


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        valid = False
    if not valid:
        raise SettingsError(f"{url!r} is not the address of a control plane: give http://HOST:PORT")
    return url.rstrip("/")


def _checked_token(token: str) -> str:
    if not (token.isascii() and token.isprintable()):
        raise SettingsError("the token holds characters that no token has: look at COMPUTESHARE_TOKEN or HOME/token")
    return token


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
