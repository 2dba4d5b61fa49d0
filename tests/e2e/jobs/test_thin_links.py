"""Workers behind thin links, to whom versions come down while their rounds go up: the bits of one beside the broker."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast
from urllib.parse import urlsplit

import pytest

from computeshare.client import Client
from computeshare.protocol.keys import JobKeys
from computeshare.replay.replay import Replay
from computeshare.settings import RunFile
from tests.support.control_plane import DIGITS_MLP, ControlPlane
from tests.support.proxy import Proxy

pytestmark = [pytest.mark.e2e, pytest.mark.long]
UP = ("--workers", "0", "--queue", "e2e")
BYTES_PER_S = 8_000_000.0
BUCKETS: dict[str, Any] = {
    **DIGITS_MLP,
    "model": "mobilenet_v3_small",
    "input": [1, 32, 32],
    "rounds": 20,
    "checkpoint_every": 10,
    "evaluate_every": 0,
    "codec": {"up": "int8", "down": "int8"},
}
"""A model of several buckets: only such a model's versions are drafted."""
WITHOUT_ROUND = {key: value for key, value in BUCKETS.items() if key not in ("optimizer", "micro_batches_per_round")}
JOBS: dict[str, dict[str, Any]] = {
    "sync": BUCKETS,
    "sync, delay": {**BUCKETS, "strategy": {"kind": "sync", "delay": 1}},
    "low rank down, delay": {
        **BUCKETS,
        "strategy": {"kind": "sync", "delay": 1},
        "codec": {"up": "int8", "down": "lowrank4"},
    },
    "local, delay": {
        **WITHOUT_ROUND,
        "strategy": {"kind": "local", "inner_steps": 2, "replicas": 4, "delay": 1},
        "codec": {"up": "int4", "down": "int4"},
    },
}


CHOSEN: dict[str, Any] = {
    **WITHOUT_ROUND,
    "strategy": {"kind": "local", "inner_steps": 2, "replicas": 2, "inner_state": "kept"},
    "codec": "auto",
    "workers": {"min": 2, "max": 2},
}


@contextmanager
def thin_workers(plane: ControlPlane, count: int) -> Iterator[list[int]]:
    """Workers with a thin link each to the broker, until the end of the block; yields their process ids."""
    run, server = RunFile.read(plane.home / "run.json"), cast(dict[str, Any], plane.broker().info("server"))
    assert run is not None
    password = urlsplit(run.redis_urls["worker"]).password
    with ExitStack() as stack:
        pids = []
        for number in range(count):
            proxy = stack.enter_context(Proxy(("127.0.0.1", server["tcp_port"])))
            proxy.bytes_per_s = BYTES_PER_S
            url = f"redis://worker:{password}@127.0.0.1:{proxy.port}/0"
            worker = plane.worker("e2e", f"thin-{number}", COMPUTESHARE_REDIS_URL=url)
            pids.append(stack.enter_context(worker).pid)
        yield pids


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", JOBS)
def test_versions_drafted_in_open_rounds_have_the_bits_of_those_made_after_them(plane: ControlPlane, name: str) -> None:
    with plane.worker("e2e", "near"):
        near = plane.finish(plane.create(**JOBS[name]))

    redis = plane.broker()
    with thin_workers(plane, 3) as pids:
        whole = plane.create(**JOBS[name], workers={"min": 3, "max": 3})
        plane.until("drafts", lambda: redis.xlen(JobKeys(whole).drafts()))
        assert plane.finish(whole)["weights_sha256"] == near["weights_sha256"]

        fewer = plane.create(**JOBS[name], workers={"min": 1, "max": 3})
        plane.until("three workers", lambda: plane.job(fewer)["workers"] == 3)
        plane.until("drafts", lambda: redis.xlen(JobKeys(fewer).drafts()))
        for pid in pids[:2]:
            os.kill(pid, signal.SIGKILL)
        assert plane.job(fewer)["status"] == "running"
        assert plane.finish(fewer)["weights_sha256"] == near["weights_sha256"]
    for job in (whole, fewer):
        epochs = plane.get(f"/v1/jobs/{job}/ledger")["epochs"]
        assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs[:-1])
    with Client(plane.url, (plane.home / "token").read_text().strip()) as client:
        replay = Replay(client, whole, plane.home / "data")
        assert [one.version for one in replay.run()] == [*range(1, 21)]
        assert replay.verdict().outcome == "matches"


def test_by_what_their_links_carry_replicas_that_keep_their_state_get_an_overlap(plane: ControlPlane) -> None:
    with thin_workers(plane, 2):
        job = plane.finish(plane.create(**CHOSEN))
    strategy = job["spec"]["strategy"]
    assert strategy["delay"] == 0 and 0 < strategy["overlap"] < strategy["inner_steps"]
    assert f"an overlap of {strategy['overlap']} steps" in job["chosen"]
    epochs = plane.get(f"/v1/jobs/{job['id']}/ledger")["epochs"]
    assert all(epoch["counted"] == epoch["samples"] and not epoch["missing"] for epoch in epochs[:-1])
