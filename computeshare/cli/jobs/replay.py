"""`computeshare jobs replay`."""

from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from computeshare.cli.connection import Home, JobId, Json, Url, connect, recipe_code_option, settings
from computeshare.replay.replay import Checked, RecipeSource, Replay, Verdict
from computeshare.terminal.output import console, print_json

SHOWN = 10
"""The most mismatches printed one by one."""


def replay(
    job_id: JobId,
    first: Annotated[
        int,
        typer.Option("--from", min=0, metavar="V", help="Version to start from: 0, or a version with a checkpoint."),
    ] = 0,
    last: Annotated[
        int | None,
        typer.Option(
            "--to", min=1, metavar="V", show_default=False, help="Last version. Default: the newest durable version."
        ),
    ] = None,
    recipe: Annotated[str | None, recipe_code_option("confined")] = None,
    unconfined: Annotated[
        bool, typer.Option("--unconfined", help="Run the recipe even where nothing here can confine it.")
    ] = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Recompute a job from its log on this machine, and compare every version's digest.

    Exit code 0 only if every version matches.
    """
    screen = console(stderr=True)
    lines = screen if screen.is_terminal else console()  # lines have to go above the bar, if one is drawn
    with connect(url, home) as client:
        its = settings(url, home)
        source = RecipeSource(recipe, its.bundles_dir, unconfined or its.unconfined)
        found = Replay(client, job_id, its.data_dir, first, last, source)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=screen, disable=not screen.is_terminal) as progress:
            task = progress.add_task("replaying", total=found.last - found.first)
            differing = 0
            for one in found.run():
                differing += one.differs
                if one.differs and differing <= SHOWN and not as_json:
                    lines.print(mismatch_line(one), markup=False)
                matching = len(found.checked) - differing
                progress.update(task, advance=1, description=f"{matching} match, {differing} do not")
    verdict = found.verdict()
    if as_json:
        print_json(verdict_document(found, verdict))
    else:
        console().print("\n".join(verdict_lines(found, verdict)), markup=False)
    raise typer.Exit(0 if verdict.outcome == "matches" else 1)


def mismatch_line(one: Checked) -> str:
    """A mismatch on one line."""
    return f"version {one.version}: recorded {one.recorded}, recomputed {one.computed}"


def verdict_lines(found: Replay, verdict: Verdict) -> list[str]:
    """The verdict as lines of text, the conclusion last."""
    lines = []
    if len(verdict.mismatches) > SHOWN:
        lines.append(f"and {len(verdict.mismatches) - SHOWN} more")
    if verdict.unrecorded:
        lines.append(f"{verdict.unrecorded} without a recorded digest")
    if not found.kinds.all:
        lines.append("the log does not say what kind of machine computed")
    compared = verdict.matched + len(verdict.mismatches)
    match verdict.outcome:
        case "matches":
            lines.append(f"every version matches: {compared} from version {found.first + 1} to {found.last}")
        case "mismatch":
            lines.append(f"first mismatch at version {verdict.first_mismatch}; {verdict.matched} of {compared} match")
        case "other kind":
            told = "; ".join(verdict.differences)
            lines.append(
                f"this machine differs from the job's machines ({told}), so the different digest of version "
                f"{verdict.first_mismatch} proves nothing; {verdict.matched} of {compared} match"
            )
    return lines


def verdict_document(found: Replay, verdict: Verdict) -> dict[str, Any]:
    """The replay and its verdict as JSON data."""
    mismatches = [
        {"version": one.version, "recorded": one.recorded, "computed": one.computed} for one in verdict.mismatches
    ]
    return {
        "id": found.job["id"],
        "from": found.first,
        "to": found.last,
        "outcome": verdict.outcome,
        "matched": verdict.matched,
        "unrecorded": verdict.unrecorded,
        "first_mismatch": verdict.first_mismatch,
        "mismatches": mismatches,
        "differences": list(verdict.differences),
        "kind": found.here,
    }
