"""The pages of tokens, links and the audit log in a real browser, and what those with few scopes see."""

import re
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect

from api.access.schemas import TokenRequest
from computeshare.settings import login_path
from tests.support.browser import Site, Watched, in_every_window, picture, problems
from tests.support.staged_jobs import under_way

pytestmark = pytest.mark.e2e


@in_every_window
def test_a_token_is_made_logs_a_browser_in_and_is_revoked(site: Site, opened: Any, browser: Browser) -> None:
    page: Page = opened("/tokens")
    page.get_by_role("button", name="New token").click()
    page.get_by_label("Name").fill("Ada")
    page.keyboard.press("Enter")
    link = page.locator("#token-login")
    expect(link).to_have_text(re.compile(r"/login\?key="))
    address = link.text_content() or ""
    assert problems(page) == []
    page.get_by_role("button", name="I have copied it").click()
    expect(link).to_have_text("")
    other = browser.new_context()
    reader = other.new_page()
    reader.goto(address)
    expect(reader.get_by_role("navigation")).to_have_text(re.compile(r"^\s*Jobs\s*Data\s*API\s*$"))
    expect(reader.locator(".whose")).to_contain_text("Logged in as Ada")
    expect(reader.get_by_role("link", name="New job")).to_have_count(0)
    picture(page, "tokens")
    page.get_by_role("button", name="Revoke Ada").click()
    page.get_by_role("button", name="Revoke token").click()
    expect(page.locator("#tokens")).not_to_contain_text("Ada")
    reader.reload()
    expect(reader.get_by_role("heading", name="Not logged in")).to_be_visible()
    other.close()
    page.goto(site.url + "/audit")
    expect(page.locator("#audit")).to_contain_text("token.revoke")
    assert problems(page) == []
    picture(page, "audit")


@in_every_window
def test_a_job_is_shared_followed_and_no_more(site: Site, opened: Any, browser: Browser) -> None:
    feed = under_way(site)
    page: Page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Share").click()
    page.get_by_role("button", name="Create link").click()
    expect(page.locator("#share-url")).to_have_text(re.compile("/shared/"))
    address = page.locator("#share-url").text_content() or ""
    assert problems(page) == []
    context = browser.new_context(viewport=page.viewport_size)
    stranger = Watched(context)
    stranger.page.goto(address)
    expect(stranger.page.locator("[data-plot=loss] canvas")).to_be_visible()
    expect(stranger.page.get_by_role("navigation")).to_have_count(0)
    before = stranger.page.locator("[data-field=version]").text_content()
    feed.versions(1)
    expect(stranger.page.locator("[data-field=version]")).not_to_have_text(before or "")
    assert problems(stranger.page) == []
    picture(stranger.page, "shared")
    assert stranger.problems == []
    page.get_by_role("button", name="Revoke").click()
    expect(page.locator("#share-links li")).to_have_count(0)
    stranger.page.reload()
    expect(stranger.page.get_by_role("heading", name="Page not found")).to_be_visible()
    context.close()


def test_a_reader_finds_a_jobs_page_whole_and_without_controls(site: Site, browser: Browser) -> None:
    feed = under_way(site)
    _, token = site.services.tokens.create(TokenRequest(name="reader", scopes=["jobs:read"], days=1))
    context = browser.new_context()
    reader = Watched(context)
    reader.page.goto(site.url + login_path(token))
    reader.page.goto(f"{site.url}/jobs/{feed.job_id}")
    expect(reader.page.locator("[data-plot=loss] canvas")).to_be_visible()
    for name in ("Pause", "Rename", "Share", "Set", "Create invite"):
        expect(reader.page.get_by_role("button", name=name, exact=True)).to_have_count(0)
    reader.page.get_by_role("button", name="Log out").click()
    expect(reader.page.get_by_role("heading", name="Not logged in")).to_be_visible()
    assert [told for told in reader.problems if "401" not in told] == []
    context.close()
