"""`computeshare predict`."""

from pathlib import Path
from typing import Annotated, Any

import typer

from computeshare.cli.connection import Home, JobId, Json, Url, Version, recipe_code_option
from computeshare.client import ComputeShare
from computeshare.errors import InputError
from computeshare.tasks.usage import Guess
from computeshare.terminal.command import FAILED, report
from computeshare.terminal.output import console, percent, print_json


def predict(
    job_id: JobId,
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Images, of any size and mode; for a recipe, what its predict() reads.",
            show_default=False,
        ),
    ],
    version: Version = "latest",
    top: Annotated[int, typer.Option(min=1, metavar="N", help="Most classes to print for each file.")] = 3,
    recipe: Annotated[str | None, recipe_code_option("with your rights")] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Classify files with a job's model: the likeliest classes and their probabilities.

    A file that cannot be read is reported and the others are classified; the exit code is then 1.
    """
    screen = console(stderr=True)
    with ComputeShare(url, home=home) as cs, screen.status("loading the model"):
        model = cs.jobs.get(job_id).trained(version, recipe)
    items: list[dict[str, Any]] = []
    for file in files:
        try:
            guesses = model.guess(file, top)
        except InputError as error:
            report(f"{file}: {error}")
            items.append({"file": str(file), "error": str(error)})
            continue
        items.append({"file": str(file), "classes": [guess_document(guess) for guess in guesses]})
        if not as_json:
            console().print(f"{file}: {', '.join(map(guess_line, guesses))}", markup=False, soft_wrap=True)
    if as_json:
        print_json({"id": job_id, "version": model.version, "items": items})
    if any("error" in item for item in items):
        raise typer.Exit(FAILED)


def guess_line(guess: Guess) -> str:
    """A class with its probability, as text."""
    return f"{guess.name or f'class {guess.index}'} {percent(guess.probability)}"


def guess_document(guess: Guess) -> dict[str, Any]:
    """A class with its probability, as JSON data."""
    return {"class": guess.index, "name": guess.name, "probability": guess.probability}
