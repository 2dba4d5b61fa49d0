"""The schemas of users' data sets in the REST API."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from api.schemas import Instant
from computeshare.jobspec.tasks.own_data import DataKind, DatasetSizes, Digest, check_name

DatasetName = Annotated[str, Field(max_length=64), AfterValidator(check_name)]


class DatasetRequest(BaseModel):
    """A new data set: prepared files that were uploaded as a bundle, and what is known of them."""

    model_config = ConfigDict(extra="forbid")

    name: DatasetName = Field(description="letters, digits, '.', '-' and '_'; not a name that is built in")
    kind: DataKind
    bundle: Digest = Field(description="digest of the prepared files, `sha256:` and 64 hex digits")
    facts: DatasetSizes


class DatasetPublic(BaseModel):
    """A user's data set."""

    name: str
    kind: DataKind
    bundle: str = Field(description="digest of the prepared files")
    facts: DatasetSizes
    bytes: int = Field(description="size of the prepared files")
    jobs: list[str] = Field(description="ids of the jobs that are not over and train on it")
    created_at: Instant


class DatasetList(BaseModel):
    items: list[DatasetPublic]
