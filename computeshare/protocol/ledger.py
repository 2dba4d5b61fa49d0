"""The record of what made each version, as it rests beside a checkpoint. Pure.

The control plane stores the job's events; those that the broker loses before that are the ones a checkpoint has to
bring along. An entry is a `version` event: `at` (milliseconds) and `data`.
"""

from collections.abc import Iterable
from typing import Any

from computeshare.types import Token

Entry = dict[str, Any]
LONGEST = 10_000
"""Most versions that one checkpoint tells of: no outage of the control plane is as long."""


def lineage(entries: Iterable[Entry], token: Token) -> list[Entry]:
    """Those entries, oldest first, that lead to this version, without those of branches that were lost.

    A restored version is the one it was restored from under another incarnation: number and digest are the same.
    """
    by_version = {_identity(entry["data"]["token"]): entry for entry in entries}
    found: list[Entry] = []
    wanted = (token.version, token.digest16)
    while (entry := by_version.get(wanted)) and len(found) < LONGEST:
        found.append(entry)
        wanted = _identity(entry["data"]["base"])
    return found[::-1]


def _identity(text: str) -> tuple[int, str]:
    token = Token.parse(text)
    return token.version, token.digest16
