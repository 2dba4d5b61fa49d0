"""A plain script with a model in stages: the same weights as in one process."""

import threading
import uuid

import pytest
import torch
from redis import Redis
from torch import nn

from computeshare.torch.stages import StageLost, connect, serve
from tests.support.coroutines import asynchronously

LR = 0.1


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.rand(10, 8, generator=generator), torch.randint(4, (10,), generator=generator)) for _ in range(5)]


def alone() -> list[torch.Tensor]:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


async def script(first: nn.Module, group: str, broker: str) -> None:
    """An ordinary loop, but for the lines with `stages`."""
    stages = await connect(first, group=group, stages=3, broker=broker)
    optimizer = torch.optim.SGD(first.parameters(), lr=LR)
    for inputs, labels in batches():
        optimizer.zero_grad()
        output = await stages(inputs)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        optimizer.step()
        await stages.step()
    await stages.close()


def test_a_loop_over_stages_makes_the_weights_of_a_loop_alone(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, layers()

    def hold(stage: int) -> None:
        optimizer = torch.optim.SGD(parts[stage].parameters(), lr=LR)
        asynchronously(serve(parts[stage], group, stage, 3, optimizer, redis_url))

    threads = [threading.Thread(target=hold, args=(stage,)) for stage in (1, 2)]
    for thread in threads:
        thread.start()
    asynchronously(script(parts[0], group, redis_url))
    for thread in threads:
        thread.join(20)
    found = [parameter.detach() for part in parts for parameter in part.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(found, alone(), strict=True))


def test_a_stage_that_does_not_answer_is_named(redis_url: str, redis: Redis) -> None:
    group = uuid.uuid4().hex

    async def forward() -> None:
        stages = await connect(layers()[0], group=group, stages=2, broker=redis_url, timeout_s=0.1)
        await stages(torch.rand(2, 8))

    with pytest.raises(StageLost, match="stage 1 has not answered"):
        asynchronously(forward())
    assert 0 < redis.ttl(f"cs:pipeline:{group}:stage:1") <= 120


def test_stages_keep_nothing_of_what_is_only_evaluated(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, layers()
    wanted: list[bool] = []
    parts[1].register_forward_hook(lambda _, __, output: wanted.append(output.requires_grad))

    def hold(stage: int) -> None:
        asynchronously(serve(parts[stage], group, stage, 3, torch.optim.SGD(parts[stage].parameters()), redis_url))

    async def evaluate() -> torch.Tensor:
        stages = await connect(parts[0], group=group, stages=3, broker=redis_url)
        with torch.no_grad():
            output = await stages(batches()[0][0])
        await stages(batches()[0][0])
        await stages.close()
        return output

    threads = [threading.Thread(target=hold, args=(stage,)) for stage in (1, 2)]
    for thread in threads:
        thread.start()
    output = asynchronously(evaluate())
    for thread in threads:
        thread.join(20)
    assert wanted == [False, True] and not output.requires_grad
    assert torch.equal(output, nn.Sequential(*parts)(batches()[0][0]))
