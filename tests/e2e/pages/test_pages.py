"""The pages in a real browser, on the real application; events are written to the stream as the training would."""

import math
import re
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Browser, Page, expect
from safetensors.numpy import load_file

from api import text_format
from api.database import now_ms
from api.jobs.event_feeds import Feeds
from api.pages.views import elapsed_s
from api.recipes.schemas import RecipeRequest
from api.stored_specs import plan_of
from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts
from computeshare.evaluator.text_server import serve_texts
from computeshare.jobspec.tasks.language_models import GptArgs
from computeshare.protocol.keys import EVALUATOR
from computeshare.queue import WorkerInfo, register
from computeshare.tasks import class_counts
from computeshare.tasks.images.datasets.class_names import class_names
from computeshare.tasks.text.language_model import LanguageModel
from tests.support.browser import SCREENSHOTS, Site, Window, forgive, in_every_window, picture
from tests.support.evaluated_job import save_module
from tests.support.job_feed import Feed
from tests.support.recipe_jobs import FACTS
from tests.support.staged_jobs import arrived, start, under_way
from tests.support.wait import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

HOSTILE = "<img src=x onerror=alert(1)>\"'&{{7*7}}"


def points(page: Page, plot: str) -> int:
    return int(page.locator(f"[data-plot={plot}]").get_attribute("data-points") or 0)


def test_plots_and_numbers_grow_without_reloading(site: Site, opened: Any) -> None:
    feed = under_way(site)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-field=version]")).to_have_text("120")
    loss, accuracy = points(page, "loss"), points(page, "accuracy")
    assert (loss, accuracy) == (120, 6)
    page.evaluate("() => { window.same = true }")
    feed.versions(30)
    feed.scored(0.975)
    feed.joined("w3minimac", "mac-mini", "Apple M4 (MPS)")
    expect(page.locator("[data-field=version]")).to_have_text("150")
    expect(page.locator("[data-field=accuracy]")).to_have_text("97.50 %")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "150")
    expect(page.locator("[data-plot=accuracy]")).to_have_attribute("data-points", "7")
    expect(page.locator("#workers")).to_contain_text("mac-mini")
    expect(page.locator("#timeline")).to_contain_text("mac-mini joined with Apple M4 (MPS)")
    expect(page.locator("#ledger")).to_contain_text("19,200 of 19,200 samples counted once")
    expect(page).to_have_title(re.compile(r"^15 % · mnist, lenet5"))
    assert page.evaluate("() => window.same") is True
    assert page.locator(".u-wrap canvas").count() == 4


def test_a_language_models_page_follows_its_loss_and_perplexity(site: Site, opened: Any) -> None:
    spec = {"name": "shakespeare", "dataset": "tinyshakespeare", "model": "gpt"}
    feed = under_way(site, 40, **spec)
    page = opened(f"/jobs/{feed.job_id}")

    def told(version: int) -> tuple[str, str]:
        loss = 2.2 * math.exp(-version / 90) + 0.08
        return f"{text_format.loss(loss)} nats", f"{math.exp(loss):.2f}"

    for version in (40, 60):
        nats, perplexity = told(version)
        expect(page.locator("[data-field=test_loss]")).to_have_text(nats)
        expect(page.locator("[data-field=perplexity]")).to_have_text(perplexity)
        expect(page.locator("[data-plot=perplexity]")).to_have_attribute("data-points", str(version // 20))
        best = f"best {nats}, perplexity {perplexity} at version {version}"
        expect(page.locator("[data-best=perplexity]")).to_have_text(best)
        feed.versions(20)
        feed.scored()
    expect(page.locator("[data-field=accuracy]")).to_have_count(0)
    page.goto(f"{site.url}/?search=shakespeare")
    expect(page.locator("tbody tr")).to_contain_text("nats, perplexity ")
    other = under_way(site, 20)
    page.goto(f"{site.url}/compare?job={feed.job_id}&job={other.job_id}")
    expect(page.locator("#results")).to_contain_text("Best score")
    expect(page.locator("[data-plot=accuracy]")).to_have_attribute("data-points", "1")
    expect(page.locator("[data-plot=perplexity]")).to_have_attribute("data-points", "4")


@in_every_window
def test_a_recipes_page_follows_its_loss_and_its_own_metrics(site: Site, opened: Any) -> None:
    recipe = RecipeRequest(files={"recipe.py": "def model(): ...\ndef data(split, folder): ..."}, name="regression")
    digest = site.services.recipes.add(recipe)[0].digest
    initial = site.settings.home / "initial"
    initial.write_bytes(b"weights")
    facts = {**FACTS, "initial": BundleStore(site.settings.bundles_dir).add(initial).digest}
    names = ["error", HOSTILE]
    spec = {"recipe": digest, "recipe_facts": {**facts, "train": 60_000, "metrics": names}, "name": "regression"}
    feed = under_way(site, 40, dataset=None, model=None, **spec)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-metric=error]")).to_have_text("–")
    feed.versions(20)
    feed.scored(own_metrics={"error": 0.125, HOSTILE: 2.5})
    loss = text_format.loss(2.2 * math.exp(-60 / 90) + 0.08)
    expect(page.locator("[data-field=test_loss]")).to_have_text(loss)
    expect(page.locator("[data-metric=error]")).to_have_text("0.125")
    expect(page.locator("#timeline")).to_contain_text(f"Version 60 scored loss {loss}, error 0.125, {HOSTILE} 2.5")
    for absent in ("[data-field=perplexity]", "[data-plot=accuracy]", "#by-class", "#generate", "#samples"):
        expect(page.locator(absent)).to_have_count(0)
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "60")
    plot = page.locator("[data-plot=own]").first
    expect(plot).to_have_attribute("data-points", "1")
    feed.versions(10)
    feed.scored(own_metrics={"error": 0.0625, HOSTILE: -2.5})
    expect(plot).to_have_attribute("data-points", "2")
    page.reload()
    expect(page.locator("[data-plot=own]").nth(1)).to_have_attribute("data-points", "2")
    for cell in ("error", HOSTILE, "0.0625"):
        expect(page.locator("#values-scroll")).to_contain_text(cell)
    page.goto(f"{site.url}/?search=regression")
    expect(page.locator("tbody tr").first).to_contain_text(f"loss {text_format.loss(2.2 * math.exp(-70 / 90) + 0.08)}")


@in_every_window
def test_samples_of_a_language_model_come_with_its_scores(site: Site, opened: Any) -> None:
    feed = start(site, name="shakespeare", dataset="tinyshakespeare", model="gpt")
    feed.opened()
    feed.joined("w1studio", "mac-studio", "Apple M2 Ultra (MPS)")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#samples")).to_contain_text("No samples yet")
    line = "Whan that Aprill, with his shoures soote,\nThe droghte of March hath perced to the roote,\n"
    for number in range(1, 8):
        feed.versions(20)
        feed.scored(sample=f"\n{number}. {line}{HOSTILE}\n{'x' * 90}")
    newest = page.locator("#samples figure").first
    expect(newest).to_contain_text("Version 140")
    expect(newest.locator("pre")).to_contain_text("7. Whan that Aprill, with his shoures soote,")
    expect(newest.locator("pre")).to_contain_text(HOSTILE)
    expect(page.locator("#samples figure")).to_have_count(6)
    assert newest.locator("pre").text_content() == f"\n7. {line}{HOSTILE}\n{'x' * 90}"
    page.locator("#samples").scroll_into_view_if_needed()


@in_every_window
def test_a_prompt_is_continued_on_the_page_and_the_text_is_only_text(site: Site, opened: Any) -> None:
    size = {"n_layer": 1, "n_head": 1, "n_embd": 4, "block_size": 16}
    feed = start(site, dataset="tinyshakespeare", model="gpt", model_args=size)
    saved = save_module(
        Artifacts(site.settings.artifacts_dir, feed.job_id),
        LanguageModel("tinyshakespeare", GptArgs.model_validate(size)).module(0),
        1,
    )
    feed.opened()
    feed.tell("checkpoint", token=str(saved), version=1, sha256="0" * 64, bytes=400, path=str(saved))
    arrived(site, feed)
    stop = threading.Event()
    texts = threading.Thread(
        target=serve_texts, args=(site.redis, site.settings.artifacts_dir, BundleStore(site.settings.bundles_dir), stop)
    )
    texts.start()
    site.redis.set(EVALUATOR, "it", px=60_000)
    try:
        page = opened(f"/jobs/{feed.job_id}")
        page.get_by_label("Prompt").fill(f"{HOSTILE}\nROMEO:")
        page.get_by_label("Characters").fill("50")
        page.get_by_role("button", name="Generate").click()
        expect(page.locator("#generated")).to_contain_text(HOSTILE)
        text = page.locator("#generated").text_content() or ""
        assert len(text) == len(HOSTILE) + len("\nROMEO:") + 50
    finally:
        site.redis.delete(EVALUATOR)
        stop.set()
        texts.join()


def test_what_is_left_elapsed_and_the_speed_follow_the_snapshot_as_the_job_moves(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    fields = {name: page.locator(f"[data-field={name}]") for name in ("left", "elapsed", "speed", "version")}

    def told() -> tuple[str, str]:
        job = site.services.jobs.show(feed.job_id)
        left = f"{text_format.duration(job.left_s)} left" if job.left_s is not None else ""
        return left, f"{text_format.rate(60 * job.samples_per_s / plan_of(job.spec).samples_per_round)} rounds a minute"

    def shown() -> tuple[str, str]:
        return fields["left"].inner_text(), fields["speed"].inner_text()

    def elapsed_now() -> float:
        return elapsed_s(site.services.jobs.show(feed.job_id), datetime.now(UTC))

    def of_this_second(told: Callable[[float], str], seconds: float) -> set[str]:
        return {told(seconds), told(seconds - 1)}  # the page's clock ticks once a second, at a moment of its own

    wait_until(lambda: shown() == told())
    before, after = shown(), ("", "")

    def has_moved() -> bool:
        nonlocal after
        after = shown()
        return after == told() != before

    feed.now_ms = now_ms() - 5_000
    feed.versions(100)  # one every 50 ms
    wait_until(has_moved)
    assert re.fullmatch(r"[1-9].* left", after[0])
    assert 100 < float(after[1].partition(" ")[0].replace(",", "")) <= 1201
    expect(fields["version"]).to_have_text("120")
    first = of_this_second(text_format.duration, elapsed_now())
    wait_until(
        lambda: (
            (text := fields["elapsed"].inner_text()) not in first
            and text in of_this_second(text_format.duration, elapsed_now())
        )
    )
    started = page.locator("#started time")
    at = site.services.jobs.show(feed.job_id).started_at
    expect(started).to_have_attribute("datetime", at.isoformat())
    wait_until(
        lambda: started.inner_text() in of_this_second(text_format.ago, (datetime.now(UTC) - at).total_seconds())
    )
    site.services.jobs.pause(feed.job_id)
    expect(fields["left"]).to_have_text("")
    expect(fields["speed"]).to_have_text("")
    stopped = text_format.duration(elapsed_now())
    expect(fields["elapsed"]).to_have_text(stopped)
    page.wait_for_function("start => Date.now() > start + 1500", arg=page.evaluate("() => Date.now()"))
    assert fields["elapsed"].inner_text() == text_format.duration(elapsed_now()) == stopped


def test_scores_on_a_validation_split_are_drawn_and_called_so(site: Site, opened: Any) -> None:
    feed = under_way(site, 40, validation=0.1)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=accuracy]")).to_have_attribute("data-points", "2")
    feed.versions(20)
    feed.scored(0.975)
    expect(page.locator("[data-plot=accuracy]")).to_have_attribute("data-points", "3")
    expect(page.locator("[data-best=loss]")).to_contain_text("lowest validation loss")
    page.get_by_text("Plot data", exact=True).click()
    expect(page.locator(".values thead")).to_contain_text("Validation accuracy")


@in_every_window
def test_the_score_on_the_test_set_is_shown_when_it_comes(site: Site, opened: Any) -> None:
    feed = under_way(site, 40, validation=0.1)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-field=tested]")).to_have_text("–")
    feed.versions(20)
    feed.scored(0.25)
    best, last = ({"loss": 0.25, "accuracy": accuracy, "samples": 10_000} for accuracy in (0.5, 0.125))
    feed.scored(version=40, test=best)
    feed.scored(0.25, test=last)
    expect(page.locator("[data-field=tested]")).to_have_text("50.00 %")
    expect(page.locator("[data-field=tested_of]")).to_have_text("best (version 40); last 12.50 %")
    expect(page.locator("#timeline")).to_contain_text("Version 40 scored 50.00 % on the test set")
    page.reload()
    expect(page.locator("[data-field=tested_of]")).to_have_text("best (version 40); last 12.50 %")


def by_class(site: Site, feed: Feed, seed: int = 0) -> None:
    """Give the newest version scores by class, a confusion matrix among them."""
    rng = np.random.default_rng(seed)
    actual = rng.integers(0, 10, 10_000)
    given = np.where(rng.random(10_000) < 0.8, actual, rng.integers(0, 10, 10_000))
    counts = class_counts.count_classes(actual, given, 10, class_names("cifar10"))
    Artifacts(site.settings.artifacts_dir, feed.job_id).save_classes(feed.token(), "test", counts.model_dump())


def test_the_scores_by_class_are_read_when_they_are_opened(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.checkpoint()
    feed.scored()
    by_class(site, feed)
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#classes")).to_contain_text("Scores by class and confusion matrix")
    page.locator("#by-class summary").click()
    expect(page.locator("#classes .matrix tbody tr")).to_have_count(10)
    expect(page.locator("#classes .matrix td.right").first).to_have_text(re.compile("[0-9]{3}"))
    shade = "one => getComputedStyle(one).backgroundColor"
    right, wrong = page.locator("#classes td.right").first, page.locator("#classes .matrix tbody td:not(.right)").first
    assert right.evaluate(shade) != wrong.evaluate(shade)
    page.locator(f"#checkpoints a[href$='version={feed.version}']").click()
    expect(page.get_by_role("heading", name="Classes")).to_be_visible()
    expect(page.get_by_role("region", name="Scores by class, test").locator("tbody tr")).to_have_count(10)


def test_stream_resumes_where_it_was_cut(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "40")
    asked: list[str] = []
    page.on("request", lambda r: asked.append(r.headers.get("last-event-id", "")) if "/events" in r.url else None)
    site.services.stopping, usual = (lambda: True), site.services.stopping
    expect(page.locator("#connection")).to_have_text(", reconnecting")
    feed.versions(10)
    arrived(site, feed)
    site.services.stopping = usual
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "50")
    expect(page.locator("#connection")).to_have_text("")
    assert points(page, "accuracy") == 2
    assert asked


def test_hidden_page_lets_go_of_the_stream_and_catches_up_when_shown(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "20")
    hide = "value => { Object.defineProperty(document, 'hidden', {get: () => value, configurable: true});"
    hide += " document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    feed.versions(20)
    arrived(site, feed)
    with page.expect_request(lambda request: "/events" in request.url):
        page.evaluate(hide, False)
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "40")
    expect(page.locator("[data-field=version]")).to_have_text("40")


def test_a_restored_job_forgets_the_lost_versions(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "40")
    about = {"incarnation": 2, "sha256": "0" * 64, "restored": True, "parameters": 61_706, "bytes": 246_824}
    feed.tell("opened", token=f"2.25.{'0' * 16}", version=25, **about)
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "25")
    expect(page.locator("[data-plot=accuracy]")).to_have_attribute("data-points", "1")
    expect(page.locator("#timeline")).to_contain_text("Continued from version 25, the last checkpoint")


def test_a_queued_job_says_what_it_needs_and_how_to_give_it(site: Site, opened: Any) -> None:
    feed = start(site, queue="lonely")
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#state")).to_contain_text("Needs 1 worker on queue lonely, 0 are online")
    expect(page.locator("#state .hint")).to_contain_text(
        "Start a worker on this machine, or invite another machine below:"
    )
    expect(page.locator("#state code")).to_have_text("computeshare-worker --queue lonely")
    expect(page.locator("#plots")).not_to_be_visible()
    expect(page.locator(".steps .step-done")).to_have_text("Done: Broker answers")
    expect(page.locator(".steps .step-now")).to_have_text("Now: Workers: 0 of 1 that the job waits for")
    expect(page.locator(".steps .step-later")).to_have_count(2)
    feed.opened()
    register(site.redis, WorkerInfo("w1studio", "mac-studio", "CPU", ("lonely",), {"torch": "2.15"}, 8 * 10**9, "h", 7))
    feed.joined("w1studio", "mac-studio", "CPU")
    expect(page.locator(".steps .step-now")).to_contain_text("First round")
    feed.versions(3)
    expect(page.locator("#plots")).to_be_visible()
    expect(page.locator("#outlook")).to_be_empty()
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "3")
    canvas = page.locator("[data-plot=loss] canvas")
    assert canvas.bounding_box()["width"] > 300


def test_a_job_that_waits_for_several_workers_asks_for_as_many(site: Site, opened: Any) -> None:
    feed = start(site, queue="lonely", workers={"min": 3, "max": 8})
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#state .hint")).to_contain_text(
        "3 more workers are missing. Start one on this machine, and invite 2 other machines below:"
    )
    expect(page.locator(".steps .step-now")).to_have_text("Now: Workers: 0 of 3 that the job waits for")
    page.get_by_role("link", name="invite 2 other machines").click()
    expect(page.get_by_role("button", name="Create invite")).to_be_in_viewport()


DOTS = """([plot, name]) => {
  const canvas = document.querySelector(`[data-plot=${plot}] canvas`);
  const paint = document.createElement("canvas").getContext("2d");
  paint.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(name);
  paint.fillRect(0, 0, 1, 1);
  const [red, green, blue] = paint.getImageData(0, 0, 1, 1).data;
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let found = 0;
  for (let at = 0; at < data.length; at += 4) {
    found += data[at] === red && data[at + 1] === green && data[at + 2] === blue;
  }
  return found;
}"""
"""How many pixels of a plot have the colour of this name."""


@in_every_window
def test_a_job_that_diverged_at_its_first_version_shows_that_one_and_what_helps(site: Site, opened: Any) -> None:
    feed = start(site)
    feed.opened()
    feed.joined("w1studio", "mac-studio", "CPU")
    feed.versions(1)
    feed.tell("failed", error="Training diverged at version 1: the loss is not finite", detail="")
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "1")
    for plot in ("loss", "speed", "bytes"):
        assert page.evaluate(DOTS, [plot, "--train"]) > 4, plot
    assert page.evaluate(DOTS, ["accuracy", "--test"]) == 0
    expect(page.locator("#actions .primary")).to_have_text("Clone")
    expect(page.locator("#retry")).not_to_be_visible()
    expect(page.locator("#state")).not_to_contain_text("checkpoint")
    expect(page.locator("#checkpoints")).to_have_text("This job has no checkpoints.")
    page.get_by_role("button", name="More").click()
    expect(page.get_by_role("button", name="Retry")).to_be_visible()


HEARD = """
(() => {
  const draw = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, ...more) {
    window.written.push(text);
    return draw.call(this, text, ...more);
  };
})();
"""
"""Has a page remember what its plots write."""


def test_axes_without_values_are_empty_and_those_of_bytes_count_whole_bytes(site: Site, opened: Any) -> None:
    feed = start(site)
    feed.opened()
    feed.joined("w1studio", "mac-studio", "CPU")
    feed.versions(1)
    arrived(site, feed)
    page = opened("/")
    page.add_init_script(HEARD)
    page.goto(f"{site.url}/jobs/{feed.job_id}")
    expect(page.locator("[data-plot=bytes]")).to_have_attribute("data-points", "1")
    page.evaluate("() => { window.written = [] }")
    page.evaluate(
        """async () => {
          const { plots } = await import("/static/plots.js");
          for (const place of document.querySelectorAll("[data-plot]")) place.remove();
          document.body.insertAdjacentHTML("beforeend", '<div class="plot" data-plot="bytes"></div>');
          const { Series } = await import("/static/series.js");
          const series = new Series();
          const view = { across: "version", log: false, smooth: 0, zoom: null };
          const changed = plots((lines) => lines.map((line) => ({ ...line, series, start: 0 })), view, () => {});
          window.empty = [...window.written];
          window.written = [];
          series.put(1, 0, 0);
          changed(true);
        }"""
    )
    wait_until(lambda: page.evaluate("() => window.written.length") > 0)
    assert {text for text in page.evaluate("() => window.empty") if text.strip()} == set()
    bytes_told = [text for text in page.evaluate("() => window.written") if text.endswith(" B")]
    assert len(bytes_told) > 1 and all(one != next_one for one, next_one in pairwise(bytes_told)), bytes_told


FADE = "one => getComputedStyle(one).getPropertyValue('--fade')"


@pytest.mark.sampled(2)
def test_a_cut_row_is_seen_to_go_on_and_the_last_one_is_whole(
    site: Site, opened: Any, showcase: dict[str, str], window: Window
) -> None:
    page = opened(showcase["job"])
    for name in ("checkpoints-scroll", "timeline-scroll"):
        place = page.locator(f"#{name}")
        place.scroll_into_view_if_needed()
        if not place.evaluate("one => one.scrollHeight > one.clientHeight"):
            assert place.evaluate(FADE) == "0px"
            continue
        assert float(place.evaluate(FADE).removesuffix("px")) > 20
        place.evaluate("one => one.scrollTo(0, one.scrollHeight)")
        wait_until(lambda place=place: place.evaluate(FADE) == "0px")
        ends = place.evaluate(
            """one => [one, [...one.querySelectorAll("tr, .timeline > li")].at(-1)]
              .map((each) => each.getBoundingClientRect().bottom)"""
        )
        assert ends[1] <= ends[0] + 0.5, name


def test_the_first_screen_of_a_phone_has_what_matters_and_nothing_overlaps(
    site: Site, opened: Any, showcase: dict[str, str]
) -> None:
    page = opened("/", viewport={"width": 390, "height": 844})
    heading, new = (page.locator(one).bounding_box() for one in ("h1", "#new-job"))
    assert new["y"] < heading["y"] + heading["height"], "a short title leaves room for the button"
    for name in ("job", "job-queued", "job-failed", "job-completed"):
        page.goto(site.url + showcase[name])
        assert page.locator("[data-field=bar]").bounding_box()["y"] < 560, name
        expect(page.locator(".sections")).to_be_in_viewport()
    feed = under_way(site, 40, dataset="tinyshakespeare", model="gpt")
    page.goto(f"{site.url}/jobs/{feed.job_id}")
    figures = page.locator(".figures dd").evaluate_all("all => all.map((one) => [one.scrollWidth, one.clientWidth])")
    assert [inner for inner, outer in figures if inner > outer] == [], "a figure reaches into the next"


def test_what_is_tapped_on_a_phone_is_tall_enough_for_a_finger(
    site: Site, opened: Any, showcase: dict[str, str]
) -> None:
    page = opened("/", viewport={"width": 390, "height": 900})
    for name in ("jobs", "job", "job-completed", "workers", "compare"):
        page.goto(site.url + showcase[name])
        small = page.evaluate(
            """() => [...document.querySelectorAll("a:not(.skip), main button, main summary, main select")]
              .map((one) => [one.textContent.trim() || one.id, Math.round(one.getBoundingClientRect().height)])
              .filter(([, height]) => height > 0 && height < 24)"""
        )
        assert small == [], name


@in_every_window
def test_a_completed_job_offers_its_best_weights_and_the_lines_that_load_them(site: Site, opened: Any) -> None:
    feed = under_way(site, 20, rounds=40)
    feed.checkpoint()
    feed.versions(20)
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#outlook")).to_be_empty()
    feed.checkpoint()
    feed.scored()
    expect(page.locator("#result-heading")).to_contain_text("Best version: 40, ")
    with page.expect_download() as saved:
        page.get_by_role("link", name="Download weights").click()
    name = saved.value.suggested_filename
    assert name == f"{feed.job_id}-v40.safetensors"
    expect(page.locator("#loading")).to_contain_text(f'load_file("{name}")')
    assert load_file(saved.value.path())["weight"] == [40]


@in_every_window
def test_cancel_asks_once_and_ends_the_job(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="More").click()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Keep job").click()
    expect(page.locator("#confirm")).not_to_be_visible()
    expect(page.locator("#more")).to_be_focused()
    assert site.services.jobs.show(feed.job_id).status == "running"
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="Cancel job").click()
    expect(page.locator("#state")).to_contain_text("Cancelled")
    expect(page.locator("#actions > *")).to_have_text(["Clone"])
    expect(page).to_have_title(re.compile("^Cancelled · "))
    assert site.services.jobs.show(feed.job_id).status == "cancelled"


@in_every_window
def test_pause_and_resume_take_one_click_each(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("#state .state-paused")).to_have_text("Paused")
    expect(page.locator("#state")).to_contain_text("Paused by the owner")
    expect(page.locator("#timeline")).to_contain_text("Paused by the owner")
    expect(page).to_have_title(re.compile("^Paused · "))
    expect(page.locator("#actions > button")).to_have_text(["Resume"])
    assert site.services.jobs.show(feed.job_id).status == "paused"
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#actions > button")).to_have_text(["Pause"])
    expect(page.locator("#timeline")).to_contain_text("Resumed by the owner")
    assert site.services.jobs.show(feed.job_id).status == "queued"
    feed.joined("w3again", "mac-mini", "CPU")
    expect(page.locator("#state")).to_contain_text("Running")


@in_every_window
def test_a_pause_of_some_hours_is_two_clicks_and_says_when_it_ends(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    height = page.locator(".title").bounding_box()["height"]
    page.get_by_role("button", name="More").click()
    expect(page.get_by_role("button", name="8 hours")).to_be_in_viewport(ratio=1)
    assert page.locator(".title").bounding_box()["height"] == height, "the header is stretched"
    page.get_by_role("button", name="8 hours").click()
    expect(page.locator("#state")).to_contain_text(re.compile("Resumes automatically in (8 h|7 h 59 min)"))
    page.get_by_role("button", name="Resume").click()
    expect(page.locator("#state")).not_to_contain_text("automatically")


def test_the_page_of_a_job_that_was_deleted_says_so(
    site: Site, browser: Browser, monkeypatch: pytest.MonkeyPatch
) -> None:
    feed = under_way(site, 20)
    context = browser.new_context()
    page = context.new_page()
    page.goto(site.login)
    page.goto(f"{site.url}/jobs/{feed.job_id}")
    expect(page.locator("[data-field=version]")).to_have_text("20")
    site.services.jobs.cancel(feed.job_id)
    expect(page).to_have_title(re.compile("^Cancelled · "))
    page.close()
    look, looking = Feeds._has_changed, threading.Lock()

    async def look_if_free(feeds: Feeds, feed: Any) -> bool:
        if not looking.acquire(blocking=False):
            return False
        try:
            return await look(feeds, feed)
        finally:
            looking.release()

    monkeypatch.setattr(Feeds, "_has_changed", look_if_free)
    retried = under_way(site, 20)
    page = context.new_page()
    page.goto(f"{site.url}/jobs/{retried.job_id}")
    expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "20")
    with looking:  # no look falls between the two calls
        site.services.jobs.cancel(retried.job_id)
        site.services.jobs.delete(retried.job_id)
    expect(page.locator("h1")).to_have_text(f"There is no job {retried.job_id}")
    context.close()


def test_a_list_says_that_it_is_old_while_the_server_is_away(site: Site, opened: Any) -> None:
    page = opened("/")
    page.evaluate("() => { window.usual = fetch; window.fetch = async () => { throw new TypeError('away'); }; }")
    expect(page.locator("#trouble")).to_have_text("The server does not answer: this page is out of date.")
    page.evaluate("() => { window.fetch = window.usual; }")
    expect(page.locator("#trouble")).to_have_text("")


def test_a_fork_of_replicas_changes_their_own_rate(site: Site, opened: Any) -> None:
    inner = {"name": "AdamW", "lr": 0.001, "weight_decay": 0.05}
    strategy = {"kind": "local", "inner_steps": 10, "replicas": 2, "inner_optimizer": inner}
    feed = start(site, strategy=strategy, micro_batches_per_round=None)
    feed.opened()
    feed.joined("w1studio", "mac-studio", "CPU")
    feed.versions(1)
    feed.checkpoint()
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator(".meta").first).to_contain_text("AdamW, learning rate 0.001")
    page.get_by_role("button", name="Fork version 1").click()
    page.get_by_label("Learning rate").fill("0.0005")
    page.get_by_role("button", name="Create job").click()
    expect(page.locator("#origin")).to_be_visible()
    made = site.services.jobs.show(page.url.rpartition("/")[2]).spec["strategy"]
    assert made["inner_optimizer"] | {"lr": 0.0005, "weight_decay": 0.05} == made["inner_optimizer"]
    assert (made["inner_steps"], made["replicas"]) == (10, 2)


def test_a_pause_shows_though_slow_parts_of_before_are_still_on_their_way(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    held: list[tuple[Any, Any]] = []
    page.route("**/parts*", lambda route: route.continue_() if held else held.append((route, route.fetch())))
    feed.scored()
    # The answer of before the pause is held back, long enough for the page to think the server slow. The page may have
    # asked already, or ask late: after slow answers it waits up to 20 s.
    wait_until(lambda: page.wait_for_timeout(500) or bool(held))
    with page.expect_response("**/pause"):
        page.get_by_role("button", name="Pause", exact=True).click()
    route, before = held[0]
    route.fulfill(response=before)
    expect(page.locator("#state .state-paused")).to_have_text("Paused")


@in_every_window
def test_a_fork_is_a_click_and_a_form_away_and_leads_back_to_its_parent(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.checkpoint()
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    page.get_by_role("button", name="Fork version 20").click()
    page.get_by_role("button", name="Close").click()
    expect(page.locator("#fork")).not_to_be_visible()
    page.get_by_role("button", name="Fork version 20").click()
    expect(page.locator("#fork").get_by_label("Name")).to_have_value("mnist, lenet5 from version 20")
    page.get_by_label("Rounds").fill("77")
    page.get_by_label("Learning rate").fill("0.005")
    page.get_by_role("button", name="Create job").click()
    expect(page.locator("#origin")).to_have_text("Forked from version 20 of mnist, lenet5")
    made = site.services.jobs.show(page.url.rpartition("/")[2])
    assert (made.rounds_total, made.spec["optimizer"]["lr"], made.spec["optimizer"]["momentum"]) == (77, 0.005, 0.9)
    assert made.forked_from and (made.forked_from.job_id, made.forked_from.optimizer) == (feed.job_id, "kept")
    expect(page.locator("#timeline")).to_contain_text(f"Forked by the owner from version 20 of job {feed.job_id}")
    expect(page.locator("#checkpoints tbody th")).to_have_text("0")
    page.locator("#origin a").click()
    expect(page).to_have_url(f"{site.url}/jobs/{feed.job_id}")


@in_every_window
@pytest.mark.parametrize("live", [True, False], ids=["failed before the eyes", "failed before it was opened"])
def test_a_failed_job_is_retried_and_its_page_is_live_again(site: Site, opened: Any, live: bool) -> None:
    feed = under_way(site, 20)
    if live:
        page = opened(f"/jobs/{feed.job_id}")
    feed.tell("failed", error="no space left on the disk", detail="")
    arrived(site, feed)
    if not live:
        page = opened(f"/jobs/{feed.job_id}")
    expect(page.locator("#state .problem-box")).to_be_visible()
    page.get_by_role("button", name="Retry").click()
    expect(page.locator("#state .problem-box")).to_have_count(0)
    expect(page.locator("#actions > button")).to_have_text(["Pause"])
    expect(page.locator("#timeline")).to_contain_text("Retried by the owner")
    feed.joined("w3again", "mac-mini", "CPU")
    feed.versions(5)
    expect(page.locator("[data-field=version]")).to_have_text("25")


def test_a_change_that_was_not_made_is_said(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    page.evaluate(
        """() => {
          const ask = fetch;
          window.fetch = async (path, options) => {
            if (path.endsWith("/pause")) throw new Error("the line is cut");
            return ask(path, options);
          };
        }"""
    )
    page.get_by_role("button", name="Pause", exact=True).click()
    expect(page.locator("#action-problem")).to_have_text("The job was not paused: the line is cut")
    assert site.services.jobs.show(feed.job_id).status == "running"


def test_a_failure_is_shown_first_and_live(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    page = opened(f"/jobs/{feed.job_id}")
    detail = 'Traceback (most recent call last):\n  File "reducer.py", line 7\nDiverged'
    feed.tell("failed", error="diverged at version 20. Try a lower learning rate.", detail=detail)
    box = page.locator("#state .problem-box")
    expect(box).to_contain_text("This job failed. diverged at version 20. Try a lower learning rate.")
    expect(box.locator("pre")).not_to_be_visible()
    box.locator("summary").click()
    expect(box.locator("pre")).to_contain_text("Traceback")


def test_hostile_names_are_only_text(site: Site, opened: Any) -> None:
    feed = start(site, name=HOSTILE)
    feed.opened()
    feed.joined("whostile1", HOSTILE, HOSTILE)
    feed.versions(5)
    register(site.redis, WorkerInfo("whostile1", HOSTILE, HOSTILE, (HOSTILE,), {HOSTILE: HOSTILE}, 1, HOSTILE, 1))
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    feed.joined("whostile2", HOSTILE + "2", "CPU")
    feed.left("whostile1", HOSTILE)
    feed.tell("failed", error=HOSTILE, detail=HOSTILE)
    expect(page.locator("#state .problem-box")).to_contain_text(HOSTILE)
    expect(page.locator("#workers")).to_contain_text(HOSTILE + "2")
    expect(page.locator("#timeline")).to_contain_text(f"{HOSTILE} left ({HOSTILE})")
    expect(page.locator("h1")).to_have_text(HOSTILE)
    expect(page).to_have_title(f"Failed · {HOSTILE} – ComputeShare")
    for path in ("/", "/workers"):
        page.goto(site.url + path)
        expect(page.locator("main")).to_contain_text(HOSTILE)
    assert page.locator("img:not(.brand img, #invite-qr)").count() == 0


def test_pages_are_whole_without_javascript(site: Site, opened: Any) -> None:
    feed = under_way(site, 40)
    feed.checkpoint()
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}", java_script_enabled=False)
    expect(page.locator("#state")).to_contain_text("Running")
    expect(page.locator("[data-field=version]")).to_have_text("40")
    expect(page.locator("#values tbody tr").first).to_be_visible()
    expect(page.locator("#values tbody tr").first).to_contain_text("40")
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    expect(page.locator("#checkpoints a[download]")).to_have_attribute("href", f"/v1/jobs/{feed.job_id}/checkpoints/40")
    page.locator("#more").click()
    commands = page.locator("#menu noscript code")
    expect(commands).to_have_text(
        [
            f"computeshare jobs {words}"
            for words in (
                f"pause {feed.job_id}",
                f"pause {feed.job_id} --after-round",
                f"share {feed.job_id}",
                f"rename {feed.job_id} NAME",
                f"edit {feed.job_id} --notes TEXT --tags TAG,TAG",
                f"cancel {feed.job_id}",
            )
        ]
    )
    expect(commands.last).to_be_in_viewport()
    expect(page.get_by_role("link", name="Clone")).to_be_in_viewport()
    expect(page.locator("#pause")).not_to_be_visible()
    expect(page.locator(".plot").first).not_to_be_visible()
    expect(page.locator("#cancel")).not_to_be_visible()
    page.goto(site.url)
    expect(page.locator(f"#job-{feed.job_id}")).to_be_visible()


def test_the_lists_stay_fresh(site: Site, opened: Any) -> None:
    page = opened("/")
    feed = start(site, name="a job that came later")
    expect(page.locator(f"#job-{feed.job_id}")).to_be_visible()
    page.goto(site.url + "/workers")
    register(
        site.redis, WorkerInfo("wfreshly", "just arrived", "cpu", ("mnist",), {"torch": "2.15"}, 8 * 10**9, "h", 7)
    )
    expect(page.locator("#workers")).to_contain_text("just arrived")


def test_refreshing_keeps_what_was_opened_and_focused(site: Site, opened: Any) -> None:
    feed = under_way(site, 20)
    feed.checkpoint()
    arrived(site, feed)
    page = opened(f"/jobs/{feed.job_id}")
    link = page.locator("#checkpoints a").first
    link.focus()
    name = link.get_attribute("id")
    feed.versions(5)
    feed.checkpoint()
    expect(page.locator("#checkpoints tbody tr")).to_have_count(2)
    assert page.evaluate("() => document.activeElement.id") == name


def test_series_stay_small_and_keep_their_extremes(site: Site, opened: Any) -> None:
    page = opened("/")
    found = page.evaluate(
        """async () => {
          const { Series, LIMIT } = await import("/static/series.js");
          const series = new Series();
          for (let v = 1; v <= 100000; v += 1) series.put(v, v / 10, v === 31337 ? -5 : v === 271 ? 99 : Math.sin(v));
          const sorted = series.versions.every((v, at) => at === 0 || series.versions[at - 1] < v);
          const extremes = [series.best((a, b) => a < b), series.best((a, b) => a > b)];
          return { size: series.versions.length, LIMIT, last: series.versions.at(-1), sorted, extremes };
        }"""
    )
    assert 500 < found["size"] <= found["LIMIT"] == 2000
    assert (found["last"], found["sorted"]) == (100_000, True)
    assert found["extremes"] == [{"version": 31_337, "value": -5}, {"version": 271, "value": 99}]


def test_browser_and_server_use_the_same_words(site: Site, opened: Any) -> None:
    numbers = [0, 0.00001234, 0.0001, 0.03126, 0.5, 1, 7.25, 59, 60, 61, 99.94, 3599, 3600, 7384, 86_400, 123_456, 9e9]
    ways = ("count", "rate", "percent", "loss", "duration", "ago", "until", "size")
    said = opened("/").evaluate(
        """async ([ways, numbers]) => {
          const format = await import("/static/format.js");
          return ways.map((way) => numbers.map((number) => format[way](number)));
        }""",
        [ways, numbers],
    )
    assert dict(zip(ways, said, strict=True)) == {way: [getattr(text_format, way)(n) for n in numbers] for way in ways}


@pytest.fixture(scope="module")
def showcase(site: Site) -> dict[str, str]:
    """Jobs in every state, for the screenshots: the name of a picture to the page it shows."""
    failed = under_way(site, 40, name="a rate too high", model="simplenet", optimizer={"name": "SGD", "lr": 2.0})
    error = "Training diverged at version 40: micro-batch 163 produced NaN or infinity 3 times (1 worker)."
    failed.tell("failed", error=error, detail="Traceback (most recent call last):\n  in reduce")
    done = under_way(site, 140, name="", dataset="digits", model="mlp", rounds=140)
    done.checkpoint()
    cancelled = under_way(site, 60, name="fashion", dataset="fashion-mnist")
    site.services.jobs.cancel(cancelled.job_id)
    paused = under_way(site, 60, name="resting overnight")
    site.services.jobs.pause(paused.job_id)
    queued = start(site, name="waiting for the lab", queue="lab", workers={"min": 3, "max": 8})
    running = long_under_way(site)
    for feed in (failed, done, running):
        arrived(site, feed)
    shown = {"job": running, "job-failed": failed, "job-queued": queued, "job-paused": paused, "job-completed": done}
    pages = {
        "jobs": "/",
        "workers": "/workers",
        "new": "/new",
        "compare": f"/compare?job={running.job_id}&job={failed.job_id}&smooth=0.7",
        "submissions": f"/jobs/{running.job_id}/submissions",
        "timeline": f"/jobs/{running.job_id}/timeline",
        "classes": f"/jobs/{running.job_id}/classes?version=latest",
        "join": f"/join/{site.services.invites.create('mnist', 15)[1]}",
        "missing": "/jobs/nosuchid",
    }
    return pages | {name: f"/jobs/{feed.job_id}" for name, feed in shown.items()}


def long_under_way(site: Site) -> Feed:
    """A job in which all sorts of things have happened."""
    feed = under_way(site, 400)
    feed.left("w2laptop", "the machine went to sleep")
    moved = {"from": "w2laptop", "to": "w1studio", "after_ms": 3100}
    feed.tell("reassigned", version=400, micro_batch=1601, **moved)
    feed.joined("w3minimac", "mac-mini", "Apple M4 (MPS)")
    feed.joined("w4labgpu", "lab-gpu-1", "NVIDIA RTX 4090")
    for _ in range(10):
        feed.versions(20)
        feed.checkpoint()
        feed.scored()
    by_class(site, feed)
    feed.submission("w3minimac", 2401, "stale")
    refused = {"nonce": "w4labgpu-2399-accepted", "micro_batch": 2399, "base": "", "reason": "checksum differs"}
    feed.tell("refused", worker="w4labgpu", **refused)
    return feed


def online(site: Site) -> None:
    """Two machines that say they are there."""
    versions = {"computeshare": "0.1.0", "torch": "2.15.0"}
    studio = WorkerInfo("w1studio", "mac-studio", "Apple M2 (MPS)", ("mnist",), versions, 64 * 10**9, "studio", 811)
    lab = WorkerInfo("w4labgpu", "lab-gpu-1", "NVIDIA RTX 4090", ("lab",), versions, 128 * 10**9, "lab1", 4242)
    for worker in (studio, lab):
        register(site.redis, worker)


@pytest.mark.sampled(2)
def test_pages_fit_their_window(site: Site, opened: Any, showcase: dict[str, str], window: Window) -> None:
    online(site)
    page = opened("/")
    forgive(page, showcase["missing"])
    for name, path in showcase.items():
        page.goto(site.url + path)
        if name == "job":
            expect(page.locator("[data-plot=loss]")).to_have_attribute("data-points", "600")
        picture(page, f"{name}-{window}", whole=True)


def test_the_form_of_a_fork_fits_its_window(site: Site, opened: Any, showcase: dict[str, str], window: Window) -> None:
    page = opened(showcase["job-completed"])
    page.get_by_role("button", name="Fork version").click()
    box = page.locator("#fork").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= window.width
    picture(page, f"fork-{window}")
    page.locator("#fork-close").click()
    table = page.locator("#checkpoints-scroll")
    widths = table.evaluate("one => [one.scrollWidth, one.clientWidth]")
    assert widths[0] <= widths[1], "the checkpoints scroll sideways"
    page.locator("#checkpoints").screenshot(path=SCREENSHOTS / f"checkpoints-{window}.png")


def test_plots_take_the_colours_of_the_scheme(site: Site, opened: Any, showcase: dict[str, str]) -> None:
    page = opened(showcase["job"], color_scheme="light")
    marker = "() => getComputedStyle(document.querySelectorAll('.u-marker')[0]).borderTopColor"
    light = page.evaluate(marker)
    page.emulate_media(color_scheme="dark")
    expect(page.locator(".u-wrap canvas")).to_have_count(4)
    assert page.evaluate(marker) != light
    drawn = "() => [...document.querySelectorAll('canvas')].map(c => c.toDataURL().length)"
    assert min(page.evaluate(drawn)) > 3000


def test_plots_follow_the_width_of_the_window(site: Site, opened: Any, showcase: dict[str, str]) -> None:
    page = opened(showcase["job"], viewport={"width": 1280, "height": 900})
    canvas = page.locator("[data-plot=loss] canvas")
    wide = canvas.bounding_box()["width"]
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("wide => document.querySelector('canvas').clientWidth < wide", arg=wide)
    assert canvas.bounding_box()["width"] <= 390
