"""`ComputeShare`: the Python client's entry point."""

from pathlib import Path
from typing import Self

import platformdirs

from computeshare.bundles.source import Progress
from computeshare.client.api.address import NoServer
from computeshare.client.api.calls import Client
from computeshare.client.bundles.datasets import Datasets
from computeshare.client.bundles.recipe_upload import name_of
from computeshare.client.bundles.uploads import upload
from computeshare.client.jobs import Jobs
from computeshare.client.weights import WeightsCache
from computeshare.errors import SettingsError
from computeshare.settings import Settings
from computeshare.tasks.recipes import bundle

CACHE_BYTES = 4_000_000_000


def reach(settings: Settings, timeout_s: float = 15.0) -> Client:
    """A client of the control plane in the settings or in `run.json`. Raises NoServer: neither names one."""
    try:
        address = settings.resolve_url()
    except SettingsError as error:
        raise NoServer(str(error)) from error
    try:
        token = settings.resolve_token()
    except SettingsError:
        token = None  # the control plane refuses, and its answer says what to do
    return Client(address, token, timeout_s)


class ComputeShare:
    """A control plane and its jobs. Usable as a context manager.

    Args:
        url: address of the control plane; default COMPUTESHARE_URL, else the control plane that runs on this machine.
        token: default COMPUTESHARE_TOKEN, else the token that `computeshare up` stored on this machine.
        home: folder of the token file and `run.json`; default COMPUTESHARE_HOME.
        timeout_s: seconds to wait for an answer.
        cache: folder for downloaded weights; default the platform's cache folder.
        cache_bytes: size limit of that folder; the newest file is kept whatever its size.
    Raises: NoServer: no control plane is known. SettingsError: the address or the token is malformed.
    """

    def __init__(
        self,
        url: str | None = None,
        token: str | None = None,
        *,
        home: Path | None = None,
        timeout_s: float = 15.0,
        cache: Path | None = None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.client = reach(Settings.given(url=url, token=token, home=home), timeout_s)
        folder = cache or platformdirs.user_cache_path("computeshare", appauthor=False) / "weights"
        self.datasets = Datasets(self.client)
        self.jobs = Jobs(self.client, WeightsCache(folder, cache_bytes))

    @property
    def url(self) -> str:
        """The control plane's address."""
        return self.client.url

    def upload_bundle(self, source: Path, progress: Progress | None = None) -> str:
        """Upload a folder's files, or one file, and return the bundle's digest. What an interrupted upload sent is not
        sent again; hidden files are left out.

        Args:
            progress: called with the bytes that the control plane has, and all bytes.
        Raises: BundleError: the files cannot make a bundle, or one changed meanwhile. NoServer, Problem.
        """
        return upload(self.client.bundles, source, progress)

    def create_recipe(self, source: str | Path, name: str = "") -> str:
        """Add the recipe in a file or folder, without trying it, and return its digest.

        Raises: RecipeError: it cannot be read. NoServer, Problem.
        """
        files = bundle.read(Path(source)).files
        return self.client.recipes.create(files, name or name_of(source))["digest"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ComputeShare({self.url!r})"

    def close(self) -> None:
        """Close the connections."""
        self.client.close()
