"""Recipes: add, show, list, delete. They are text here: no code of a recipe is run."""

from typing import Any

from sqlalchemy import func, select
from sqlalchemy.orm import Session
from sqlmodel import col

from api.access.audit import record
from api.database import Database, now_ms
from api.errors import Conflict, InvalidFields, NotFound
from api.recipes.schemas import RecipeDetail, RecipeList, RecipePublic, RecipeRequest
from api.tables import Job, Recipe
from computeshare.errors import RecipeError
from computeshare.jobspec.tasks.recipes import PACKAGE
from computeshare.tasks.recipes import requirements
from computeshare.tasks.recipes.bundle import Bundle, of_package
from computeshare.types import ENDED

_RECIPE_OF: Any = col(Job.spec)["recipe"].as_string()


class Recipes:
    """The recipes of users, named by the digest of their files."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, request: RecipeRequest) -> tuple[RecipePublic, bool]:
        """Store a recipe; returns it, and whether it is new. Raises InvalidFields."""
        try:
            bundle = Bundle(request.files).checked()
            requirements.required(bundle)
        except RecipeError as error:
            raise InvalidFields.at(str(error), "files") from error
        content = bundle.content
        with self._database.write() as session:
            if is_new := session.get(Recipe, bundle.digest) is None:
                session.add(
                    Recipe(
                        digest=bundle.digest,
                        name=request.name,
                        content=content,
                        bytes=len(content),
                        created_ms=now_ms(),
                    )
                )
                session.flush()
                record(session, "recipe.create", bundle.digest, name=request.name)
            return _public(session, bundle.digest), is_new

    def show(self, digest: str) -> RecipeDetail:
        """A recipe with its files. Raises NotFound."""
        with self._database.read() as session:
            public = _public(session, digest)
            return RecipeDetail(**public.model_dump(), files=bundle_of(session, digest).files)

    def bundle(self, digest: str) -> Bundle:
        """A recipe's files. Raises NotFound."""
        with self._database.read() as session:
            return bundle_of(session, digest)

    def list(self) -> RecipeList:
        """All recipes, newest first."""
        with self._database.read() as session:
            counted = select(_RECIPE_OF, func.count()).where(_RECIPE_OF.is_not(None)).group_by(_RECIPE_OF)
            jobs: dict[str, int] = dict(map(tuple, session.execute(counted)))
            columns = (col(Recipe.digest), col(Recipe.name), col(Recipe.bytes), col(Recipe.created_ms))
            rows = session.execute(select(*columns).order_by(col(Recipe.created_ms).desc(), col(Recipe.digest)))
            return RecipeList(items=[_shown(row, jobs.get(row.digest, 0)) for row in rows])

    def delete(self, digest: str) -> None:
        """Delete a recipe. Raises NotFound; Conflict: a job that has not ended trains it."""
        with self._database.write() as session:
            row = _found(session, digest)
            using = select(col(Job.id)).where(digest == _RECIPE_OF, col(Job.status).not_in(ENDED))
            if job_id := session.scalar(using.limit(1)):
                raise Conflict(f"job {job_id} trains this recipe and has not ended: cancel it first")
            session.delete(row)
            record(session, "recipe.delete", digest)


def bundle_of(session: Session, digest: str) -> Bundle:
    """The files of a stored recipe, or those of a recipe `package:NAME`. Raises NotFound."""
    if digest.startswith(PACKAGE):
        return of_package(digest)
    return Bundle.parse(_found(session, digest).content)


def _found(session: Session, digest: str) -> Recipe:
    row = session.get(Recipe, digest)
    if row is None:
        raise NotFound(f"there is no recipe {digest[:80]}: add it by `computeshare jobs create --recipe`")
    return row


def _public(session: Session, digest: str) -> RecipePublic:
    row = _found(session, digest)
    jobs = session.scalar(select(func.count()).select_from(Job).where(digest == _RECIPE_OF))
    return _shown(row, jobs or 0)


def _shown(row: Any, jobs: int) -> RecipePublic:
    return RecipePublic(digest=row.digest, name=row.name, bytes=row.bytes, created_at=row.created_ms, jobs=jobs)
