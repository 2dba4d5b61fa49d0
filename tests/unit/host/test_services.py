"""Services for launchd and systemd: exactly the flags, no secrets, files that their readers take."""

import configparser
import os
import plistlib
import shutil
import signal
import subprocess
import sys
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest
import typer

from computeshare.errors import SettingsError
from computeshare.host.services import ENVIRONMENT, KINDS, flags, printed, spelled_out
from computeshare.terminal.command import run
from computeshare.worker.process import command
from tests.support.requirements import lacking
from tests.support.wait import wait_until

PYTHON = "/opt/a folder/bin/python3"
ODD = 'it\'s "50 %", $HOME\\n & <b>; `id`'
GIVEN = ["--queue", "mnist", "--name", ODD, "--hours", "22-07"]


def unescaped(line: str) -> list[str]:
    """The arguments of an ExecStart line, as systemd.syntax(7) describes them."""
    found, word, quoted, rest = [], "", False, iter(line)
    for c in rest:
        if c == '"':
            quoted = not quoted
        elif c == "\\":
            word += {"n": "\n", "t": "\t", "r": "\r"}.get(follows := next(rest), follows)
        elif c in "%$":
            assert next(rest) == c, f"a bare {c} means something to systemd"
            word += c
        elif c == " " and not quoted:
            found.append(word)
            word = ""
        else:
            word += c
    assert not quoted
    return [*found, word]


def unit(arguments: list[str]) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(printed("systemd", arguments, PYTHON, Path("/home/ada")))
    return parser


def plist(arguments: list[str], python: str = PYTHON, home: Path = Path("/Users/ada")) -> dict[str, Any]:
    return dict(plistlib.loads(printed("launchd", arguments, python, home).encode()))


def test_a_systemd_unit_runs_exactly_the_given_flags_and_comes_back_after_a_failure() -> None:
    service = unit(GIVEN)["Service"]
    assert unescaped(service["ExecStart"]) == [PYTHON, "-m", "computeshare.worker.process", *GIVEN]
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", "2 5")
    assert service["SuccessExitStatus"] == "6"
    assert service["EnvironmentFile"] == f"-%h/{ENVIRONMENT}"
    assert unit(GIVEN)["Install"]["WantedBy"] == "default.target"


def test_systemd_itself_takes_the_unit(tmp_path: Path) -> None:
    if not shutil.which("systemd-analyze"):
        lacking("no systemd-analyze: install systemd")
    path = tmp_path / "computeshare-worker.service"
    path.write_text(printed("systemd", GIVEN, sys.executable, tmp_path))
    verified = subprocess.run(
        ["systemd-analyze", "verify", "--user", "--man=no", "--generators=no", path],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert path.name not in verified.stderr, verified.stderr


def test_a_launchd_plist_runs_exactly_the_given_flags_and_comes_back_after_a_failure() -> None:
    found = plist(GIVEN)
    assert found["ProgramArguments"][-9:] == [PYTHON, "-m", "computeshare.worker.process", *GIVEN]
    assert found["KeepAlive"] == {"SuccessfulExit": False} and found["RunAtLoad"] is True
    assert found["ProcessType"] == "Interactive"  # else macOS throttles it
    assert found["StandardErrorPath"] == "/Users/ada/Library/Logs/computeshare-worker.log"


def test_what_launchd_runs_has_the_variables_of_the_private_file(tmp_path: Path) -> None:
    home = tmp_path / "ada's home"
    secrets = home / ENVIRONMENT
    secrets.parent.mkdir(parents=True)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$COMPUTESHARE_REDIS_URL"\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    command = plist(GIVEN, str(python), home)["ProgramArguments"]
    without = subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout.splitlines()
    assert without == ["", "-m", "computeshare.worker.process", *GIVEN]
    secrets.write_text("COMPUTESHARE_REDIS_URL='rediss://:p&w d@host:1/0'\n")
    told = subprocess.run(command, capture_output=True, text=True, check=True, env={}).stdout.splitlines()
    assert told == ["rediss://:p&w d@host:1/0", "-m", "computeshare.worker.process", *GIVEN]


SHELLS = [shell for shell in ("/bin/sh", "/bin/bash") if Path(shell).exists()]


def launched(shell: str, python: Path, script: str) -> list[str]:
    """What launchd runs, with a program in the worker's place, by this shell (a Mac's sh is bash)."""
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    return [shell, *plist(GIVEN, str(python))["ProgramArguments"][1:]]


@pytest.mark.parametrize(("code", "told"), [(0, 0), (1, 1), (2, 0), (3, 3), (5, 0), (6, 0), (70, 70)])
@pytest.mark.parametrize("shell", SHELLS)
def test_launchd_does_not_start_again_where_that_would_change_nothing(
    shell: str, code: int, told: int, tmp_path: Path
) -> None:
    command = launched(shell, tmp_path / "python", f"exit {code}")
    assert subprocess.run(command, check=False, timeout=60).returncode == told


def catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for this signal."""
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(lines["SigCgt"], 16) >> (number - 1) & 1)


@pytest.mark.skipif(sys.platform != "linux", reason="what a process handles is told by /proc")
@pytest.mark.parametrize("shell", SHELLS)
def test_a_worker_that_launchd_stops_is_told_and_waited_for(shell: str, tmp_path: Path) -> None:
    waits = "trap 'read word; echo $word; exit 7' TERM; echo ready; while kill -0 $PPID; do sleep 0.05; done"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = launched(shell, tmp_path / "python", f"exec <> {pipe}; {waits}")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        try:
            assert service.stdout is not None and service.stdout.readline() == "ready\n"
            wait_until(lambda: catches(service.pid, signal.SIGTERM))
            service.terminate()
            pipe.write_text("the work unit is done\n")
            assert service.stdout.readline() == "the work unit is done\n"
            assert service.wait(60) == 7
        finally:
            service.kill()


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_lines_say_where_it_goes_and_how_it_starts(kind: str) -> None:
    text = printed(kind, GIVEN, PYTHON, Path("/home/ada"), ["COMPUTESHARE_HOME"])
    if kind == "launchd":
        (comment,) = [n.data for n in xml.dom.minidom.parseString(text).childNodes if n.nodeType == n.COMMENT_NODE]
        assert text.splitlines()[1] == "<!--" and "launchctl bootstrap gui/$(id -u) ~/Library/LaunchAgents" in comment
    else:
        comment = text.split("[Unit]")[0]
        assert all(line.startswith("# ") for line in comment.strip().splitlines())
        assert "~/.config/systemd/user/computeshare-worker.service" in comment and "enable --now" in comment
    assert ENVIRONMENT in comment and "write COMPUTESHARE_HOME there, too" in comment


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@host:6379/0",
        "rediss://ada:hunter2@host",
        "redis://host?password=hunter2",
        "redis://:p@[x",
        "redis://:/hunter2@host",
        "redis://:#hunter2@host",
        "redis://:?hunter2@host",
    ],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_password_does_not_go_into_a_file_that_others_can_read(kind: str, url: str) -> None:
    with pytest.raises(SettingsError, match=r"no password goes into it.*worker\.env") as refused:
        printed(kind, ["--redis-url", url], PYTHON, Path("/home/ada"))
    assert "hunter2" not in str(refused.value)


def test_an_address_without_a_password_does() -> None:
    assert "redis://host:6379/0" in printed("systemd", ["--redis-url", "redis://host:6379/0"], PYTHON, Path("/h"))


def test_another_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(SettingsError, match=r"launchd \(macOS\) or systemd \(Linux\)"):
        printed("upstart", [], PYTHON, Path("/h"))


def test_flags_are_typed_again_with_absolute_paths() -> None:
    given = {
        "--queue": ["a", "b"],
        "--only-on-power": True,
        "--battery-stop": 30.0,
        "--home": Path("here"),
        "--nice": 0,
    }
    typed = ["--queue", "a", "--queue", "b", "--only-on-power", "--battery-stop", "30", "--home"]
    assert flags(given) == [*typed, str(Path("here").absolute()), "--nice", "0"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--print-service"], ["--print-service=auto"]),
        (["--print-service", "--queue", "q"], ["--print-service=auto", "--queue", "q"]),
        (["--queue", "q", "--print-service", "launchd"], ["--queue", "q", "--print-service", "launchd"]),
        (["--print-service=systemd"], ["--print-service=systemd"]),
        (["--queue", "q"], ["--queue", "q"]),
    ],
    ids=str,
)
def test_a_bare_flag_means_the_service_of_this_system(typed: list[str], meant: list[str]) -> None:
    assert spelled_out(typed) == meant


def run_worker(arguments: list[str]) -> int:
    app = typer.Typer()
    app.command()(command)
    return run(app, spelled_out(arguments))


def test_the_command_prints_a_service_with_its_other_flags_and_starts_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": "/home/ada", "COMPUTESHARE_URL": "x"})
    given = ["--queue", "a", "--queue", "b", "--battery-stop", "0", "--nice", "0", "--only-on-power", "--hours", "22-7"]
    given += ["--max-up", "5mbit"]
    assert run_worker([*given, "--print-service", "systemd"]) == 0
    parser = configparser.ConfigParser(interpolation=None)
    parser.read_string(text := capsys.readouterr().out)
    python, module, name, *printed_flags = unescaped(parser["Service"]["ExecStart"])
    assert (python, module, name) == (sys.executable, "-m", "computeshare.worker.process")
    first = ["--queue", "a", "--queue", "b", "--max-up", "5mbit", "--nice", "0", "--only-on-power"]
    assert printed_flags == [*first, "--battery-stop", "0", "--hours", "22-7"]
    assert "write COMPUTESHARE_URL there" in text  # and nothing that flags say already


def test_a_service_that_would_find_no_broker_is_printed_with_a_warning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    flags = ["--queue", "family", "--home", str(tmp_path), "--print-service", "launchd"]
    assert run_worker(flags) == 0
    said = capsys.readouterr()
    assert said.err.startswith("warning: no broker is known") and "computeshare-worker --join LINK" in said.err
    assert "--queue</string>" in said.out
    (tmp_path / "joined.json").write_text('{"invite": "rediss://:hunter2@broker:6379/0"}')
    assert run_worker(flags) == 0
    said = capsys.readouterr()
    assert said.err == "" and "hunter2" not in said.out


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--hours", "25-3"], "a day has hours 0 to 24"),
        (["--battery-start", "50"], "needs --battery-stop"),
        (["--redis-url", "redis://:hunter2@h"], "no password goes into it"),
        (["--queue", "no good"], "letters, digits"),
        (["--max-up", "fast"], "is not a rate"),
    ],
    ids=str,
)
def test_flags_that_would_not_start_print_no_service(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_worker([*flags, "--print-service"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and told in said.err and "hunter2" not in said.err
