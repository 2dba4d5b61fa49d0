"""The pictures of the README, of real jobs; `make pictures` puts them where it looks for them."""

import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from computeshare.settings import login_path
from tests.support.browser import SCREENSHOTS, Watched, Window
from tests.support.control_plane import DIGITS_MLP, control_plane

pytestmark = pytest.mark.e2e
README = Path(__file__).resolve().parents[3] / "README.md"
PICTURES = {
    "job": (Window(1280, "light"), 1180),
    "phone": (Window(390, "dark"), 800),
    "compare": (Window(1280, "light"), 1180),
    "workers": (Window(1280, "dark"), 640),
}
"""Name to the window that the page is seen through, and its height."""


@pytest.mark.long
def test_the_readmes_pictures_are_taken(tmp_path: Path, browser: Browser) -> None:
    with control_plane(tmp_path, "--workers", "3", "--queue", "e2e") as plane:
        scored = {**DIGITS_MLP, "checkpoint_every": 500, "evaluate_every": 50, "workers": {"min": 3, "max": 3}}
        slow = {"name": "SGD", "lr": 0.01, "momentum": 0.9}
        before = plane.create(**{**scored, "optimizer": slow}, rounds=900, name="digits, rate 0.01")
        plane.finish(before)
        job_id = plane.create(**scored, rounds=3000, name="digits, three workers")
        paths = {"job": f"/jobs/{job_id}", "compare": f"/compare?job={job_id}&job={before}", "workers": "/workers"}
        plane.reach(job_id, 900)
        for name, (window, height) in PICTURES.items():
            context = browser.new_context(**window.options)
            watched = Watched(context)
            page = watched.page
            page.goto(plane.url + login_path((plane.home / "token").read_text().strip()))
            page.set_viewport_size({"width": window.width, "height": height})
            page.goto(plane.url + paths.get(name, paths["job"]))
            if name != "workers":
                expect(page.locator("[data-plot=loss] canvas")).to_be_visible()
            page.screenshot(path=SCREENSHOTS / "readme" / f"{name}.png")
            context.close()
            assert watched.problems == []
        plane.http.post(f"/v1/jobs/{job_id}/cancel")


def test_the_readme_shows_these_and_no_others() -> None:
    named = re.findall(r"docs/images/(\w+)\.png", README.read_text())
    assert sorted(named) == sorted(PICTURES)
    assert all((README.parent / "docs" / "images" / f"{name}.png").stat().st_size < 300_000 for name in PICTURES)
