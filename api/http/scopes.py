"""The scope that each route needs, by the beginning of its path. What is not listed needs `admin`."""

from dataclasses import dataclass
from typing import Literal

from api.access.caller import Caller, Scope

Need = Scope | Literal["any"]
"""`any`: every token will do."""
READS = frozenset({"GET", "HEAD", "OPTIONS"})


@dataclass(frozen=True, slots=True)
class Rule:
    """What reading and changing needs at `path`, and (unless `alone`) at all paths below it."""

    path: str
    read: Need
    change: Need
    alone: bool = False

    def covers(self, path: str) -> bool:
        return path == self.path or (not self.alone and path.startswith(f"{self.path}/"))


RULES = (
    Rule("/", "jobs:read", "jobs:write", alone=True),
    Rule("/jobs", "jobs:read", "jobs:write"),
    Rule("/compare", "jobs:read", "jobs:write"),
    Rule("/new", "jobs:write", "jobs:write"),
    Rule("/v1/jobs", "jobs:read", "jobs:write"),
    Rule("/v1/compare", "jobs:read", "jobs:write"),
    Rule("/v1/recipes", "jobs:read", "jobs:write"),
    Rule("/datasets", "jobs:read", "jobs:write"),
    Rule("/v1/datasets", "jobs:read", "jobs:write"),
    Rule("/v1/bundles", "jobs:read", "jobs:write"),
    Rule("/workers", "workers:read", "admin"),
    Rule("/v1/workers", "workers:read", "admin"),
    Rule("/v1/queues", "workers:read", "admin"),
    Rule("/v1/invites", "workers:join", "workers:join"),
    Rule("/webhooks", "admin", "admin"),
    Rule("/v1/webhooks", "admin", "admin"),
    Rule("/tokens", "admin", "admin"),
    Rule("/v1/tokens", "admin", "admin"),
    Rule("/audit", "admin", "admin"),
    Rule("/v1/audit", "admin", "admin"),
    Rule("/metrics", "jobs:read", "admin"),
    Rule("/v1/version", "any", "admin"),
    Rule("/logout", "any", "any"),
    Rule("/docs", "any", "admin"),
    Rule("/openapi.json", "any", "admin"),
)


def rule_of(path: str) -> Rule | None:
    """The rule that covers a path; None: nobody has declared one."""
    return next((rule for rule in RULES if rule.covers(path)), None)


def needed(method: str, path: str) -> Need:
    """What a request needs."""
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
