"""A worker as a service of its machine: files for launchd and systemd. Pure."""

import re
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from xml.sax.saxutils import escape

from computeshare.errors import SettingsError
from computeshare.transport.addresses import has_secret

NAME = "computeshare-worker"
LABEL = "computeshare.worker"
FLAG = "--print-service"
KINDS = ("launchd", "systemd")
ENVIRONMENT = ".config/computeshare/worker.env"
"""File below the home folder for environment variables that are secret."""
_PLAIN = re.compile(r"[A-Za-z0-9@%+=:,./_-]+")
_UNTIL_USELESS = (
    '"$0" "$@" & trap "kill $!" TERM; wait $!; code=$?; while kill -0 $! 2>/dev/null; do wait $!; code=$?; done; '
    "case $code in 2|5|6) exit 0;; esac; exit $code"
)
"""Shell script that runs a worker and exits with 0 where a restart would change nothing (codes 2, 5 and 6): launchd
restarts a service only after another code.
"""
_ESCAPES = {"\\": "\\\\", '"': '\\"', "%": "%%", "$": "$$", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """A command line in which a bare `--print-service` has its value, `auto`."""
    found = []
    for index, argument in enumerate(arguments):
        bare = argument == FLAG and (index + 1 == len(arguments) or arguments[index + 1] not in (*KINDS, "auto"))
        found.append(f"{FLAG}=auto" if bare else argument)
    return found


def flags(given: Mapping[str, Any]) -> list[str]:
    """Flags as typed on a command line, with absolute paths: a service runs in another folder.

    Args:
        given: flag to value; a list for a repeated flag, True for a switch.
    """
    found: list[str] = []
    for flag, value in given.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            found += [flag] if one is True else [flag, _typed(one)]
    return found


def _typed(value: object) -> str:
    if isinstance(value, Path):
        return str(value.expanduser().absolute())
    return f"{value:g}" if isinstance(value, float) else str(value)


def refuse_secrets(arguments: Sequence[str]) -> None:
    """Raises SettingsError if an address among the arguments holds a password: others can read a service's file."""
    for argument in arguments:
        if "://" in argument and has_secret(argument):
            raise SettingsError(
                "a service's file can be read by others, so no password goes into it: leave --redis-url out, and write "
                f"COMPUTESHARE_REDIS_URL='...' into ~/{ENVIRONMENT} (mode 600), which the service reads"
            )


def printed(kind: str, arguments: Sequence[str], python: str, home: Path, unsaid: Sequence[str] = ()) -> str:
    """The text of a service file that runs the worker with these arguments.

    Args:
        kind: `launchd` or `systemd`.
        python: the interpreter's absolute path.
        home: the user's home folder.
        unsaid: names of variables that this shell has and the service will not have.
    Raises: SettingsError: unknown `kind`, or a secret among the arguments.
    """
    if kind not in KINDS:
        raise SettingsError(f"{FLAG} {kind}: give launchd (macOS) or systemd (Linux)")
    refuse_secrets(arguments)
    command = [python, "-m", "computeshare.worker.process", *arguments]
    missing = f"The service does not see what this shell has: write {', '.join(unsaid)} there, too." if unsaid else ""
    return _launchd(command, home, missing) if kind == "launchd" else _systemd(command, missing)


def _filled(template: str, **values: str) -> str:
    """A template's text with its names filled in; a line that holds only an empty value is left out."""
    lines = (files(__package__) / "templates" / template).read_text().splitlines()
    empty = {f"${name}" for name, value in values.items() if not value}
    text = "".join(f"{line}\n" for line in lines if line not in empty)
    return Template(text).substitute(values, name=NAME, label=LABEL, environment=ENVIRONMENT)


def _systemd(command: Sequence[str], missing: str) -> str:
    return _filled("systemd.service", command=" ".join(map(_quoted, command)), missing=missing and f"# {missing}")


def _quoted(argument: str) -> str:
    """An argument quoted for systemd."""
    escaped = "".join(_ESCAPES.get(c, c) for c in argument)
    return escaped if _PLAIN.fullmatch(argument) else f'"{escaped}"'


def _launchd(command: Sequence[str], home: Path, missing: str) -> str:
    secrets = shlex.quote(str(home / ENVIRONMENT))
    script = f"if [ -r {secrets} ]; then set -a; . {secrets}; set +a; fi; {_UNTIL_USELESS}"
    arguments = (f"    <string>{escape(argument)}</string>" for argument in ["/bin/sh", "-c", script, *command])
    log = escape(str(home / "Library" / "Logs" / f"{NAME}.log"))
    return _filled("launchd.plist", arguments="\n".join(arguments), log=log, missing=missing)
