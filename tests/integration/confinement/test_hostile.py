"""Recipes that try to get out, by each method that works here."""

import sys
from pathlib import Path

import pytest

from computeshare.confinement import methods
from computeshare.confinement.methods import Method
from computeshare.confinement.process import start

TRY = """
import ctypes, os, signal, socket, subprocess, sys
from pathlib import Path

def refused(do, *arguments):
    try:
        print("DONE", do, arguments, do(*arguments))
    except OSError as error:
        print("refused", error)
"""
METHODS = methods.available()


@pytest.fixture(params=METHODS, ids=lambda method: method.name)
def by(request: pytest.FixtureRequest) -> Method:
    found: Method = request.param
    return found


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's home with a key and a token, as this process has it."""
    for name in ("home/.ssh/id_ed25519", "home/.local/share/computeshare/token"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("secret")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COMPUTESHARE_HOME", str(tmp_path / "home/.local/share/computeshare"))
    monkeypatch.setenv("COMPUTESHARE_TOKEN", "secret")
    return tmp_path / "home"


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    (tmp_path / "scratch").mkdir()
    return tmp_path / "scratch"


def run(by: Method, scratch: Path, program: str, *arguments: object, **options: object) -> str:
    """What a confined Python prints, both streams."""
    argv = [sys.executable, "-P", "-c", TRY + program, *map(str, arguments)]
    process = start(argv, scratch=scratch, by=by, **options)  # type: ignore[arg-type]
    try:
        return process.communicate(timeout=120)[0].decode()
    finally:
        process.kill()


def test_a_method_works_on_this_machine() -> None:
    """Else none of these tests would run."""
    assert sys.platform != "linux" or {method.name for method in METHODS} >= {"landlock"}


def test_torch_computes_inside(by: Method, scratch: Path) -> None:
    told = run(by, scratch, "import torch; x = torch.ones(300, 300); print('sum', float((x @ x).sum()))")
    assert told == "sum 27000000.0\n"


def test_it_reads_the_readable_and_no_secret(by: Method, scratch: Path, home: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.txt").write_text("data")
    program = """
home, data = sys.argv[1:]
print("data", (Path(data) / "a.txt").read_text(), bool(Path("/etc/passwd").read_text()))
for name in (".ssh/id_ed25519", ".local/share/computeshare/token"):
    refused(Path(home, name).read_text)
for name in ("", ".ssh", ".."):
    refused(os.listdir, Path(home, name))
refused(Path("/etc/shadow").read_text)
print([word for word in (*os.environ, *os.environ.values()) if "COMPUTESHARE" in word or "secret" in word])
"""
    told = run(by, scratch, program, home, tmp_path / "data", readable=(tmp_path / "data",)).splitlines()
    assert told[0] == "data data True" and told[-1] == "[]"
    listed = [line for line in told[1:-1] if not line.startswith("refused")]
    assert "secret" not in "".join(told) and not [line for line in listed if "id_ed25519" in line or "token" in line]
