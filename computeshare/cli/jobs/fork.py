"""`computeshare jobs fork`."""

from typing import Annotated

import typer

from computeshare.cli.connection import Home, Json, Url, connect, job_ids, page_url, settings
from computeshare.cli.jobs import spec_options
from computeshare.cli.jobs.recipe_options import ArgOption, FolderOption, RecipeOption, choice_of
from computeshare.terminal.output import plain, print_json


def fork(
    source: Annotated[
        str,
        typer.Argument(
            metavar="JOB[@V]",
            show_default=False,
            autocompletion=job_ids,
            help="A job's id and a version: a number, latest (default) or best.",
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the new job.", show_default=False)] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            show_default=False,
            help="Change a field, as JSON: --set optimizer.lr=0.01. May be repeated.",
        ),
    ] = None,
    fresh_optimizer: Annotated[
        bool, typer.Option("--fresh-optimizer", help="Start with a fresh optimizer state.")
    ] = False,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", show_default=False, help="Calls with the same key create one job.")
    ] = None,
    recipe: RecipeOption = None,
    arg: ArgOption = None,
    folder: FolderOption = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a job that starts from a version of another job.

    Fields that --set does not name keep their values. The optimizer's state is copied if only the optimizer's lr and
    weight_decay change.

    computeshare jobs fork ab12cd34@best --set optimizer.lr=0.01 --set epochs=2
    """
    job_id, version = parse_source(source)
    changes: spec_options.Document = {} if name is None else {"name": name}
    for text in setting or []:
        spec_options.put(changes, *spec_options.parse_setting(text))
    with connect(url, home) as client:
        if recipe or arg:
            parent = client.show(job_id)["spec"]
            if choice := choice_of(recipe, arg or (), folder, parent):
                told = {**parent, **changes}
                changes |= choice.tried(client, settings(url, home).bundles_dir, told["seed"], told.get("dataset"))
        job = client.fork(job_id, version, changes, "fresh" if fresh_optimizer else None, idempotency_key)
        if as_json:
            print_json(job)
        else:
            print(f"{plain(job['id'])}  {page_url(client, job['id'])}")


def parse_source(text: str) -> tuple[str, int | str]:
    """Parse `JOB@V` into job and version; without `@V`, the version is `latest`. Raises BadParameter."""
    job_id, at, version = text.partition("@")
    number = version.isascii() and version.isdecimal() and len(version) <= 15
    if not job_id or (at and not number and version not in ("latest", "best")):
        raise typer.BadParameter(f"{text}: give JOB@V, V a number, latest or best", param_hint="JOB[@V]")
    return job_id, int(version) if number else version or "latest"
