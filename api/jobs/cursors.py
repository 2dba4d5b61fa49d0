"""Pages of a long list by keyset cursors, which stay valid while rows are added."""

import base64
from typing import Any

from sqlakeyset import Page, select_page, serialize_bookmark, unserialize_bookmark
from sqlakeyset.types import Marker
from sqlalchemy import Select
from sqlalchemy.orm import Session

from computeshare.errors import SpecError


class BadCursor(SpecError):
    """The cursor is not from this list, or not from this order of it."""


def page(
    session: Session, query: Select[Any], kinds: tuple[type, ...], cursor: str | None, limit: int, order: str = ""
) -> Page[Any]:
    """A page of at most `limit` rows: the first page, or the page that `cursor` points to.

    Args:
        query: ordered by as many columns as there are `kinds`; the last column is unique.
        kinds: the Python type of each of these columns.
        order: the name of the order, for a list with several: a cursor of another order is refused.
    Raises: BadCursor.
    """
    return select_page(session, query, per_page=limit, page=_place(cursor, kinds, order) if cursor else None)


def next_cursor(rows: Page[Any], order: str = "") -> str | None:
    """The cursor of the page after `rows`; None on the last page. `order` as for `page`."""
    if not rows.paging.has_next:
        return None
    bookmark = order + serialize_bookmark(rows.paging.next)
    return base64.urlsafe_b64encode(bookmark.encode()).decode().rstrip("=")


def _place(cursor: str, kinds: tuple[type, ...], order: str) -> Marker:
    try:
        padded = cursor + "=" * (-len(cursor) % 4)
        bookmark = base64.b64decode(padded, altchars=b"-_", validate=True).decode()
        if not bookmark.startswith(order):
            raise BadCursor(_NOT_OURS)
        marker = unserialize_bookmark(bookmark.removeprefix(order))
    except Exception as error:  # the parser's error for a damaged bookmark may be of any type
        raise BadCursor(_NOT_OURS) from error
    place = marker.place or ()
    if len(place) != len(kinds) or not all(_fits(v, kind) for v, kind in zip(place, kinds, strict=True)):
        raise BadCursor(_NOT_OURS)
    return marker


_NOT_OURS = "cursor is not from this list: use the next_cursor of a page, or leave cursor out to start at the top"


def _fits(value: object, kind: type) -> bool:
    return type(value) is kind and (not isinstance(value, int) or abs(value) < 2**63)
