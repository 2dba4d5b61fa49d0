"""Recognises the secrets that requests carry: tokens, login keys, cookies and the codes of links."""

import hmac

from api.access.caller import OWNER, Caller
from api.access.links import Links
from api.access.tokens import Tokens, cookie_of, login_key_of


def matches(given: str, expected: str) -> bool:
    """Compare two secrets in constant time."""
    return hmac.compare_digest(given.encode(errors="replace"), expected.encode())


class Credentials:
    """The owner's token, and the tokens and links in the database. Methods read the database, but for the owner."""

    def __init__(self, owner_token: str, tokens: Tokens, links: Links) -> None:
        self._token = owner_token
        self._login_key = login_key_of(owner_token)
        self._cookie = cookie_of(self._login_key)
        self._tokens, self._links = tokens, links

    def of_token(self, given: str) -> Caller | None:
        """Who sends this token as a bearer."""
        return OWNER if matches(given, self._token) else self._tokens.find(given)

    def of_cookie(self, given: str) -> Caller | None:
        """Whose browser sends this cookie."""
        return OWNER if matches(given, self._cookie) else self._tokens.find(given, "cookie_digest")

    def of_link(self, code: str) -> Caller | None:
        """The reader with this code of a link."""
        return self._links.find(code)

    def login(self, given: str) -> tuple[Caller, str] | None:
        """Who logs in with this login key, or with the token itself; and the browser's cookie."""
        for key in (given, login_key_of(given)):
            found = OWNER if matches(key, self._login_key) else self._tokens.find(key, "login_digest")
            if found:
                return found, cookie_of(key)
        return None

    def hold(self, caller: Caller) -> bool:
        """Whether a caller's secret is still good: neither expired nor revoked."""
        return self._links.holds(caller) if caller.job_id else self._tokens.holds(caller)
