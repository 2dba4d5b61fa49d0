"""A plain script with a model in stages: the same weights as in one process."""

import asyncio
import contextlib
import os
import signal
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from redis import Redis
from torch import nn

from computeshare.errors import SettingsError
from computeshare.torch.stage_saves import StageSaves
from computeshare.torch.stages import StageLost, Stages, connect, serve
from computeshare.transport.connections import by_loopback
from tests.support.coroutines import asynchronously
from tests.support.proxy import Proxy
from tests.support.stage_seats import PROCESSES
from tests.support.wait import wait_until

LR = 0.1


def layers() -> list[nn.Module]:
    torch.manual_seed(3)
    return [nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Sequential(nn.Linear(16, 16), nn.Tanh()), nn.Linear(16, 4)]


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.rand(10, 8, generator=generator), torch.randint(4, (10,), generator=generator)) for _ in range(5)]


def alone(momentum: float = 0.0, max_norm: float = 0.0) -> list[torch.Tensor]:
    model = nn.Sequential(*layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=momentum)
    for inputs, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


async def script(first: nn.Module, group: str, broker: str, max_norm: float = 0.0) -> None:
    """An ordinary loop, but for the lines with `stages`."""
    stages = await connect(first, group=group, stages=3, broker=broker)
    optimizer = torch.optim.SGD(first.parameters(), lr=LR)
    for inputs, labels in batches():
        optimizer.zero_grad()
        output = await stages(inputs)
        loss = nn.functional.cross_entropy(output, labels)
        loss.backward()
        if max_norm:
            assert await stages.clip_norm(max_norm) > max_norm
        optimizer.step()
        await stages.step()
    await stages.close()


@pytest.mark.parametrize("max_norm", [0.0, 0.05])
def test_a_loop_over_stages_makes_the_weights_of_a_loop_alone(redis_url: str, max_norm: float) -> None:
    group, parts = uuid.uuid4().hex, layers()

    def hold(stage: int) -> None:
        optimizer = torch.optim.SGD(parts[stage].parameters(), lr=LR)
        asynchronously(serve(parts[stage], group, stage, 3, optimizer, redis_url))

    threads = [threading.Thread(target=hold, args=(stage,)) for stage in (1, 2)]
    for thread in threads:
        thread.start()
    asynchronously(script(parts[0], group, redis_url, max_norm))
    for thread in threads:
        thread.join(20)
    found = [parameter.detach() for part in parts for parameter in part.parameters()]
    same = torch.allclose if max_norm else torch.equal  # the norm is added up stage by stage
    assert all(same(one, other) for one, other in zip(found, alone(max_norm=max_norm), strict=True))


@contextlib.contextmanager
def holders(parts: Sequence[nn.Module], group: str, broker: str) -> Iterator[None]:
    """The later stages, each in a thread, until the script has closed its connection."""

    def hold(stage: int) -> None:
        parameters = [*parts[stage].parameters()]
        optimizer = torch.optim.SGD(parameters, lr=LR)
        asynchronously(serve(parts[stage], group, stage, len(parts), optimizer, broker))

    threads = [threading.Thread(target=hold, args=(stage,)) for stage in range(1, len(parts))]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(20)


def normalised() -> list[nn.Module]:
    """Stages of which a later one normalises, and the last one drops out."""
    first, second, last = layers()
    return [first, nn.Sequential(second, nn.BatchNorm1d(16)), nn.Sequential(nn.Dropout(0.5), last)]


def test_all_stages_train_and_evaluate_as_the_first_one_does(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, normalised()
    (trained, _), (tested, _), *_ = batches()

    async def evaluate() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        stages = await connect(parts[0], group=group, stages=3, broker=redis_url)
        await stages(trained)
        parts[0].eval()
        with torch.no_grad():
            found = [await stages(tested) for _ in range(2)]
        parts[0].train()
        again = [await stages(trained) for _ in range(2)]
        await stages.close()
        return found, again

    with holders(parts, group, redis_url):
        found, again = asynchronously(evaluate())
    assert not torch.equal(*again), "dropout draws another mask for each"
    assert int(parts[1][1].num_batches_tracked) == 3  # type: ignore[index]
    expected = nn.Sequential(*normalised())
    expected(trained)
    with torch.no_grad():
        output = expected.eval()(tested)
    assert all(torch.equal(one, output) for one in found)


@pytest.mark.parametrize("frozen", [1, 2])
def test_the_later_stages_train_where_the_first_are_frozen(redis_url: str, frozen: int) -> None:
    group, parts, whole = uuid.uuid4().hex, layers(), layers()
    for part in (*parts[:frozen], *whole[:frozen]):
        part.requires_grad_(False)

    async def train() -> None:
        stages = await connect(parts[0], group=group, stages=3, broker=redis_url)
        for inputs, labels in batches():
            nn.functional.cross_entropy(await stages(inputs), labels).backward()
            await stages.step()
        await stages.close()

    with holders(parts, group, redis_url):
        asynchronously(train())
    model = nn.Sequential(*whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    for inputs, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    weights = [parameter for part in parts for parameter in part.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(*both) for both in zip(parts[0].parameters(), layers()[0].parameters(), strict=True))


def test_where_all_stages_are_frozen_no_gradient_is_wanted(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, layers()
    for part in parts:
        part.requires_grad_(False)

    async def forward() -> torch.Tensor:
        stages = await connect(parts[0], group=group, stages=3, broker=redis_url)
        output = await stages(batches()[0][0])
        await stages.close()
        return output

    with holders(parts, group, redis_url):
        assert not asynchronously(forward()).requires_grad


def test_a_scheduler_of_the_scripts_reaches_all_stages(redis_url: str) -> None:
    def decaying(module: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.SGD(module.parameters(), lr=LR)
        return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    group, parts = uuid.uuid4().hex, layers()

    async def train() -> None:
        stages = await connect(parts[0], group=group, stages=3, broker=redis_url)
        optimizer, scheduler = decaying(parts[0])
        for inputs, labels in batches():
            optimizer.zero_grad()
            nn.functional.cross_entropy(await stages(inputs), labels).backward()
            optimizer.step()
            await stages.step(lr=scheduler.get_last_lr()[0])
            scheduler.step()
        await stages.close()

    with holders(parts, group, redis_url):
        asynchronously(train())
    model = nn.Sequential(*layers())
    optimizer, scheduler = decaying(model)
    for inputs, labels in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        scheduler.step()
    weights = [parameter for part in parts for parameter in part.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, model.parameters(), strict=True))


def test_a_message_whose_reply_was_lost_counts_once_though_it_is_sent_again(redis_url: str, redis: Redis) -> None:
    group, parts = uuid.uuid4().hex, normalised()
    there = by_loopback(redis).connection_pool.connection_kwargs

    async def forward(proxy: Proxy) -> None:
        broker = f"redis://{there['username']}:{there['password']}@127.0.0.1:{proxy.port}"
        stages = await connect(parts[0], group=group, stages=3, broker=broker)
        before = proxy.connections
        proxy.drop_next_reply()
        await stages(batches()[0][0])
        assert proxy.connections > before
        await stages.close()

    with Proxy((there["host"], there["port"])) as proxy, holders(parts, group, redis_url):
        asynchronously(forward(proxy))
    assert int(parts[1][1].num_batches_tracked) == 1  # type: ignore[index]


def serve_until_interrupted(group: str, broker: str) -> None:
    """A stage's process, as a script has it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job is deaf to it
    torch.set_num_threads(1)
    part = layers()[1]
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(part, group, 1, 2, torch.optim.SGD(part.parameters(), lr=LR), broker))


@pytest.mark.slow
def test_ctrl_c_ends_a_stage(redis_url: str, redis: Redis) -> None:
    group = uuid.uuid4().hex
    process: Any = PROCESSES.Process(target=serve_until_interrupted, args=(group, redis_url), daemon=True)
    process.start()

    async def forward() -> None:
        stages = await connect(layers()[0], group=group, stages=2, broker=redis_url)
        await stages(batches()[0][0])  # it serves

    asynchronously(forward())
    os.kill(process.pid, signal.SIGINT)
    process.join(60)  # a busy machine is slow to end a process; without its end the test fails
    assert process.exitcode == 0
    assert not redis.exists(f"cs:pipeline:{group}:stage:1")


def go_back_until_interrupted(group: str, broker: str) -> None:
    """A script's process whose backward pass nobody answers."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)

    async def script() -> None:
        stages = await connect(layers()[0], group=group, stages=2, broker=broker)
        output = await stages(batches()[0][0])
        with Redis.from_url(broker) as redis:
            redis.rpush(f"{group}:forward", "done")
            redis.blpop([f"{group}:lost"])
        output.sum().backward()

    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(script())


@pytest.mark.slow
def test_ctrl_c_ends_a_backward_pass_that_nobody_answers(redis_url: str, redis: Redis) -> None:
    group = uuid.uuid4().hex
    tasks = (serve_until_interrupted, go_back_until_interrupted)
    server, script = (PROCESSES.Process(target=task, args=(group, redis_url), daemon=True) for task in tasks)
    server.start()
    script.start()
    assert redis.blpop([f"{group}:forward"], 60)
    os.kill(server.pid or 0, signal.SIGKILL)
    server.join(20)
    redis.rpush(f"{group}:lost", "yes")
    wait_until(lambda: redis.exists(f"cs:pipeline:{group}:stage:1"))  # the backward pass has asked
    os.kill(script.pid or 0, signal.SIGINT)
    script.join(30)  # not the minute that a stage may take
    assert script.exitcode == 0


def test_a_call_that_is_cancelled_waits_no_longer_and_the_next_one_goes_through(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, layers()[:2]

    async def forward() -> None:
        stages = await connect(parts[0], group=group, stages=2, broker=redis_url)
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(stages(batches()[0][0]), 0.1)
        assert time.monotonic() - began < 20, "not the minute that a stage may take"
        with holders(parts, group, redis_url):
            await stages(batches()[0][0])
            await stages.close()

    asynchronously(forward())


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


def hold_and_save(stage: int, group: str, broker: str, folder: str) -> None:
    """A stage's process, which saves into a folder."""
    torch.set_num_threads(1)
    part = layers()[stage]
    optimizer = torch.optim.SGD(part.parameters(), lr=LR, momentum=0.9)
    asynchronously(serve(part, group, stage, 3, optimizer, broker, folder=folder))


class Holders:
    """The processes of the later stages."""

    def __init__(self, group: str, broker: str, folder: Path) -> None:
        self._about = group, broker, str(folder)
        self._processes: dict[int, Any] = {}
        for stage in (1, 2):
            self.start(stage)

    def start(self, stage: int) -> None:
        self._processes[stage] = PROCESSES.Process(target=hold_and_save, args=(stage, *self._about), daemon=True)
        self._processes[stage].start()

    def kill(self, stage: int) -> None:
        os.kill(self._processes[stage].pid, signal.SIGKILL)
        self._processes[stage].join(20)

    def end(self) -> None:
        for process in self._processes.values():
            process.join(20)
            assert process.exitcode == 0


async def step(stages: Stages, optimizer: torch.optim.Optimizer, number: int) -> None:
    inputs, labels = batches()[number]
    optimizer.zero_grad()
    nn.functional.cross_entropy(await stages(inputs), labels).backward()
    optimizer.step()
    await stages.step()
    if stages.steps % 2 == 0:
        await stages.save()


@pytest.mark.slow
def test_a_stage_whose_process_died_goes_on_from_the_last_save_of_all(redis_url: str, tmp_path: Path) -> None:
    group, first = uuid.uuid4().hex, layers()[0]
    holders = Holders(group, redis_url, tmp_path)

    async def train() -> list[int]:
        optimizer = torch.optim.SGD(first.parameters(), lr=LR, momentum=0.9)
        about: dict[str, Any] = {"broker": redis_url, "optimizer": optimizer, "folder": tmp_path, "timeout_s": 60}
        stages = await connect(first, group, 3, **about)
        taken: list[int] = []
        while stages.steps < 5:
            try:
                if taken == [0, 1, 2]:
                    holders.kill(1)
                    holders.start(1)
                taken.append(stages.steps)
                await step(stages, optimizer, stages.steps)
            except StageLost as error:
                assert "stage 1 was started again" in str(error)
                assert await stages.resume() == 2
        await stages.close()
        holders.end()
        stages = await connect(first, group, 3, **about)  # the script anew, and the stages
        for stage in (1, 2):
            holders.start(stage)
        assert await stages.resume() == 4
        await step(stages, optimizer, 4)
        await stages.close()
        return taken

    taken = asynchronously(train())
    holders.end()
    assert taken == [0, 1, 2, 3, 2, 3, 4], "the third step was lost, and taken again"
    weights = [parameter.detach() for parameter in first.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(weights, alone(momentum=0.9), strict=False))
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"stage-{n}-{k}.pt" for n in range(3) for k in (2, 4)]


def test_saving_needs_a_folder(redis_url: str) -> None:
    async def save() -> None:
        await (await connect(layers()[0], uuid.uuid4().hex, 2, redis_url)).save()

    with pytest.raises(SettingsError, match="pass a folder"):
        asynchronously(save())


@pytest.mark.parametrize(("is_full", "why"), [(False, "pass a folder"), (True, "full")])
def test_a_stage_that_cannot_save_says_so_and_serves_on(
    redis_url: str, tmp_path: Path, is_full: bool, why: str
) -> None:
    group, parts, full = uuid.uuid4().hex, layers(), tmp_path / "full"
    full.mkdir()
    (full / "stage-1-0.partial").symlink_to("/dev/full")

    def hold() -> None:
        optimizer = torch.optim.SGD(parts[1].parameters(), lr=LR)
        asynchronously(serve(parts[1], group, 1, 2, optimizer, redis_url, folder=full if is_full else None))

    async def train() -> None:
        stages = await connect(parts[0], group, 2, redis_url, folder=tmp_path)
        with pytest.raises(SettingsError, match=f"stage 1 was not saved.*{why}"):
            await stages.save()
        await stages(batches()[0][0])
        await stages.step()
        if is_full:  # there is room again
            await stages.save()
        await stages.close()

    thread = threading.Thread(target=hold)
    thread.start()
    asynchronously(train())
    thread.join(20)
    assert [path.name for path in full.glob("*.pt")] == ["stage-1-1.pt"] * is_full


def test_the_last_save_of_all_stages_stays_until_all_have_a_later_one(tmp_path: Path) -> None:
    saves = StageSaves(tmp_path, 0, layers()[0], None)
    for steps, since in ((100, 0), (200, 100), (300, 100)):  # another stage could not save after 200 and 300
        saves.save(steps, since)
    assert saves.steps() == [100, 200, 300]
    saves.save(400, 300)
    assert saves.steps() == [300, 400]
    with pytest.raises(SettingsError, match="a save of 400 steps, and this script has taken 5: begin with"):
        saves.save(5, 0)


def test_a_stage_may_begin_with_a_change_in_place(redis_url: str) -> None:
    group, parts, whole = uuid.uuid4().hex, layers(), layers()
    for some in (parts, whole):
        some[0], some[1] = nn.Linear(8, 16), nn.Sequential(nn.ReLU(inplace=True), some[1])
        nn.init.ones_(some[0].weight)
        nn.init.zeros_(some[0].bias)
    inputs, labels = batches()[0]

    async def train() -> None:
        stages = await connect(parts[0], group, 3, redis_url)
        nn.functional.cross_entropy(await stages(inputs), labels).backward()
        await stages.close()

    with holders(parts, group, redis_url):
        asynchronously(train())
    nn.functional.cross_entropy(nn.Sequential(*whole)(inputs), labels).backward()
    found, expected = ([one.grad for part in some for one in part.parameters()] for some in (parts[:1], whole[:1]))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_a_second_backward_pass_is_refused_at_once(redis_url: str) -> None:
    group, parts = uuid.uuid4().hex, layers()

    async def train() -> None:
        stages = await connect(parts[0], group, 3, redis_url)
        loss = (await stages(batches()[0][0])).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="once for each output"):
            loss.backward()
        await stages.step()
        await stages.close()

    with holders(parts, group, redis_url):
        asynchronously(train())


def test_a_first_step_that_not_all_stages_took_cannot_be_resumed(redis_url: str, tmp_path: Path) -> None:
    group, parts = uuid.uuid4().hex, layers()

    async def train() -> None:
        stages = await connect(parts[0], group, 3, redis_url, timeout_s=0.2, folder=tmp_path)
        assert stages.steps == 0
        with pytest.raises(StageLost, match="has not answered"):
            await stages.step()
        stages.timeout_s = 60
        with holders(parts, group, redis_url):
            with pytest.raises(StageLost, match="no save that all stages have"):
                await stages.resume()
            await stages.close()

    asynchronously(train())


@pytest.mark.parametrize(("stages", "codec"), [(2, "float32"), (3, "bfloat16")])
def test_processes_with_other_arguments_are_told_at_once_and_the_next_script_is_served(
    redis_url: str, stages: int, codec: str
) -> None:
    group, parts = uuid.uuid4().hex, layers()
    inputs = batches()[0][0]

    async def wrong(resumes: bool) -> None:
        found = await connect(parts[0], group, stages, redis_url, codec)
        if resumes:
            await found.resume()
        await found(inputs)

    async def right() -> torch.Tensor:
        found = await connect(parts[0], group, 3, redis_url)
        output = await found(inputs)
        await found.close()
        return output

    with holders(parts, group, redis_url):
        for resumes in (False, True):
            with pytest.raises(
                SettingsError, match=f"with stages=3 and codec float32.*stages={stages} and codec {codec}"
            ):
                asynchronously(wrong(resumes))
        assert torch.equal(asynchronously(right()), nn.Sequential(*parts)(inputs))


def test_a_stage_returns_one_tensor(redis_url: str) -> None:
    class Pair(nn.Module):
        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return inputs, inputs

    async def call() -> None:
        await (await connect(Pair(), uuid.uuid4().hex, 2, redis_url))(batches()[0][0])

    with pytest.raises(SettingsError, match="stage 0 returns a tuple: one tensor"):
        asynchronously(call())
