"""Fetches the files that a seat's job needs before the seat loads it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import structlog
from redis import Redis

from computeshare.bundles.exchange import FetchProgress, fetch
from computeshare.bundles.store import BundleStore, cache_limit
from computeshare.jobspec.memory_estimate import allowed_bytes
from computeshare.runtime.log_lines import Seldom
from computeshare.settings import Settings
from computeshare.worker.seat.progress_pipe import fetching

TOLD_EVERY_S = 10.0
log = structlog.get_logger()


@contextmanager
def fetched(
    redis: Redis,
    digests: tuple[str, ...],
    settings: Settings,
    goes_on: Callable[[], bool],
    progress: Callable[[FetchProgress], object],
    only: Sequence[str] = (),
    worker: str = "",
) -> Iterator[None]:
    """Have bundles on this machine within the block, and keep them from being removed to make room for others.

    `progress` is told of one bundle after another; its bytes over the wire are those of all. Files are left out whose
    paths start with none of `only`, unless that is empty.

    Raises: Interrupted: `goes_on` returned False. BundleError: they cannot be had; SettingsError.
    """
    if not digests:
        yield
        return
    store = BundleStore(settings.bundles_dir, cache_limit(settings.bundles_dir, allowed_bytes(settings.cache)))
    seldom, before, last = Seldom(TOLD_EVERY_S), (0, 0), (0, 0)

    def tell(now: FetchProgress) -> None:
        nonlocal last
        last = before[0] + now.bytes_sent, before[1] + now.bytes_received
        progress(replace(now, bytes_sent=last[0], bytes_received=last[1]))
        seldom.tell(log.info, fetching(now.done_bytes, now.total_bytes), kind="fetching")

    with ExitStack() as kept:
        for digest in digests:
            kept.enter_context(store.using(digest))
            fetch(redis, store, digest, only, goes_on, tell, worker)
            before = last
        yield
