"""How values and jobs look."""

import io
from datetime import UTC, datetime

import pytest
from rich.console import Console, RenderableType

from computeshare.terminal import output, watch
from tests.support.http_answers import job

NOW = datetime(2026, 1, 1, 12, 1, 5, tzinfo=UTC)
HOSTILE = "\x1b[31mred [bold]bold[/bold] [link=http://evil]x[/link]\r\u202e\x9b"


def drawn(renderable: RenderableType, width: int = 100, terminal: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=terminal, color_system=None, highlight=False).print(renderable)
    return file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (0, "0 s"), (-3, "0 s"), (59.4, "59 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"),
     (7500, "2 h 5 min"), (273_600, "3 d 4 h")],
)  # fmt: skip
def test_durations_read_like_speech(seconds: float | None, text: str) -> None:
    assert output.duration(seconds) == text


def test_elapsed_ends_when_the_job_does() -> None:
    assert output.elapsed(job(), NOW) == "1 min 0 s"
    assert output.elapsed(job(finished_at="2026-01-01T12:00:15.5+00:00"), NOW) == "10 s"
    assert output.elapsed(job(paused_at="2026-01-01T12:00:20.5+00:00", stopped_s=5.0), NOW) == "10 s"
    assert output.elapsed(job(started_at=None), NOW) == "–"


def test_names_reach_the_terminal_as_plain_text() -> None:
    hostile = job(title=HOSTILE, queue=HOSTILE, reason=HOSTILE, error=HOSTILE, id=HOSTILE)
    shown = [
        drawn(output.job_table([hostile], NOW), 400),
        drawn(output.job_details(hostile, "http://x/jobs/1", NOW), 400),
        drawn(watch.bar(hostile, HOSTILE, NOW), 400, terminal=True),
        watch.line(hostile, HOSTILE),
    ]
    for text in shown:
        assert not set(text) & set("\x1b\r\u202e\x9b")
        assert "[bold]bold[/bold]" in text


def test_a_table_shows_progress_and_figures() -> None:
    row = drawn(output.job_table([job()], NOW)).splitlines()[1]
    assert " ".join(row.split()) == "ab12cd34 first ▶ running default 25/100 0.5000 75.00 % 2 1 min 5 s"


def test_details_of_a_failed_job_begin_with_the_error() -> None:
    lines = drawn(output.job_details(job(status="failed", error="diverged at version 3"), "http://x", NOW)).splitlines()
    assert "✗ failed" in lines[0]
    assert lines[1].split() == ["Error", "diverged", "at", "version", "3"]


def test_submissions_are_told_by_outcome_the_rare_ones_where_there_were_any() -> None:
    assert output.submissions(job()) == "100 accepted, 3 stale, 1 duplicate"
    rare = job(stale=0, refused=2, lease_lost=4, fenced=5)
    assert output.submissions(rare) == "100 accepted, 0 stale, 1 duplicate, 4 lease lost, 5 fenced, 2 refused"
    assert output.submissions(rare) in drawn(output.job_details(rare, "http://x", NOW))


def test_the_bar_fits_a_narrow_terminal_and_tells_everything() -> None:
    text = drawn(watch.bar(job(), "", NOW), width=60, terminal=True)
    assert all(len(line) <= 60 for line in text.splitlines())
    for part in ("first", "▶ running", "25 %", "25 of 100", "loss 0.5000", "accuracy 75.00 %", "1,198 samples/s",
                 "2 workers", "8 s left"):  # fmt: skip
        assert part in " ".join(text.split())


def test_plain_lines_come_with_every_change_of_state_and_seldom_otherwise() -> None:
    file, now_s = io.StringIO(), 0.0
    with watch.plain_lines(Console(file=file, width=300), every_s=5, clock=lambda: now_s) as show:
        show(job(status="queued", reason="Needs 1 worker", version=0), "")
        show(job(version=1), "")
        show(job(version=2), "")
        now_s = 5.0
        show(job(version=3), "")
        now_s = 99.0
        show(job(version=3), "")
        show(job(version=3), "reconnecting: gone")
        show(job(status="completed", version=100), "")
    lines = file.getvalue().splitlines()
    assert [line.split("  ")[:2] for line in lines] == [
        ["queued", "0/100"], ["running", "1/100"], ["running", "3/100"], ["running", "3/100"], ["completed", "100/100"],
    ]  # fmt: skip
    assert lines[0].endswith("Needs 1 worker")
    assert lines[3].endswith("reconnecting: gone")


def test_audits_are_shown_where_there_were_some() -> None:
    assert "Audits" not in drawn(output.job_details(job(), "http://x", NOW))
    shown = drawn(output.job_details(job(audited=1200, confirmed=1199), "http://x", NOW))
    assert "1,200, 1,199 confirmed" in shown
