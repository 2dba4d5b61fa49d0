"""Loops of one's own, whose weights are averaged in pairs."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from redis import Redis
from torch import nn

from computeshare.errors import SettingsError
from computeshare.torch import Connection, connect
from tests.support.wait import wait_until


def model(value: float = 0.0, inputs: int = 3) -> nn.Module:
    module = nn.Sequential(nn.Linear(inputs, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


@pytest.fixture
def joined(redis_url: str, redis: Redis, request: pytest.FixtureRequest) -> Any:
    """Joins processes to a group of the test's own; they leave at its end."""
    open_: list[Connection] = []
    group = str(abs(hash(request.node.nodeid)))

    def join(module: nn.Module, name: str, **fields: Any) -> Connection:
        given = {"timeout_ms": 20_000, "codec": "float32", **fields}
        open_.append(connect(module, group, name, redis_url, **given))
        return open_[-1]

    yield join
    for connection in open_:
        connection.close()


def published(connection: Connection) -> None:
    """Wait until a connection's weights have been published."""
    sending = connection._sending
    assert sending
    sending.result(30)


def value(module: nn.Module) -> float:
    return next(module.parameters()).detach().flatten()[0].item()


def test_a_batch_ends_between_the_two(joined: Any) -> None:
    one, two = model(1.0), model(3.0)
    first, second = joined(one, "one"), joined(two, "two", factor=0.25)
    first.update_send(0.5)
    published(first)
    assert not first.update_wait(0.5) and value(one) == 1.0, "it was alone when it asked"
    second.update_send(0.5)
    assert second.update_wait(0.5) and value(two) == 2.5
    assert second.met == {"peer": "one", "share": 0.25, "distance": 2.0}
    published(second)
    first.update_send(0.5)
    assert first.update_wait(0.5) and value(one) == 2.0, "the other had published 3"


def test_who_left_or_has_another_model_or_codec_is_not_averaged_with(joined: Any) -> None:
    mine = model(1.0)
    first, gone, other = joined(mine, "one"), joined(model(5.0), "gone"), joined(model(9.0, inputs=4), "other")
    halved = joined(model(7.0), "halved", codec="float16")
    for connection in (gone, other, halved):
        connection.update_send(0.5)
        published(connection)
    gone.close()
    for _ in range(3):
        first.update_send(0.5)
        assert not first.update_wait(0.5)
    assert value(mine) == 1.0


def test_a_broker_that_is_gone_does_not_stop_the_loop() -> None:
    module = model(1.0)
    connection = connect(module, "alone", broker="redis://127.0.0.1:1/0", timeout_ms=10)
    connection.update_send(0.5)
    assert not connection.update_wait(0.5)
    assert value(module) == 1.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"group": "a b"}, "letters, digits"),
        ({"codec": "int8"}, "suit differences alone"),
        ({"every": 10}, "every: a loop of your own takes"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(SettingsError, match=said):
        connect(model(), **{"group": "mine", "broker": "redis://127.0.0.1:1/0", **fields})


def test_two_loops_on_halves_of_the_data_agree_on_what_neither_could_learn_alone(joined: Any) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(512, 8)
    target = inputs @ torch.randn(8, 1)
    halves = inputs.clone(), inputs.clone()
    halves[0][:, :4], halves[1][:, 4:] = 0, 0  # each sees half of the features

    def loop(number: int) -> nn.Module:
        net = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
        connection = joined(net, f"loop-{number}")
        wait_until(lambda: ready(connection), 60)
        loss = torch.tensor(1.0)
        for _ in range(300):
            connection.update_send(loss.item())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(halves[number]), halves[number] @ truth)
            loss.backward()
            optimizer.step()
            connection.update_wait(loss.item())
        return net

    def ready(connection: Connection) -> bool:
        connection.update_send(1.0)
        published(connection)
        connection.update_wait(1.0)
        return len(connection._board.others()) == 1

    truth = torch.linalg.lstsq(inputs, target).solution
    with ThreadPoolExecutor(2) as pool:
        nets = list(pool.map(loop, range(2)))
    errors = [float(nn.functional.mse_loss(net(inputs), target)) for net in nets]
    assert max(errors) < 0.05 * float(target.var()), errors
