"""The content of the log panel on a job's page."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.logs.reader import Logs, Which
from api.schemas import LogLinePublic
from computeshare.runtime.log_lines import LEVELS, SERVICES, Level, called, fields_text

SHOWN = 100
"""Lines in the page itself, before the live stream adds more."""


@dataclass(frozen=True, slots=True)
class LogView:
    """The log panel: the newest lines that pass the filter, and the choices for the filter."""

    lines: list[LogLinePublic]
    writers: Sequence[tuple[str, str]]
    """Pairs of id and label."""
    worker: str
    level: str
    more: bool
    """Whether there are older lines than these."""
    levels: Sequence[Level] = LEVELS

    @property
    def is_open(self) -> bool:
        """Whether the panel begins open: a user has set a filter."""
        return bool(self.worker or self.level)

    @property
    def last(self) -> int:
        """The newest line's id."""
        return self.lines[-1].id if self.lines else 0

    @staticmethod
    def called(line: LogLinePublic) -> str:
        """The display name of a line's writer."""
        return called(line.worker, line.name)

    @staticmethod
    def said(line: LogLinePublic) -> str:
        """A line's fields as text, the same text as in `static/logs.js`."""
        return fields_text(line.data)


def log_view(logs: Logs, job_id: str, worker: str = "", level: str = "") -> LogView:
    """The panel of a job's log. Raises NotFound.

    Args:
        worker: shows only lines of this id or name; empty for all lines.
        level: the lowest level to show; an unknown level means all.
    """
    least = next((one for one in LEVELS if one == level), None)
    page = logs.page(job_id, Which(worker or None, least), limit=SHOWN)
    writers = [(one, one if one in SERVICES else f"{name or one} ({one})") for one, name in logs.writers(job_id)]
    return LogView(page.items, writers, worker, least or "", page.previous is not None)
