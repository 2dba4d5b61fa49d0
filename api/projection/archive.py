"""Old versions and their ledger entries, packed into few rows.

Durable versions of closed epochs are packed 1,000 at a time: all columns of their rows and of their ledger rows, as
JSON compressed with zstandard. Every 50th version stays unpacked, for plots of long jobs. Before a restore or a
rollback of the broker changes rows, they are unpacked; so a version is in one place at a time.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import zstandard
from sqlalchemy import Connection

from api.database import Database
from api.stored_specs import plan_of
from computeshare.checkpoints.branch import ALL, Branch

BLOCK = 1000
"""Versions per block; the blocks begin at versions 1, 1,001 and so on."""
SPARSE = 50
"""Versions divisible by this number are not packed."""
PLAIN = 1000
"""The number of newest versions that are not packed."""
AT_ONCE = 1
"""Blocks packed at a time, every few seconds: other writers must not wait long."""
LARGEST = 1 << 28
"""The most bytes of a decompressed block; a larger block is damaged."""

_VERSION = (
    *("token", "incarnation", "version", "epoch", "loss", "sha256", "samples", "samples_per_s", "bytes_up"),
    *("bytes_down", "seconds", "at_ms", "voided", "consensus"),
)
_LEDGER = ("token", "micro_batch", "incarnation", "version", "epoch", "worker", "samples", "voided", "staleness")
_OWN = ("micro_batch", "worker", "samples", "voided", "staleness")
"""Columns of a ledger row that do not follow from its version's row."""
_WITHIN = "job_id = :job AND version BETWEEN :first AND :last"
_PACKED = f"{_WITHIN} AND version % :sparse != 0"
_OF_THEM = "job_id = :job AND token IN (SELECT value FROM json_each(:tokens))"
_LONG = "SELECT id, spec, version, durable_version FROM job WHERE version > ?"
_INSERT = "INSERT INTO {0} (job_id, {1}) VALUES (:job_id, {2})"


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of versions and of their ledger, each a dict by column name."""

    versions: Sequence[dict[str, Any]]
    ledger: Sequence[dict[str, Any]]


def compact(database: Database) -> int:
    """Pack the oldest `AT_ONCE` blocks that are due, each in its own transaction; returns the number packed."""
    with database.engine.connect() as connection:
        due = [
            block
            for job in connection.exec_driver_sql(_LONG, (BLOCK + PLAIN,)).all()
            for block in _due(connection, job)
        ]
    for job_id, first in due[:AT_ONCE]:
        with database.writing() as connection:
            _pack(connection, job_id, first)
    return len(due[:AT_ONCE])


def _due(connection: Connection, job: Any) -> Iterable[tuple[str, int]]:
    """The blocks of a job that may be packed, as (job id, first version)."""
    per_epoch = plan_of(json.loads(job.spec)).rounds_per_epoch
    upto = min(job.version // per_epoch * per_epoch, job.durable_version, job.version - PLAIN)
    query = "SELECT COUNT(*) FROM archive WHERE job_id = ?"
    if connection.exec_driver_sql(query, (job.id,)).scalar_one() >= upto // BLOCK:
        return ()
    query = "SELECT first FROM archive WHERE job_id = ?"
    packed = set(connection.exec_driver_sql(query, (job.id,)).scalars())
    return ((job.id, first) for first in range(1, upto - BLOCK + 2, BLOCK) if first not in packed)


def _pack(connection: Connection, job_id: str, first: int) -> None:
    names: dict[str, Any] = {"job": job_id, "first": first, "last": first + BLOCK - 1, "sparse": SPARSE}
    query = f"SELECT {', '.join(_VERSION)} FROM version WHERE {_PACKED} ORDER BY version, incarnation, token"
    versions = [dict(row._mapping) for row in connection.exec_driver_sql(query, names)]
    names["tokens"] = json.dumps([row["token"] for row in versions])
    query = f"SELECT {', '.join(_LEDGER)} FROM ledger_entry WHERE {_OF_THEM} ORDER BY version, token, micro_batch"
    ledger = [dict(row._mapping) for row in connection.exec_driver_sql(query, names)]
    samples: Counter[str] = Counter()
    for row in ledger:
        if not row["voided"]:
            samples[row["worker"]] += row["samples"]
    query = f"SELECT token, incarnation, version, voided FROM version WHERE {_WITHIN}"
    ends = _ends(connection.exec_driver_sql(query, names).mappings())
    row = {"job": job_id, "first": first, "last": names["last"], "ends": json.dumps(ends)}
    row |= {"samples": json.dumps(samples), "data": encode(Block(versions, ledger))}
    connection.exec_driver_sql("INSERT INTO archive VALUES (:job, :first, :last, :ends, :samples, :data)", row)
    connection.exec_driver_sql(f"DELETE FROM ledger_entry WHERE {_OF_THEM}", names)
    connection.exec_driver_sql(f"DELETE FROM version WHERE {_PACKED}", names)


def _ends(versions: Iterable[Mapping[Any, Any]]) -> dict[str, list[int]]:
    """By incarnation, the last version that stands and the first that is voided, without renamed rows (`~`)."""
    found: dict[str, list[int]] = {}
    for row in versions:
        if "~" not in row["token"]:
            ends = found.setdefault(str(row["incarnation"]), [-1, ALL])
            if row["voided"]:
                ends[1] = min(ends[1], row["version"])
            else:
                ends[0] = max(ends[0], row["version"])
    return found


def unpack_rows(connection: Connection, job_id: str, per_epoch: int, since: int, branch: Branch | None = None) -> int:
    """Put back the packed rows of all versions from the epoch of `since` on; with a branch, from the epoch of the first
    block that disagrees with the branch, if that is earlier. Returns the number of blocks unpacked.
    """
    rows = connection.exec_driver_sql("SELECT first, ends FROM archive WHERE job_id = ?", (job_id,)).all()
    wrong = [row.first for row in rows if branch and not _agrees(json.loads(row.ends), branch)]
    since = min([since, *wrong])
    since = max(0, since - 1) // per_epoch * per_epoch + 1
    blocks = _blocks(connection, job_id, since, ALL)
    for table, columns, found in (
        ("version", _VERSION, [row for block in blocks for row in block.versions]),
        ("ledger_entry", _LEDGER, [row for block in blocks for row in block.ledger]),
    ):
        if found:
            statement = _INSERT.format(table, ", ".join(columns), ", ".join(f":{name}" for name in columns))
            connection.exec_driver_sql(statement, [row | {"job_id": job_id} for row in found])
    connection.exec_driver_sql("DELETE FROM archive WHERE job_id = ? AND last >= ?", (job_id, since))
    return len(blocks)


def _agrees(ends: dict[str, list[int]], branch: Branch) -> bool:
    """Whether the standing versions of a block belong to the branch, and the voided versions do not."""
    for incarnation, (standing, voided) in ends.items():
        number = int(incarnation)
        end = branch.ends.get(number, ALL if number >= branch.incarnation else branch.others)
        if standing > end or voided <= end:
            return False
    return True


def samples_of_workers(connection: Connection, job_id: str) -> Counter[str]:
    """The samples that count for each worker in the packed ledger."""
    found: Counter[str] = Counter()
    for row in connection.exec_driver_sql("SELECT samples FROM archive WHERE job_id = ?", (job_id,)):
        found.update(json.loads(row.samples))
    return found


def newest(connection: Connection, job_id: str) -> int:
    """The last packed version; 0 if no version is packed."""
    query = "SELECT COALESCE(MAX(last), 0) FROM archive WHERE job_id = ?"
    return int(connection.exec_driver_sql(query, (job_id,)).scalar_one())


def standing(connection: Connection, job_id: str, first: int, last: int) -> tuple[list[SimpleNamespace], Block]:
    """The packed versions from `first` to `last` that stand, ascending, and a block of them and their ledger rows."""
    blocks = _blocks(connection, job_id, first, last)
    rows = (row for block in blocks for row in block.versions)
    versions = [row for row in rows if not row["voided"] and first <= row["version"] <= last]
    tokens = {row["token"] for row in versions}
    ledger = [row for block in blocks for row in block.ledger if not row["voided"] and row["token"] in tokens]
    return [SimpleNamespace(**row) for row in versions], Block(versions, ledger)


def _blocks(connection: Connection, job_id: str, first: int, last: int) -> list[Block]:
    query = "SELECT data FROM archive WHERE job_id = ? AND last >= ? AND first <= ? ORDER BY first"
    return [decode(row.data) for row in connection.exec_driver_sql(query, (job_id, first, last))]


def encode(block: Block) -> bytes:
    """Compress a block column by column: derivable columns are left out, integers stored as differences, and columns of
    few distinct values as indices.
    """
    place = {row["token"]: number for number, row in enumerate(block.versions)}
    columns = {name: _column([row[name] for row in block.versions]) for name in _VERSION if name != "token"}
    columns["token"] = [None if row["token"] == _usual(row) else row["token"] for row in block.versions]
    own = {name: _column([row[name] for row in block.ledger]) for name in _OWN}
    own["of"] = _column([place[row["token"]] for row in block.ledger])
    text = json.dumps({"version": columns, "ledger": own}, separators=(",", ":"))
    return zstandard.ZstdCompressor(level=9).compress(text.encode())


def decode(data: bytes) -> Block:
    """The block that `encode` compressed."""
    with zstandard.ZstdDecompressor().stream_reader(data) as reader:
        found = json.loads(reader.read(LARGEST))
    versions = _rows({name: _values(column) for name, column in found["version"].items()})
    for row in versions:
        row["token"] = row["token"] or _usual(row)
        row.setdefault("consensus", None)  # blocks of a release without peers
    ledger = _rows({name: _values(column) for name, column in found["ledger"].items()})
    for row in ledger:
        version = versions[row.pop("of")]
        row |= {name: version[name] for name in _LEDGER if name not in _OWN}
    return Block(versions, ledger)


def _usual(row: dict[str, Any]) -> str:
    return f"{row['incarnation']}.{row['version']}.{(row['sha256'] or '')[:16]}"


def _column(values: list[Any]) -> Any:
    if values and all(type(value) is int for value in values):
        return {"differences": [after - before for before, after in zip([0, *values], values, strict=False)]}
    known = list(dict.fromkeys(values))
    if len(known) <= len(values) // 4:
        place = {value: number for number, value in enumerate(known)}
        return {"known": known, "places": [place[value] for value in values]}
    return values


def _values(column: Any) -> list[Any]:
    if isinstance(column, list):
        return column
    if "known" in column:
        return [column["known"][place] for place in column["places"]]
    found, value = [], 0
    for difference in column["differences"]:
        value += difference
        found.append(value)
    return found


def _rows(columns: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
