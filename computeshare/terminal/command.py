"""The end of every command: an exit code, and an error message on standard error if the command failed."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
import typer.main
from pydantic import ValidationError
from rich.console import Console
from rich.text import Text
from typer.exceptions import TyperException

from computeshare import __version__
from computeshare.client import NoServer
from computeshare.errors import (
    ApiError,
    BrokerError,
    ComputeShareError,
    NoToken,
    SettingsError,
    SpecError,
    Unreachable,
    VersionError,
)
from computeshare.jobspec.part import plain_errors
from computeshare.terminal.output import plain
from computeshare.types import plain_message

FAILED, USAGE, NO_SERVER, NOT_ALLOWED, OTHER_VERSION = 1, 2, 3, 4, 5
REMOVED = 6
"""A user removed this worker: a supervisor must not restart it."""
DETACHED = 130
"""Ctrl-C while watching: the job goes on."""


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"computeshare {__version__}")
        raise typer.Exit()


Version = Annotated[bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)]
"""The option of every command that prints its version and ends."""


def exit_code(error: ComputeShareError) -> int:
    """The exit code for this kind of error."""
    match error:
        case NoServer() | BrokerError() | Unreachable():
            return NO_SERVER
        case ApiError(status=401 | 403) | NoToken():
            return NOT_ALLOWED
        case ApiError(status=status) if status >= 500:
            return NO_SERVER
        case VersionError():
            return OTHER_VERSION
        case ApiError() | SpecError() | SettingsError():
            return USAGE
        case _:
            return FAILED


def run(app: typer.Typer, arguments: Sequence[str] | None = None) -> int:
    """Run a Typer app to its end; errors of this package become a line on standard error, never a traceback.

    Args:
        arguments: as on the command line, without the program's name; default: this process's arguments.
    Returns: the exit code.
    """
    command: Any = typer.main.get_command(app)
    _leave_out_flag_types(command)
    try:
        ended = command(args=arguments, standalone_mode=False)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except typer.Abort:
        print("Aborted.", file=sys.stderr)
        return FAILED
    except TyperException as error:
        _report_usage(error)
        return error.exit_code
    except ComputeShareError as error:
        report(str(error))
        return exit_code(error)
    except ValidationError as error:
        if error.title != "Settings":
            raise
        report("\n".join(f"COMPUTESHARE_{name.upper()}: {message}" for name, message in validation_errors(error)))
        return USAGE
    return ended if isinstance(ended, int) else 0


def _report_usage(error: TyperException) -> None:
    """Print what is wrong with a command's words, and where its help is; nothing where the help was printed."""
    context = getattr(error, "ctx", None)
    if not (message := error.format_message()):
        return
    if isinstance(error, typer.BadParameter) and error.message:
        message = message.replace(error.message, plain_message(error.message))
    report(f"{message}\nFor help: {context.command_path} --help" if context else message)


def _leave_out_flag_types(command: Any) -> None:
    """Have the help of a command, and of those below it, show no type beside a flag, which takes no value."""
    shown_by = command.get_help_option(typer.Context(command))  # which the command keeps
    for option in (*command.params, *filter(None, [shown_by])):
        if getattr(option, "is_bool_flag", False) and option.metavar is None:
            option.metavar = ""
    for below in getattr(command, "commands", {}).values():
        _leave_out_flag_types(below)


def run_command(function: Callable[..., Any]) -> None:
    """Run a single function as this process's command, and exit with its code."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(function)
    sys.exit(run(app))


def report(message: str) -> None:
    """Print an error message on standard error."""
    lines = "\n".join(plain(line) for line in message.splitlines())
    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), lines), soft_wrap=True)


def validation_errors(error: ValidationError) -> list[tuple[str, str]]:
    """The dotted field and the message of each pydantic error."""
    found = []
    for each in plain_errors(error.errors(include_url=False)):
        found.append((".".join(map(str, each["loc"])), each["msg"]))
    return found
