"""How much a browser has to fetch for the page of a long job with many workers."""

import pytest
from playwright.sync_api import Browser, Request, expect

from tests.support.browser import Site
from tests.support.staged_jobs import arrived, start

pytestmark = pytest.mark.e2e
MOST_BYTES = 300_000


def test_a_long_jobs_page_with_64_workers_weighs_less_than_300_kb(site: Site, browser: Browser) -> None:
    feed = start(site, rounds=5000)
    feed.opened()
    for number in range(64):
        feed.joined(f"w{number}", f"mac-{number}", "Apple M2 (MPS)")
    for _ in range(40):
        feed.versions(50)
        feed.scored()
    arrived(site, feed)
    context = browser.new_context()
    context.request.get(site.login)  # the cookie alone: nothing is in the browser's cache yet
    page = context.new_page()
    fetched: list[Request] = []

    def finished(request: Request) -> None:
        fetched.append(request)

    page.on("requestfinished", finished)
    page.goto(f"{site.url}/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss] canvas")).to_be_visible()
    expect(page.locator("#workers tbody tr")).to_have_count(64)
    sent = {request.url.removeprefix(site.url): request.sizes()["responseBodySize"] for request in fetched}
    context.close()
    assert len(sent) > 5 and 0 < sum(sent.values()) < MOST_BYTES, sent
