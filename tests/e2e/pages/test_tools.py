"""What readers of the pages do: look their own way, compare, invite a machine, make a job, ask why one was dropped."""

import re
import secrets
from typing import Any

import httpx2
import pytest
from PIL import Image
from playwright.sync_api import expect

from api.database import now_ms
from api.errors import NotFound
from api.fleet.worker_wheel import PATH
from api.pages import views
from api.scheduler.machines import remember
from api.tables import WorkerStat
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.queue import WorkerInfo, register, unregister
from computeshare.runtime.signatures import SigningKey
from computeshare.worker.invite import introduction
from tests.support.browser import Site, Window, forgive, in_every_window, problems
from tests.support.staged_jobs import arrived, start, under_way
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e


@in_every_window
def test_the_way_of_looking_is_kept_in_the_address(site: Site, opened: Any) -> None:
    feed = under_way(site, 60)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_label("X axis").select_option("time")
    page.get_by_label("Smoothing").fill("0.6")
    page.get_by_label("Log scale").check()
    expect(page.locator("#view output")).to_have_text("0.60")
    assert set(page.url.partition("?")[2].split("&")) == {"across=time", "log=1", "smooth=0.6"}
    page.reload()
    expect(page.get_by_label("X axis")).to_have_value("time")
    expect(page.get_by_label("Log scale")).to_be_checked()
    legend = page.locator("[data-plot=loss] .u-legend")
    expect(legend).to_contain_text("Time")
    expect(legend).to_contain_text("Training, smoothed")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "60")
    page.get_by_label("Smoothing").fill("0")
    page.get_by_label("Log scale").uncheck()
    page.get_by_label("X axis").select_option("version")
    assert page.url == f"{site.url}/jobs/{feed.job_id}"
    expect(legend).not_to_contain_text("smoothed")


def drag(page: Any, plot: str, start: float, end: float) -> None:
    """Select a part of a plot's width."""
    box = page.locator(f"[data-plot={plot}] .u-over").bounding_box()
    y = box["y"] + box["height"] / 2
    page.mouse.move(box["x"] + start * box["width"], y)
    page.mouse.down()
    page.mouse.move(box["x"] + end * box["width"], y, steps=4)
    page.mouse.up()


def spans(page: Any) -> set[tuple[int, ...]]:
    """The ranges of x that the plots show."""
    told = page.locator("[data-plot]").evaluate_all("all => all.map((one) => one.dataset.span)")
    return {tuple(int(number) for number in one.split()) for one in told}


@pytest.mark.parametrize("window", [Window(1280, "dark"), Window(390, "light")], ids=str)
def test_dragging_in_a_plot_zooms_all_and_new_data_leaves_that(site: Site, opened: Any, window: Window) -> None:
    feed = under_way(site, 100)
    page = opened(f"/jobs/{feed.job_id}")
    reset = page.get_by_role("button", name="Reset zoom")
    page.locator("[data-plot=loss]").scroll_into_view_if_needed()
    wait_until(lambda: spans(page) == {(0, 100)})
    expect(reset).to_be_hidden()
    drag(page, "loss", 0.25, 0.75)
    ((low, high),) = spans(page)
    assert 20 <= low <= 26 and 74 <= high <= 80
    assert page.url.endswith(f"?zoom={low}-{high}")
    assert page.locator(".u-select").evaluate_all("all => all.every((one) => one.offsetWidth === 0)")
    feed.versions(20)
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "120")
    assert spans(page) == {(low, high)}
    page.reload()
    expect(reset).to_be_visible()
    assert spans(page) == {(low, high)}
    reset.click()
    assert spans(page) == {(0, 120)}
    expect(reset).to_be_hidden()
    page.locator("[data-plot=accuracy]").scroll_into_view_if_needed()
    drag(page, "accuracy", 0.5, 0.9)
    assert len(spans(page)) == 1 and spans(page) != {(0, 120)}
    page.locator("[data-plot=accuracy] .u-over").dblclick()
    assert spans(page) == {(0, 120)}
    assert page.url == f"{site.url}/jobs/{feed.job_id}"
    drag(page, "accuracy", 0.5, 0.9)
    page.get_by_label("X axis").select_option("time")  # other units, so all of it
    expect(reset).to_be_hidden()
    assert page.url.endswith("?across=time")


def test_one_cursor_goes_through_all_plots(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    page = opened(f"/jobs/{feed.job_id}")

    def under_the_cursor() -> list[str]:
        box = page.locator("[data-plot=loss] .u-over").bounding_box()
        for above in (20, 21):  # a plot that is laid out anew forgets a cursor that stands still
            page.mouse.move(box["x"] + box["width"] / 2, box["y"] + above)
        plots = ("loss", "accuracy", "speed", "bytes")
        return [page.locator(f"[data-plot={plot}] .u-legend .u-value").first.text_content() for plot in plots]

    wait_until(lambda: under_the_cursor() == ["20"] * 4)


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
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Finish this round").click()
    expect(page.locator("#state")).to_contain_text("Pauses after this round")
    page.get_by_role("button", name="Don't pause").click()
    expect(page.locator("#state")).not_to_contain_text("Pauses after")
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Finish this round").click()
    expect(page.get_by_role("button", name="Don't pause")).to_be_visible()
    feed.versions(1)
    expect(page.locator("#state")).to_contain_text("Paused by the owner, once the round was done")
    expect(page.locator("#timeline")).to_contain_text("Pause after this round requested by the owner")


@in_every_window
def test_a_menu_works_by_keyboard_and_closes_by_escape_and_a_click_elsewhere(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    more, menu = page.locator("#more"), page.locator("#menu")
    expect(page.locator(".actions > button, #actions > *")).to_have_text(["Pause", "More"])
    row = [box["y"] for box in (page.locator(one).bounding_box() for one in ("#pause", "#more"))]
    assert len(set(row)) == 1, "the header's buttons wrap"
    links = page.locator(".top nav a").evaluate_all("links => links.map((link) => link.getBoundingClientRect().y)")
    assert len(set(links)) == 1, "the links to the other pages wrap"
    for close in (lambda: page.keyboard.press("Escape"), page.get_by_role("heading", level=1).click):
        more.click()
        box = menu.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"]
        assert box["y"] > more.bounding_box()["y"]
        close()
        expect(menu).not_to_be_visible()
    more.focus()
    page.keyboard.press("Enter")
    expect(menu).to_be_visible()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.closest('#menu') !== null")
    page.keyboard.press("Escape")
    expect(more).to_be_focused()
    more.click()
    expect(menu).to_be_visible()


def test_an_open_menu_stays_open_while_the_page_changes_around_it(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.locator("#more").click()
    page.evaluate("() => { document.querySelector('#menu-actions').firstElementChild.textContent = 'old'; }")
    with page.expect_response("**/parts*"):
        feed.joined("w3mini", "mac-mini", "CPU")
    expect(page.locator("#menu-actions > button").first).to_have_text("Copy link")
    expect(page.get_by_role("button", name="8 hours")).to_be_in_viewport(ratio=1)


@in_every_window
def test_a_job_is_renamed_on_its_page(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Rename").click()
    field = page.locator("#rename").get_by_label("Name")
    expect(field).to_have_value("mnist, lenet5")
    field.fill("the good one")
    field.press("Enter")
    expect(page.locator("h1")).to_have_text("the good one")
    expect(page.locator("#timeline")).to_contain_text(
        'Name changed from "mnist, lenet5" to "the good one" by the owner'
    )
    assert site.services.jobs.show(feed.job_id).name == "the good one"
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Rename").click()
    expect(field).to_have_value("the good one")
    page.get_by_role("button", name="Close").click()


@in_every_window
def test_notes_are_edited_on_the_page_by_keyboard(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    notes, field = page.locator("#notes"), page.locator("#edit-notes").get_by_label("Notes")
    expect(notes).not_to_be_visible()
    page.locator("#more").focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Edit notes").focus()
    page.keyboard.press("Enter")
    expect(field).to_be_focused()
    page.keyboard.type("Rate <halved>")
    page.keyboard.press("Enter")
    page.keyboard.type("and twice the batch")
    box = page.locator("#edit-notes").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= page.viewport_size["width"] and not problems(page)
    page.keyboard.press("Tab")
    page.keyboard.type("wide, x2")
    for _ in range(2):  # past Close
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    expect(notes).to_have_text("Rate <halved>\nand twice the batch")
    expect(page.locator("#tags a")).to_have_text(["wide", "x2"])
    expect(page.locator("#timeline")).to_contain_text('Tags set to "wide, x2" by the owner')
    assert site.services.jobs.show(feed.job_id).spec["notes"] == "Rate <halved>\nand twice the batch"
    expect(page.locator("#more")).to_be_focused()
    site.services.jobs.update(feed.job_id, notes="edited elsewhere")
    expect(notes).to_have_text("edited elsewhere")
    page.locator("#more").click()
    page.get_by_role("button", name="Edit notes").click()
    expect(field).to_have_value("edited elsewhere")


@in_every_window
def test_the_list_shows_curves_times_and_tags_by_which_it_is_filtered(site: Site, opened: Any) -> None:
    tag = f"baseline-{secrets.token_hex(3)}"
    feed = under_way(site, 100, name="tagged and scored", tags=(tag, "wide"))
    feed.now_ms = now_ms() - 1500
    feed.versions(20)
    arrived(site, feed)
    other = under_way(site, 20, name="another one")
    site.services.jobs.cancel(other.job_id)
    page = opened("/?search=tagged and scored")
    row = page.locator("tbody tr").filter(has=page.locator(f"#job-{feed.job_id}"))
    expect(row).to_contain_text(re.compile(r"120 of 1,000, \d+ (s|min)[^,]* left"))
    points = row.locator(".curve polyline").get_attribute("points").split()
    assert len(points) == 5 and points[0].endswith(",28.0") and points[-1] == "100.0,2.0"
    row.get_by_role("link", name=tag).click()
    expect(page.locator("#every-tag")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(1)
    assert f"tag={tag}" in page.url
    page.goto(f"{site.url}/?search={other.job_id}")
    expect(page.locator("tbody tr")).to_contain_text(re.compile(r"20 of 1,000, took \d+ (s|min)"))
    page.goto(f"{site.url}/?tag=nobodys")
    expect(page.locator(".empty")).to_contain_text("No jobs tagged nobodys.")


@in_every_window
def test_several_jobs_are_cancelled_and_deleted_at_once_after_a_question(site: Site, opened: Any) -> None:
    feeds = [under_way(site, 20, name=f"one of several {number}") for number in range(3)]
    page = opened("/?search=one of several")
    expect(page.locator("#cancel-ticked")).not_to_be_visible()
    for feed in feeds[:2]:
        page.locator(f"#tick-{feed.job_id}").check()
    page.get_by_role("button", name="Cancel selected").click()
    expect(page.locator("#many-heading")).to_have_text("Cancel 2 jobs?")
    page.get_by_role("button", name="Cancel 2 jobs").click()
    expect(page.locator("#many")).not_to_be_visible()
    expect(page.locator(".state-cancelled:visible")).to_have_count(2)
    assert [site.services.jobs.show(feed.job_id).status for feed in feeds] == ["cancelled", "cancelled", "running"]
    for feed in feeds[:2]:
        page.locator(f"#tick-{feed.job_id}").check()
    page.evaluate(
        """() => {
          const ask = fetch;
          let whole = false;
          window.fetch = async (path, options) => {
            if (options?.method !== "DELETE" || whole) return ask(path, options);
            whole = true;
            throw new Error("the line is cut");
          };
        }"""
    )
    page.get_by_role("button", name="Delete selected").click()
    page.get_by_role("button", name="Delete 2 jobs").click()
    expect(page.locator("#many-problem")).to_have_text("the line is cut")
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("button", name="Delete 1 job", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(1)
    expect(page.locator("#ticked")).to_be_empty()
    site.services.jobs.cancel(feeds[2].job_id)
    site.services.jobs.delete(feeds[2].job_id)


@in_every_window
def test_the_timeline_folds_runs_and_shows_what_a_reader_looks_for(site: Site, opened: Any) -> None:
    feed = under_way(site, 200)
    feed.tell("refused", worker="w2laptop", nonce="n", micro_batch=7, base="", reason="checksum differs")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    timeline = page.locator("#timeline .timeline > li")
    run = page.locator("#timeline .run")
    expect(run.locator("summary")).to_contain_text("10 checkpoints and scores, newest: Version 200 scored")
    expect(run.get_by_text("Version 20 scored")).not_to_be_visible()
    run.locator("summary").click()
    expect(run.get_by_text("Version 20 scored")).to_be_visible()
    page.get_by_text("Workers", exact=True).and_(page.locator(".choices label")).click()
    expect(timeline.filter(visible=True)).to_have_count(2)
    page.locator(".choices label").filter(has_text="Problems").click()
    expect(timeline.filter(visible=True)).to_contain_text(["checksum differs"])
    feed.left("w2laptop", "the machine went to sleep")
    expect(page.locator("#timeline")).to_contain_text("the machine went to sleep")
    expect(timeline.filter(visible=True)).to_have_count(1)
    page.locator("#all-events").click()
    page.locator("#filter-workers").click()
    expect(page.locator("#timeline li")).to_have_count(3)
    assert "events=workers" in page.url


@in_every_window
def test_links_to_sections_stay_in_sight_and_a_failure_opens_the_logs(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    page = opened(f"/jobs/{feed.job_id}")
    sections = page.get_by_role("navigation", name="Sections of this page")
    sections.get_by_role("link", name="Ledger").click()
    expect(page.locator("#ledger-heading")).to_be_in_viewport()
    expect(sections).to_be_in_viewport()
    top, below = (page.locator(one).bounding_box() for one in (".sections", "#ledger-heading"))
    assert below["y"] >= top["y"] + top["height"], "the links cover the heading"
    expect(page.locator("#logs")).not_to_have_attribute("open", "")
    feed.tell("failed", error="no space left on the disk", detail="")
    expect(page.locator("#logs")).to_have_attribute("open", "")
    page.reload()
    expect(page.locator("#logs")).to_have_attribute("open", "")


@in_every_window
def test_a_finished_job_is_deleted_from_its_page_which_asks_once(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    site.services.jobs.cancel(feed.job_id)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("dialog")).to_contain_text("mnist, lenet5, its checkpoints and its log")
    page.get_by_role("button", name="Keep job").click()
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("button", name="Delete job").click()
    expect(page).to_have_url(f"{site.url}/")
    with pytest.raises(NotFound):
        site.services.jobs.show(feed.job_id)


@in_every_window
def test_jobs_are_renamed_and_deleted_in_the_list(site: Site, opened: Any) -> None:
    queue = f"tidy-{secrets.token_hex(3)}"
    kept, gone = (start(site, queue=queue, name=name).job_id for name in ("kept", "gone"))
    site.services.jobs.cancel(gone)
    page = opened(f"/?queue={queue}")
    for job_id in (kept, gone):
        page.locator(f"#tick-{job_id}").check()
    page.get_by_role("button", name="Actions for kept").click()
    expect(page.locator(f"#menu-{kept} button")).to_have_text(["Rename"])  # it has not ended
    page.get_by_role("button", name="Rename").click()
    page.locator("#rename").get_by_label("Name").fill("well kept")
    page.locator("#rename").get_by_role("button", name="Rename").click()
    expect(page.locator(f"#job-{kept}")).to_have_text("well kept")
    page.get_by_role("button", name="Actions for gone").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    page.get_by_role("button", name="Delete job").click()
    expect(page.locator(f"#job-{gone}")).to_have_count(0)
    expect(page.locator("#ticked")).to_have_text("1 job selected, at least 2 needed")


@in_every_window
def test_the_list_is_searched_and_sorted_as_one_types_and_the_address_keeps_it(site: Site, opened: Any) -> None:
    queue = f"find-{secrets.token_hex(3)}"
    b, *_ = (start(site, queue=queue, name=name).job_id for name in ("try b", "try a", "other"))
    site.services.jobs.pause(b)
    page = opened(f"/?queue={queue}")
    jobs = page.locator("#jobs th a[id^=job-]")
    page.get_by_label("Search").fill("TRY")
    expect(jobs).to_have_text(["try a", "try b"])
    expect(page.locator("#filter-all")).to_have_text("All 2")
    page.get_by_label("Search").press("Enter")
    page.get_by_label("Sort by").select_option("oldest")
    expect(jobs).to_have_text(["try b", "try a"])
    assert page.url.endswith(f"/?queue={queue}&search=TRY&sort=oldest")
    page.locator("#filter-queued").click()
    expect(jobs).to_have_text(["try a"])
    page.reload()
    expect(page.get_by_label("Search")).to_have_value("TRY")
    expect(page.get_by_label("Sort by")).to_have_value("oldest")
    page.get_by_label("Search").fill("no such job")
    expect(page.locator("#jobs")).to_contain_text("No queued jobs on queue")
    page.get_by_label("Search").fill("")
    expect(jobs).to_have_text(["try a", "other"])


def test_the_list_is_searched_without_javascript(site: Site, opened: Any) -> None:
    job_id = start(site, name=f"needle {secrets.token_hex(3)}").job_id
    start(site)
    page = opened("/", java_script_enabled=False)
    page.get_by_label("Search").fill("NEEDLE")
    page.get_by_label("Sort by").select_option("name")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("#jobs th a[id^=job-]")).to_have_count(1)
    page.locator(f"#more-{job_id}").click()
    command = page.locator(f"#menu-{job_id} code")
    expect(command).to_have_text(f"computeshare jobs rename {job_id} NAME")
    expect(command).to_be_in_viewport()


@in_every_window
def test_a_priority_is_changed_on_the_page(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_label("Priority").fill("7")
    page.get_by_role("button", name="Set").click()
    expect(page.locator("#priority [role=status]")).to_have_text("Priority set to 7")
    expect(page.locator("#timeline")).to_contain_text("Priority changed from 0 to 7 by the owner")
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
    site.services.jobs.update(feed.job_id, priority=3)
    expect(field).to_have_value("3")
    field.fill("12")
    site.services.jobs.update(feed.job_id, priority=4)
    expect(timeline).to_contain_text("Priority changed from 3 to 4")
    expect(field).to_have_value("12")
    page.get_by_role("button", name="Set", exact=True).click()
    expect(page.locator("#priority [role=status]")).to_have_text("Priority set to 12")
    site.services.jobs.update(feed.job_id, priority=5)
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
    page.get_by_role("button", name="Lift ban").click()
    expect(page.locator("#workers")).not_to_contain_text("Banned")
    assert not site.redis.exists(keys.banned(), keys.strikes())


def test_what_is_pressed_is_not_replaced_before_it_is_let_go(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.tell("banned", worker="w2laptop", session="w2laptop-1", strikes=5, reason="checksum differs")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="Lift ban").hover()
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
    page = opened(f"/jobs/{feed.job_id}", permissions=["clipboard-write"])
    page.get_by_text("Command line").click()
    shown = page.locator("#shown-3").text_content()
    page.locator("[data-copy=shown-3]").click()
    expect(page.locator("[data-copy=shown-3]")).to_have_text("Copied")
    assert pasted(page) == shown
    assert "it'\"'\"'s" in shown
    page.get_by_role("button", name="More").click()
    page.locator("#copy-link").click()
    expect(page.locator("#copy-link")).to_have_text("Copied")
    assert pasted(page) == page.url
    page.keyboard.press("Escape")
    page.get_by_role("button", name="copy the sha256 of version 20").click()
    (checkpoint,) = site.services.history.checkpoints(feed.job_id).items
    wait_until(lambda: pasted(page) == checkpoint.sha256)


def pasted(page: Any) -> str:
    """The text that a reader pastes; the pages themselves are not allowed to read the clipboard."""
    page.evaluate("() => document.body.append(Object.assign(document.createElement('textarea'), {id: 'pasted'}))")
    page.locator("#pasted").press("ControlOrMeta+V")
    text = page.locator("#pasted").input_value()
    page.evaluate("() => document.getElementById('pasted').remove()")
    return text


@in_every_window
def test_an_invite_is_counted_down_until_a_machine_has_taken_it_up(
    site: Site, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.services.invites, "public_url", site.url)
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_text("Add a machine").click()
    page.get_by_role("button", name="Create invite").click()
    command = page.locator("#invite-new")
    expect(command).to_contain_text(f"uvx --from {site.url}/v1/worker/")
    expect(command).to_contain_text(f"computeshare-worker --join {site.url}#")
    page.get_by_text("With pipx instead").click()
    expect(page.locator("#invite-pipx")).to_contain_text("pipx run --spec")
    expect(page.locator("#invite-status")).to_have_text("Waiting for the machine")
    expect(page.locator("#invite-left")).to_contain_text("left")
    assert page.locator("#invite-qr").evaluate("one => one.naturalWidth") > 50
    code = command.text_content().rpartition("#")[2]
    name = f"anna's mac {secrets.token_hex(3)}"
    assert httpx2.post(f"{site.url}/join/{code}", json=introduction(name, code, SigningKey.new())).is_success
    expect(page.locator("#invite-status")).to_have_text(f"{name} has taken it up, and is not heard of yet")
    heard_of(site, name, "mnist")
    expect(page.locator("#invite-status")).to_have_text(f"{name} has joined")


def heard_of(site: Site, name: str, queue: str) -> None:
    """A worker of the machine that took up the newest invite."""
    machine = site.services.invites.list().items[0].id
    worker = WorkerInfo(machine + secrets.token_hex(4), name, "cpu", (queue,), {}, 1, "home", 1, last_seen_ms=now_ms())
    with site.services.database.writing() as connection:
        remember(connection, worker, now_ms())


@in_every_window
def test_a_machine_is_invited_from_the_page_of_the_workers_for_a_queue_that_is_typed(
    site: Site, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site.services.invites, "public_url", site.url)
    page = opened("/workers")
    page.get_by_text("Add a machine").click()
    expect(page.locator("#invite-queue")).to_have_value("default")
    page.locator("#invite-queue").fill("lonely")
    page.locator("#invite").get_by_label("Person").fill("Anna")
    page.get_by_role("button", name="Create invite").click()
    page.get_by_text("ComputeShare is installed there").click()
    expect(page.locator("#invite-command")).to_contain_text(f"computeshare-worker --join {site.url}#")
    made = site.services.invites.list().items[0]
    assert (made.queue, made.person) == ("lonely", "Anna")
    warning = page.locator("#invite-caution-line")
    expect(warning).not_to_be_visible()
    monkeypatch.setattr(site.services.invites, "_broker_url", "rediss://home.example")
    page.get_by_role("button", name="Create invite").click()
    expect(warning).to_contain_text("Warning: the address in COMPUTESHARE_PUBLIC_REDIS_URL is not that of")


@in_every_window
def test_a_machine_is_assigned_to_a_person_and_what_it_has_done_with_it(site: Site, opened: Any) -> None:
    worker = WorkerInfo(secrets.token_hex(6), f"lab {secrets.token_hex(3)}", "cpu", ("lonely",), {}, 1, "lab", 1)
    register(site.redis, worker)
    feed = under_way(site, 20)
    with site.services.database.write() as session:
        session.add(WorkerStat(job_id=feed.job_id, worker=worker.id, name=worker.name, samples=64, seen_ms=now_ms()))
    page = opened("/workers")
    name = f"Ben {secrets.token_hex(3)}"
    page.get_by_role("button", name=f"Person of {worker.name}").click()
    field = page.locator("#person").get_by_label("Person")
    expect(field).to_have_value("owner")
    field.fill(name)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#workers")).to_contain_text(f"Person: {name}")
    group = page.locator("#helped tbody").filter(has_text=name)
    expect(group.locator("tr")).to_have_count(2)
    expect(group).to_contain_text(worker.name)
    unregister(site.redis, worker.id)


@in_every_window
def test_where_no_other_machine_could_join_the_page_says_what_to_do_instead_of_inviting(
    site: Site, opened: Any
) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_text("Add a machine").click()
    page.get_by_role("button", name="Create invite").click()
    expect(page.locator("#invite-obstacle")).to_contain_text("No other machine can join yet")
    expect(page.locator("#invite-remedy")).to_have_text("computeshare up --lan")
    for useless in ("#invite-new", "#invite-qr", "#invite-status"):
        expect(page.locator(useless)).not_to_be_visible()


def test_what_an_invite_links_to_can_be_read_without_logging_in(site: Site, browser: Any) -> None:
    made, code = site.services.invites.create("mnist", 15)
    page = browser.new_page()
    page.goto(f"{site.url}/join/{code}")
    joining = f"computeshare-worker --join {site.url}#{code}"
    expect(page.locator("#new-machine")).to_have_text(f"uvx --from {site.url}{PATH} {joining}")
    expect(page.locator("#command")).to_have_text(joining)
    assert site.services.invites.show(made.id).status == "pending"
    page.close()


@in_every_window
def test_a_dropped_submission_says_why_and_where_its_time_went(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.submission("w1studio", 3, "stale")
    feed.submission("w2laptop", 5, "fenced")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#pace")).to_have_text(
        "Workers spend 25 % of the time sending updates: update codec int8 would help."
    )
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
    page.get_by_role("button", name="Compare selected").click()
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
    expect(ticked).to_have_text("")
    page.locator(f"#tick-{newest}").check()
    expect(ticked).to_have_text("1 job selected, at least 2 needed")
    expect(compare).to_be_disabled()
    page.get_by_role("link", name="Older jobs").click()
    expect(ticked).to_have_text("1 job selected, at least 2 needed, 1 not on this page")
    page.locator(f"#tick-{oldest}").check()
    expect(compare).to_be_enabled()
    page.go_back()
    expect(page.locator(f"#tick-{newest}")).to_be_checked()
    expect(ticked).to_have_text("2 jobs selected, 1 not on this page")
    for _ in range(2):
        start(site, queue=queue)
    expect(page.locator(f"#tick-{newest}")).to_have_count(0)
    expect(ticked).to_have_text("2 jobs selected, 2 not on this page")
    page.locator("#filter-queued").click()
    page.reload()
    expect(ticked).to_have_text("2 jobs selected, 2 not on this page")
    compare.click()
    expect(page.locator(".compared thead a")).to_have_text(["newest", "oldest"])
    page.go_back()
    page.locator(".tick input").first.check()
    expect(ticked).to_have_text("3 jobs selected, 2 not on this page")


def test_a_seventh_tick_is_one_too_many(site: Site, opened: Any) -> None:
    queue = f"ticks-{secrets.token_hex(3)}"
    made = [start(site, queue=queue).job_id for _ in range(7)]
    page = opened(f"/?queue={queue}")
    for job_id in made:
        page.locator(f"#tick-{job_id}").check()
    expect(page.locator("#ticked")).to_have_text("7 jobs selected, at most 6 can be compared")
    expect(page.locator("#compare")).to_be_disabled()
    page.locator(f"#tick-{made[3]}").uncheck()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("6 jobs compared")
    page.go_back()
    page.get_by_role("button", name="Clear selection").click()
    expect(page.locator("#ticked")).to_have_text("")
    expect(page.locator("#compare")).to_be_disabled()
    expect(page.locator(".tick input:checked")).to_have_count(0)
    expect(page.get_by_role("button", name="Clear selection")).to_be_hidden()


def test_jobs_are_compared_without_javascript(site: Site, opened: Any) -> None:
    queue = f"ticks-{secrets.token_hex(3)}"
    made = [start(site, queue=queue).job_id for _ in range(2)]
    page = opened(f"/?queue={queue}", java_script_enabled=False)
    forgive(page, "/compare*")
    page.locator(f"#tick-{made[0]}").check()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("Select more jobs")
    expect(page.locator("main")).to_contain_text("2 to 6 jobs can be compared; selected: 1")
    page.get_by_role("link", name="Back to the list").click()
    for job_id in made:
        page.locator(f"#tick-{job_id}").check()
    page.locator("#compare").click()
    expect(page.locator("h1")).to_have_text("2 jobs compared")


@in_every_window
def test_a_closed_panel_with_something_wrong_in_it_opens_where_that_is(site: Site, opened: Any) -> None:
    page = opened("/new")
    forgive(page, "/new")
    panel, more = page.locator("details.panel"), page.get_by_label("Other fields")
    panel.locator("summary").click()
    more.fill("[1]")
    expect(page.locator("#more-error")).to_contain_text("must be a JSON object")
    panel.locator("summary").click()
    expect(more).to_be_hidden()
    page.get_by_label("Name").fill("still wrong")
    expect(more).to_be_visible()
    panel.locator("summary").click()
    expect(more).to_be_hidden()
    page.get_by_role("link", name="Other fields (JSON)").click()
    expect(more).to_be_focused()
    panel.locator("summary").click()
    page.get_by_role("button", name="Create job").click()
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
    page.get_by_role("button", name="Create job").click()
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
    expect(page.locator("#strategy-inner-steps-error")).to_have_text("must be at least 1")
    page.get_by_label("Inner steps").fill("10")
    page.get_by_label("Name").fill("made by hand")
    page.get_by_label("Compression").select_option("auto")
    expect(page.get_by_label("Update codec (up)")).not_to_be_visible()
    expect(page.locator("#ways")).to_contain_text('"codec": "auto"')
    page.get_by_role("button", name="Create job").click()
    expect(page.locator("h1")).to_have_text("made by hand")
    made = site.services.jobs.show(page.url.rpartition("/")[2])
    assert (made.spec["strategy"]["inner_steps"], made.spec["codec"]) == (10, "auto")
    page.get_by_role("button", name="More").click()
    page.get_by_role("link", name="Clone").click()
    expect(page.get_by_label("Name")).to_have_value("made by hand")
    expect(page.get_by_label("Inner steps")).to_have_value("10")


@in_every_window
def test_the_form_has_a_language_models_size_and_early_stopping(site: Site, opened: Any) -> None:
    page = opened("/new")
    expect(page.get_by_label("Layers")).not_to_be_visible()
    page.get_by_label("Data set").select_option("tinyshakespeare")
    page.get_by_label("Model").select_option("gpt")
    page.get_by_label("Layers").fill("2")
    page.get_by_label("Augmentation").fill("flip")
    expect(page.locator("#augment-error")).to_contain_text("for images only")
    page.get_by_label("Augmentation").fill("")
    page.get_by_text("More options").click()
    page.get_by_label("Early stopping: metric").select_option("loss")
    expect(page.locator("#stop-metric-error")).to_contain_text("needs metric and at together")
    page.get_by_label("Early stopping: value").fill("1.5")
    expect(page.locator("#stop-metric-error")).to_have_text("")
    page.get_by_role("button", name="Create job").click()
    expect(page.locator("h1")).to_have_text("gpt on tinyshakespeare")
    made = site.services.jobs.show(page.url.rpartition("/")[2]).spec
    assert made["model_args"]["n_layer"] == 2
    assert made["stop"] == {"metric": "loss", "at": 1.5, "patience": None}
    page.goto(f"{site.url}/new?from={page.url.rpartition('/')[2]}")
    expect(page.get_by_label("Layers")).to_have_value("2")


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
    page.get_by_role("button", name="New webhook").click()
    expect(page.get_by_role("dialog")).to_be_visible()
    if wrong := problems(page):
        found["a dialog"] = wrong
    assert found == {}


@in_every_window
def test_a_plot_is_saved_as_a_picture_and_shown_on_the_whole_screen(site: Site, opened: Any) -> None:
    feed = under_way(site, 60)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "60")
    with page.expect_download() as saved:
        page.get_by_role("button", name="Save Loss as PNG").click()
    assert saved.value.suggested_filename == "mnist, lenet5, Loss.png"
    with Image.open(saved.value.path()) as picture:
        canvas = page.locator("[data-plot=loss] canvas").bounding_box()
        assert picture.width > canvas["width"] and picture.height > canvas["height"]
        assert len(picture.convert("RGB").getcolors(1 << 24) or ()) > 20, "nothing is drawn"
    whole = page.get_by_role("button", name="Show Loss on the whole screen")
    whole.click()
    expect(whole).to_have_attribute("aria-pressed", "true")
    expect(page.locator("[data-plot=loss] .u-wrap")).to_have_css("height", re.compile(r"^(5|6|7|8|9)\d\dpx$"))
    whole.click()
    expect(whole).to_have_attribute("aria-pressed", "false")
    expect(page.locator("[data-plot=loss] .u-wrap")).to_have_css("height", "240px")
