"""`computeshare jobs create`."""

import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from computeshare.cli.connection import Home, Json, Url, connect, page, queues, settings
from computeshare.cli.jobs import spec_options
from computeshare.errors import SettingsError, SpecError
from computeshare.jobspec import export
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.spec import JobSpec
from computeshare.terminal.output import plain, print_json
from computeshare.terminal.watch import follow_to_end

Form = Literal["cli", "curl", "python", "json"]


def _field(text: str, field: str = "", **options: Any) -> Any:
    """An option that stands for a field of the JobSpec and shows that field's default."""
    default = ""
    if field:
        value: Any = JobSpec.model_construct(dataset="", model="")
        for name in field.split("."):
            value = getattr(value, name)
        default = f" (default {value})"
    return typer.Option(
        help=text.removesuffix(".") + default + ".", show_default=False, rich_help_panel="The job", **options
    )


def create(
    dataset: Annotated[str | None, _field("Data set.", autocompletion=lambda: sorted(catalog().datasets))] = None,
    model: Annotated[str | None, _field("Model.", autocompletion=lambda: sorted(catalog().models))] = None,
    name: Annotated[str | None, _field("What the pages call the job.")] = None,
    queue: Annotated[str | None, _field("Queue whose workers may serve it.", "queue", autocompletion=queues)] = None,
    epochs: Annotated[int | None, _field("How long to train, in epochs (default 1, unless --rounds is given).")] = None,
    rounds: Annotated[int | None, _field("How long to train, in rounds.")] = None,
    micro_batch: Annotated[int | None, _field("Samples in a micro-batch.", "micro_batch")] = None,
    micro_batches_per_round: Annotated[
        int | None, _field("Micro-batches in a round; their samples are the global batch.", "micro_batches_per_round")
    ] = None,
    optimizer: Annotated[
        str | None,
        _field(
            "Optimizer of torch.optim, with its own defaults (default SGD, lr 0.05, momentum 0.9).",
            autocompletion=lambda: sorted(catalog().optimizers),
        ),
    ] = None,
    lr: Annotated[float | None, _field("The optimizer's learning rate.")] = None,
    momentum: Annotated[float | None, _field("The optimizer's momentum.")] = None,
    seed: Annotated[int | None, _field("Seed of the weights, the order and the dropout.", "seed")] = None,
    threads: Annotated[int | None, _field("CPU threads of a worker; 0: the machine decides.", "threads")] = None,
    codec: Annotated[str | None, _field("auto: chosen once, by what the first workers measure.")] = None,
    codec_up: Annotated[str | None, _field("How updates travel.", "codec.up")] = None,
    codec_down: Annotated[str | None, _field("How weights travel.", "codec.down")] = None,
    min_workers: Annotated[int | None, _field("Workers to wait for before it starts.", "workers.min")] = None,
    max_workers: Annotated[int | None, _field("Workers it takes at most.", "workers.max")] = None,
    priority: Annotated[int | None, _field("Jobs with more get workers first; -100 to 100.", "priority")] = None,
    checkpoint_every: Annotated[
        int | None, _field("Versions between checkpoints; 0: only at the end.", "checkpoint_every")
    ] = None,
    evaluate_every: Annotated[
        int | None, _field("Versions between scorings; 0: only at the end.", "evaluate_every")
    ] = None,
    keep_last: Annotated[int | None, _field("Newest checkpoints that are kept.", "keep.last")] = None,
    keep_best: Annotated[int | None, _field("Most accurate checkpoints that are kept.", "keep.best")] = None,
    keep_every: Annotated[
        int | None, _field("Versions from one checkpoint that is kept for good to the next; 0: none is.", "keep.every")
    ] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="FIELD=VALUE",
            show_default=False,
            help="Any field, as JSON: --set optimizer.weight_decay=0.0005. May be repeated.",
        ),
    ] = None,
    spec: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="JobSpec as JSON to start from, - for standard input; flags change it.",
        ),
    ] = None,
    idempotency_key: Annotated[
        str | None, typer.Option(metavar="KEY", show_default=False, help="Makes repetitions of this call one job.")
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", help="Watch it until it ends.")] = False,
    show: Annotated[
        Form | None,
        typer.Option(
            "--show", show_default=False, help="Print the same job as curl, Python, JSON or command; send nothing."
        ),
    ] = None,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Create a job.

    computeshare jobs create --dataset mnist --model lenet5 --epochs 4 --lr 0.02 --watch
    """
    flags = {
        "dataset": dataset,
        "model": model,
        "name": name,
        "queue": queue,
        "epochs": epochs,
        "rounds": rounds,
        "micro_batch": micro_batch,
        "micro_batches_per_round": micro_batches_per_round,
        "optimizer.name": optimizer,
        "optimizer.lr": lr,
        "optimizer.momentum": momentum,
        "seed": seed,
        "threads": threads,
        "codec": codec,
        "codec.up": codec_up,
        "codec.down": codec_down,
        "workers.min": min_workers,
        "workers.max": max_workers,
        "priority": priority,
        "checkpoint_every": checkpoint_every,
        "evaluate_every": evaluate_every,
        "keep.last": keep_last,
        "keep.best": keep_best,
        "keep.every": keep_every,
    }
    document = spec_options.build(_read(spec) if spec else {}, flags, setting or [])
    checked = spec_options.check(document)
    if show:
        print(_shown(checked, show, url, home).rstrip())
        return
    with connect(url, home) as client:
        job = client.create(document, idempotency_key)
        created = f"{plain(job['id'])}  {page(client, job['id'])}"
        if watch:
            print(created, file=sys.stderr if as_json else sys.stdout)
            follow_to_end(client, job["id"], as_json)
        elif as_json:
            print_json(job)
        else:
            print(created)


def _shown(spec: JobSpec, form: Form, url: str | None, home: Path | None) -> str:
    """The job in another form; in curl, the address is that of the control plane that would be asked."""
    document = spec.model_dump(mode="json")
    if form != "curl":
        return {"cli": export.as_cli, "python": export.as_python, "json": export.as_json}[form](document)
    try:
        return export.as_curl(document, settings(url, home).resolve_url())
    except SettingsError:
        return export.as_curl(document, "http://127.0.0.1:8000")  # where `computeshare up` would be


def _read(source: str) -> spec_options.Document:
    """The document in a file or, for `-`, on standard input. Raises SpecError."""
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"--spec {source} cannot be read: {error}") from error
    return spec_options.parse(text, "standard input" if source == "-" else source)
