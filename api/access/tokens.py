"""Tokens: create, list, revoke, find. Only digests of secrets are stored.

A token logs a browser in, too: `login_key_of` derives the key of its login link from it, and `cookie_of` the cookie
from that key. So the database can recognise each of the three, and holds none of them.
"""

import hashlib
import secrets
from collections.abc import Sequence
from typing import Any

from sqlalchemy import ColumnElement, select

from api.access.audit import record
from api.access.caller import OWNER, Caller, author
from api.access.schemas import TokenList, TokenPublic, TokenRequest
from api.access.use import is_held, is_valid, note_use
from api.database import Database, now_ms
from api.errors import Conflict, NotFound
from api.tables import AccessToken, table
from computeshare.settings import derive

TOKEN = table(AccessToken)
MOST = 1000
"""The most tokens of a control plane."""
DAY_MS = 24 * 3600 * 1000
PREFIX = "cst_"
"""The beginning of every token, by which tools that look for leaked secrets can recognise one."""


def digest(secret: str) -> str:
    """sha256 of a secret of at least 144 random bits, which cannot be guessed from it."""
    return hashlib.sha256(secret.encode(errors="replace")).hexdigest()


def login_key_of(token: str) -> str:
    """The key of the link that logs a browser in with this token."""
    return derive(token, "login")


def cookie_of(login_key: str) -> str:
    """The cookie of a browser that has logged in with this key."""
    return derive(login_key, "cookie")


class Tokens:
    """The tokens that were made for others; the owner's own is in a file."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(self, request: TokenRequest) -> tuple[TokenPublic, str]:
        """A new token, and its text, which cannot be read again. Raises Conflict: the name is taken, or there are
        `MOST` already.
        """
        token, now = PREFIX + secrets.token_urlsafe(32), now_ms()
        key = login_key_of(token)
        row: dict[str, Any] = {
            "id": secrets.token_hex(4),
            "name": request.name,
            "digest": digest(token),
            "login_digest": digest(key),
            "cookie_digest": digest(cookie_of(key)),
            "scopes": sorted(set(request.scopes)),
            "created_ms": now,
            "created_by": author(),
            "expires_ms": now + request.days * DAY_MS if request.days else None,
        }
        with self._database.writing() as connection:
            names = [one.name.casefold() for one in connection.execute(select(TOKEN.c.name))]
            if request.name.casefold() in names:
                raise Conflict(f"there is already a token named {request.name}: revoke it, or choose another name")
            if len(names) >= MOST:
                raise Conflict(f"there are already {MOST} tokens, the maximum: revoke one first")
            connection.execute(TOKEN.insert(), row)
            detail = {"name": row["name"], "scopes": row["scopes"], "days": request.days}
            record(connection, "token.create", row["id"], **detail)
        return self._public(TOKEN.c.id == row["id"])[0], token

    def list(self) -> TokenList:
        """All tokens, newest first."""
        return TokenList(items=self._public())

    def revoke(self, token_id: str) -> None:
        """Delete a token: from now on nothing accepts it, and its open event streams end. Raises NotFound."""
        with self._database.writing() as connection:
            mine = TOKEN.c.id == token_id
            row = connection.execute(TOKEN.delete().where(mine).returning(TOKEN.c.name)).one_or_none()
            if row is None:
                raise NotFound(f"there is no token {token_id}", "computeshare tokens list")
            record(connection, "token.revoke", token_id, name=row.name)

    def find(self, secret: str, column: str = "digest") -> Caller | None:
        """Whose secret this is, if it has not expired; `column`: `digest`, `login_digest` or `cookie_digest`."""
        mine = (TOKEN.c[column] == digest(secret)) & is_valid(TOKEN)
        with self._database.engine.connect() as connection:
            row = connection.execute(select(TOKEN).where(mine)).one_or_none()
        if row is None:
            return None
        note_use(self._database, TOKEN, row)
        return Caller(row.name, frozenset(row.scopes), row.id)

    def holds(self, caller: Caller) -> bool:
        """Whether a caller's token has neither expired nor been revoked."""
        return caller is OWNER or is_held(self._database, TOKEN, caller.id)

    def _public(self, *which: ColumnElement[bool]) -> Sequence[TokenPublic]:
        query = select(TOKEN).where(*which).order_by(TOKEN.c.created_ms.desc(), TOKEN.c.id)
        with self._database.engine.connect() as connection:
            rows = connection.execute(query).all()
        return [
            TokenPublic(
                id=row.id,
                name=row.name,
                scopes=row.scopes,
                created_at=row.created_ms,
                created_by=row.created_by,
                expires_at=row.expires_ms,
                expired=row.expires_ms is not None and row.expires_ms <= now_ms(),
                used_at=row.used_ms,
            )
            for row in rows
        ]
