"""Bundles that nobody names are removed; those of data sets and of jobs stay."""

from pathlib import Path

import numpy as np
from sqlalchemy import text

from api.database import Database
from api.datasets.schemas import DatasetRequest
from api.datasets.service import Datasets
from api.jobs.service import Jobs
from api.system.unused_bundles import UnusedBundles
from computeshare.bundles.store import BundleStore
from computeshare.datasets import arrays
from computeshare.datasets.prepared import quiet
from computeshare.jobspec.spec import JobSpec


def test_what_neither_a_job_nor_a_data_set_names_is_removed(database: Database, tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundles")
    datasets = Datasets(database, store)
    bundles = []
    for number in range(3):
        np.savez(tmp_path / "in.npz", x=np.full((20, 2), number) + np.arange(40).reshape(20, 2), y=np.arange(20) % 2)
        made = arrays.prepare(tmp_path / "in.npz", tmp_path / str(number), 0, quiet)
        bundles.append(store.add(made.folder).digest)
        datasets.create(DatasetRequest(name=f"set{number}", kind="arrays", bundle=bundles[-1], facts=made.sizes))
    jobs = Jobs(database, tmp_path / "artifacts", datasets=datasets)
    jobs.create(JobSpec(dataset="set0", model="mlp", rounds=1))
    with database.write() as session:
        session.execute(text("DELETE FROM dataset WHERE name != 'set1'"))
    unused = UnusedBundles(database, store)
    assert unused.remove() == []  # used a moment ago
    assert unused.remove(unused_s=-1) == [bundles[2]]
    assert set(store.digests()) == set(bundles[:2])
