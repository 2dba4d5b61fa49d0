"""The wheel for machines without a checkout: complete, small, and the same bytes each time."""

import ast
import io
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from api.fleet.worker_wheel import CONTROL_PLANE_ONLY, EXTRAS, FILE, build, commands, project, wheel
from computeshare import __version__

ROOT = Path(__file__).resolve().parents[4]
OF_OTHERS = {"annotated_types", "pydantic_core", "huggingface_hub", "scipy", "triton"}
"""Packages that come with pydantic, with the extra `hf`, with scikit-learn and with torch."""


@pytest.fixture(scope="module")
def packed() -> zipfile.ZipFile:
    return zipfile.ZipFile(io.BytesIO(wheel().content))


def imported(name: str, source: str) -> Iterator[str]:
    """The dotted names that a module imports, at its top or anywhere in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} has a relative import"
            yield node.module or ""


def test_what_the_wheel_imports_is_in_it_or_among_its_requirements(packed: zipfile.ZipFile) -> None:
    sources = {name: packed.read(name).decode() for name in packed.namelist() if name.endswith(".py")}
    found = {(name, module) for name, source in sources.items() for module in imported(name, source)}
    inside = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in sources}
    own = {(name, module) for name, module in found if module.split(".")[0] == "computeshare"}
    assert len(own) > 300 and {(name, module) for name, module in own if module not in inside} == set()
    others = {module.split(".")[0] for _, module in found - own} - sys.stdlib_module_names - OF_OTHERS
    providers = metadata.packages_distributions()
    lacking = {
        module for module in others if not set(map(canonicalize_name, providers.get(module, [module]))) & asked()
    }
    assert {"torch", "redis", "rq"} <= others and lacking == set()


def asked() -> set[str]:
    """Names of the wheel's requirements, those of its extras too."""
    told = project(__version__)
    optional = told["optional-dependencies"]
    assert isinstance(optional, dict) and isinstance(told["dependencies"], list)
    every = [*told["dependencies"], *(each for some in optional.values() for each in some)]
    return {canonicalize_name(Requirement(each).name) for each in every}


def test_modules_that_are_started_as_processes_are_in_the_wheel(packed: zipfile.ZipFile) -> None:
    sources = [packed.read(name).decode() for name in packed.namelist() if name.endswith(".py")]
    started = {found for source in sources for found in re.findall(r'"-m", "(computeshare[\w.]*)"', source)}
    paths = {f"{module.replace('.', '/')}.py" for module in started}
    assert len(started) > 2 and paths <= set(packed.namelist())


def test_it_asks_for_nothing_that_only_the_control_plane_needs() -> None:
    everything = {canonicalize_name(Requirement(each).name) for each in metadata.requires("computeshare") or ()}
    assert asked() & CONTROL_PLANE_ONLY == set()
    assert set(project(__version__)["optional-dependencies"]) == EXTRAS  # type: ignore[call-overload]
    assert CONTROL_PLANE_ONLY - everything == {"sqlalchemy", "starlette"}  # which come with others


def test_it_is_the_same_bytes_wherever_the_files_lie_and_whenever_they_were_written(tmp_path: Path) -> None:
    copied = Path(shutil.copytree(ROOT / "computeshare", tmp_path / "computeshare"))
    shutil.copy(ROOT / "LICENSE", tmp_path)
    for path in copied.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))
    assert build(__version__, tmp_path) == wheel().content


def test_it_names_its_version_and_holds_scripts_data_and_licence(packed: zipfile.ZipFile) -> None:
    folder = f"computeshare_worker-{__version__}.dist-info"
    told = packed.read(f"{folder}/METADATA").decode()
    assert f"computeshare_worker-{__version__}-py3-none-any.whl" == FILE
    assert f"Name: computeshare-worker\nVersion: {__version__}\n" in told
    assert packed.read(f"{folder}/entry_points.txt").decode().split("\n")[1].startswith("computeshare-worker = ")
    wanted = {"computeshare/jobspec/catalog.json", "computeshare/protocol/lua/lease.lua", "computeshare/py.typed"}
    assert wanted | {f"{folder}/licenses/LICENSE"} <= set(packed.namelist())
    assert [
        name for name in packed.namelist() if name.startswith(("api", "computeshare/up", "computeshare/cli/"))
    ] == []


def test_the_commands_name_the_wheel_and_pin_a_certificate_that_no_system_trusts() -> None:
    joining = "computeshare-worker --join https://home.example#CODE"
    url = f"https://home.example/v1/worker/{FILE}"
    assert commands("https://home.example", joining) == [
        f"uvx --from {url} {joining}",
        f"pipx run --spec {url} {joining}",
    ]
    fetched = f"curl -fskO --pinnedpubkey 'sha256//KEY=' {url} && "
    assert commands("https://home.example", joining, "KEY=") == [
        f"{fetched}uvx --from ./{FILE} {joining}",
        f"{fetched}pipx run --spec ./{FILE} {joining}",
    ]
