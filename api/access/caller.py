"""Who makes a request: the name and the scopes of a token or of a link."""

from contextvars import ContextVar
from dataclasses import dataclass
from typing import Literal, get_args

Scope = Literal["jobs:read", "jobs:write", "workers:read", "workers:join", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
INCLUDED: dict[Scope, frozenset[Scope]] = {"jobs:write": frozenset({"jobs:read"}), "admin": frozenset(SCOPES)}
"""The scopes that another one includes."""
A_USER = "a user"
"""The author of a change that no request made."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request.

    Args:
        name: of the token, for the timeline and the audit log.
        id: of the token or the link; "" for the owner, whose token is in a file.
        job_id: the only job that a link shows; None for tokens.
    """

    name: str
    scopes: frozenset[Scope] = frozenset()
    id: str = ""
    job_id: str | None = None

    def may(self, scope: Scope) -> bool:
        """Whether this caller has a scope, or one that includes it."""
        return any(scope == own or scope in INCLUDED.get(own, ()) for own in self.scopes)


OWNER = Caller("the owner", frozenset({"admin"}))
RESERVED = frozenset({OWNER.name, A_USER, "the clock", "an invited machine"})
"""Names that no token may have, because the timeline uses them."""
current: ContextVar[tuple[Caller, str] | None] = ContextVar("caller", default=None)
"""The caller of the request being answered and its address; None outside requests, and in those that need no token."""


def author() -> str:
    """The name of whoever makes the present request, for the timeline."""
    found = current.get()
    return found[0].name if found else A_USER
