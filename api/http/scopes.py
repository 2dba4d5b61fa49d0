"""The scope that each route needs, by the beginning of its path. What is not listed needs `admin`."""

from dataclasses import dataclass
from typing import Literal

from api.access.caller import Caller, Scope

Need = Scope | Literal["any"]
"""`any`: every token will do."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class RouteRule:
    """The scopes needed to read and to change `path` and (unless `alone`) all paths below it."""

    path: str
    read: Need
    change: Need
    alone: bool = False

    def covers(self, path: str) -> bool:
        return path == self.path or (not self.alone and path.startswith(f"{self.path}/"))


RULES = (
    RouteRule("/", "jobs:read", "jobs:write", alone=True),
    RouteRule("/jobs", "jobs:read", "jobs:write"),
    RouteRule("/compare", "jobs:read", "jobs:write"),
    RouteRule("/new", "jobs:write", "jobs:write"),
    RouteRule("/v1/jobs", "jobs:read", "jobs:write"),
    RouteRule("/v1/compare", "jobs:read", "jobs:write"),
    RouteRule("/v1/recipes", "jobs:read", "jobs:write"),
    RouteRule("/datasets", "jobs:read", "jobs:write"),
    RouteRule("/v1/datasets", "jobs:read", "jobs:write"),
    RouteRule("/v1/bundles", "jobs:read", "jobs:write"),
    RouteRule("/workers", "workers:read", "admin"),
    RouteRule("/v1/workers", "workers:read", "admin"),
    RouteRule("/v1/queues", "workers:read", "admin"),
    RouteRule("/v1/invites", "workers:join", "workers:join"),
    RouteRule("/webhooks", "admin", "admin"),
    RouteRule("/v1/webhooks", "admin", "admin"),
    RouteRule("/tokens", "admin", "admin"),
    RouteRule("/v1/tokens", "admin", "admin"),
    RouteRule("/audit", "admin", "admin"),
    RouteRule("/v1/audit", "admin", "admin"),
    RouteRule("/metrics", "jobs:read", "admin"),
    RouteRule("/v1/version", "any", "admin"),
    RouteRule("/logout", "any", "any"),
    RouteRule("/docs", "any", "admin"),
    RouteRule("/openapi.json", "any", "admin"),
)


def rule_of(path: str) -> RouteRule | None:
    """The rule that covers a path; None: nobody has declared one."""
    return next((rule for rule in RULES if rule.covers(path)), None)


def needed(method: str, path: str) -> Need:
    """The scope that a request needs."""
    rule = rule_of(path)
    if rule is None:
        return "admin"
    return rule.read if method in READS else rule.change


def refused_with(caller: Caller, method: str, path: str) -> Literal[403, 404] | None:
    """None: the request is allowed. 403: the caller may read there, but not change. 404: the caller may not learn that
    the resource exists.
    """
    need = needed(method, path)
    if need == "any" or caller.may(need):
        return None
    read = needed("GET", path)
    return 403 if read != "any" and caller.may(read) else 404
