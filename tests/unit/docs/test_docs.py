"""What users and operators need to know is written down, and stays so."""

import inspect
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer.main
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute

from api.main import ROUTES, create_app
from computeshare.cli.main import app
from computeshare.client import ComputeShare, Job, Jobs, Metrics
from computeshare.evaluator import process as evaluator
from computeshare.jobspec.documents.fields import reference
from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.reducer import process as reducer
from computeshare.settings import INTERNAL, Settings
from computeshare.tasks.images.datasets.reference import datasets_page
from computeshare.worker import process as worker

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text()
CLI = (ROOT / "docs" / "cli.md").read_text()
EVERYWHERE = ("--url", "--home", "--json")
WORKER = (ROOT / "docs" / "worker.md").read_text()
FIELDS = (ROOT / "docs" / "job.md").read_text()
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()


def test_every_variable_is_declared_among_the_settings_and_told_in_the_readme() -> None:
    declared = {name.upper() for name in Settings.model_fields} | INTERNAL
    sources = [path.read_text() for folder in ("computeshare", "api") for path in (ROOT / folder).rglob("*.py")]
    named = {name for text in sources for name in re.findall(r"COMPUTESHARE_([A-Z_]*[A-Z])", text)}
    told = set(re.findall(r"`COMPUTESHARE_([A-Z_]+)`", README))
    assert named <= declared == told
    assert [text for text in sources if re.search(r"(environ(\.get)?|getenv)[\[(]\"COMPUTESHARE", text)] == []


def test_the_reference_of_a_jobs_fields_is_that_of_the_jobspec() -> None:
    assert reference() == FIELDS, "run: python -m computeshare.jobspec.documents.fields > docs/job.md"


def test_the_page_of_data_sets_is_that_of_the_table() -> None:
    page = (ROOT / "docs" / "datasets.md").read_text()
    command = "python -m computeshare.tasks.images.datasets.reference > docs/datasets.md"
    assert datasets_page() == page, f"run: {command}"


def test_every_command_is_in_the_readme() -> None:
    found = [name.split()[1:] for name, _ in commands_of(typer.main.get_command(app), "computeshare")]
    assert len(found) > 20 and [words for words in found if not is_in_the_readme(*words)] == []


def is_in_the_readme(first: str, second: str = "") -> bool:
    """Whether the table of commands has it: a command, or in a row of its group one of that."""
    rows = re.findall(rf"^\| [^|]*`computeshare {first}\b[^|]*\|", README, re.MULTILINE)
    return any(not second or re.search(rf"[` ]{second}`", row) for row in rows)


def test_every_command_has_an_example_and_every_option_is_told() -> None:
    found = dict(commands_of(typer.main.get_command(app), "computeshare"))
    assert len(found) > 20 and [name for name in found if f"`{name}" not in CLI] == []
    options = [(name, flag) for name, one in found.items() for flag in flags_of(one) if flag not in EVERYWHERE]
    assert [flag for flag in EVERYWHERE if not is_told(flag, section(CLI, "# The command line"))] == []
    assert len(options) > 60 and [(name, flag) for name, flag in options if not is_told(flag, told_of(name))] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "guides").glob("*.md")), ids=lambda page: str(page.stem))
def test_every_command_of_a_guide_exists_with_its_options(page: Path) -> None:
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        for line in re.findall(r"^computeshare .*", block.replace("\\\n", ""), re.MULTILINE):
            command, words = typer.main.get_command(app), shlex.split(line, comments=True)[1:]
            while below := getattr(command, "commands", {}):
                command = below[words.pop(0)]
            command.make_context(line, words)  # raises for what it does not know


@pytest.mark.parametrize("program", [worker, reducer, evaluator], ids=["worker", "reducer", "evaluator"])
def test_every_option_of_the_other_programs_is_told(program: ModuleType) -> None:
    single = typer.Typer(add_completion=False)
    single.command()(program.command)
    told = told_of(f"computeshare-{program.__name__.split('.')[1]}")
    options = flags_of(typer.main.get_command(single))
    assert options and [flag for flag in options if not is_told(flag, told)] == []


def told_of(name: str) -> str:
    """What is told of a command: in its rows, and in a section or page of its own."""
    rows = [line for line in CLI.splitlines() if line.startswith("|") and re.search(rf"`{name}[ `]", line)]
    beside = {
        "computeshare jobs edit": FIELDS,
        "computeshare jobs create": section(CLI, "### Creating one") + FIELDS,
        "computeshare-worker": WORKER,
    }
    return "\n".join([*rows, beside.get(name, "")])


def section(text: str, heading: str) -> str:
    """A section of a document, up to the next heading."""
    return text.partition(f"{heading}\n")[2].partition("\n#")[0]


def is_told(flag: str, text: str) -> bool:
    return re.search(rf"[` ]{flag}[`, ]", text) is not None


def test_the_pages_are_told_and_no_other() -> None:
    routes = [route for module in ROUTES for route in module.router.routes if isinstance(route, APIRoute)]
    pages = [route for route in routes if "GET" in route.methods and not route.include_in_schema]
    shown = {route.path for route in pages if route.response_class is HTMLResponse}
    told = re.findall(r"^\| `(/[^`]*)` \|", section((ROOT / "docs" / "rest.md").read_text(), "## Pages"), re.MULTILINE)
    assert len(shown) > 8 and sorted(told) == sorted(shown)


def test_every_route_is_told_and_no_other(tmp_path: Path) -> None:
    described = create_app(Settings(home=tmp_path)).openapi()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in described.items() for method in methods}
    told = re.findall(r"^\| `([A-Z]+ /[^`]*)` \|", (ROOT / "docs" / "rest.md").read_text(), re.MULTILINE)
    assert len(routes) > 20 and sorted(told) == sorted(routes)


def test_every_part_of_the_python_client_is_told() -> None:
    text = (ROOT / "docs" / "python.md").read_text()
    public = {"cs": ComputeShare, "cs.jobs": Jobs, "job": Job, "metrics": Metrics}
    for prefix, kind in public.items():
        for name, part in vars(kind).items():
            if not name.startswith("_"):
                told = f"{prefix}.{name}(" if inspect.isfunction(part) else name
                assert told in text or f"{name}`" in text, told
    assert [error for error in ("NoServer", "Problem", "JobFailed", "ArtifactError") if f"`{error}`" not in text] == []


def commands_of(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command below this one that does something, by what one types."""
    for word, below in getattr(command, "commands", {}).items():
        if hasattr(below, "commands"):
            yield from commands_of(below, f"{name} {word}")
        else:
            yield f"{name} {word}", below


def flags_of(command: Any) -> list[str]:
    """A command's options, as one types them."""
    shown = [option for option in command.params if option.param_type_name == "option" and not option.hidden]
    return [flag for option in shown for flag in option.opts]


def test_every_key_is_in_the_protocol() -> None:
    job = [name for name, _ in inspect.getmembers(JobKeys, inspect.isfunction) if not name.startswith("_")]
    named = [name for name in job if name not in ("pattern", "messages")]
    undocumented = [name for name in named if not re.search(rf"`{name}[`:]", PROTOCOL)]
    assert len(job) > 15 and undocumented == []
    shared = (keys.JOBS, keys.WORKERS, keys.CONTROL_LOCK, keys.worker("ID"), keys.orders("ID"))
    shared += (keys.GATEWAYS, keys.gateway("ID"))
    shared += (keys.TEXT_REQUESTS, keys.text_request("ID"), keys.text_answer("ID"))
    assert all(f"`{key}`" in PROTOCOL for key in shared)


def test_every_script_says_what_it_does_and_returns() -> None:
    scripts = sorted((ROOT / "computeshare" / "protocol" / "lua").glob("*.lua"))
    assert len(scripts) >= 10
    for script in scripts:
        header = script.read_text().split("\n\n")[0]
        assert header.startswith(f"-- {script.name}: ")
        assert "\n-- Returns" in header or script.name == "shared.lua", script


def test_every_event_that_is_written_is_in_the_protocol() -> None:
    sources = [*ROOT.glob("computeshare/protocol/lua/*.lua"), *ROOT.glob("computeshare/**/*.py")]
    text = "\n".join(source.read_text() for source in sources)
    kinds = set(re.findall(r'append_event\(events_key, "(\w+)"', text)) | set(
        re.findall(r'(?:announce|append)\("(\w+)",', text)
    )
    assert len(kinds) >= 9 and [kind for kind in sorted(kinds) if f"| `{kind}` |" not in PROTOCOL] == []


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", *ROOT.glob("docs/**/*.md")]
    for document in documents:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
