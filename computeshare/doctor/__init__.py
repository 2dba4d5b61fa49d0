"""`computeshare doctor`: checks of this machine and of its connections, with advice for each problem.

A check examines one subject and returns a `Check`; it changes nothing. Checks that need torch run in a process of their
own (`doctor/probe.py`): importing torch takes seconds, and may crash the process.
"""

from collections.abc import Callable

from rich.table import Table
from rich.text import Text

from computeshare.doctor import machine_checks, services
from computeshare.doctor.machine import Check, Surroundings
from computeshare.terminal.output import plain

__all__ = ["CHECKS", "Check", "Surroundings", "checks_table", "diagnose"]

_LOOKS = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "fail": ("✗", "red")}
CHECKS: tuple[Callable[[Surroundings], Check], ...] = (
    machine_checks.python,
    machine_checks.packages,
    machine_checks.device,
    machine_checks.home,
    machine_checks.disk,
    machine_checks.database,
    machine_checks.processes,
    machine_checks.port,
    machine_checks.proxies,
    machine_checks.recipes,
    services.broker,
    services.broker_memory,
    services.control_plane,
    services.token,
    services.versions,
    services.clock,
    services.workers,
    machine_checks.data_sets,
)


def diagnose(machine: Surroundings) -> list[Check]:
    """Run every check, in order."""
    return [check(machine) for check in CHECKS]


def checks_table(checks: list[Check]) -> Table:
    """The checks as a table for a terminal."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True)
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for check in checks:
        icon, style = _LOOKS[check.status]
        advice = Text(f"\n→ {plain(check.advice)}", style) if check.advice else Text()
        grid.add_row(Text(icon, style), check.name, Text(plain(check.finding)) + advice)
    return grid
