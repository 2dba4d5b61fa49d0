"""Which scope each route needs."""

from pathlib import Path

import pytest

from api.access.caller import OWNER, SCOPES, Caller, Scope
from api.http.scopes import RULES, needed, refused_with, rule_of
from api.http.security import OPEN_FOLDERS, OPEN_PATHS, SHARED
from api.main import create_app
from computeshare.settings import Settings
from tests.support.routes import routes


def caller(*scopes: Scope) -> Caller:
    return Caller("a test", frozenset(scopes), "t")


def test_every_route_has_a_scope_that_somebody_declared_or_is_meant_to_be_open(tmp_path: Path) -> None:
    found = list(routes(create_app(Settings(home=tmp_path, token="secret"))))
    open_to_all = [path for _, path in found if path in OPEN_PATHS or path.startswith(OPEN_FOLDERS)]
    undeclared = {path for _, path in found if path not in open_to_all and rule_of(path) is None}
    assert len(found) > 60 and undeclared == set(), "add a Rule to api/http/scopes.py"
    meant = {
        "/healthz",
        "/readyz",
        "/login",
        "/join/{code}",
        "/join/machines/{machine_id}/key",
        "/v1/worker/release",
        "/v1/worker/{file}",
    }  # a machine's new key is signed by its old key; what is below /shared/ needs a link's code
    open_to_all = [path for path in open_to_all if not path.startswith(SHARED)]
    assert set(open_to_all) == meant, "these need no token at all: is that meant?"


def test_what_nobody_declared_needs_the_whole_right() -> None:
    for path in ("/v1/new", "/v1/jobsandmore", "/jobs2", "/x", "/v1", "//v1/jobs", "/V1/jobs", ""):
        assert needed("GET", path) == "admin"
        assert refused_with(caller(*(s for s in SCOPES if s != "admin")), "GET", path) == 404
        assert refused_with(OWNER, "GET", path) is None


@pytest.mark.parametrize("path", ["/v1/recipes", "/v1/datasets/x", "/v1/bundles/x/y"])
def test_what_jobs_are_made_of_is_read_and_changed_by_those_who_may_read_and_change_jobs(path: str) -> None:
    assert (needed("GET", path), needed("POST", path), needed("DELETE", path)) == ("jobs:read", *["jobs:write"] * 2)


def test_whoever_may_read_is_told_what_is_lacking_and_nobody_else() -> None:
    reader, inviter = caller("jobs:read"), caller("workers:join")
    assert refused_with(reader, "GET", "/v1/jobs/x") is None
    assert refused_with(reader, "DELETE", "/v1/jobs/x") == 403
    assert refused_with(inviter, "GET", "/v1/jobs/x") == refused_with(inviter, "DELETE", "/v1/jobs/x") == 404
    assert refused_with(inviter, "POST", "/v1/invites") is None
    assert refused_with(reader, "GET", "/v1/tokens") == 404


def test_any_method_that_is_not_for_reading_counts_as_a_change() -> None:
    assert {needed(method, "/v1/jobs") for method in ("POST", "PUT", "PATCH", "DELETE", "TRACE", "BREW")} == {
        "jobs:write"
    }


def test_scopes_include_others() -> None:
    assert all(OWNER.may(scope) for scope in SCOPES)
    assert caller("jobs:write").may("jobs:read") and not caller("jobs:read").may("jobs:write")
    assert not any(caller().may(scope) for scope in SCOPES)


def test_no_rule_hides_another() -> None:
    assert [rule.path for rule in RULES if rule_of(rule.path) is not rule] == []
