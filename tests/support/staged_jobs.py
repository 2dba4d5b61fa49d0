"""Jobs for pages to show, put on the stage by their events."""

from typing import Any

from api.database import now_ms
from computeshare.jobspec.spec import JobSpec
from tests.support.browser import Site
from tests.support.job_feed import Feed
from tests.support.wait import wait_until

SPEC: dict[str, Any] = {
    "name": "mnist, lenet5",
    "queue": "mnist",
    "dataset": "mnist",
    "model": "lenet5",
    "micro_batch": 32,
    "micro_batches_per_round": 4,
    "rounds": 1000,
}


def start(site: Site, **spec: Any) -> Feed:
    """A job whose events the returned feed writes; a field that is None is left out."""
    given = {name: value for name, value in (SPEC | spec).items() if value is not None}
    checked = JobSpec.model_validate(given)
    job = site.services.jobs.create(checked).model_dump(mode="json")
    return Feed(site.redis, job, site.settings.artifacts_dir, now_ms() - 60_000, checked.facts.train)


def under_way(site: Site, versions: int = 120, **spec: Any) -> Feed:
    """A job with two workers and some rounds behind it, as the database has it."""
    feed = start(site, **spec)
    feed.opened()
    feed.joined("w1studio", "mac-studio", "Apple M2 Ultra (MPS)")
    feed.joined("w2laptop", "laptop", "CPU, 8 cores")
    for _ in range(versions // 20):
        feed.versions(20)
        feed.scored()
    arrived(site, feed)
    return feed


def arrived(site: Site, feed: Feed) -> None:
    """Wait until the database holds everything the feed wrote."""
    name = f"cs:{{{feed.job_id}}}:events"
    wait_until(lambda: site.redis.xlen(name) == 0)
