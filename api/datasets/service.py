"""Users' data sets: add, show, list, remove; and their facts, for jobs."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

from pydantic import ValidationError
from sqlalchemy import ColumnElement, func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.access.audit import record
from api.database import Database, now_ms
from api.datasets.schemas import DatasetList, DatasetPublic, DatasetRequest
from api.errors import Conflict, InvalidFields, NotFound
from api.tables import Dataset, Job
from computeshare.bundles.store import BundleStore
from computeshare.errors import BundleError
from computeshare.jobspec.part import plain_errors
from computeshare.jobspec.tasks.own_data import DatasetFacts, DatasetSizes
from computeshare.types import ENDED

MOST = 1000
"""The most data sets of a control plane."""
MOST_JOBS = 50
"""The most jobs that a data set's page names."""


class UsingJob(NamedTuple):
    """A job that uses a data set."""

    id: str
    title: str
    status: str


class Datasets:
    """Adds, reads and removes users' data sets. Methods about one data set raise NotFound if it does not exist."""

    def __init__(self, database: Database, bundles: BundleStore) -> None:
        self._database, self._bundles = database, bundles

    def create(self, request: DatasetRequest) -> tuple[DatasetPublic, bool]:
        """Add a data set whose files are here; returns it, and whether it is new: the same may be added again.

        Raises: InvalidFields: the facts are wrong for the kind, or files are missing. Conflict: the name is another's.
        """
        facts = _facts(request)
        try:
            self._bundles.open_files(request.bundle)
            size = self._bundles.manifest(request.bundle).bytes
        except BundleError as error:
            raise InvalidFields.at(f"the files are not complete here: {error}", "bundle") from error
        with self._database.write() as session:
            known = session.get(Dataset, request.name)
            if known:
                if known.facts != facts.model_dump(mode="json"):
                    raise Conflict(
                        f"there is already a data set {request.name}, with other data: choose another name, or remove "
                        f"it first by `computeshare data remove {request.name}`"
                    )
                return _public(session, known), False
            if (session.scalar(select(func.count()).select_from(Dataset)) or 0) >= MOST:
                raise Conflict(f"there are already {MOST} data sets, the maximum: remove one first")
            row = Dataset(
                name=request.name,
                bundle=request.bundle,
                facts=facts.model_dump(mode="json"),
                bytes=size,
                created_ms=now_ms(),
            )
            session.add(row)
            record(session, "dataset.create", row.name, kind=request.kind, bytes=size)
            session.flush()
            return _public(session, row), True

    def list(self) -> DatasetList:
        """All data sets, by name."""
        with self._database.read() as session:
            rows = session.scalars(select(Dataset).order_by(func.casefold(col(Dataset.name)), col(Dataset.name))).all()
            return DatasetList(items=[_public(session, row) for row in rows])

    def show(self, name: str) -> DatasetPublic:
        """A data set by its name."""
        with self._database.read() as session:
            return _public(session, _find(session, name))

    def remove(self, name: str) -> None:
        """Remove a data set, and its files unless a job or another data set has the same. Raises Conflict: a job that
        is not over uses it.
        """
        with self._database.write() as session:
            row = _find(session, name)
            if using := _jobs(session, row.bundle):
                told = ", ".join(f"{job.title} ({job.id})" for job in using[:3])
                raise Conflict(
                    f"{name} cannot be removed while a job uses it: {told}. Cancel that job or wait for its end"
                )
            bundle = row.bundle
            record(session, "dataset.delete", name)
            session.delete(row)
            session.flush()
            self.free(session, [bundle])

    def free(self, session: Session, bundles: Iterable[str]) -> None:
        """Remove those bundles from the disk that neither a data set nor a job names any more; within the transaction
        that ended it, so that nobody can name them meanwhile.
        """
        for bundle in set(bundles) - named_bundles(session):
            self._bundles.remove(bundle)

    def jobs(self, name: str) -> Sequence[UsingJob]:
        """The newest jobs that use a data set, those that are over, too."""
        with self._database.read() as session:
            query = select(Job).where(_trains_on(_find(session, name).bundle)).order_by(col(Job.created_ms).desc())
            return [UsingJob(job.id, job.title, job.status) for job in session.scalars(query.limit(MOST_JOBS))]

    def facts(self, name: str) -> DatasetFacts | None:
        """A data set's facts; None: there is none."""
        with self._database.read() as session:
            row = session.get(Dataset, name)
            return DatasetFacts.model_validate(row.facts) if row else None

    def names(self) -> Sequence[str]:
        """The names of all data sets."""
        with self._database.read() as session:
            return session.scalars(select(col(Dataset.name)).order_by(col(Dataset.name))).all()

    def has_files(self, bundle: str) -> bool:
        """Whether the files of a data set are here and complete."""
        return self._bundles.has(bundle)


def named_bundles(session: Session) -> set[str]:
    """The bundles that jobs and data sets name."""
    spec: Any = col(Job.spec)
    by_jobs = (spec["data"]["bundle"].as_string(), spec["recipe_facts"]["initial"].as_string())
    found = {digest for row in session.execute(select(*by_jobs).distinct()) for digest in row}
    found |= set(session.scalars(select(col(Dataset.bundle))))
    return {digest for digest in found if digest}


def _facts(request: DatasetRequest) -> DatasetFacts:
    try:
        about = {"kind": request.kind, "bundle": request.bundle}
        return DatasetFacts.model_validate(request.facts.model_dump(mode="json") | about)
    except ValidationError as error:
        raise InvalidFields.at(plain_errors(error.errors())[0]["msg"], "facts") from error


def _find(session: Session, name: str) -> Dataset:
    row = session.get(Dataset, name)
    if row is None:
        raise NotFound(f"there is no data set {name}", "computeshare data list")
    return row


def _trains_on(bundle: str) -> ColumnElement[bool]:
    document: Any = col(Job.spec)
    return cast(ColumnElement[bool], document["data"]["bundle"].as_string() == bundle)


def _jobs(session: Session, bundle: str) -> Sequence[Job]:
    """The jobs that are not over and train on a bundle, newest first."""
    query = select(Job).where(_trains_on(bundle), col(Job.status).not_in(ENDED)).order_by(col(Job.created_ms).desc())
    return session.scalars(query).all()


def _public(session: Session, row: Dataset) -> DatasetPublic:
    facts = DatasetFacts.model_validate(row.facts)
    sizes = DatasetSizes.model_validate(facts.model_dump(exclude={"kind", "bundle"}))
    return DatasetPublic(
        name=row.name,
        kind=facts.kind,
        bundle=row.bundle,
        facts=sizes,
        bytes=row.bytes,
        jobs=[job.id for job in _jobs(session, row.bundle)],
        created_at=row.created_ms,
    )
