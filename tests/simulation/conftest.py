"""One real broker for all schedules; a fresh job id for each."""

from collections.abc import Iterator

import pytest
from redis import Redis

from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker


@pytest.fixture(scope="session")
def sim_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Redis]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log")
    client = connect(broker.url, retries=0)
    yield client
    client.close()
    broker.stop()
