"""The client has a method for each REST call, and asks for nothing that is not there."""

import contextlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from api.main import create_app
from computeshare.bundles.manifest import FileEntry, Manifest
from computeshare.client import Client
from computeshare.client.api.models import Problem
from computeshare.settings import Settings
from tests.support.http_answers import Answer, FakeServer, job, serving

FOR_WORKERS = ("/v1/worker/release", "/v1/worker/{file}")
"""Routes from which new machines and workers fetch their software."""
WITH_PARAMETERS = (("/v1/jobs", "get"), ("/v1/jobs/{job_id}", "patch"))


@pytest.fixture(scope="module")
def routes(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    paths = create_app(Settings(home=tmp_path_factory.mktemp("home"))).openapi()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """What all methods of a client together ask for, of a server that has nothing."""
    with serving() as server, Client(server.url, "secret") as client:
        for call in calls(client):
            call_with_anything(call, server, tmp_path_factory.mktemp("files"))
        return {f"{request.method} {urlsplit(request.path).path}" for request in server.requests}


def test_every_route_has_a_method_of_the_client(routes: set[str], asked: set[str]) -> None:
    below = {route for route in routes if " /v1/" in route and not route.endswith(FOR_WORKERS)}
    lacking = [route for route in sorted(below) if not any(pattern(route).fullmatch(one) for one in asked)]
    assert len(below) > 30 and lacking == []


def test_every_method_of_the_client_has_a_route(routes: set[str], asked: set[str]) -> None:
    assert len(asked) > 30
    assert [one for one in sorted(asked) if not any(pattern(route).fullmatch(one) for route in routes)] == []


def test_every_parameter_of_a_list_of_jobs_can_be_asked_for(tmp_path: Path) -> None:
    documented = create_app(Settings(home=tmp_path)).openapi()
    (list_jobs, change) = (documented["paths"][path][method] for path, method in WITH_PARAMETERS)
    told = {one["name"] for one in list_jobs["parameters"]}
    body = change["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    with serving() as server, Client(server.url, "secret") as client:
        first = {"items": [job()], "next_cursor": "more"}
        query = "status=failed&queue=q&search=s&sort=name&tag=t&limit=100"
        server.on(f"GET /v1/jobs?{query}", Answer(first))
        server.on(f"GET /v1/jobs?{query}&cursor=more", Answer({"items": [], "next_cursor": None}))
        assert len(list(client.jobs(["failed"], "q", None, "s", "name", "t"))) == 1
        asked = parse_qs(urlsplit(server.requests[-1].path).query).keys()
        server.on("PATCH /v1/jobs/ID", Answer(job()))
        client.rename("ID", "other")
        client.edit("ID", {"notes": "another", "tags": [], "requires": {}, "prefers": {}})
        client.prioritise("ID", 1)
        sent = {name for request in server.asked("PATCH /v1/jobs/ID") for name in json.loads(request.body)}
    assert asked == told
    assert sent == documented["components"]["schemas"][body]["properties"].keys()


def calls(client: Client) -> Iterator[Callable[..., Any]]:
    """The methods that ask for something."""
    for part in (
        client,
        client.webhooks,
        client.invites,
        client.access,
        client.bundles,
        client.datasets,
        client.recipes,
    ):
        for name, method in inspect.getmembers(part, inspect.ismethod):
            if not name.startswith("_") and name != "close":
                yield method


def call_with_anything(method: Callable[..., Any], server: FakeServer, folder: Path) -> None:
    """Call it with what its parameters without a default may be; it has to ask, and to tell that there is nothing."""
    by_type: dict[Any, Any] = {str: "ID", int: 1, Path: folder / "file", Sequence[str]: ["ID", "OTHER"]}
    by_type |= {
        str | None: "ID",
        Mapping[str, str]: {"recipe.py": ""},
        bytes: b"",
        Manifest: Manifest(files=(FileEntry(path="a", size=0, pieces=()),)),
    }
    by_name = {"job": job(), "spec": {}, "request": {}, "change": {}, "changes": {}, "facts": {}}
    parameters = [one for one in inspect.signature(method).parameters.values() if one.default is one.empty]
    given = [by_name[one.name] if one.name in by_name else by_type[one.annotation] for one in parameters]
    before = len(server.requests)
    with contextlib.suppress(Problem):
        found = method(*given)
        list(found if inspect.isgenerator(found) else ())
        pytest.fail(f"{method.__qualname__} hears nothing of the refusal")
    assert len(server.requests) > before


def pattern(route: str) -> re.Pattern[str]:
    """A route, whatever stands in its places."""
    return re.compile(re.sub(r"{\w+}", "[^/]+", route))
