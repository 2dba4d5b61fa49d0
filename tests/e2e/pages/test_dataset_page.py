"""The pages of users' data sets and the form's choice of recipes: samples of each kind, a new job, removing one."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import expect

from computeshare import ComputeShare
from tests.support.browser import Site, in_every_window, picture, problems
from tests.support.own_images import make_images
from tests.support.recipes import NOISE

pytestmark = pytest.mark.e2e


@pytest.fixture
def added(site: Site, tmp_path: Path) -> Iterator[None]:
    images = make_images(tmp_path / "in", ["dunkel", "grau", "wei\u00df"], 10)
    text = tmp_path / "poem.txt"
    text.write_text("roses are red, violets are blue\n" * 20)
    np.savez(tmp_path / "table.npz", x=np.random.default_rng(0).normal(size=(40, 12)), y=np.arange(40) % 2)
    with ComputeShare(site.url, site.services.token) as cs:
        cs.datasets.add("tones", images, size=32)
        cs.datasets.add("poem", text)
        cs.datasets.add("table", tmp_path / "table.npz")
        cs.datasets.add("notes", tmp_path / "poem.txt", kind="files")
        yield
        for one in cs.datasets.list():
            cs.datasets.remove(one["name"])


@in_every_window
def test_samples_are_shown_a_job_is_begun_and_a_data_set_removed(site: Site, opened: Any, added: None) -> None:
    page = opened("/datasets")
    tones = page.get_by_role("region", name="tones", exact=True)
    expect(tones.locator("img")).to_have_count(24)
    for image in tones.locator("img").all():
        image.scroll_into_view_if_needed()
    page.wait_for_function("() => [...document.images].every((one) => one.complete && one.naturalWidth)")
    expect(tones.locator("figcaption").last).to_have_text("wei\u00df")
    expect(page.locator(".excerpt")).to_contain_text("roses are red")
    expect(page.get_by_role("region", name="notes", exact=True)).to_contain_text("poem.txt")
    assert problems(page) == []
    picture(page, "datasets", whole=True)
    page.get_by_role("link", name="tones", exact=True).click()
    expect(page.get_by_role("heading", name="tones", level=1)).to_be_visible()
    expect(page.get_by_role("row", name="train 27")).to_be_visible()
    expect(page.get_by_text("Classes: dunkel, grau, wei\u00df")).to_be_visible()
    expect(page.locator(".gallery img")).to_have_count(24)
    expect(page.get_by_text("No job has trained on it yet.")).to_be_visible()
    assert problems(page) == []
    picture(page, "dataset", whole=True)
    page.go_back()
    page.get_by_role("region", name="table", exact=True).get_by_role("button", name="Remove").click()
    page.get_by_role("button", name="Remove data set").click()
    expect(page.get_by_role("region", name="table", exact=True)).to_have_count(0)
    tones.get_by_role("link", name="New job").click()
    expect(page.get_by_label("Data set")).to_have_value("tones")
    expect(page.locator("#made")).to_contain_text("parameters")
    picture(page, "new-own")


def test_a_stored_recipe_is_chosen_in_the_form_with_its_arguments(site: Site, opened: Any, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NOISE + "def model(width=4): return nn.Linear(144, width)\n")
    with ComputeShare(site.url, site.services.token) as cs:
        digest = cs.create_recipe(tmp_path / "net.py")
    page = opened("/new")
    expect(page.get_by_label("Recipe's arguments")).to_be_hidden()
    page.get_by_label("Recipe", exact=True).select_option(digest)
    expect(page.get_by_label("Model", exact=True)).to_be_hidden()
    expect(page.get_by_label("Data set")).to_have_value("")
    page.get_by_label("Recipe's arguments").fill("width")
    expect(page.locator("#recipe-args-error")).to_contain_text("write NAME=VALUE")
    page.get_by_label("Recipe's arguments").fill("width=8")
    expect(page.locator("#made")).to_contain_text("the recipe is tried first")
    expect(page.locator("#ways")).to_contain_text('"width": 8')
    assert problems(page) == []
