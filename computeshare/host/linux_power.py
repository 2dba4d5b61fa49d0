"""A Linux machine's own power, read from /sys/class/power_supply."""

from pathlib import Path

from computeshare.host.rest_policy import Power

FOLDER = Path("/sys/class/power_supply")


def read(folder: Path) -> Power:
    """The machine's power, without the batteries of devices such as a mouse. Raises OSError, ValueError."""
    own = [path for path in sorted(folder.iterdir()) if _text(path / "scope") != "Device"]
    batteries = [path for path in own if _text(path / "type") == "Battery"]
    if not batteries:
        return Power()
    percents = [float(_text(path / "capacity")) for path in batteries]
    return Power(_is_plugged(own, batteries), min(100.0, max(0.0, sum(percents) / len(percents))))


def _is_plugged(own: list[Path], batteries: list[Path]) -> bool | None:
    mains = [_text(path / "online") == "1" for path in own if _text(path / "type") == "Mains"]
    if mains:
        return any(mains)
    states = {_text(path / "status") for path in batteries} - {"Unknown", ""}
    return "Discharging" not in states if states else None


def _text(path: Path) -> str:
    """A file's stripped text; empty if the file does not exist."""
    try:
        return path.read_text().strip()
    except FileNotFoundError:
        return ""
