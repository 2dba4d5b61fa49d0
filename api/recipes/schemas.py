"""The schemas of recipes in the REST API."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from api.schemas import Instant
from computeshare.jobspec.spec import JobName


class RecipeRequest(BaseModel):
    """A recipe's files."""

    model_config = ConfigDict(extra="forbid", strict=True)

    files: dict[str, str] = Field(description="their text by path; `recipe.py` defines the functions")
    name: Annotated[JobName, Field(description="what lists show beside the digest")] = ""


class RecipePublic(BaseModel):
    """A recipe."""

    model_config = ConfigDict(from_attributes=True)

    digest: str = Field(description="`sha256:` and 64 hex digits, of the files as canonical JSON")
    name: str
    bytes: int
    created_at: Instant
    jobs: int = Field(description="jobs that train it, also those that have ended")


class RecipeDetail(RecipePublic):
    """A recipe with its files."""

    files: Mapping[str, str]


class RecipeList(BaseModel):
    """All recipes, newest first."""

    items: list[RecipePublic]
