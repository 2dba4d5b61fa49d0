"""What the panel of a job's log shows."""

from collections.abc import Sequence
from dataclasses import dataclass

from api.logs.reader import Logs, Which
from api.schemas import LogLinePublic
from computeshare.runtime.log_lines import LEVELS, SERVICES, Level, called, fields_text

SHOWN = 100
"""Lines that are there before anything comes live."""


@dataclass(frozen=True, slots=True)
class LogView:
    """The panel: the newest lines of those that are wanted, and what can be chosen instead."""

    lines: list[LogLinePublic]
    writers: Sequence[tuple[str, str]]
    """Ids, each with what to call it."""
    worker: str
    level: str
    more: bool
    """Whether there are older lines than these."""
    levels: Sequence[Level] = LEVELS

    @property
    def is_open(self) -> bool:
        """Whether the panel begins open: somebody has chosen something in it."""
        return bool(self.worker or self.level)

    @property
    def last(self) -> int:
        """The newest line's id."""
        return self.lines[-1].id if self.lines else 0

    @staticmethod
    def called(line: LogLinePublic) -> str:
        """Who wrote a line."""
        return called(line.worker, line.name)

    @staticmethod
    def said(line: LogLinePublic) -> str:
        """A line's fields in words; `static/logs.js` says the same."""
        return fields_text(line.data)


def log_view(logs: Logs, job_id: str, worker: str = "", level: str = "") -> LogView:
    """The panel of a job's log. Raises NotFound.

    Args:
        worker: the id or name whose lines are wanted; empty: everyone's.
        level: the least level; one that there is not, as none.
    """
    least = next((one for one in LEVELS if one == level), None)
    page = logs.page(job_id, Which(worker or None, least), limit=SHOWN)
    writers = [(one, one if one in SERVICES else f"{name or one} ({one})") for one, name in logs.writers(job_id)]
    return LogView(page.items, writers, worker, least or "", page.previous is not None)
