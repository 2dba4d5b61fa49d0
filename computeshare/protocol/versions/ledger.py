"""The ledger that a checkpoint carries: which micro-batches made each version. Pure.

The control plane stores the job's events; the ledger preserves events that the broker loses before they are stored. An
entry is a `version` event: `at` (milliseconds since the epoch) and `data`.
"""

from collections.abc import Iterable
from typing import Any

from computeshare.types import Token

Entry = dict[str, Any]
LONGEST = 10_000
"""Maximum number of versions in a checkpoint's ledger: no outage of the control plane lasts longer."""


def lineage(entries: Iterable[Entry], token: Token) -> list[Entry]:
    """The entries, oldest first, that lead to the version `token`; leaves out entries of abandoned branches.

    Ignores incarnations: a restored version has the number and digest of the version that it was restored from.
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
