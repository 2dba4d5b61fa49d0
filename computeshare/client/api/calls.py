"""A synchronous client of the REST API, with a method for each call."""

import os
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self, cast
from urllib.parse import quote

from computeshare.checkpoints.store import weights_digest
from computeshare.client.api.access import Access
from computeshare.client.api.address import NoServer
from computeshare.client.api.bundles import Bundles
from computeshare.client.api.datasets import DatasetCalls
from computeshare.client.api.invites import Invites
from computeshare.client.api.models import (
    Checkpoint,
    ClassScores,
    Comparison,
    EpochLedger,
    Estimate,
    Event,
    Job,
    JobWorker,
    LogLine,
    Problem,
    Sample,
    Submission,
    Version,
    items,
    json_object,
    raise_for_problem,
)
from computeshare.client.api.recipes import Recipes
from computeshare.client.api.requests import PAGE, Progress, Requests, given
from computeshare.client.api.webhooks import Webhooks
from computeshare.client.event_feed import CLOSED, Course, passing
from computeshare.errors import ArtifactError
from computeshare.types import JobSort

_LINES = 1000


class Client:
    """A client of one control plane; usable as a context manager.

    Methods raise NoServer if the control plane does not answer, and Problem (an ApiError) if it refuses the request.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 15.0) -> None:
        self._requests = Requests(url, token, timeout_s)
        self.url, self.connection = self._requests.url, self._requests.connection
        self.webhooks, self.invites = Webhooks(self._requests), Invites(self._requests)
        self.bundles, self.recipes = Bundles(self._requests), Recipes(self._requests)
        self.access = Access(self._requests)
        self.datasets = DatasetCalls(self._requests)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._requests.close()

    def create(self, spec: Mapping[str, Any], idempotency_key: str | None = None) -> Job:
        """Create a job from a JobSpec's document; calls that repeat `idempotency_key` create one job."""
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        return cast(Job, json_object(self._requests.repeatable("POST", "/v1/jobs", json=dict(spec), headers=headers)))

    def fork(
        self,
        job_id: str,
        version: int | str = "latest",
        spec: Mapping[str, Any] | None = None,
        optimizer: str | None = None,
        idempotency_key: str | None = None,
    ) -> Job:
        """Create a job that starts from a version of another job; calls that repeat `idempotency_key` create one job.

        Args:
            version: a number, `latest` or `best`.
            spec: fields of the JobSpec that change; the others are the parent's.
            optimizer: `kept` or `fresh`; by default the optimizer's state is kept if its settings stay the same.
        """
        document_sent = {"version": version, "spec": dict(spec or {}), "optimizer": optimizer}
        headers = {"Idempotency-Key": idempotency_key or uuid.uuid4().hex}
        response = self._requests.repeatable("POST", _path(job_id, "fork"), json=document_sent, headers=headers)
        return cast(Job, json_object(response))

    def jobs(
        self,
        statuses: Sequence[str] = (),
        queue: str | None = None,
        limit: int | None = None,
        search: str | None = None,
        sort: JobSort | None = None,
        tag: str | None = None,
    ) -> Iterator[Job]:
        """Yield jobs newest first, `limit` of them or all; further pages are fetched on demand.

        Args:
            search: only jobs whose title contains this text (in upper or lower case) or whose id is this text.
            sort: another order: `oldest`, `name`, `accuracy` (the best first) or `updated` (the latest first).
            tag: only jobs with this tag.
        """
        filters = {"status": list(statuses) or None, "queue": queue, "search": search, "sort": sort, "tag": tag}
        return self._requests.listed("/v1/jobs", filters, limit)

    def show(self, job_id: str) -> Job:
        """Fetch a job."""
        return cast(Job, json_object(self._requests.repeatable("GET", _path(job_id))))

    def compare(self, job_ids: Sequence[str]) -> Comparison:
        """Compare two to six jobs: their results, and the fields of their specifications that differ."""
        parameters = {"job": list(job_ids)}
        return cast(Comparison, json_object(self._requests.repeatable("GET", "/v1/compare", params=parameters)))

    def pause(self, job_id: str, after_round: bool = False, hours: float | None = None) -> Job:
        """Pause a queued or running job, at once or at the end of its round; its workers' finished work is kept.

        Args:
            hours: time after which the job resumes by itself; None: it stays paused until `resume`.
        """
        parameters: dict[str, Any] = {"after": "round"} if after_round else {}
        parameters |= {"hours": hours} if hours is not None else {}
        return cast(Job, json_object(self._requests.once("POST", _path(job_id, "pause"), params=parameters)))

    def resume(self, job_id: str) -> Job:
        """Continue a paused job where it stopped."""
        return cast(Job, json_object(self._requests.once("POST", _path(job_id, "resume"))))

    def retry(self, job_id: str) -> Job:
        """Continue a failed job from its last checkpoint."""
        return cast(Job, json_object(self._requests.once("POST", _path(job_id, "retry"))))

    def workers(self, job_id: str) -> list[JobWorker]:
        """The workers that take or took part in a job."""
        return items(self._requests.repeatable("GET", _path(job_id, "workers")))[0]

    def stages(self, job_id: str) -> list[dict[str, Any]]:
        """Who holds which stages of a model that is spread over workers: `worker`, `first`, `stop`, `busy` and more."""
        found = json_object(self._requests.repeatable("GET", _path(job_id, "workers")))
        return list(found.get("stages", []))

    def unban(self, job_id: str, worker_id: str) -> dict[str, Any]:
        """Let a banned worker take part in a job again; returns its entry among the job's workers (`JobWorker`)."""
        return json_object(self._requests.once("POST", _path(job_id, "workers", quote(worker_id, safe=""), "unban")))

    def prioritise(self, job_id: str, priority: int) -> Job:
        """Set the priority of a job that has not ended."""
        return cast(Job, json_object(self._requests.repeatable("PATCH", _path(job_id), json={"priority": priority})))

    def rename(self, job_id: str, name: str) -> Job:
        """Set a job's name. A job with an empty name is shown as `MODEL on DATASET`."""
        return cast(Job, json_object(self._requests.repeatable("PATCH", _path(job_id), json={"name": name})))

    def edit(self, job_id: str, changes: Mapping[str, Any]) -> Job:
        """Change fields of a job's specification that may be changed."""
        return cast(Job, json_object(self._requests.repeatable("PATCH", _path(job_id), json=dict(changes))))

    def fleet(self, offline: bool = False) -> list[dict[str, Any]]:
        """The workers that are online; with `offline`, also the workers seen in the last 30 days."""
        return items(self._requests.repeatable("GET", "/v1/workers", params={"offline": offline}))[0]

    def contributions(self) -> dict[str, list[dict[str, Any]]]:
        """The contributions of each machine (`items`) and person (`people`) to all jobs, most samples first."""
        return json_object(self._requests.repeatable("GET", "/v1/workers/contributions"))

    def drain(self, worker_id: str) -> dict[str, Any]:
        """Give a worker no further work; it finishes its current work unit."""
        return json_object(self._requests.repeatable("POST", _worker_path(worker_id, "drain")))

    def undrain(self, worker_id: str) -> dict[str, Any]:
        """Give a drained worker work again."""
        return json_object(self._requests.repeatable("POST", _worker_path(worker_id, "undrain")))

    def assign(self, worker_id: str, person: str | None) -> dict[str, Any]:
        """Say whose a worker's machine is, also in what it has contributed; None: the owner's, or nobody's if
        the machine was invited.
        """
        body = {"person": person}
        return json_object(self._requests.repeatable("PATCH", _worker_path(worker_id), json=body))

    def remove(self, worker_id: str) -> None:
        """Make an online worker finish its work unit and exit; forget an offline worker."""
        self._requests.once("DELETE", _worker_path(worker_id))

    def queues(self) -> list[dict[str, Any]]:
        """The queues that have workers or jobs, each with its jobs in the order in which they are served."""
        return items(self._requests.repeatable("GET", "/v1/queues"))[0]

    def cancel(self, job_id: str) -> Job:
        """Stop a job for good."""
        return cast(Job, json_object(self._requests.once("POST", _path(job_id, "cancel"))))

    def delete(self, job_id: str) -> None:
        """Delete a job that has ended, and its checkpoints."""
        self._requests.once("DELETE", _path(job_id))

    def checkpoints(self, job_id: str) -> list[Checkpoint]:
        """The versions that can be downloaded, newest first."""
        return items(self._requests.repeatable("GET", _path(job_id, "checkpoints")))[0]

    def versions(self, job_id: str, first: int, last: int) -> Iterator[Version]:
        """Yield the versions from `first` to `last` that no restore has undone; pages are fetched on demand."""
        since: int | None = first - 1
        while since is not None and since < last:
            parameters = {"since": since, "limit": min(PAGE, last - since)}
            page = json_object(self._requests.repeatable("GET", _path(job_id, "versions"), params=parameters))
            yield from cast(list[Version], page["items"])
            since = page["next_since"]

    def state(self, job_id: str, version: int) -> bytes:
        """The reducer's state that belongs to a checkpoint's weights: optimizer state and full-precision parameters."""
        return self._requests.repeatable("GET", _path(job_id, "checkpoints", str(version), "state")).content

    def classes(self, job_id: str, which: str) -> list[ClassScores]:
        """A version's scores by class, for each part of the data that it was scored on; `which`: a number, `latest` or
        `best`.
        """
        response = self._requests.repeatable("GET", _path(job_id, "checkpoints", which, "classes"))
        return cast(list[ClassScores], json_object(response)["parts"])

    def metrics(
        self, job_id: str, since: int = 0, until: int | None = None, points: int = 1000
    ) -> dict[str, list[dict[str, Any]]]:
        """A job's series by name, each a list of points by version, for versions above `since` up to `until`.

        Args:
            points: about this many points per series; of more versions, some are left out evenly.
        """
        parameters = given(since=since, until=until, points=points)
        response = self._requests.repeatable("GET", _path(job_id, "metrics"), params=parameters)
        return cast(dict[str, list[dict[str, Any]]], json_object(response))

    def metrics_csv(self, job_id: str) -> str:
        """Every version of a job with its values, as CSV."""
        return self._requests.repeatable("GET", _path(job_id, "metrics.csv")).text

    def estimate(self, job_id: str) -> Estimate:
        """The expected speed-up of a job from one more worker."""
        return cast(Estimate, json_object(self._requests.repeatable("GET", _path(job_id, "estimate"))))

    def ledger(self, job_id: str) -> list[EpochLedger]:
        """For each epoch, how many samples were counted, missing, reassigned or refused as duplicates."""
        return cast(list[EpochLedger], json_object(self._requests.repeatable("GET", _path(job_id, "ledger")))["epochs"])

    def submissions(
        self, job_id: str, limit: int | None = PAGE, outcome: str | None = None, worker: str | None = None
    ) -> Iterator[Submission]:
        """Yield a job's submissions newest first, `limit` of them or all, with the seconds each took the worker.

        Args:
            outcome: only submissions with this outcome.
            worker: only submissions of the worker with this id.
        """
        return self._requests.listed(_path(job_id, "submissions"), {"outcome": outcome, "worker": worker}, limit)

    def samples(self, job_id: str, limit: int | None = PAGE) -> Iterator[Sample]:
        """Yield short texts by a language model's scored versions, newest first, `limit` of them or all."""
        return self._requests.listed(_path(job_id, "samples"), {}, limit)

    def generate(
        self,
        job_id: str,
        prompt: str = "\n",
        characters: int = 200,
        temperature: float = 0.8,
        seed: int = 0,
        version: int | str = "latest",
    ) -> dict[str, Any]:
        """Continue a prompt with a job's language model, on the evaluator: `version`, `prompt` and `text`.

        Args:
            version: a number, `latest` or `best`.
        """
        asked = {"prompt": prompt, "characters": characters, "temperature": temperature, "seed": seed}
        return json_object(self._requests.once("POST", _path(job_id, "generate"), json={**asked, "version": version}))

    def release(self) -> dict[str, Any]:
        """The control plane's `version` and the `protocol` that it speaks."""
        return json_object(self._requests.repeatable("GET", "/v1/version"))

    def ready(self) -> tuple[dict[str, Any], Mapping[str, str]]:
        """The content and the headers of `/readyz`, whether it answers ready (200) or not ready (503)."""
        response = self._requests.get("/readyz")
        if response.status_code != 503:
            raise_for_problem(response)
        return json_object(response), response.headers

    def events(self, job_id: str, after: int | None = None) -> Iterator[Event]:
        """Yield a job's events above the id `after` until this connection ends; `follow` reconnects."""
        yield from self._requests.listen(_path(job_id, "events"), after, {})

    def follow(self, job: Job, after: int | None = None) -> Iterator[Event]:
        """Yield a job's events until it has ended: after event `after`, else after the last event known to `job`.

        A lost connection is reopened where it broke off, after growing pauses of up to 5 s; each loss yields an event
        of type `lost`.
        """
        course = Course.of(job, after)
        while not course.ended:
            lost = CLOSED
            try:
                for event in self.events(job["id"], course.last):
                    course.saw(event)
                    yield event
            except (NoServer, Problem) as error:
                lost = course.cut(error)
            if not course.ended:
                yield course.lost(lost)
                time.sleep(course.pause())

    def logs(
        self, job_id: str, worker: str | None = None, level: str | None = None, limit: int | None = 100
    ) -> Iterator[LogLine]:
        """Yield the newest `limit` lines of a job's log (None: all) in ascending order.

        Args:
            worker: only lines of this worker: its id or its name.
            level: only lines of at least this level: debug, info, warning or error.
        """
        wanted, path = given(worker=worker, level=level), _path(job_id, "logs")
        if limit is None:
            yield from self._all_lines(path, wanted)
            return
        pages: list[list[LogLine]] = []
        before: int | None = None
        while limit > 0:
            parameters = given(**wanted, limit=min(limit, _LINES), before=before)
            page = json_object(self._requests.repeatable("GET", path, params=parameters))
            pages.append(page["items"])
            limit, before = limit - len(page["items"]), page["previous"]
            if before is None:
                break
        for lines in reversed(pages):
            yield from lines

    def follow_logs(
        self,
        job_id: str,
        worker: str | None = None,
        level: str | None = None,
        after: int = 0,
        lost: Callable[[str], None] = lambda _: None,
    ) -> Iterator[LogLine]:
        """Yield the lines of a job's log above the id `after`, and new lines until the job has ended.

        A lost connection is reopened where it broke off, after growing pauses of up to 5 s; `lost` is called with the
        reason.
        """
        course, wanted = Course(after), given(worker=worker, level=level)
        while True:
            reason = CLOSED
            try:
                for event in self._requests.listen(_path(job_id, "logs", "stream"), course.last, wanted):
                    if event.type == "end":
                        return
                    course.saw(event)
                    yield cast(LogLine, event.data)
            except (NoServer, Problem) as error:
                reason = passing(error)
            lost(reason)
            time.sleep(course.pause())

    def download(
        self,
        job_id: str,
        version: int,
        path: Path,
        progress: Progress | None = None,
        kind: Literal["average", "raw", "before"] = "average",
    ) -> str:
        """Write a version's weights (safetensors) to `path` in one step; returns their sha256.

        Args:
            kind: average: the moving average, if the job keeps one; raw: the version itself; before: the version before
                it, in a job with a delay or an overlap.
        Raises: ArtifactError: `path` cannot be written, or the weights' sha256 differs from the answer's ETag.
        """
        partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            source = _path(job_id, "checkpoints", str(version)) + ("" if kind == "average" else f"?weights={kind}")
            etag = self._requests.save(source, partial, progress)
            sha256 = etag.removeprefix("W/").strip('"')
            _check_weights(partial, sha256)
            os.replace(partial, path)
        except OSError as error:
            raise ArtifactError(f"cannot write {path}: {error.strerror or error}") from error
        finally:
            partial.unlink(missing_ok=True)
        return sha256

    def _all_lines(self, path: str, wanted: Mapping[str, Any]) -> Iterator[LogLine]:
        after = 0
        while True:
            lines, _ = items(self._requests.repeatable("GET", path, params={**wanted, "limit": _LINES, "after": after}))
            yield from lines
            if len(lines) < _LINES:
                return
            after = lines[-1]["id"]


def _path(job_id: str, *parts: str) -> str:
    return "/".join(["/v1/jobs", quote(job_id, safe=""), *parts])


def _worker_path(worker_id: str, *parts: str) -> str:
    return "/".join(["/v1/workers", quote(worker_id, safe=""), *parts])


def _check_weights(path: Path, sha256: str) -> None:
    """Raises ArtifactError unless the file is whole and holds the weights that the control plane announced."""
    if weights_digest(path) != sha256:
        raise ArtifactError("the weights are not those the control plane announced: download them again")
