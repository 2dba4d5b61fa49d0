"""A job, and a list of jobs, as small HTML for notebooks, which takes its colours from the notebook. Pure."""

from collections.abc import Sequence
from html import escape

from computeshare.client.api.models import ICONS, Job, quality, trouble

_CARD = "max-width:34em;padding:.7em 1em;border:1px solid #8886;border-radius:8px;line-height:1.6"
_TRACK = "height:6px;margin:.4em 0;border-radius:3px;background:#8884;overflow:hidden"
_FILL = "height:6px;background:#2f80d0"
_LINK = "color:inherit;text-decoration:underline"
_WRONG = "border-left:3px solid #d64545;padding-left:.6em;white-space:pre-wrap;overflow-wrap:anywhere"
_CELL = "text-align:left;padding:.2em .8em"
LONGEST = 600
"""Most characters of an error that a card shows."""


def card(job: Job, url: str) -> str:
    """A job's name, state, progress and score, with its error or the reason why it is not running.

    Args:
        url: address of the job's page.
    """
    parts = [
        f"<b>{_link(job, url)}</b>",
        f"<div>{_state(job)}{_figures(job)}</div>",
        _bar(job),
    ]
    if told := trouble(job):
        parts.append(f'<div style="{_WRONG}">{escape(shorten(told))}</div>')
    return f'<div style="{_CARD}">{"".join(parts)}</div>'


def shorten(text: str) -> str:
    """Cut a text to its first `LONGEST` characters."""
    return text if len(text) <= LONGEST else text[:LONGEST] + " …"


def jobs_table(jobs: Sequence[tuple[Job, str]]) -> str:
    """A table of jobs, one per row. Each job comes with the address of its page."""
    heads = "".join(f'<th style="{_CELL}">{name}</th>' for name in ("Job", "State", "Progress", "Score"))
    rows = "".join(f"<tr>{_row(job, url)}</tr>" for job, url in jobs)
    return f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"


def _row(job: Job, url: str) -> str:
    cells = (
        _link(job, url),
        _state(job),
        f"{job['version']:,} of {job['rounds_total']:,}{_bar(job)}",
        quality(job) or "–",
    )
    return "".join(f'<td style="{_CELL}">{cell}</td>' for cell in cells)


def _link(job: Job, url: str) -> str:
    title = escape(job.get("title") or job["name"] or job["id"])
    return f'<a href="{escape(url)}" style="{_LINK}">{title}</a> <code>{escape(job["id"])}</code>'


def _state(job: Job) -> str:
    return f"{ICONS.get(job['status'], '?')} {escape(job['status'])}"


def _figures(job: Job) -> str:
    told = f" · version {job['version']:,} of {job['rounds_total']:,}"
    return f"{told} · {score}" if (score := quality(job)) else told


def _bar(job: Job) -> str:
    percent = min(100.0, 100 * job["version"] / max(1, job["rounds_total"]))
    label = f'role="progressbar" aria-valuenow="{percent:.0f}" aria-valuemin="0" aria-valuemax="100"'
    return f'<div {label} style="{_TRACK}"><div style="{_FILL};width:{percent:.1f}%"></div></div>'
