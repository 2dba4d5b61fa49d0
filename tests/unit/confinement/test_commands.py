"""The rules that each means is given, as text."""

import sys
from pathlib import Path

import pytest

from computeshare.confinement import bubblewrap, folders, seatbelt
from computeshare.confinement.command import Bounds, confined
from computeshare.confinement.kinds import LANDLOCK
from computeshare.confinement.landlock import PathAccess
from computeshare.confinement.launcher import LaunchOrder


def test_bubblewrap_binds_what_is_readable_and_writes_in_one_place() -> None:
    words = bubblewrap.options([Path("/data/set")], Path("/scratch"), gpu=False)
    assert {"--unshare-net", "--unshare-pid", "--unshare-user", "--die-with-parent"} <= set(words)
    writable = [words[at + 1] for at, word in enumerate(words) if word in ("--bind", "--dev-bind", "--bind-try")]
    assert writable == ["/scratch"]
    bound = {words[at + 1] for at, word in enumerate(words) if word == "--ro-bind-try"}
    assert {"/data/set", "/etc/passwd", "/sys/devices/system"} <= bound and "/sys" not in bound
    assert not {str(Path.home()), "/", "/etc", "/tmp", "/proc"} & bound
    assert "/sys" in bubblewrap.options([], Path("/scratch"), gpu=True)


def test_a_gpus_devices_are_there_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "gpu_devices", lambda: (Path("/dev/nvidia0"), Path("/dev/nvidiactl")))
    words = bubblewrap.options([], Path("/scratch"), gpu=True)
    assert [words[at + 1] for at, word in enumerate(words) if word == "--dev-bind"] == [
        "/dev/nvidia0",
        "/dev/nvidiactl",
    ]
    assert "--dev-bind" not in bubblewrap.options([], Path("/scratch"), gpu=False)
    orders = (confined(["true"], LANDLOCK, Bounds(Path("/scratch"), gpu=gpu)) for gpu in (True, False))
    assert ["/dev/nvidia0" in " ".join(words) for words in orders] == [True, False]


def python_at(monkeypatch: pytest.MonkeyPatch, prefix: Path, base: Path) -> None:
    monkeypatch.setattr(sys, "executable", str(prefix / "bin/python"))
    for name, value in (("prefix", prefix), ("exec_prefix", prefix), ("base_prefix", base), ("base_exec_prefix", base)):
        monkeypatch.setattr(sys, name, str(value))


def test_python_below_the_home_folder_is_readable_and_nothing_else_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As uv installs it: the environment's interpreter is a link by way of a link."""
    uv = tmp_path / ".local/share/uv/python"
    real, alias, environment = uv / "cpython-3.12.9", uv / "cpython-3.12", tmp_path / "project/.venv"
    for folder in (real / "bin", real / "lib/python3.12", environment / "bin", environment / "lib", tmp_path / ".ssh"):
        folder.mkdir(parents=True)
    (real / "bin/python3.12").touch()
    alias.symlink_to(real.name)
    (environment / "bin/python").symlink_to(alias / "bin/python3.12")
    (environment / "pyvenv.cfg").touch()
    python_at(monkeypatch, environment, real)
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(environment / "lib/python3.12/site-packages")])
    expected = {
        *(environment / name for name in ("bin", "lib", "pyvenv.cfg")),
        *(folder / name for folder in (real, alias) for name in ("bin", "lib")),
        folders.package_root() / "computeshare",
    }
    assert set(folders.python_paths()) == expected


def test_an_environment_that_is_the_home_folder_does_not_make_it_readable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bin", "lib", "share", ".ssh", ".local/share/computeshare"):
        (tmp_path / name).mkdir(parents=True)
    python_at(monkeypatch, tmp_path, Path("/usr"))
    found = folders.python_paths()
    assert tmp_path / "lib" in found and not {tmp_path, tmp_path / "share", tmp_path / ".ssh"} & set(found)


def test_the_users_packages_are_readable_where_python_imports_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages = tmp_path / ".local/lib/python3.12/site-packages"
    packages.mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    assert packages in folders.python_paths()


def test_the_project_folders_names_are_listed_where_python_finds_the_package_by_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "path", ["/usr/lib/python3"])
    assert folders.names_for_python() == ()
    monkeypatch.setattr(sys, "path", [str(folders.package_root())])
    assert folders.names_for_python() == (folders.package_root(),)


def test_outermost_drops_what_lies_below_another() -> None:
    paths = map(Path, ("/a/b", "/a", "/ab", "/c/d/e", "/c/d"))
    assert folders.outermost(paths) == (Path("/a"), Path("/ab"), Path("/c/d"))


def test_an_order_survives_its_way_to_the_launcher() -> None:
    access = PathAccess(("/usr",), ("/project",), ("/dev/null",), ("/scratch",))
    for order in (LaunchOrder(1, {"CORE": 0}, True, False, access), LaunchOrder(0, {}, False, True, None)):
        loaded = LaunchOrder.loads(order.dumps())
        assert loaded.dumps() == order.dumps() and type(loaded.access) is type(order.access)


def test_the_profile_for_macos_refuses_by_default_and_names_each_folder() -> None:
    text = seatbelt.profile(
        ["/Users/ann/data", '/Users/ann/"odd"\\name'], ["/Users/ann/project"], ["/private/tmp/scratch"], gpu=False
    )
    rules = text.splitlines()
    assert rules[:2] == ["(version 1)", "(deny default)"] and text.count("(") == text.count(")")
    assert "(deny network*)" in rules and "process-fork" not in text and "network-outbound" not in text
    writes = [rule for rule in rules if "file-write*" in rule]
    assert writes == ['(allow file-write* (subpath "/private/tmp/scratch"))']
    (reads,) = (rule for rule in rules if rule.startswith("(allow file-read* (literal"))
    assert '(subpath "/Users/ann/data")' in reads and '(subpath "/Users/ann/\\"odd\\"\\\\name")' in reads
    assert '(literal "/Users/ann/project")' in reads and '(subpath "/Users/ann/project")' not in text
    assert '(subpath "/Users")' not in text and '(subpath "/")' not in reads
    assert "iokit-open" not in text and "AGXDeviceUserClient" in seatbelt.profile([], [], [], gpu=True)
