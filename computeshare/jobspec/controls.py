"""Controls of a job's fields: the heading in the form, the command-line option, and when the field may change."""

from dataclasses import dataclass
from typing import Literal

DATA = "Model and data"
ROUND = "Strategy and batch size"
OPTIMIZER = "Optimizer"
MACHINES = "Workers and network"
MORE = "More options"
HEADINGS = (DATA, ROUND, OPTIMIZER, MACHINES, MORE)
"""The headings of the form for a new job, from top to bottom."""


@dataclass(frozen=True, slots=True)
class Control:
    """How users set a field, written in its annotation: `Annotated[int, Control(MORE)]`.

    A field without a control is set by `--set`, or as JSON in the form's last field.

    Args:
        heading: of `HEADINGS`; the fields below it are in the order of the JobSpec.
        flag: of `computeshare jobs create`; empty: the field's path, `--keep-last`; None: only `--set`.
        change: when the field of an existing job may be changed: never, while the job has not ended, or always. A field
            that may always be changed describes the job to people and has no part in the training.
        lines: of the text box in the form; 1: a line.
    """

    heading: str
    flag: str | None = ""
    change: Literal["", "active", "always"] = ""
    lines: int = 1
