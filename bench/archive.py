"""Measures the disk space of versions and ledger, plain and packed, and the time to restore a long job.

python -m bench.archive --versions 100000
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from api.database import Database
from api.jobs.service import Jobs
from api.projection import archive
from api.projection.checkpoint_restore import Restored, restore
from api.projection.row_store import load_job, save_job
from bench.ledger import digest, fill
from computeshare.checkpoints.branch import Branch
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Token


def taken(database: Database) -> int:
    """Bytes of the tables of versions, ledger and archive, with their indexes."""
    query = """SELECT SUM(pgsize) FROM dbstat WHERE name IN (
      SELECT name FROM sqlite_master WHERE tbl_name IN ('version', 'ledger_entry', 'archive'))"""
    return int(database.peek(query)[0][0])


def restore_ms(database: Database, job_id: str, version: int, incarnation: int) -> float:
    """Milliseconds to bring the rows in line when the job is restored to this version."""
    token = Token(incarnation, version, digest(version)[:16])
    started = time.perf_counter()
    with database.writing() as connection:
        state = load_job(connection, job_id)
        assert state is not None
        branch = Branch(incarnation, {1: version}, version)
        restore(connection, state, Restored(token, 2_000_000_000_000), branch, [])
        save_job(connection, state)
    return round(1000 * (time.perf_counter() - started), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--versions", type=int, default=100_000)
    parser.add_argument("--dataset", default="mnist", help="mnist has 469 rounds an epoch, digits 12")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Database(f"sqlite:///{Path(folder) / 'computeshare.db'}")
        database.migrate()
        spec = JobSpec(dataset=options.dataset, model="mlp", rounds=options.versions + 1)
        job_id = Jobs(database, Path(folder)).create(spec).id
        fill(database, job_id, options.versions)
        per_million = 1_000_000 / options.versions
        result: dict[str, float] = {"versions": options.versions}
        result["plain MB a million"] = round(taken(database) * per_million / 1e6, 1)
        result["restore, plain, ms"] = restore_ms(database, job_id, options.versions - 50, 2)
        started = time.perf_counter()
        while archive.compact(database):
            pass
        result["packing, ms a block"] = round(1000 * (time.perf_counter() - started) * 1000 / options.versions, 1)
        result["packed MB a million"] = round(taken(database) * per_million / 1e6, 1)
        result["restore, packed, ms"] = restore_ms(database, job_id, options.versions - 100, 3)
        result["restore 5,000 versions back, packed, ms"] = restore_ms(database, job_id, options.versions - 5000, 4)
        print(json.dumps(result))
        database.close()


if __name__ == "__main__":
    main()
