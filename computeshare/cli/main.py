"""The command `computeshare`."""

import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from computeshare.cli import control_plane, data, queues, recipes, tokens, webhooks, workers
from computeshare.cli.connection import Home, Json, Url, settings
from computeshare.cli.export import export
from computeshare.cli.generate import generate
from computeshare.cli.jobs import commands
from computeshare.cli.predict import predict
from computeshare.settings import Settings, login_path
from computeshare.terminal.command import FAILED, NO_SERVER, Version, run, run_command
from computeshare.terminal.output import console, print_json

__all__ = ["app", "main", "run_command"]

app = typer.Typer(name="computeshare", no_args_is_help=True, pretty_exceptions_enable=False)
RUN, TRAIN, MACHINES = "Run it", "Train", "Machines and access"
"""The headings of the commands in the help."""


@app.callback()
def root(version: Version = False) -> None:
    """Train a PyTorch model on the machines you already own."""


def up(
    host: Annotated[str, typer.Option(help="Address to listen on. 0.0.0.0 admits other machines.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    workers: Annotated[int, typer.Option(min=0, max=256, help="Workers to run on this machine.")] = 0,
    queue: Annotated[str, typer.Option(help="Queue that these workers serve.")] = "default",
    home: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default=False, help="Folder for the database, checkpoints and token."),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(
            metavar="URL", show_default=False, help="Address for invited machines, https://HOST; they use its gateway."
        ),
    ] = None,
    lan: Annotated[
        bool, typer.Option("--lan", help="Let machines on this network join, over HTTPS with a certificate made here.")
    ] = False,
    person: Annotated[
        str | None,
        typer.Option(metavar="NAME", show_default=False, help="Whose machines join without an invite. Default: owner."),
    ] = None,
    tls: Annotated[
        str | None,
        typer.Option(metavar="self", show_default=False, help="self: serve HTTPS, too, with a certificate made here."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(show_default=False, help="Serve HTTPS, too, with this certificate (PEM) ...")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(show_default=False, help="... and its key (PEM).")] = None,
    tls_port: Annotated[
        int | None, typer.Option(min=1, max=65535, show_default=False, help="Port of HTTPS. Default: 8443.")
    ] = None,
) -> None:
    """Run a control plane on this machine until Ctrl-C."""
    from computeshare.up import stack

    https: dict[str, Any] = {"tls": tls, "tls_cert": tls_cert, "tls_key": tls_key, "tls_port": tls_port}
    options = stack.UpOptions(host, port, workers, queue, home, public_url, lan=lan, person=person, **https)
    raise typer.Exit(stack.up(options))


def down(home: Home = None) -> None:
    """Stop the control plane that runs on this machine."""
    from computeshare.up import stack

    found = stack.down(settings(None, home))
    console(stderr=True).print("stopped" if found else "no control plane runs here")
    raise typer.Exit(0 if found else NO_SERVER)


def login(url: Url = None, home: Home = None, as_json: Json = False) -> None:
    """Print the link that logs a browser in."""
    found = settings(url, home)
    link = found.resolve_url() + login_path(found.resolve_token())
    if as_json:
        print_json({"url": link})
    else:
        print(link)


def token(home: Home = None, as_json: Json = False) -> None:
    """Print the token that scripts send as a bearer."""
    found = settings(None, home).resolve_token()
    if as_json:
        print_json({"token": found})
    else:
        print(found)


def demo(
    dataset: Annotated[str, typer.Option(help="Data set to train on.")] = "digits",
    workers: Annotated[int, typer.Option(min=1, max=64, help="Workers to run on this machine.")] = 2,
) -> None:
    """Run everything on this machine and train a small model."""
    from computeshare.up import stack

    raise typer.Exit(stack.demo(dataset, workers))


def doctor(
    url: Url = None,
    home: Home = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to be used by `computeshare up`.")] = 8000,
    selftest: Annotated[
        bool,
        typer.Option(
            "--selftest",
            help="Test all that a worker needs of this machine. Takes minutes; the output is made to be shared.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Check this machine and its connections, and give advice."""
    if selftest:
        _selftest(settings(url, home), as_json)
    from computeshare.doctor import Surroundings, checks_table, diagnose

    screen = console(stderr=True)
    with screen.status("checking this machine"):
        checks = diagnose(Surroundings(settings(url, home), port))
    if as_json:
        print_json({"ok": all(c.status != "fail" for c in checks), "checks": [c.as_dict() for c in checks]})
    else:
        console().print(checks_table(checks))
    raise typer.Exit(FAILED if any(check.status == "fail" for check in checks) else 0)


def _selftest(found: Settings, as_json: bool) -> NoReturn:
    """Print a line as each part is done, or one JSON document; exits with 1 if a part failed."""
    from computeshare.doctor import selftest

    about, parts = selftest.heading(), []
    screen = console(stderr=True)
    if not as_json:
        print("\n".join(about), flush=True)
    for part in selftest.run(found, found.device):
        parts.append(part)
        if as_json:
            screen.print(f"{part.name}: {part.status}", markup=False)
        else:
            print(selftest.line(part), flush=True)
    if as_json:
        print_json(selftest.document(parts, about))
    else:
        print(selftest.summary(parts))
    raise typer.Exit(FAILED if any(part.status == "failed" for part in parts) else 0)


in_run, in_train, in_machines = (app.command(rich_help_panel=panel) for panel in (RUN, TRAIN, MACHINES))
in_run(up)
in_run(control_plane.status)
app.command("open", rich_help_panel=RUN)(control_plane.open_pages)
app.command(
    "worker",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    rich_help_panel=RUN,
)(control_plane.worker)
in_run(down)
in_run(login)
in_run(demo)
in_run(doctor)
in_train(export)
in_train(predict)
in_train(generate)
in_machines(token)
in_machines(tokens.audit)
for name, group in (("jobs", commands.app), ("data", data.app), ("recipes", recipes.app)):
    app.add_typer(group, name=name, rich_help_panel=TRAIN)
for name, group in (
    ("workers", workers.app),
    ("queues", queues.app),
    ("tokens", tokens.app),
    ("webhooks", webhooks.app),
):
    app.add_typer(group, name=name, rich_help_panel=MACHINES)


def main() -> None:
    """The command `computeshare`."""
    sys.exit(run(app))


if __name__ == "__main__":
    main()
