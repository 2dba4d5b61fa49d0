"""Reports of `make bench`: tables as Markdown, plots as SVG files."""

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any

from computeshare.codecs.measured_link import shown

Cell = str | float | int | None
MARKED = 40
"""Lines with at most this many points have markers."""
COLOURS = 10
"""Colours of lines, which repeat; lines beyond these are dashed."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table; each row has a cell for each column. Numbers are rounded on output."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines by name, each a list of points (x, y); `doubling` makes the x axis logarithmic with base 2."""

    name: str
    title: str
    x: str
    y: str
    lines: Mapping[str, Sequence[Sequence[float]]]
    doubling: bool = False


@dataclass(frozen=True, slots=True)
class Part:
    """The results of one part."""

    tables: Sequence[Table] = ()
    plots: Sequence[Plot] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """Every single measurement, stored in the JSON file only."""

    def save(self, path: Path) -> None:
        """Write the part as JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Part":
        """Read a part that `save` wrote."""
        found = json.loads(path.read_text())
        tables = [Table(**each) for each in found["tables"]]
        return cls(tables, [Plot(**each) for each in found["plots"]], found["details"])


def merged(parts: Sequence[Part]) -> Part:
    """Merge several parts into one."""
    tables = [table for part in parts for table in part.tables]
    details = {name: value for part in parts for name, value in part.details.items()}
    return Part(tables, [plot for part in parts for plot in part.plots], details)


def paired(label: str, values: Sequence[tuple[float | None, float | None]]) -> list[Cell]:
    """A row of paired values of ours and a peer: both medians, and the median of the pairwise ratios."""
    ratios = [a / b if a is not None and b else None for a, b in values]
    return [label, median([a for a, _ in values]), median([b for _, b in values]), median(ratios)]


def median(values: Sequence[float | None]) -> float | None:
    """The median; None if any value is None, for example a time to an accuracy that was not reached."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known and len(known) == len(values) else None


def spread(values: Sequence[float | None]) -> str | None:
    """The least and the most of some values, as a table has them; None as of `median`."""
    known = [value for value in values if value is not None]
    return f"{cell(min(known))} to {cell(max(known))}" if known and len(known) == len(values) else None


def markdown(part: Part) -> str:
    """A part as Markdown: its tables, and links to the files of its plots."""
    sections = [f"### {table.title}\n\n{_rows(table)}\n{table.note}".rstrip() + "\n" for table in part.tables]
    sections += [f"![{plot.title}]({plot.name}.svg)\n" for plot in part.plots]
    return "\n".join(sections)


def _rows(table: Table) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    return "".join(f"| {' | '.join(cell(value) for value in line)} |\n" for line in lines)


def cell(value: Cell) -> str:
    """A number with three significant digits, integers and numbers from 1,000 on in full; `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return f"{value:,}" if isinstance(value, int) else shown(value)


def svg(plot: Plot) -> str:
    """The plot as an SVG document, with labels as text."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter

    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot(title=plot.title, xlabel=plot.x, ylabel=plot.y)
    for number, (name, points) in enumerate(plot.lines.items()):
        marker, style = "o" if len(points) <= MARKED else "", "-" if number < COLOURS else "--"
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, marker=marker, linestyle=style, gid=name)
    if plot.doubling:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({x for points in plot.lines.values() for x, _ in points}))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: cell(x)))
    axes.set_ylim(bottom=0)
    axes.grid(axis="y")
    figure.legend(loc="outside right upper")
    document = StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        figure.savefig(document, format="svg", metadata={"Date": None})
    return document.getvalue()
