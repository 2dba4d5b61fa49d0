"""Jobs with a delay: the same bits whoever computes or reduces, wherever they are restored, and as a plain loop has."""

import copy
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from computeshare.checkpoints.store import BEFORE, Artifacts
from computeshare.codecs import messages
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.reducer import round_handler
from computeshare.tasks.modules import weights_of
from computeshare.tasks.registry import task_of
from computeshare.tensors import layout
from computeshare.types import Token, Vector
from tests.support.job_reducer import Job, Worker
from tests.support.rounds import events

DELAYED: dict[str, Any] = {"strategy": {"kind": "sync", "delay": 1}, "codec": {"up": "float32", "down": "float32"}}
LOSSY = DELAYED | {"codec": {"up": "int8", "down": "int8"}}


def worker(job: Job, name: str) -> Worker:
    return Worker(job.hand(name))


def version(job: Job) -> int:
    state = job.store.read()
    assert state is not None
    return state.version


def advance(job: Job, *workers: Worker) -> None:
    """The next version; the workers have computed all that there was by then."""
    before = version(job)
    turns = cycle(workers)
    while any(one.turn() for one, _ in zip(turns, range(len(workers)), strict=False)):
        pass
    assert job.reducer.advance() and version(job) == before + 1


def finish(job: Job, *workers: Worker) -> str:
    while (state := job.store.read()) and state.status == "running":
        advance(job, *workers)
    job.reducer.advance()
    job.reducer.close()
    return job.digest()


def lose_the_broker(job: Job) -> None:
    job.reducer.close()
    job.store.purge()
    job.store.publish(job.spec.model_dump_json())
    job.reducer = job.new_reducer()
    assert job.reducer.advance()


def plain(spec: JobSpec) -> Vector:
    """One process that steps with the gradient of the weights before the last step."""
    torch.set_num_threads(1)
    instance = task_of(spec).instance(spec.seed, "train", Path())
    module = instance.module.train()
    optimizer = getattr(torch.optim, spec.optimizer.name)(module.parameters(), **spec.optimizer.arguments)
    before = copy.deepcopy(module)
    for version in range(spec.rounds_total):
        numbers = spec.plan.round(version).units
        images, labels = instance.split.batch(np.concatenate([spec.plan.indices(m) for m in numbers]))
        before.zero_grad()
        functional.cross_entropy(before(images), labels).backward()  # type: ignore[no-untyped-call]
        for own, earlier in zip(module.parameters(), before.parameters(), strict=True):
            own.grad = earlier.grad.clone() if earlier.grad is not None else None
        before.load_state_dict(module.state_dict())
        optimizer.step()
    return weights_of(module, instance.layout).parameters


@pytest.mark.parametrize("changes", [DELAYED, LOSSY], ids=["exact", "differences"])
def test_the_weights_do_not_depend_on_who_takes_part(start: Callable[..., Job], changes: dict[str, Any]) -> None:
    alone, many = start(**changes), start(**changes)
    expected = finish(alone, worker(alone, "solo"))
    assert finish(many, *(worker(many, name) for name in "abc")) == expected


def test_the_weights_are_those_of_a_plain_loop_with_the_same_delay(start: Callable[..., Job]) -> None:
    momentum = {"name": "SGD", "lr": 0.05, "momentum": 0.9}
    job = start(**DELAYED, optimizer=momentum, rounds=40)
    without = start(codec=DELAYED["codec"], optimizer=momentum, rounds=40)
    solo = worker(job, "solo")
    assert finish(job, solo) != without.finish(without.hand("solo"))
    artifacts = Artifacts(job.root, job.job_id)
    ours = solo.hand.layout.gather(artifacts.tensors(artifacts.tokens()[-1])).parameters
    np.testing.assert_allclose(ours, plain(job.spec), rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [DELAYED, LOSSY], ids=["exact", "differences"])
def test_reducers_that_take_over_and_a_lost_broker_change_no_bit(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    whole, broken = start(**changes, rounds=12), start(**changes, rounds=12)
    expected = finish(whole, worker(whole, "solo"))
    solo = worker(broken, "solo")
    for turn in range(5):  # five reducers die, every other one between commit and state; the next makes a version, too
        with monkeypatch.context() as patch:
            if turn % 2:
                patch.setattr(round_handler, "armed", lambda _: True)  # else the state goes with the commit
                patch.setattr(ReducerSession, "store_state", lambda *_: None)
            advance(broken, solo)
        broken.reducer = broken.new_reducer()
        assert broken.reducer.advance()
    lose_the_broker(broken)
    state = broken.store.read()
    assert state is not None and state.base is not None and (state.version, state.base.version) == (9, 8)
    assert finish(broken, worker(broken, "another"), worker(broken, "third")) == expected


def test_steps_are_repeated_from_updates_computed_on_the_version_before(
    start: Callable[..., Job], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state is stored after several versions, as that of a large model is."""
    monkeypatch.setattr(layout, "BUCKET", 5000)
    monkeypatch.setattr(messages, "NEWS_BYTES", 0)
    changes = {**LOSSY, "codec": {"up": "lowrank2", "down": "lowrank2"}}
    whole, broken = start(**changes, rounds=9), start(**changes, rounds=9)
    expected = finish(whole, worker(whole, "solo"))
    solo = worker(broken, "solo")
    for turn in range(6):
        advance(broken, solo)
        if turn % 3 == 2:
            assert len(broken.reducer.session.steps()) >= 3
            broken.reducer = broken.new_reducer()
            assert broken.reducer.advance() and len(broken.reducer.session.steps()) <= 1  # it may make a version
    assert finish(broken, solo) == expected


def test_audits_compare_updates_computed_on_the_version_before(start: Callable[..., Job]) -> None:
    plain, audited = start(**DELAYED), start(**DELAYED, audit=1.0)
    expected = finish(plain, worker(plain, "solo"))
    assert finish(audited, *(worker(audited, name) for name in "abc")) == expected
    assert {event["outcome"] for event in events(audited.store, "audited")} == {"confirmed"}
    assert not audited.redis.keys(f"{audited.store.keys.pattern()}:copy")


def test_a_job_restored_at_version_0_computes_two_rounds_on_it(start: Callable[..., Job]) -> None:
    whole, broken = start(**DELAYED, checkpoint_every=0), start(**DELAYED, checkpoint_every=0)
    expected = finish(whole, worker(whole, "solo"))
    advance(broken, worker(broken, "solo"))
    lose_the_broker(broken)
    state = broken.store.read()
    assert state is not None and (state.version, state.base) == (0, None)
    assert finish(broken, worker(broken, "another")) == expected


def test_a_checkpoint_whose_earlier_version_is_damaged_is_passed_over(start: Callable[..., Job]) -> None:
    whole, broken = start(**DELAYED, checkpoint_every=2), start(**DELAYED, checkpoint_every=2)
    expected = finish(whole, worker(whole, "solo"))
    solo = worker(broken, "solo")
    for _ in range(5):
        advance(broken, solo)
    broken.reducer.close()
    artifacts = Artifacts(broken.root, broken.job_id)
    assert [token.version for token in artifacts.tokens()] == [2, 4]
    path = artifacts.path(artifacts.tokens()[-1], BEFORE)
    content = path.read_bytes()
    path.write_bytes(content[:-5] + bytes([content[-5] ^ 1]) + content[-4:])
    lose_the_broker(broken)
    assert version(broken) == 2
    assert finish(broken, worker(broken, "another")) == expected


def test_a_unit_of_a_worker_that_died_is_computed_on_its_version_by_another(start: Callable[..., Job]) -> None:
    whole, job = start(**DELAYED), start(**DELAYED)
    expected = finish(whole, worker(whole, "solo"))
    dies, stays = worker(job, "dies"), worker(job, "stays")
    for one in (dies, stays):
        assert one.turn()
    dead = dies.hand.session.lease(dies.loaded)
    assert dead.answer == "leased"
    while stays.turn():
        pass
    assert job.reducer.advance() and version(job) == 1
    while stays.turn():
        pass
    before = Token.parse(stays.loaded).version
    dies.hand.session.leave("killed")
    assert stays.turn() and (before, Token.parse(stays.loaded).version) == (1, 0)
    assert finish(job, stays) == expected


def test_damaged_weights_of_the_version_before_have_the_job_restored(start: Callable[..., Job]) -> None:
    whole, job = start(**DELAYED), start(**DELAYED)
    expected = finish(whole, worker(whole, "solo"))
    solo = worker(job, "solo")
    for _ in range(4):
        advance(job, solo)
    state = job.store.read()
    assert state is not None and state.base is not None
    for again in (False, True):
        solo.hand.session.doubt(str(state.base), again)
    assert job.reducer.advance()
    assert version(job) == 3
    assert finish(job, worker(job, "another")) == expected
