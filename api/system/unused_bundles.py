"""Removes bundles that neither a job nor a data set names, such as those of uploads that were given up."""

import time

import structlog

from api.database import Database
from api.datasets.service import named_bundles
from computeshare.bundles.store import UNUSED_S, BundleStore

EVERY_S = 3600.0
log = structlog.get_logger()


class UnusedBundles:
    """Removes them when it is time to; a background loop calls `step`."""

    def __init__(self, database: Database, bundles: BundleStore) -> None:
        self._database, self._bundles = database, bundles
        self._due_s = time.monotonic()

    def step(self) -> None:
        """Remove what was not used for a day and is not named, once an hour."""
        if time.monotonic() >= self._due_s:
            self._due_s = time.monotonic() + EVERY_S
            self.remove()

    def remove(self, unused_s: float = UNUSED_S) -> list[str]:
        """Remove the bundles that nobody names and nobody used for so many seconds; returns their digests."""
        with self._database.read() as session:
            named = named_bundles(session)
        removed = self._bundles.remove_unnamed(named, unused_s)
        if removed:
            log.info("removed unused bundles", count=len(removed))
        return removed
