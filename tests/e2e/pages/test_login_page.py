"""A browser that is not logged in, and the page of the routes, in a real one."""

from typing import Any

import pytest
from playwright.sync_api import Browser, expect

from tests.support.browser import Site, Window, picture, problems

pytestmark = pytest.mark.e2e


def test_whoever_is_not_logged_in_pastes_the_link_and_goes_on(site: Site, browser: Browser, window: Window) -> None:
    context = browser.new_context(**window.options)
    page = context.new_page()
    page.goto(f"{site.url}/workers?queue=home")
    expect(page.get_by_role("heading", level=1)).to_have_text("Not logged in")
    assert problems(page) == []
    picture(page, f"login-{window}")
    page.get_by_label("paste it").fill("http://studio.local:8000/login?key=another")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_contain_text("not a login link")
    page.get_by_label("paste it").fill(site.login)
    page.get_by_role("button", name="Log in").click()
    expect(page).to_have_url(f"{site.url}/workers?queue=home")
    expect(page.get_by_role("heading", level=1)).to_have_text("Workers")
    context.close()


def test_the_page_of_the_routes_fits_its_window(site: Site, opened: Any, window: Window) -> None:
    page = opened("/docs")
    expect(page.get_by_role("link", name="API", exact=True)).to_have_attribute("aria-current", "page")
    longest = page.get_by_text("/v1/webhooks/{webhook_id}/deliveries/{delivery_id}/redeliver")
    expect(longest).to_be_visible()
    assert longest.bounding_box()["width"] <= window.width
    assert problems(page) == []
    picture(page, f"routes-{window}")
