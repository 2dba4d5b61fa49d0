"""Bundles that nobody names are removed; those of data sets and of jobs stay."""

from pathlib import Path

import numpy as np
from sqlalchemy import text

from api.database import Database
from api.datasets.schemas import DatasetRequest
from api.datasets.service import Datasets
from api.jobs.service import Jobs
from api.system.unused_bundles import UnusedBundles
from api.tables import Recipe
from computeshare.bundles.store import BundleStore
from computeshare.datasets import arrays
from computeshare.datasets.prepared import quiet
from computeshare.jobspec.spec import JobSpec
from tests.support.recipe_jobs import FACTS, RECIPE, recipe_spec


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


def test_the_files_that_only_a_deleted_job_needed_are_removed_at_once(database: Database, tmp_path: Path) -> None:
    store = BundleStore(tmp_path / "bundles")
    jobs = Jobs(database, tmp_path / "artifacts", datasets=Datasets(database, store))
    with database.write() as session:
        session.add(Recipe(digest=RECIPE, name="net", content=b"{}", bytes=2, created_ms=0))
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "initial.safetensors").write_bytes(b"weights")
    initial = store.add(tmp_path / "state").digest
    spec = recipe_spec(recipe_facts=FACTS | {"initial": initial})
    first, second = (jobs.create(spec).id for _ in range(2))
    for job_id, left in ((first, [initial]), (second, [])):
        jobs.cancel(job_id)
        jobs.delete(job_id)
        assert store.digests() == left
