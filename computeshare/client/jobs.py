"""The jobs of a control plane: create, get and list."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from computeshare.client.api.calls import Client
from computeshare.client.bundles.recipe_upload import data_folder, is_digest, name_of, recipe_of, upload_recipe
from computeshare.client.card import jobs_table
from computeshare.client.job import Job
from computeshare.client.weights import WeightsCache
from computeshare.training.recipe_check import Trial
from computeshare.types import JobSort


@dataclass(frozen=True, slots=True)
class JobList:
    """Jobs, in the order asked for; a notebook shows them as a table."""

    items: tuple[Job, ...]

    def __iter__(self) -> Iterator[Job]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Job:
        return self.items[index]

    def _repr_html_(self) -> str:
        return jobs_table([(job.document, job.url) for job in self.items])


class Jobs:
    """The jobs of a control plane. Methods raise NoServer and Problem."""

    def __init__(self, client: Client, cache: WeightsCache) -> None:
        self._client, self._cache = client, cache

    def create(
        self,
        spec: Mapping[str, Any] | None = None,
        /,
        *,
        idempotency_key: str | None = None,
        folder: str | Path | None = None,
        **fields: Any,
    ) -> Job:
        """Create a job. A `recipe` given as a path, or as package:NAME, is first tried on this machine, with your
        rights, and uploaded.

        Args:
            spec: a JobSpec's document; `fields` override its entries.
            idempotency_key: any text; calls that repeat it create one job.
            folder: with the data that a recipe reads when it is tried; default: the files of `dataset`.
            fields: fields of the JobSpec: `dataset`, `model`, `optimizer={"name": "SGD", "lr": 0.02}` and so on.
        Raises: RecipeError: the recipe cannot train. Problem: a field is wrong; `errors` names the field and says which
            values are allowed.
        """
        document = {**(spec or {}), **fields}
        if (source := document.get("recipe")) and not is_digest(source):
            recipe, store = recipe_of(self._client, source), self._cache.bundles
            where = Path(folder).resolve() if folder else data_folder(self._client, document.get("dataset"), store)
            trial = Trial(document.get("recipe_args") or {}, where, document.get("seed", 0))
            document |= upload_recipe(self._client, recipe, trial, name_of(source))[0]
        return self._job(self._client.create(document, idempotency_key))

    def get(self, job_id: str) -> Job:
        """The job with this id. Raises Problem: there is no such job."""
        return self._job(self._client.show(job_id))

    def list(
        self,
        status: str | Sequence[str] = (),
        queue: str | None = None,
        limit: int | None = 50,
        search: str | None = None,
        sort: JobSort | None = None,
        tag: str | None = None,
    ) -> JobList:
        """Jobs, newest first.

        Args:
            status: only jobs in this state, or in one of these states.
            queue: only jobs of this queue.
            limit: most jobs to return; None: all.
            search: only jobs whose title contains this text (in upper or lower case) or whose id is this text.
            sort: another order: `oldest`, `name`, `accuracy` (the best first) or `updated` (the latest first).
            tag: only jobs with this tag.
        """
        statuses = (status,) if isinstance(status, str) else status
        found = self._client.jobs(statuses, queue, limit, search, sort, tag)
        return JobList(tuple(self._job(one) for one in found))

    def _job(self, document: Any) -> Job:
        return Job(document, self._client, self._cache)
