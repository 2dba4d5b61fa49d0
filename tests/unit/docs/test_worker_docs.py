"""Every flag of the worker is in its page."""

from pathlib import Path

import typer.main

from computeshare.worker.process import command

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "worker.md").read_text()


def test_every_flag_of_the_worker_is_in_its_page() -> None:
    app = typer.Typer()
    app.command()(command)
    parameters = typer.main.get_command(app).params
    flags = [parameter.opts[0] for parameter in parameters if not getattr(parameter, "hidden", False)]
    documented = [flag for flag in flags if f"`{flag}" in PAGE or flag in ("--install-completion", "--show-completion")]
    assert len(flags) > 12 and documented == flags
