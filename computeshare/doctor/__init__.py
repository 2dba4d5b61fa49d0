"""`computeshare doctor`: what this machine has, what it reaches, and what to do about the rest.

A check looks at one thing and returns a `Check`; it changes nothing. What needs torch runs in a process of its own
(`commands/probe.py`): importing torch takes seconds, and may fail in ways that end a process.
"""

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from computeshare.doctor import here, services
from computeshare.doctor.machine import Check, Surroundings
from computeshare.terminal.output import plain

__all__ = ["CHECKS", "Check", "Surroundings", "diagnose", "table"]

_LOOKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
CHECKS: tuple[Callable[[Surroundings], Check], ...] = (
    here.python,
    here.packages,
    here.device,
    here.home,
    here.disk,
    here.database,
    here.processes,
    here.port,
    here.proxies,
    services.broker,
    services.broker_memory,
    services.control_plane,
    services.token,
    services.versions,
    services.clock,
    services.workers,
    here.data_sets,
)


def diagnose(machine: Surroundings) -> list[Check]:
    """Every check, in order."""
    return [check(machine) for check in CHECKS]


def table(checks: list[Check]) -> Table:
    """The checks for people."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        icon, style = _LOOKS[check.status]
        advice = Text(f"\n→ {plain(check.advice)}", style) if check.advice else Text()
        grid.add_row(Text(icon, style), check.name, Text(plain(check.finding)) + advice)
    return grid
