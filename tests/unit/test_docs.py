"""What users and operators need to know is written down, and stays so."""

import inspect
import re
from pathlib import Path

import typer.main

from computeshare import keys
from computeshare.cli import app
from computeshare.keys import JobKeys
from computeshare.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()


def test_every_setting_is_in_the_readme() -> None:
    assert [name for name in Settings.model_fields if f"`COMPUTESHARE_{name.upper()}`" not in README] == []


def test_every_command_is_in_the_readme() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    names = [f"`computeshare {name}" for name in commands]
    names += [f"{'jobs ' if name == 'create' else '`'}{name}`" for name in commands["jobs"].commands]
    assert len(names) > 10 and [name for name in names if name not in README] == []


def test_every_key_is_in_the_protocol() -> None:
    job = [name for name, _ in inspect.getmembers(JobKeys, inspect.isfunction) if not name.startswith("_")]
    undocumented = [name for name in job if name != "pattern" and not re.search(rf"`{name}[`:]", PROTOCOL)]
    assert len(job) > 15 and undocumented == []
    assert all(f"`{key}`" in PROTOCOL for key in (keys.JOBS, keys.WORKERS, keys.CONTROL_LOCK, keys.worker("ID")))


def test_every_script_says_what_it_takes_and_returns() -> None:
    scripts = sorted((ROOT / "computeshare" / "lua").glob("*.lua"))
    assert len(scripts) >= 10
    for script in scripts:
        header = script.read_text().split("\n\n")[0]
        assert header.startswith(f"-- {script.name}: ")
        assert all(word in header for word in ("-- KEYS", "-- ARGV", "-- Returns")) or script.name == "keep.lua", script


def test_every_event_that_is_written_is_in_the_protocol() -> None:
    sources = [*ROOT.glob("computeshare/lua/*.lua"), *ROOT.glob("computeshare/*.py"), *ROOT.glob("computeshare/*/*.py")]
    text = "\n".join(source.read_text() for source in sources)
    kinds = set(re.findall(r'"type", "(\w+)"', text)) | set(re.findall(r'(?:announce|append)\("(\w+)",', text))
    assert len(kinds) >= 9 and [kind for kind in sorted(kinds) if f"| `{kind}` |" not in PROTOCOL] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
