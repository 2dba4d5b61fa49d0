"""Decides whether a worker may work now, by its owner's hours and the machine's power and battery. Pure."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, time, timedelta

from computeshare.errors import SettingsError

DAY = 24 * 60
"""Minutes."""
START_ABOVE_STOP = 10.0
"""Default distance from `battery_stop` to `battery_start`, in percentage points."""
_WINDOW = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*-\s*(\d{1,2})(?::(\d{2}))?")


@dataclass(frozen=True, slots=True)
class Power:
    """A machine's power; a field is None if unknown, and `percent` (0 to 100) also without a battery."""

    plugged: bool | None = None
    percent: float | None = None


UNKNOWN = Power()


@dataclass(frozen=True, slots=True)
class Window:
    """A window of each day in minutes of local time: from `start` to before `end`, over midnight if `end` is less."""

    start: int
    end: int

    def holds(self, now: datetime) -> bool:
        """Whether the window is open."""
        minute = now.hour * 60 + now.minute
        if self.start < self.end:
            return self.start <= minute < self.end
        return minute >= self.start or minute < self.end

    def opens(self, now: datetime) -> datetime:
        """The next opening after `now`."""
        opening = datetime.combine(now.date(), time(*divmod(self.start, 60)), now.tzinfo)
        return opening if opening > now else opening + timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Manners:
    """The owner's rules for the worker. By default it works at any hour, and on battery down to the last percent."""

    only_on_power: bool = False
    battery_stop: float | None = None
    """Battery percentage at which work stops."""
    battery_start: float = 100.0
    """Battery percentage at which work starts again."""
    hours: tuple[Window, ...] = ()
    """Windows in which to work; empty: always."""


@dataclass(frozen=True, slots=True)
class RestDecision:
    """Whether to work, and why not; `until` is the end of the rest, if the clock decides it."""

    work: bool
    reason: str = ""
    until: datetime | None = None
    charging: bool = False
    """The battery has fallen to `battery_stop` and has not yet risen to `battery_start`."""


def may_work(manners: Manners, power: Power, now: datetime, before: RestDecision = RestDecision(True)) -> RestDecision:
    """Whether a machine may work.

    Args:
        now: local time.
        before: the previous decision, for hysteresis between the two battery thresholds.
    """
    charging = _is_charging(manners, power, before.charging)
    if manners.hours and not any(window.holds(now) for window in manners.hours):
        until = min(window.opens(now) for window in manners.hours)
        return RestDecision(False, f"outside its hours until {until:%H:%M}", until, charging)
    if manners.only_on_power and power.plugged is False:
        return RestDecision(False, "on battery until it is plugged in", None, charging)
    if charging:
        where = "charging" if power.plugged else "on battery"
        return RestDecision(False, f"{where} until {manners.battery_start:g} %", None, charging)
    return RestDecision(True)


def _is_charging(manners: Manners, power: Power, before: bool) -> bool:
    if manners.battery_stop is None or power.percent is None:
        return False
    return power.percent <= manners.battery_stop or (before and power.percent < manners.battery_start)


def manners_of(
    only_on_power: bool = False,
    battery_stop: float | None = None,
    battery_start: float | None = None,
    hours: Sequence[str] = (),
) -> Manners:
    """Rules from the flags of `computeshare-worker`; percentages from 0 to 100.

    Raises: SettingsError: the flags contradict each other or cannot be parsed.
    """
    if battery_stop is None and battery_start is not None:
        raise SettingsError(f"--battery-start {battery_start:g} needs --battery-stop: at which percentage to rest")
    if battery_stop is None:
        return Manners(only_on_power, hours=parse_hours(hours))
    start = min(100.0, battery_stop + START_ABOVE_STOP) if battery_start is None else battery_start
    if start <= battery_stop:
        raise SettingsError(f"--battery-start {start:g} must be above --battery-stop {battery_stop:g}")
    return Manners(only_on_power, battery_stop, start, parse_hours(hours))


def parse_hours(texts: Sequence[str]) -> tuple[Window, ...]:
    """Parse windows such as `22-07`, `22:30-07` and `12-13,18-23:30`. Raises SettingsError."""
    return tuple(_window(part.strip()) for text in texts for part in text.split(","))


def _window(text: str) -> Window:
    found = _WINDOW.fullmatch(text)
    if not found:
        raise SettingsError(f"hours {text!r}: write from-to as in 22-07 or 22:30-07, several by commas")
    start, end = (_minute(text, found[i], found[i + 1]) for i in (1, 3))
    if start in (DAY, end):
        raise SettingsError(f"hours {text!r} are empty or begin after the day ends: omit --hours to work at all times")
    return Window(start, end)


def _minute(text: str, hour: str, minute: str | None) -> int:
    found = int(hour) * 60 + int(minute or 0)
    if int(minute or 0) > 59 or found > DAY:
        raise SettingsError(f"hours {text!r}: a day has hours 0 to 24, an hour minutes 0 to 59")
    return found
