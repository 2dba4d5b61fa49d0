"""One real broker per test session; a fresh job id per test, so that nothing has to be flushed."""

import functools
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from sqlalchemy import create_engine
from sqlalchemy.util import LRUCache
from starlette.testclient import TestClient

from api.database import Database
from api.jobs import service
from api.jobs.history import History
from api.jobs.service import Jobs
from api.main import create_app
from api.publication import outbox
from api.scheduler import dispatcher as dispatcher_module
from api.scheduler.dispatcher import Dispatcher
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.rounds import join, reducer, store  # noqa: F401
from tests.support.scheduling_clock import Clock


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log: Path = tmp_path_factory.mktemp("broker") / "broker.log"
    broker = EmbeddedBroker.start(log)
    yield broker.url
    broker.stop()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = connect(redis_url, retries=0)
    yield client
    client.close()


@pytest.fixture
def own_url(redis_url: str) -> str:
    """The address of a part of the broker in which only one test at a time has workers and a release."""
    return f"{redis_url}?db=9"


@pytest.fixture
def own(own_url: str) -> Iterator[Redis]:
    """That part of the broker, empty."""
    client = Redis.from_url(own_url)
    client.flushdb()
    yield client
    client.flushdb()
    client.close()


@pytest.fixture
def job_id() -> str:
    return secrets.token_hex(4)


@pytest.fixture(scope="session")
def migrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with its tables, for tests to copy: all migrations take longer than most tests."""
    path = tmp_path_factory.mktemp("database") / "computeshare.db"
    database = Database(f"sqlite:///{path}")
    database.migrate()
    database.close()
    return path


class Compiled(LRUCache[Any, Any]):
    """Compiled SQL by statement, whatever engine's dialect compiled it: those of all tests are alike."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key[1:], default)

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key[1:], value)


@pytest.fixture(scope="session", autouse=True)
def _statements_compiled_once() -> Iterator[None]:
    """One cache of compiled SQL for the engines of all tests: each engine has its own otherwise."""
    make = functools.partial(create_engine, execution_options={"compiled_cache": Compiled(2000)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("api.database.create_engine", make)
        yield


@pytest.fixture
def database_file(migrated: Path, tmp_path: Path) -> Path:
    """The database of the test's control plane."""
    return Path(shutil.copy(migrated, tmp_path))


@pytest.fixture
def database(database_file: Path) -> Iterator[Database]:
    """A fresh control-plane database with its tables."""
    database = Database(f"sqlite:///{database_file}")
    database.migrate()
    yield database
    database.close()


@pytest.fixture
def jobs(database: Database, tmp_path: Path) -> Jobs:
    return Jobs(database, tmp_path / "artifacts")


@pytest.fixture
def history(database: Database, tmp_path: Path) -> History:
    return History(database, tmp_path / "artifacts")


@pytest.fixture
def settings(database_file: Path, redis_url: str) -> Settings:
    home = database_file.parent
    return Settings(home=home, data=home / "data", redis_url=redis_url, token="secret")


@pytest.fixture
def client(settings: Settings) -> Iterator[TestClient]:
    """A client of a whole control plane, background loops included, with the token."""
    headers = {"Authorization": "Bearer secret"}
    app = create_app(settings)
    with TestClient(app, base_url="http://localhost", headers=headers, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The control plane's clock, in the test's hands."""
    clock = Clock(1_800_000_000_000)
    for module in (dispatcher_module, outbox, service):
        monkeypatch.setattr(module, "now_ms", clock)
    return clock


@pytest.fixture
def queue() -> str:
    return f"q{secrets.token_hex(4)}"


@pytest.fixture
def create(jobs: Jobs, queue: str, clock: Clock) -> Callable[..., str]:
    """Makes a job on the test's queue."""

    def create(**fields: Any) -> str:
        clock.ms += 1
        return jobs.create(JobSpec(**{"dataset": "digits", "model": "mlp", "queue": queue, "rounds": 2, **fields})).id

    return create


@pytest.fixture
def dispatcher(database: Database, tmp_path: Path, redis: Redis, clock: Clock) -> Dispatcher:
    """One that has been running for a while."""
    dispatcher = Dispatcher(database, tmp_path / "artifacts")
    for _ in range(3):
        dispatcher.step(redis)
        clock.ms += 5500
    return dispatcher
