"""The evaluator process: scores checkpoints, and answers requests for text."""

import os
import threading
from pathlib import Path
from typing import Annotated

import structlog
import typer

from computeshare.bundles.store import BundleStore
from computeshare.evaluator.evaluator import Evaluator
from computeshare.evaluator.text_server import serve_texts
from computeshare.protocol.job_log import JobLog
from computeshare.queue.recipe_runner import runner_of
from computeshare.runtime.log_lines import Writer
from computeshare.runtime.processes import (
    configure_logging,
    end_soon_after,
    exit_with_parent,
    hostname,
    lower_priority,
    stop_event,
)
from computeshare.settings import Settings
from computeshare.terminal.command import Version, run_command
from computeshare.transport.connections import connect

log = structlog.get_logger()


def serve(settings: Settings) -> None:
    """Run one evaluator in this process until a signal ends it."""
    import torch

    stop = stop_event()
    end_soon_after(stop)
    url = settings.resolve_redis_url("evaluator")
    with JobLog(url, Writer("evaluator", hostname())) as job_log:
        configure_logging(job_log.capture)
        lower_priority(5)  # scoring can wait, training cannot
        torch.set_num_threads(1)
        redis = connect(url)
        log.info("evaluator ready", pid=os.getpid())
        bundles = BundleStore(settings.bundles_dir)
        texts = threading.Thread(target=serve_texts, args=(redis, settings.artifacts_dir, bundles, stop), daemon=True)
        texts.start()
        Evaluator(redis, settings.artifacts_dir, settings.data_dir, stop, runner_of(settings), bundles).run()


def child(values: dict[str, str]) -> None:
    """Entry point for `computeshare up`: `serve` in a process that ends with its parent."""
    os.environ.update(values)
    exit_with_parent()
    serve(Settings())


def command(
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints and run.json.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
    recipes: Annotated[
        bool | None, typer.Option("--recipes", help="Also score jobs that train recipes, whose code then runs here.")
    ] = None,
    version: Version = False,
) -> None:
    """Score every checkpoint on its job's test set."""
    serve(Settings.given(redis_url=redis_url, home=home, data=data, recipes=recipes))


def main() -> None:
    """The command `computeshare-evaluator`."""
    run_command(command)


if __name__ == "__main__":
    main()
