"""The page of webhooks, and notifications of the browser's own, in a real browser."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from api.webhooks.schemas import WebhookRequest
from tests.support.browser import Site, Window, in_every_window, picture, problems
from tests.support.staged_jobs import under_way
from tests.support.wait import wait_until
from tests.support.webhook_receiver import Receiver, receiving

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module", autouse=True)
def networks() -> Iterator[None]:
    """The control plane may reach a receiver on this machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPUTESHARE_WEBHOOK_NETWORKS", "127.0.0.1")
        yield


@pytest.fixture
def receiver(site: Site) -> Iterator[Receiver]:
    with receiving() as one:
        yield one
    for hook in site.services.webhooks.list().items:
        site.services.webhooks.delete(hook.id)


def hooked(site: Site, receiver: Receiver, pings: int = 1) -> str:
    """A webhook to which so many pings were sent."""
    webhooks = site.services.webhooks
    hook = webhooks.create(WebhookRequest(url=receiver.url, events=["completed", "failed", "worker_joined"])).id
    for _ in range(pings):
        webhooks.ping(hook)
    wait_until(lambda: not webhooks.show(hook).pending)
    return hook


@in_every_window
def test_a_webhook_is_added_tried_switched_off_and_deleted(site: Site, opened: Any, receiver: Receiver) -> None:
    page = opened("/webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("Address").fill(receiver.url)
    page.get_by_label("Worker joined").check()
    page.get_by_label("Paused by an error").uncheck()
    page.keyboard.press("Enter")
    expect(page.locator("#hook-secret-text")).to_have_text(re.compile("^whsec_"))
    page.get_by_role("button", name="I have copied it").click()
    expect(page.locator("#hook-secret-text")).to_have_text("")
    (hook,) = site.services.webhooks.list().items
    assert hook.events == ["completed", "failed", "worker_joined"]
    page.get_by_role("button", name="Test").click()
    expect(page.locator(".hook td .state")).to_have_text("Delivered")
    page.get_by_role("button", name="Send msg_").click()
    wait_until(lambda: len(receiver.heard) == 2)
    page.get_by_role("button", name="Switch off").click()
    expect(page.locator(".hook-state")).to_contain_text("Switched off")
    page.get_by_role("button", name="Switch on").click()
    expect(page.locator(".hook-state")).to_contain_text("On")
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Keep webhook").click()
    assert len(site.services.webhooks.list().items) == 1
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete webhook").click()
    expect(page.locator("#webhooks")).to_contain_text("No webhooks yet")
    assert site.services.webhooks.list().items == []


def test_an_address_that_is_refused_is_said_where_it_was_typed(site: Site, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.login)
    page.goto(site.url + "/webhooks")
    page.get_by_role("button", name="New webhook").click()
    page.get_by_label("Address").fill("http://10.0.0.1/hook")
    page.get_by_role("button", name="Create").click()
    expect(page.locator("#new-hook-problem")).to_contain_text("not on the public internet")
    expect(page.locator("#new-hook")).to_be_visible()
    context.close()


def test_the_page_of_webhooks_fits_its_window(site: Site, opened: Any, receiver: Receiver, window: Window) -> None:
    hooked(site, receiver, pings=2)
    receiver.statuses = [500]
    hooked(site, receiver)
    page = opened("/webhooks")
    for summary in page.locator(".hook summary").all():
        summary.click()
    expect(page.locator(".hook td .state").first).to_be_visible()
    assert problems(page) == []
    picture(page, f"webhooks-{window}", whole=True)
    page.get_by_role("button", name="New webhook").click()
    box = page.locator("#new-hook").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= window.width
    picture(page, f"webhooks-form-{window}")


def test_the_page_can_be_read_without_javascript(site: Site, opened: Any, receiver: Receiver) -> None:
    hooked(site, receiver)
    page = opened("/webhooks", java_script_enabled=False)
    expect(page.locator(".hook td .state")).to_have_text("Delivered")
    assert page.get_by_role("button").all_inner_texts() == ["Log out"]  # a form that needs no script


WIRED = """async (job) => {
    window.shown = [];
    const Real = window.Notification;
    window.Notification = class extends Real {
        constructor(title, options) { super(title, options); window.shown.push([title, options.body]); }
    };
    const { notify } = await import("/static/notify.js");
    document.getElementById("notify").remove(); // the page's own
    const button = document.createElement("button");
    button.id = "notify";
    button.hidden = true;
    document.body.append(button);
    window.told = notify(button, job);
}"""


def wired(page: Page, job: dict[str, Any]) -> None:
    page.evaluate(WIRED, job)


def test_the_browser_says_when_a_job_ends_or_is_held_once_it_was_asked_to(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    job = site.services.jobs.show(feed.job_id).model_dump(mode="json")
    page = opened(f"/jobs/{feed.job_id}", permissions=["notifications"])
    wired(page, job)
    button = page.locator("#notify")
    expect(button).to_have_text("Notify me")
    page.evaluate("job => window.told(job)", job | {"status": "failed", "error": "unheard"})
    page.evaluate("job => window.told(job)", job)
    button.click()
    expect(button).to_have_text("Notifications on")
    expect(button).to_have_attribute("aria-pressed", "true")
    for change in (
        {"status": "paused", "reason": "Paused by a user", "reason_code": "user"},
        {"status": "running"},
        {"status": "paused", "reason": "Paused once the round was done", "reason_code": "user"},
        {"status": "running"},
        {"status": "paused", "reason": "Paused: the disk is full", "reason_code": "disk"},
        {"status": "running"},
        {"status": "running", "version": 30},
        {"status": "failed", "error": "diverged at version 3\n\nTraceback"},
        {"status": "running"},
        {"status": "completed", "accuracy": 0.9712},
        {"status": "completed", "accuracy": 0.9712},
    ):
        page.evaluate("job => window.told(job)", job | change)
    texts = ["Paused: the disk is full", "Failed: diverged at version 3", "Completed, 97.12 % test accuracy"]
    assert page.evaluate("() => window.shown") == [[job["title"], text] for text in texts]


@in_every_window
def test_the_wish_to_be_notified_is_kept_for_each_job(site: Site, opened: Any) -> None:
    feeds = [under_way(site, 20) for _ in range(2)]
    jobs = [site.services.jobs.show(feed.job_id).model_dump(mode="json") for feed in feeds]
    page = opened(f"/jobs/{jobs[0]['id']}", permissions=["notifications"])
    wired(page, jobs[0])
    page.locator("#notify").click()
    expect(page.locator("#notify")).to_have_text("Notifications on")
    page.reload()
    wired(page, jobs[0])
    expect(page.locator("#notify")).to_have_text("Notifications on")
    page.locator("#notify").click()
    expect(page.locator("#notify")).to_have_text("Notify me")
    page.goto(f"{site.url}/jobs/{jobs[1]['id']}")
    wired(page, jobs[1])
    expect(page.locator("#notify")).to_have_text("Notify me")


STUB = """window.shown = [];
window.Notification = class {
    static permission = "granted";
    static requestPermission = async () => "granted";
    constructor(title, { body }) { window.shown.push([title, body]); }
    addEventListener() {}
};"""


def test_a_job_that_fails_before_the_readers_eyes_is_said_so_by_the_browser(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.add_init_script(STUB)
    page.reload()
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Notify me").click()
    expect(page.get_by_role("button", name="Notifications on")).to_be_visible()
    feed.tell("failed", error="no space left on the disk", detail="")
    expect(page).to_have_title(re.compile("^Failed · "))
    assert page.evaluate("() => window.shown") == [["mnist, lenet5", "Failed: no space left on the disk"]]


def test_where_the_browser_has_no_notifications_nothing_is_offered(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.add_init_script("delete window.Notification;")
    page.reload()
    feed.tell("failed", error="no space left on the disk", detail="")
    expect(page).to_have_title(re.compile("^Failed · "))
    assert page.evaluate("() => 'Notification' in window") is False
    expect(page.locator("#notify")).to_be_hidden()


@in_every_window
def test_where_the_page_is_not_served_securely_it_says_why_there_are_no_notifications(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#notify-why")).to_be_hidden()
    page.add_init_script("Object.defineProperty(window, 'isSecureContext', { value: false });")
    page.reload()
    page.get_by_role("button", name="More").click()
    expect(page.locator("#notify-why")).to_have_text("Notifications need HTTPS or a page on localhost")
    expect(page.locator("#notify-why")).to_be_visible()
    expect(page.locator("#notify")).to_be_hidden()
    other = under_way(site, 20)
    page.goto(f"{site.url}/jobs/{other.job_id}")
    page.get_by_role("button", name="More").click()
    expect(page.locator("#notify-why")).to_be_visible()
    site.services.jobs.cancel(other.job_id)
    expect(page.locator("#notify-why")).to_be_hidden()  # there is nothing more to hear
    page.goto(f"{site.url}/jobs/{feed.job_id}")
    page.get_by_role("button", name="More").click()
    expect(page.locator("#notify-why")).to_be_visible()
