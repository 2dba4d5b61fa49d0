"""What a part of `make bench` found, as one Markdown file and plots in plain SVG."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from math import log2
from pathlib import Path
from typing import Any

Cell = str | float | int | None
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 640, 360, 64, 40, 150, 48
COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#a16207", "#be123c")


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` of as many cells as there are columns; numbers are rounded when it is written."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines by name, each of points (x, y); `doubling` puts the powers of two on x at equal distances."""

    name: str
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    doubling: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """What one part found."""

    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """For a reader of the JSON: every single measurement."""

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Part":
        """Read what `save` wrote."""
        found = json.loads(path.read_text())
        tables = [Table(**each) for each in found["tables"]]
        return cls(tables, [Plot(**each) for each in found["plots"]], found["details"])


def merged(parts: Sequence[Part]) -> Part:
    """Several parts as one."""
    tables = [table for part in parts for table in part.tables]
    details = {name: value for part in parts for name, value in part.details.items()}
    return Part(tables, [plot for part in parts for plot in part.plots], details)


def paired(label: str, values: Sequence[tuple[float | None, float | None]]) -> list[Cell]:
    """A row about ours and a peer's values, taken in turn: both medians, and that of the ratios pair by pair."""
    ratios = [a / b if a is not None and b else None for a, b in values]
    return [label, median([a for a, _ in values]), median([b for _, b in values]), median(ratios)]


def median(values: Sequence[float | None]) -> float | None:
    """None where one of them is: what was not reached has no time."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def markdown(part: Part) -> str:
    """A part's tables, and its plots by the names of their files."""
    sections = [f"### {table.title}\n\n{_rows(table)}\n{table.note}".rstrip() + "\n" for table in part.tables]
    sections += [f"![{plot.title}]({plot.name}.svg)\n" for plot in part.plots]
    return "\n".join(sections)


def _rows(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "".join(f"| {' | '.join(cell(value) for value in line)} |\n" for line in lines)


def cell(value: Cell) -> str:
    """A number with three digits that matter, `-` for none."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{round(value):,}"
    return f"{value:.3g}"


def svg(plot: Plot) -> str:
    """The plot as a document of its own."""
    drawn = {name: [(float(x), float(y)) for x, y in points] for name, points in plot.lines.items() if points}
    scale_x = log2 if plot.doubling else float
    xs = [scale_x(x) for points in drawn.values() for x, _ in points] or [0.0]
    top = max([y for points in drawn.values() for _, y in points] or [1.0]) or 1.0
    low, span = min(xs), (max(xs) - min(xs)) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        inner_x, inner_y = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + inner_x * (scale_x(x) - low) / span, HEIGHT - BOTTOM - inner_y * y / top

    at_x = sorted({x for points in drawn.values() for x, _ in points})
    marks = at_x if plot.doubling else [low + span * i / 4 for i in range(5)]
    parts = [_text(LEFT, TOP - 18, plot.title, "start", 15), _text(LEFT, TOP - 4, plot.y, "start")]
    for mark in marks:
        parts.append(_text(place(mark, 0)[0], HEIGHT - BOTTOM + 16, cell(mark), "middle"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = place(at_x[0] if at_x else 1.0, share * top)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ccc"/>')
        parts.append(_text(LEFT - 6, y + 4, cell(share * top), "end"))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, plot.x, "middle"))
    for number, (name, points) in enumerate(drawn.items()):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        dots = (place(*point) for point in points) if len(points) <= 40 else ()
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        parts.append(_text(WIDTH - RIGHT + 10, TOP + 16 * (number + 1), name, "start", colour=colour))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">'
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *parts, "</svg>\n"])


def _text(x: float, y: float, words: str, anchor: str, size: int = 12, colour: str = "#333") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}"'
    return f"<text {place}>{escape(words)}</text>"
