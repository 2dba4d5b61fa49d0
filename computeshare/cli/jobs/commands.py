"""`computeshare jobs`: the group of all its commands, and the commands without a module of their own."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

from computeshare.cli.connection import (
    Home,
    JobId,
    Json,
    Url,
    Worker,
    Yes,
    confirm,
    connect,
    keep_existing,
    output_option,
    page_url,
    queues,
)
from computeshare.cli.jobs import spec_options
from computeshare.cli.jobs.compare import compare
from computeshare.cli.jobs.create import create
from computeshare.cli.jobs.export import export
from computeshare.cli.jobs.fork import fork
from computeshare.cli.jobs.logs import logs
from computeshare.cli.jobs.replay import replay
from computeshare.cli.jobs.share import links, share, unshare
from computeshare.client.api.models import ICONS, Job, JobWorker, Problem
from computeshare.client.weights import pick
from computeshare.terminal.output import console, job_details, job_table, plain, print_json, size, status, target, title
from computeshare.terminal.watch import follow_to_end
from computeshare.types import JobSort

app = typer.Typer(no_args_is_help=True, help="Create, watch and fetch jobs.")
app.command()(create)
app.command()(replay)
app.command()(fork)
app.command()(compare)
app.command()(export)
app.command()(logs)
app.command()(share)
app.command()(links)
app.command()(unshare)


@app.command("list")
def list_jobs(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--status",
            help="Only jobs in this state. May be repeated.",
            show_default=False,
            autocompletion=lambda: sorted(ICONS),
        ),
    ] = None,
    queue: Annotated[
        str | None, typer.Option(help="Only jobs of this queue.", show_default=False, autocompletion=queues)
    ] = None,
    search: Annotated[
        str | None, typer.Option(help="Only jobs with this text in their name, or with this id.", show_default=False)
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Only jobs with this tag.", show_default=False)] = None,
    sort: Annotated[
        JobSort | None,
        typer.Option(help="Order. accuracy: best first; updated: latest first.", show_default="newest"),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="Most jobs to list; 0: all.")] = 20,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(url, home) as client:
        jobs = list(client.jobs(state or (), queue, limit or None, search, sort, tag))
    if as_json:
        print_json({"items": jobs})
    elif jobs:
        console().print(job_table(jobs, datetime.now(UTC)))
    elif state or queue or search or tag:
        console().print("no job matches")
    else:
        console().print("no jobs here; create one: computeshare jobs create --dataset digits --model mlp", markup=False)


@app.command()
def show(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Show one job."""
    with connect(url, home) as client:
        job = client.show(job_id)
        if as_json:
            print_json(job)
        else:
            console().print(job_details(job, page_url(client, job["id"]), datetime.now(UTC)))


@app.command()
def watch(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Watch a job until it ends. Ctrl-C stops watching, not the job."""
    with connect(url, home) as client:
        follow_to_end(client, job_id, as_json)


@app.command()
def pause(
    job_id: JobId,
    after_round: Annotated[bool, typer.Option("--after-round", help="Finish the current round first.")] = False,
    hours: Annotated[
        float | None,
        typer.Option("--hours", min=0, help="Resume automatically after this many hours.", show_default=False),
    ] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Pause a queued or running job. Its workers leave; its progress is kept."""
    with connect(url, home) as client:
        _tell(client.pause(job_id, after_round, hours), as_json)


@app.command()
def resume(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Resume a paused job where it stopped."""
    with connect(url, home) as client:
        _tell(client.resume(job_id), as_json)


@app.command()
def retry(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Continue a failed job from its last checkpoint."""
    with connect(url, home) as client:
        _tell(client.retry(job_id), as_json)


@app.command(context_settings={"ignore_unknown_options": True})  # a negative number is not an option
def priority(
    job_id: JobId,
    number: Annotated[
        int, typer.Argument(metavar="N", min=-100, max=100, help="-100 to 100; new jobs have 0.", show_default=False)
    ],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change a job's priority. Jobs of higher priority get workers first, even from jobs of lower priority."""
    with connect(url, home) as client:
        _tell(client.prioritise(job_id, number), as_json)


@app.command(context_settings={"ignore_unknown_options": True})  # a negative number is not an option
@spec_options.with_editable_fields
def edit(
    flags: Mapping[str, Any],
    job_id: JobId,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Change fields of a job: descriptive fields at any time, the others until it has ended."""
    changes = spec_options.build({}, flags, [])
    with connect(url, home) as client:
        _tell(client.edit(job_id, changes), as_json)


@app.command()
def rename(
    job_id: JobId,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help='The new name; "": model and data set.', show_default=False)
    ],
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Rename a job."""
    with connect(url, home) as client:
        job = client.rename(job_id, name)
    if as_json:
        print_json(job)
    else:
        console().print(f"{plain(job['id'])} is now {title(job)}", markup=False)


@app.command()
def cancel(job_id: JobId, url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Stop a job for good."""
    with connect(url, home) as client:
        _tell(client.cancel(job_id), as_json)


@app.command()
def unban(
    job_id: JobId,
    worker: Worker,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Let a banned worker take part in a job again."""
    with connect(url, home) as client:
        found = client.unban(job_id, banned_worker_id(client.workers(job_id), worker))
    if as_json:
        print_json(found)
    else:
        console().print(f"{plain(found['name'] or found['id'])} may take part again", markup=False)


def banned_worker_id(workers: Sequence[JobWorker], worker: str) -> str:
    """The id of the worker with this id, or of the only banned worker with this name; else `worker` itself.

    Raises: Problem: several banned workers have this name.
    """
    named = [one["id"] for one in workers if worker == one["id"] or (worker == one["name"] and one["banned"])]
    if worker in named or len(named) < 2:
        return worker if worker in named or not named else str(named[0])
    raise Problem(f"{len(named)} banned workers are named {worker}; give an id: {', '.join(named)}", 409)


def _tell(job: Job, as_json: bool) -> None:
    """Print a job's new state."""
    if as_json:
        print_json(job)
    else:
        console().print(status(job), plain(job["id"]), markup=False)


@app.command()
def delete(
    job_id: JobId,
    yes: Yes = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Delete a job that has ended, and its checkpoints."""
    with connect(url, home) as client:

        def question() -> str:
            job = client.show(job_id)
            return f"Remove job {plain(job['id'])} ({title(job)}) and its checkpoints?"

        confirm(question, yes)
        client.delete(job_id)
    if as_json:
        print_json({"id": job_id, "deleted": True})
    else:
        console().print(f"deleted {plain(job_id)}", markup=False)


@app.command()
def download(
    job_id: JobId,
    version: Annotated[str, typer.Option(metavar="latest|best|N", help="Version to download.")] = "latest",
    output: Annotated[Path | None, output_option("JOB-vN.safetensors")] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace an existing file.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="The version itself, also where the job keeps a moving average.")
    ] = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Download a version's weights as safetensors."""
    with connect(url, home) as client:
        chosen = pick(client.checkpoints(job_id), version, job_id)
        path = target(output, f"{job_id}-v{chosen['version']}.safetensors")
        keep_existing(path, force)
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        screen = console(stderr=True)
        with Progress(*columns, console=screen, disable=not screen.is_terminal) as progress:
            task = progress.add_task("", total=chosen["bytes"])

            def shown(done: int, total: int | None) -> None:
                progress.update(task, completed=done, total=total)

            sha256 = client.download(job_id, chosen["version"], path, shown, "raw" if raw else "average")
    written = path.stat().st_size
    if as_json:
        print_json({"path": str(path), "version": chosen["version"], "bytes": written, "sha256": sha256})
    else:
        console().print(f"{path}: version {chosen['version']}, {size(written)}", markup=False)
