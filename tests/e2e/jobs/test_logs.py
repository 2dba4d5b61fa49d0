"""The log of a job: written by real processes, and its panel in a real browser."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from playwright.sync_api import Browser, Page, expect

from api import text_format
from api.logs.reader import Which
from api.logs.view import log_view
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.runtime.log_lines import Writer, line_of
from tests.support.browser import Site, Watched, in_every_window, picture_of_test
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.wait import wait_until

pytestmark = pytest.mark.e2e

TEMPLATES = Path(__file__).resolve().parents[3] / "api" / "pages" / "templates"
STUDIO, LAPTOP = Writer("aaaaaaaaaaaa", "studio"), Writer("bbbbbbbbbbbb", "<b>laptop</b>")
HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"
PAGE = """<!doctype html><html lang="en" data-now="0"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width"><title>log</title>
<link rel="stylesheet" href="/static/style.css"></head><body><main>%s</main>
<script type="module">
import { logs } from "/static/logs.js";
const root = document.getElementById("logs");
logs(root, root.dataset.job);
</script></body></html>"""


def lines(plane: ControlPlane, job_id: str, **wanted: Any) -> list[dict[str, Any]]:
    return list(plane.get(f"/v1/jobs/{job_id}/logs", limit=1000, **wanted)["items"])


def texts(plane: ControlPlane, job_id: str, **wanted: Any) -> list[str]:
    return [line["text"] for line in lines(plane, job_id, **wanted)]


def test_what_a_worker_said_is_there_after_it_has_left(plane: ControlPlane) -> None:
    job_id = plane.create(**DIGITS_MLP, rounds=100_000)
    with plane.worker("e2e", "guest") as worker:
        plane.reach(job_id, 5)
        plane.until("the first lines", lambda: "joined" in texts(plane, job_id, worker="guest"))
        (seat,) = psutil.Process(worker.pid).children()
        seat.kill()
        died = "the seat's process died: killed by signal 9"
        plane.until("the end of a seat", lambda: died in texts(plane, job_id, worker="guest", level="error"))
        plane.until("another attempt", lambda: texts(plane, job_id, worker="guest").count("joined") == 2)
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    plane.until("the worker's last line", lambda: "leaving" in texts(plane, job_id, worker="guest"))
    told = texts(plane, job_id, worker="guest")
    assert [text for text in told if text != "self-test passed"][:3] == ["loading", "loaded", "joined"]  # a first job
    assert told[-1] == "leaving"
    assert {"claimed", "opened"} <= set(texts(plane, job_id, worker="reducer"))
    leaving = lines(plane, job_id, worker="guest")[-1]
    assert leaving["data"] == {"reason": "the worker was asked to leave"} and leaving["name"] == "guest"
    plane.http.post(f"/v1/jobs/{job_id}/cancel")
    assert texts(plane, job_id, worker="guest") == told


def put(site: Site, job_id: str, text: str, writer: Writer = STUDIO, level: str = "info", **fields: Any) -> None:
    """Write a line into a job's log, as of 2023-11-14 22:13:20 UTC."""
    data = line_of({"event": text, "level": level, **fields}, writer, 1_700_000_000_000)
    site.redis.xadd(JobKeys(job_id).logs(), {"data": data})


class Panel:
    """A job's log in a page of its own, as the job's page has it."""

    def __init__(self, site: Site, page: Page) -> None:
        self.site, self.page = site, page
        self.job_id = site.services.jobs.create(JobSpec(dataset="digits", model="mlp", rounds=9)).id
        page.route("**/panel*", lambda route: route.fulfill(body=PAGE % self.html(), content_type="text/html"))
        page.goto(site.login)

    def html(self) -> str:
        """The part, as the server makes it."""
        loader = FileSystemLoader(TEMPLATES)
        environment = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters["moment"] = text_format.moment
        services = self.site.services
        view = log_view(services.logs, self.job_id)
        return environment.get_template("parts/logs.html").render(job=services.jobs.show(self.job_id), logs=view)

    def put(self, *texts: str, writer: Writer = STUDIO, level: str = "info", **fields: Any) -> None:
        for text in texts:
            put(self.site, self.job_id, text, writer, level, **fields)

    def stored(self, text: str) -> None:
        """Wait until a line is in the database."""
        logs = self.site.services.logs
        wait_until(lambda: any(line.text == text for line in logs.page(self.job_id, Which(), limit=10).items))

    def open(self) -> None:
        self.page.goto(f"{self.site.url}/panel")
        self.page.locator("#logs > summary").click()

    @property
    def rows(self) -> Any:
        return self.page.locator(".log-lines li")


@pytest.fixture
def panel(site: Site, browser: Browser, options: dict[str, Any], request: pytest.FixtureRequest) -> Iterator[Panel]:
    context = browser.new_context(**options)
    watched = Watched(context)
    yield Panel(site, watched.page)
    if options:
        picture_of_test(watched.page, request)
    context.close()
    assert watched.problems == []


def test_lines_appear_live_and_escaped_below_those_the_server_made(panel: Panel) -> None:
    panel.put("first", seconds=2.5)
    panel.put(HOSTILE, writer=LAPTOP, level="error", exception=f"Traceback\n{HOSTILE}")
    panel.stored(HOSTILE)
    panel.open()
    expect(panel.rows).to_have_count(2)
    expect(panel.page.locator(".log-state")).to_have_text("live")
    panel.put("first", seconds=2.5)
    panel.put(HOSTILE, writer=LAPTOP, level="error", exception=f"Traceback\n{HOSTILE}")
    expect(panel.rows).to_have_count(4)
    made = [" ".join(text.split()) for text in panel.rows.all_text_contents()]
    assert made[:2] == made[2:] and "seconds=2.5" in made[0] and HOSTILE in made[1]
    assert panel.page.locator(".log-lines img").count() == 0


@in_every_window
def test_filters_choose_lines_and_stay_in_the_address(panel: Panel) -> None:
    panel.put("calm")
    panel.put("alarming", level="warning")
    panel.put("elsewhere", writer=LAPTOP, level="warning")
    panel.stored("elsewhere")
    panel.open()
    expect(panel.rows).to_have_count(3)
    panel.page.select_option("[name=log_level]", "warning")
    expect(panel.rows).to_have_count(2)
    panel.page.select_option("[name=log_worker]", STUDIO.worker)
    expect(panel.rows).to_have_count(1)
    query = set(panel.page.url.partition("?")[2].split("&"))
    assert query == {f"log_worker={STUDIO.worker}", "log_level=warning"}
    panel.put("calm too")
    panel.put("alarming too", level="error")
    expect(panel.rows).to_have_count(2)
    expect(panel.rows.nth(1)).to_contain_text("alarming too")


@in_every_window
def test_a_reader_who_scrolls_up_is_left_alone_until_following_again(panel: Panel) -> None:
    panel.put(*(f"line {number}" for number in range(100)))
    panel.stored("line 99")
    panel.open()
    expect(panel.page.locator(".log-state")).to_have_text("live")
    panel.page.evaluate("() => { document.querySelector('.log-lines').scrollTop = 0; }")
    expect(panel.page.locator(".log-follow")).to_be_visible()
    panel.put("news")
    expect(panel.page.locator(".log-follow")).to_have_text("Follow: 1 new")
    assert panel.page.evaluate("() => document.querySelector('.log-lines').scrollTop") == 0
    panel.page.locator(".log-follow").click()
    expect(panel.rows.last).to_contain_text("news")
    expect(panel.page.locator(".log-follow")).to_be_hidden()


def test_a_flood_leaves_the_newest_500_lines_in_the_page(panel: Panel) -> None:
    panel.open()
    expect(panel.page.locator(".log-state")).to_have_text("live")
    panel.put(*(f"line {number}" for number in range(700)))
    expect(panel.rows.last).to_contain_text("line 699")
    expect(panel.rows).to_have_count(500)


def test_nothing_is_asked_for_while_the_panel_is_closed(panel: Panel) -> None:
    asked: list[str] = []
    panel.page.on("request", lambda request: asked.append(request.url) if "/logs/stream" in request.url else None)
    panel.page.goto(f"{panel.site.url}/panel")
    panel.page.wait_for_load_state("networkidle")
    assert asked == []
    panel.page.locator("#logs > summary").click()
    expect(panel.page.locator(".log-state")).to_have_text("live")
    assert len(asked) == 1


def test_without_scripts_the_newest_lines_are_there_and_can_be_chosen(panel: Panel) -> None:
    panel.put("calm", "said last")
    panel.stored("said last")
    html = panel.html()
    assert "22:13:20 UTC</time>" in html
    assert html.index("calm") < html.index("said last") and "<noscript><button>Show</button></noscript>" in html
    assert " style=" not in html and "onclick" not in html and f'data-job="{panel.job_id}"' in html


@in_every_window
def test_the_job_s_page_has_its_log_live_and_tells_the_reader_s_own_time(site: Site, opened: Any) -> None:
    job_id = site.services.jobs.create(JobSpec(dataset="digits", model="mlp", rounds=9)).id
    put(site, job_id, "said before")
    wait_until(lambda: bool(site.services.logs.page(job_id, Which(), limit=1).items))
    page = opened(f"/jobs/{job_id}", timezone_id="Asia/Tokyo")
    page.get_by_role("heading", name="Logs").click()
    expect(page.locator(".log-state")).to_have_text("live")
    put(site, job_id, "said live")
    rows = page.locator(".log-lines li")
    expect(rows).to_contain_text(["said before", "said live"])
    expect(rows.locator("time")).to_have_text(["07:13:20"] * 2)
    for time in rows.locator("time").all():
        expect(time).to_have_attribute("datetime", re.compile(r"^2023-11-14T22:13:20"))
        expect(time).to_have_attribute("title", "15 Nov 2023, 07:13:20 GMT+9")
