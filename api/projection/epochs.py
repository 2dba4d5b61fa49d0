"""Counts of each epoch's samples, updated as the ledger is written, so that no query has to add the ledger up.

`counted` is the number of samples that stand in the ledger, `covered` the number that stand there at least once; they
differ only if a micro-batch counted twice.
"""

import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection

from api.projection.events.parser import Row

_STANDING = """SELECT micro_batch, token, samples, voided FROM ledger_entry
WHERE job_id = :job AND epoch = :epoch AND micro_batch IN (SELECT value FROM json_each(:numbers))"""
_FORGET = "UPDATE epoch_stat SET counted = 0, covered = 0 WHERE job_id = :job AND epoch >= :first"
_RECOUNT = """INSERT INTO epoch_stat (job_id, epoch, reassigned, duplicates_refused, counted, covered)
SELECT job_id, epoch, 0, 0, SUM(samples * times), SUM(samples) FROM (
  SELECT job_id, epoch, micro_batch, MAX(samples) AS samples, COUNT(*) AS times FROM ledger_entry
  WHERE job_id = :job AND epoch >= :first AND NOT voided GROUP BY epoch, micro_batch
) GROUP BY epoch
ON CONFLICT (job_id, epoch) DO UPDATE SET counted = excluded.counted, covered = excluded.covered"""


def growth(connection: Connection, job_id: str, rows: Sequence[Row]) -> dict[int, tuple[int, int]]:
    """By epoch, the growth of `counted` and `covered` from inserting these ledger rows; stored rows are ignored."""
    grown: dict[int, tuple[int, int]] = {}
    by_epoch: dict[int, list[Row]] = {}
    for row in rows:
        by_epoch.setdefault(row["epoch"], []).append(row)
    for epoch, mine in by_epoch.items():
        numbers = json.dumps([row["micro_batch"] for row in mine])
        known = connection.exec_driver_sql(_STANDING, {"job": job_id, "epoch": epoch, "numbers": numbers}).all()
        grown[epoch] = _grown(mine, {(m, token) for m, token, _, _ in known}, _largest(known))
    return grown


def _largest(known: Sequence[Any]) -> dict[int, int]:
    """By micro-batch, the largest number of samples in a standing row."""
    standing: dict[int, int] = {}
    for micro_batch, _, samples, voided in known:
        if not voided:
            standing[micro_batch] = max(samples, standing.get(micro_batch, 0))
    return standing


def _grown(rows: Sequence[Row], known: set[tuple[int, str]], standing: dict[int, int]) -> tuple[int, int]:
    counted = covered = 0
    for row in rows:
        micro_batch, samples = row["micro_batch"], row["samples"]
        if (micro_batch, row["token"]) in known:
            continue
        known.add((micro_batch, row["token"]))
        before = standing.get(micro_batch, 0)
        counted += samples
        covered += max(0, samples - before)
        standing[micro_batch] = max(samples, before)
    return counted, covered


def recount(connection: Connection, job_id: str, first: int) -> None:
    """Recompute the counts of the epochs from `first` on, after ledger rows were voided or changed."""
    connection.exec_driver_sql(_FORGET, {"job": job_id, "first": first})
    connection.exec_driver_sql(_RECOUNT, {"job": job_id, "first": first})
