"""The schemas of bundles in the REST API."""

from pydantic import BaseModel, Field

from computeshare.bundles.manifest import FileEntry


class BundlePublic(BaseModel):
    """A bundle and what of it is still to be sent."""

    digest: str = Field(description="`sha256:` and 64 hex digits, of the manifest as canonical JSON")
    bytes: int = Field(description="size of all files")
    missing: list[str] = Field(description="pieces that the control plane lacks, each once; empty: it is complete")


class BundleDetail(BundlePublic):
    """A bundle with its files."""

    files: tuple[FileEntry, ...]
