"""`python -m api`: the control plane alone, for where the broker and the other processes run elsewhere."""

from typing import Annotated

import typer

from api.main import run
from computeshare.runtime.database_file import CHECK_S
from computeshare.runtime.processes import configure_logging, exit_with_parent
from computeshare.settings import Settings
from computeshare.terminal.command import run_command


def command(
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=0, max=65535)] = 8000,
    child: Annotated[bool, typer.Option("--child", hidden=True, help="End with the process that started it.")] = False,
) -> None:
    """Serve the REST API and the pages."""
    settings = Settings()
    if child:
        exit_with_parent()
    else:  # `computeshare up` has looked already
        settings.database_file.require_whole(CHECK_S)
    configure_logging()
    run(settings, host, port)


if __name__ == "__main__":
    run_command(command)
