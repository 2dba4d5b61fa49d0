"""Every text of the pages can be read: contrast of WCAG AA, in both schemes."""

import re
from pathlib import Path

import pytest

STYLE = (Path(__file__).resolve().parents[4] / "api" / "pages" / "static" / "style.css").read_text()
BACKGROUNDS = ("page", "panel", "raised")
STATES = ("accent", "good", "bad", "wait", "off")


def colours(scheme: str) -> dict[str, tuple[float, ...]]:
    """The style sheet's colours, each as red, green and blue from 0 to 1."""
    light, dark = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)[:2]
    found = dict(re.findall(r"--(\w+): #([0-9a-f]{3,6});", light if scheme == "light" else light + dark))
    digits = {
        name: value if len(value) == 6 else "".join(2 * digit for digit in value) for name, value in found.items()
    }
    return {name: tuple(int(value[i : i + 2], 16) / 255 for i in (0, 2, 4)) for name, value in digits.items()}


def luminance(colour: tuple[float, ...]) -> float:
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: tuple[float, ...], other: tuple[float, ...]) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out(scheme: str) -> None:
    known = colours(scheme)
    weak = {
        (text, ground): round(contrast(known[text], known[ground]), 2)
        for text in ("text", "muted", *STATES)
        for ground in BACKGROUNDS
        if contrast(known[text], known[ground]) < 4.5
    }
    assert weak == {}


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_states_stand_out_on_their_own_tint(scheme: str) -> None:
    known = colours(scheme)
    for state in STATES:
        pairs = zip(known[state], known["panel"], strict=True)
        tint = tuple(0.11 * own + 0.89 * ground for own, ground in pairs)
        assert contrast(known[state], tint) >= 4.5, state


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_lines_of_the_plots_stand_out(scheme: str) -> None:
    known = colours(scheme)
    for line in ("train", "test"):
        assert contrast(known[line], known["panel"]) >= 3, line
