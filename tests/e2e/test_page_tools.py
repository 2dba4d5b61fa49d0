"""What readers of the pages do: look their own way, compare, invite a machine, make a job, ask why one was dropped."""

import secrets
from typing import Any

import httpx2
import pytest
from playwright.sync_api import expect
from staging import arrived, start, under_way
from watching import Site, forgive, in_every_window, problems

from api.database import now_ms
from api.services import views
from api.services.machines import remember
from computeshare.keys import JobKeys
from computeshare.queue import WorkerInfo, register
from computeshare.rounds import RoundStore

pytestmark = pytest.mark.e2e


@in_every_window
def test_the_way_of_looking_is_kept_in_the_address(site: Site, opened: Any) -> None:
    feed = under_way(site, 60)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_label("Across").select_option("time")
    page.get_by_label("Smoothing").fill("0.6")
    page.get_by_label("Logarithmic").check()
    expect(page.locator("#view output")).to_have_text("0.60")
    assert set(page.url.partition("?")[2].split("&")) == {"across=time", "log=1", "smooth=0.6"}
    page.reload()
    expect(page.get_by_label("Across")).to_have_value("time")
    expect(page.get_by_label("Logarithmic")).to_be_checked()
    legend = page.locator("[data-plot=loss] .u-legend")
    expect(legend).to_contain_text("After")
    expect(legend).to_contain_text("Training, smoothed")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "60")
    page.get_by_label("Smoothing").fill("0")
    page.get_by_label("Logarithmic").uncheck()
    page.get_by_label("Across").select_option("version")
    assert page.url == f"{site.url}/jobs/{feed.job_id}"
    expect(legend).not_to_contain_text("smoothed")


def test_smoothing_begins_at_the_first_value_and_follows_the_others(opened: Any) -> None:
    found = opened("/").evaluate(
        """async () => {
          const { smoothed } = await import("/static/series.js");
          return [smoothed([4, 4, 4], 0.9), smoothed([0, 10, 10, 10, 10, 10], 0.5), smoothed([1, 2, 3], 0)];
        }"""
    )
    assert found[0] == pytest.approx([4, 4, 4])
    assert found[1] == sorted(found[1]) and 9 < found[1][-1] < 10
    assert found[2] == [1, 2, 3]


def test_speed_and_traffic_grow_with_the_versions(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=speed]")).to_have_attribute("data-points", "40")
    feed.versions(10)
    expect(page.locator("[data-plot=speed]")).to_have_attribute("data-points", "50")
    expect(page.locator("[data-plot=bytes]")).to_have_attribute("data-points", "41")


@in_every_window
def test_finishing_a_round_pauses_the_job_with_the_next_version(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="Finish this round").click()
    expect(page.locator("#state")).to_contain_text("Pauses once this round is done")
    page.get_by_role("button", name="Go on after all").click()
    expect(page.locator("#state")).not_to_contain_text("Pauses once")
    page.get_by_role("button", name="Finish this round").click()
    expect(page.get_by_role("button", name="Go on after all")).to_be_visible()
    feed.versions(1)
    expect(page.locator("#state")).to_contain_text("Paused by a user, once the round was done")
    expect(page.locator("#timeline")).to_contain_text("To be paused after this round, by a user")


@in_every_window
def test_a_priority_is_changed_on_the_page(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_label("Priority").fill("7")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("#priority [role=status]")).to_have_text("Priority 7 is set")
    expect(page.locator("#timeline")).to_contain_text("Priority changed from 0 to 7 by a user")
    assert site.services.jobs.show(feed.job_id).priority == 7
    page.get_by_label("Priority").fill("700")
    expect(page.locator("#priority [role=status]")).to_have_text("")
    page.get_by_role("button", name="Set").click()
    assert page.get_by_label("Priority").evaluate("field => field.validity.rangeOverflow")
    assert site.services.jobs.show(feed.job_id).priority == 7


def test_the_field_of_the_priority_follows_but_for_a_reader_who_is_at_it(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    field, timeline = page.get_by_label("Priority"), page.locator("#timeline")
    site.services.jobs.prioritise(feed.job_id, 3)
    expect(field).to_have_value("3")
    field.fill("12")
    site.services.jobs.prioritise(feed.job_id, 4)
    expect(timeline).to_contain_text("Priority changed from 3 to 4")
    expect(field).to_have_value("12")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.locator("#priority [role=status]")).to_have_text("Priority 12 is set")
    site.services.jobs.prioritise(feed.job_id, 5)
    expect(field).to_have_value("5")
    expect(page.locator("#priority [role=status]")).to_have_text("")


@in_every_window
def test_a_ban_is_lifted_on_the_page(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    RoundStore(site.redis, feed.job_id).publish("{}")
    keys = JobKeys(feed.job_id)
    site.redis.hset(keys.banned(), "w2laptop", "checksum")
    site.redis.hset(keys.strikes(), "w2laptop", 5)
    feed.tell("banned", worker="w2laptop", session="w2laptop-1", strikes=5, reason="checksum differs")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#workers")).to_contain_text("Banned: checksum differs")
    page.get_by_role("button", name="Lift the ban").click()
    expect(page.locator("#workers")).not_to_contain_text("Banned")
    assert not site.redis.exists(keys.banned(), keys.strikes())


def test_what_is_pressed_is_not_replaced_before_it_is_let_go(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.tell("banned", worker="w2laptop", session="w2laptop-1", strikes=5, reason="checksum differs")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="Lift the ban").hover()
    page.mouse.down()
    for worker in ("w3mini", "w4mini"):  # once the second is asked for, the first has been dealt with
        with page.expect_response(f"**/jobs/{feed.job_id}/parts*"):
            feed.joined(worker, "mac-mini", "CPU, 4 cores")
    expect(page.locator("#workers")).not_to_contain_text("mac-mini")
    page.mouse.up()
    expect(page.locator("#workers")).to_contain_text("mac-mini")
    expect(page.locator("#workers")).not_to_contain_text("Banned")


@in_every_window
def test_a_copied_command_is_what_was_shown(site: Site, opened: Any) -> None:
    feed = under_way(site, 20, name='it\'s "quoted" $HOME')
    feed.checkpoint()
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_text("Command line").click()
    shown = page.locator("#shown-3").text_content()
    page.locator("[data-copy=shown-3]").click()
    expect(page.locator("[data-copy=shown-3]")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == shown
    assert "it'\"'\"'s" in shown
    page.locator("#copy-link").click()
    expect(page.locator("#copy-link")).to_have_text("Copied")
    assert page.evaluate("() => navigator.clipboard.readText()") == page.url
    page.get_by_role("button", name="copy the sha256 of version 20").click()
    (checkpoint,) = site.services.history.checkpoints(feed.job_id).items
    page.wait_for_function("async digest => await navigator.clipboard.readText() === digest", arg=checkpoint.sha256)


@in_every_window
def test_an_invite_is_counted_down_until_a_machine_has_taken_it_up(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_text("Add a machine").click()
    page.get_by_role("button", name="Make an invite").click()
    command = page.locator("#invite-command")
    expect(command).to_contain_text("computeshare-worker --queue mnist --join http")
    expect(page.locator("#invite-status")).to_have_text("Waiting for the machine")
    expect(page.locator("#invite-left")).to_contain_text("left")
    assert page.locator("#invite-qr").evaluate("one => one.naturalWidth") > 50
    link = command.text_content().rpartition(" ")[2]
    name = f"anna's mac {secrets.token_hex(3)}"
    assert httpx2.post(link, json={"name": name}).is_success
    expect(page.locator("#invite-status")).to_have_text(f"{name} has taken it up, and is not heard of yet")
    heard_of(site, name, "mnist")
    expect(page.locator("#invite-status")).to_have_text(f"{name} has joined")


def heard_of(site: Site, name: str, queue: str) -> None:
    worker = WorkerInfo(secrets.token_hex(6), name, "cpu", (queue,), {}, 1, "home", 1, last_seen_ms=now_ms())
    with site.services.database.writing() as connection:
        remember(connection, worker, now_ms())


@in_every_window
def test_a_machine_is_invited_from_the_page_of_the_workers_for_a_queue_that_is_typed(site: Site, opened: Any) -> None:
    page = opened("/workers")
    page.get_by_text("Add a machine").click()
    expect(page.locator("#invite-queue")).to_have_value("default")
    page.locator("#invite-queue").fill("lonely")
    page.get_by_role("button", name="Make an invite").click()
    expect(page.locator("#invite-command")).to_contain_text("computeshare-worker --queue lonely --join http")


def test_what_an_invite_links_to_can_be_read_without_logging_in(site: Site, browser: Any) -> None:
    made, code = site.services.invites.create("mnist", 15)
    page = browser.new_page()
    page.goto(f"{site.url}/join/{code}")
    expect(page.locator("#command")).to_have_text(f"computeshare-worker --queue mnist --join {site.url}/join/{code}")
    assert site.services.invites.show(made.id).status == "pending"
    page.close()


@in_every_window
def test_a_dropped_submission_says_why_and_where_its_time_went(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.submission("w1studio", 3, "stale")
    feed.submission("w2laptop", 5, "fenced")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("link", name="1 fenced").click()
    rows = page.locator(".submissions tbody tr")
    expect(rows).to_have_count(1)
    expect(rows).to_contain_text("a newer session of the same worker had taken over")
    expect(rows).to_contain_text("computing 0.004")
    page.get_by_label("Outcome").select_option("")
    page.get_by_label("Worker").select_option("w2laptop")
    page.get_by_role("button", name="Show").click()
    expect(rows.first).to_contain_text("laptop")
    assert "outcome=&worker=w2laptop" in page.url
    feed.submission("w2laptop", 7, "stale")
    expect(rows.first).to_contain_text("Dropped")


@in_every_window
def test_ticked_jobs_are_compared(site: Site, opened: Any) -> None:
    one = under_way(site, 40, name="first of two")
    other = under_way(site, 60, name="second of two", optimizer={"name": "Adam", "lr": 0.001})
    page = opened("/")
    for feed in (one, other):
        page.locator(f"#tick-{feed.job_id}").check()
    later = start(site, name="came meanwhile")
    expect(page.locator(f"#tick-{later.job_id}")).to_be_visible()  # the list is another, and keeps what was ticked
    for feed in (one, other):
        expect(page.locator(f"#tick-{feed.job_id}")).to_be_checked()
    page.get_by_role("button", name="Compare those ticked").click()
    expect(page.locator("h1")).to_have_text("2 jobs compared")
    expect(page.locator("#results")).to_contain_text("60 of 1,000")
    expect(page.locator(".compared code")).to_have_text(["optimizer.name", "optimizer.lr", "optimizer.momentum"])
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "60")
    expect(page.locator("[data-plot=loss] .u-legend")).to_contain_text("first of two: training")
    other.versions(20)
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "80")
    expect(page.locator("#results")).to_contain_text("80 of 1,000")


@in_every_window
def test_ticks_outlive_pages_filters_and_jobs_that_come(
    site: Site, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(views, "PER_PAGE", 2)
    queue = f"ticks-{secrets.token_hex(3)}"
    oldest, _, newest = (start(site, queue=queue, name=name).job_id for name in ("oldest", "between", "newest"))
    page = opened(f"/?queue={queue}")
    compare, ticked = page.locator("#compare"), page.locator("#ticked")
    expect(compare).to_be_disabled()
    expect(ticked).to_have_text("two to six")
    page.locator(f"#tick-{newest}").check()
    expect(ticked).to_have_text("1 job ticked, at least 2 are compared")
    expect(compare).to_be_disabled()
    page.get_by_role("link", name="Older jobs").click()
    expect(ticked).to_have_text("1 job ticked, at least 2 are compared, 1 not shown here")
    page.locator(f"#tick-{oldest}").check()
    expect(compare).to_be_enabled()
    page.go_back()
    expect(page.locator(f"#tick-{newest}")).to_be_checked()
    expect(ticked).to_have_text("2 of 6 jobs ticked, 1 not shown here")
    for _ in range(2):
        start(site, queue=queue)
    expect(page.locator(f"#tick-{newest}")).to_have_count(0)
    expect(ticked).to_have_text("2 of 6 jobs ticked, 2 not shown here")
    page.locator("#filter-queued").click()
    page.reload()
    expect(ticked).to_have_text("2 of 6 jobs ticked, 2 not shown here")
    compare.click()
    expect(page.locator(".compared thead a")).to_have_text(["newest", "oldest"])
    page.go_back()
    page.locator(".tick input").first.check()
    expect(ticked).to_have_text("3 of 6 jobs ticked, 2 not shown here")


def test_a_seventh_tick_is_one_too_many(site: Site, opened: Any) -> None:
    queue = f"ticks-{secrets.token_hex(3)}"
    made = [start(site, queue=queue).job_id for _ in range(7)]
    page = opened(f"/?queue={queue}")
    for job_id in made:
        page.locator(f"#tick-{job_id}").check()
    expect(page.locator("#ticked")).to_have_text("7 jobs ticked, at most 6 are compared")
    expect(page.locator("#compare")).to_be_disabled()
    page.locator(f"#tick-{made[3]}").uncheck()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("6 jobs compared")
    page.go_back()
    page.get_by_role("button", name="Untick all").click()
    expect(page.locator("#ticked")).to_have_text("two to six")
    expect(page.locator("#compare")).to_be_disabled()
    expect(page.locator(".tick input:checked")).to_have_count(0)
    expect(page.get_by_role("button", name="Untick all")).to_be_hidden()


def test_jobs_are_compared_without_javascript(site: Site, opened: Any) -> None:
    queue = f"ticks-{secrets.token_hex(3)}"
    made = [start(site, queue=queue).job_id for _ in range(2)]
    page = opened(f"/?queue={queue}", java_script_enabled=False)
    forgive(page, "/compare*")
    page.locator(f"#tick-{made[0]}").check()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("Tick more jobs")
    expect(page.locator("main")).to_contain_text("2 to 6 jobs can stand side by side; ticked: 1")
    page.get_by_role("link", name="Back to the list").click()
    for job_id in made:
        page.locator(f"#tick-{job_id}").check()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("2 jobs compared")


@in_every_window
def test_a_closed_panel_with_something_wrong_in_it_opens_where_that_is(site: Site, opened: Any) -> None:
    page = opened("/new")
    forgive(page, "/new")
    panel, more = page.locator("details.panel"), page.get_by_label("Any other field")
    panel.locator("summary").click()
    more.fill("[1]")
    expect(page.locator("#more-error")).to_contain_text("give an object of fields")
    panel.locator("summary").click()
    expect(more).to_be_hidden()
    page.get_by_label("Name").fill("still wrong")
    expect(more).to_be_visible()
    panel.locator("summary").click()
    expect(more).to_be_hidden()
    page.get_by_role("link", name="Any other field, as JSON").click()
    expect(more).to_be_focused()
    panel.locator("summary").click()
    page.get_by_role("button", name="Create the job").click()
    page.wait_for_function("() => performance.getEntriesByType('navigation')[0].name.endsWith('/new')")
    expect(more).to_have_value("[1]")
    expect(more).to_be_focused()
    expect(more).to_be_in_viewport()


def test_what_the_browser_itself_finds_wrong_is_not_left_in_a_closed_panel(site: Site, opened: Any) -> None:
    page = opened("/new")
    page.route("**/new/check", lambda route: route.fulfill(body=""))  # the server has not said it yet
    page.locator("details.panel summary").click()
    page.get_by_label("Seed").fill("1.5")
    page.locator("details.panel summary").click()
    page.get_by_role("button", name="Create the job").click()
    expect(page.get_by_label("Seed")).to_be_focused()
    expect(page.get_by_label("Seed")).to_be_in_viewport()


@in_every_window
def test_the_form_knows_the_queues_and_says_which_of_them_no_worker_serves(site: Site, opened: Any) -> None:
    served, waiting = (f"{word}-{secrets.token_hex(3)}" for word in ("served", "waiting"))
    register(site.redis, WorkerInfo(secrets.token_hex(6), "studio", "cpu", (served,), {}, 1, "home", 1))
    start(site, queue=waiting)
    page = opened("/new")
    found = page.locator("#queues option").evaluate_all("all => all.map((one) => one.value)")
    assert {served, waiting} <= set(found)
    hint = page.locator("#queue-unserved")
    page.get_by_label("Queue").fill(waiting)
    expect(hint).to_have_text("No worker serves this queue yet")
    expect(page.locator("#made")).to_contain_text("parameters")  # the job can be made all the same
    page.get_by_label("Queue").fill(served)
    expect(hint).to_have_text("")
    page.get_by_label("Queue").fill("no such / queue")
    expect(page.locator("#queue-error")).to_contain_text("pattern")
    expect(hint).to_have_text("")


@in_every_window
def test_the_form_says_what_is_wrong_as_it_is_filled_in_and_makes_the_job(site: Site, opened: Any) -> None:
    page = opened("/")
    page.get_by_role("link", name="New job").click()
    page.get_by_label("Model").select_option("lenet5")
    expect(page.locator("#made")).to_contain_text("needs an input of at least")
    page.get_by_label("Data set").select_option("mnist")
    expect(page.locator("#made")).to_contain_text("61,706 parameters")
    page.get_by_label("Strategy").select_option("local")
    expect(page.get_by_label("Inner steps")).to_be_visible()
    expect(page.get_by_label("Momentum (sync, async)")).not_to_be_visible()
    page.get_by_label("Inner steps").fill("0")
    expect(page.locator("#strategy-inner-steps-error")).to_contain_text("greater than or equal to 1")
    page.get_by_label("Inner steps").fill("10")
    page.get_by_label("Name").fill("made by hand")
    page.get_by_label("How values travel").select_option("auto")
    expect(page.get_by_label("Updates, up")).not_to_be_visible()
    expect(page.locator("#ways")).to_contain_text('"codec": "auto"')
    page.get_by_role("button", name="Create the job").click()
    expect(page.locator("h1")).to_have_text("made by hand")
    made = site.services.jobs.show(page.url.rpartition("/")[2])
    assert (made.spec["strategy"]["inner_steps"], made.spec["codec"]) == (10, "auto")
    page.get_by_role("link", name="Clone").click()
    expect(page.get_by_label("Name")).to_have_value("made by hand")
    expect(page.get_by_label("Inner steps")).to_have_value("10")


@in_every_window
def test_pages_are_accessible(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    feed.submission("w1studio", 3, "stale")
    feed.checkpoint()
    arrived(site, feed)
    failed = under_way(site, 20)
    failed.tell("failed", error="diverged at version 20", detail="Traceback")
    waiting = start(site, queue="lonely")
    arrived(site, failed)
    _, code = site.services.invites.create("mnist", 15)
    paths = ["/", "/workers", "/webhooks", "/new", f"/compare?job={feed.job_id}&job={failed.job_id}", f"/join/{code}"]
    paths += [f"/jobs/{one.job_id}" for one in (feed, failed, waiting)]
    paths += [f"/jobs/{feed.job_id}/{part}" for part in ("submissions", "timeline")]
    paths.append("/jobs/nosuchid")
    page = opened("/", reduced_motion="reduce")
    forgive(page, paths[-1])
    found = {}
    for path in paths:
        page.goto(site.url + path)
        page.evaluate("() => document.querySelectorAll('details:not([name])').forEach(one => { one.open = true; })")
        if wrong := problems(page):
            found[path] = wrong
    page.goto(site.url + "/webhooks")
    page.get_by_role("button", name="Add a webhook").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    if wrong := problems(page):
        found["a dialog"] = wrong
    assert found == {}
