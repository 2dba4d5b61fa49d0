"""`computeshare jobs create`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from computeshare.cli.connection import Home, Json, Url, connect, page_url, settings
from computeshare.cli.jobs import spec_options
from computeshare.cli.jobs.recipe_options import ArgOption, FolderOption, RecipeOption, choice_of
from computeshare.client.bundles.recipe_upload import name_of
from computeshare.errors import SettingsError, SpecError
from computeshare.jobspec.documents import export
from computeshare.jobspec.spec import LONGEST_NAME, JobSpec
from computeshare.terminal.output import plain, print_json
from computeshare.terminal.watch import follow_to_end

Form = Literal["cli", "curl", "python", "json"]


@spec_options.with_job_fields
def create(
    flags: Mapping[str, Any],
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            show_default=False,
            help="Set any field, as JSON: --set optimizer.weight_decay=0.0005. May be repeated.",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default=False,
            help="Samples per round, of all workers together; sets --micro-batch, one of the round's parts.",
            rich_help_panel="The job",
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="Start from a JobSpec in JSON, which flags change; - reads standard input.",
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", show_default=False, help="Calls with the same key create one job.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch the job until it ends.")] = False,
    show: Annotated[
        Form | None,
        typer.Option(
            "--show", show_default=False, help="Print the call as curl, Python, JSON or command, and send nothing."
        ),
    ] = None,
    recipe: RecipeOption = None,
    arg: ArgOption = None,
    folder: FolderOption = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a job.

    computeshare jobs create --dataset mnist --model lenet5 --epochs 4 --lr 0.02 --watch

    computeshare jobs create --recipe net.py --arg width=128 --watch
    """
    document = spec_options.build(_read(spec) if spec else {}, flags, setting or [])
    if batch_size:
        if flags.get("micro_batch"):
            raise SpecError("give --batch-size or --micro-batch, not both")
        document = spec_options.with_batch_size(document, batch_size)
    if choice := choice_of(recipe, arg or (), folder, document):
        document = {"name": name_of(choice.source)[:LONGEST_NAME], **document, **choice.fields}
    checked = spec_options.check(document)
    if show:
        print(_shown(checked, show, url, home).rstrip())
        return
    with connect(url, home) as client:
        if choice:
            document |= choice.tried(client, settings(url, home).bundles_dir, checked.seed, checked.dataset)
            spec_options.check(document)
        job = client.create(document, idempotency_key)
        for warning in job.get("warnings", ()):
            print(f"warning: {plain(warning)}", file=sys.stderr)
        created = f"{plain(job['id'])}  {page_url(client, job['id'])}"
        if watch:
            print(created, file=sys.stderr if as_json else sys.stdout)
            follow_to_end(client, job["id"], as_json)
        elif as_json:
            print_json(job)
        else:
            print(created)


def _shown(spec: JobSpec, form: Form, url: str | None, home: Path | None) -> str:
    """The job in another form; the curl form holds the address of the control plane that `create` would use."""
    document = spec.model_dump(mode="json")
    if form != "curl":
        return {"cli": export.as_cli, "python": export.as_python, "json": export.as_json}[form](document)
    try:
        return export.as_curl(document, settings(url, home).resolve_url())
    except SettingsError:
        return export.as_curl(document, "http://127.0.0.1:8000")  # the default address of `computeshare up`


def _read(source: str) -> spec_options.Document:
    """The document in a file or, for `-`, on standard input. Raises SpecError."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except OSError as error:
        raise SpecError(f"--spec {source} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise SpecError(f"--spec {source} is not text in UTF-8: {error}") from error
    return spec_options.parse(text, "standard input" if source == "-" else source)
