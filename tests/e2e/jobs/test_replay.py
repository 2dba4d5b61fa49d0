"""Jobs recomputed from their logs, and forked: every version matches, and what was changed in a log is found."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from typing import Any, cast

import psutil
import pytest
from redis import Redis

from computeshare.client import Client
from computeshare.codecs.registry import WITHOUT_RESIDUAL
from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.keys import JobKeys
from computeshare.replay.replay import Replay, Verdict
from tests.support.control_plane import DIGITS_MLP, ControlPlane

pytestmark = pytest.mark.e2e
UP = ("--workers", "2", "--queue", "e2e")
DIGITS: dict[str, Any] = {
    **DIGITS_MLP,
    "rounds": 60,
    "checkpoint_every": 20,
    "evaluate_every": 0,
}


WITHOUT_ROUND = {name: DIGITS[name] for name in ("dataset", "model", "queue", "micro_batch")}
WITHOUT_ROUND |= {"checkpoint_every": 5, "evaluate_every": 0}
"""What is left to a strategy that says for itself what a round is."""
BUCKETS = {"model": "mobilenet_v3_small", "input": [1, 32, 32], "rounds": 4, "checkpoint_every": 2}
"""A model of more than a million parameters."""
CHANGES = ("--set", "optimizer.lr=0.01", "--set", "queue=nobody")


@pytest.fixture(scope="module")
def done(plane: ControlPlane) -> dict[str, Any]:
    """A job of 60 versions with checkpoints of 20, 40 and 60."""
    return plane.finish(plane.create(**DIGITS))


def command(plane: ControlPlane, *arguments: str) -> tuple[int, str]:
    """A command as a user runs it: its exit code and what it prints."""
    line = [sys.executable, "-m", "computeshare.cli.main", "jobs", *arguments]
    done = subprocess.run(line, env=plane.environment, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout or done.stderr


def recomputed(plane: ControlPlane, job_id: str, first: int = 0, last: int | None = None) -> tuple[list[int], Verdict]:
    """The versions that a replay in this process compared, and its verdict."""
    with Client(plane.url, (plane.home / "token").read_text().strip()) as client:
        replay = Replay(client, job_id, plane.home / "data", first, last)
        return [one.version for one in replay.run()], replay.verdict()


def write(plane: ControlPlane, statement: str, *values: object) -> None:
    """Change the control plane's database behind its back; exactly one row."""
    with closing(sqlite3.connect(plane.home / "computeshare.db", timeout=10)) as database, database:
        assert database.execute(statement, values).rowcount == 1


def fork(plane: ControlPlane, job_id: str, **request: Any) -> dict[str, Any]:
    response = plane.http.post(f"/v1/jobs/{job_id}/fork", json=request)
    assert response.status_code == 201, response.text
    return dict(response.json())


def lose_the_broker(plane: ControlPlane) -> None:
    plane.broker().flushall()


def opened(plane: ControlPlane, job_id: str) -> list[tuple[int, int, bool]]:
    """Incarnation, version and whether it was restored, for each time a job that has ended was opened."""
    with plane.http.stream("GET", f"/v1/jobs/{job_id}/events") as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    told = [event["data"] for event in map(json.loads, lines) if event.get("type") == "opened"]
    return [(data["incarnation"], data["version"], data["restored"]) for data in told]


def test_a_replay_of_every_version_matches_and_says_so(plane: ControlPlane, done: dict[str, Any]) -> None:
    code, printed = command(plane, "replay", done["id"])
    assert (code, printed) == (0, "every version matches: 60 from version 1 to 60\n")
    code, printed = command(plane, "replay", done["id"], "--from", "40", "--to", "50", "--json")
    found = json.loads(printed)
    assert (code, found["outcome"], found["matched"], found["from"], found["to"]) == (0, "matches", 10, 40, 50)
    assert found["kind"] == plane.get(f"/v1/jobs/{done['id']}/workers")["items"][0]["kinds"][-1]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec",
    [
        {"codec": {"up": "float32", "down": "float16"}, "optimizer": {"name": "Adam", "lr": 0.01}},
        {"strategy": {"combine": "median", "max_norm": 0.5}, "lr_scaling": "linear", "micro_batch": 100},
        {"model": "shufflenet_v2_x0_5", "input": [1, 32, 32], "rounds": 4, "checkpoint_every": 2},
        {"codec": {"up": "int8", "down": "int8"}, "optimizer": {"name": "Adam", "lr": 0.01}},
        {"codec": {"up": "bfloat16", "down": "bfloat16"}, "micro_batch": 100},
        {
            "schedule": {"name": "linear", "warmup": 5},
            "clip_norm": 0.5,
            "decay": "matrices",
            "label_smoothing": 0.1,
            "ema": 0.9,
            "augment": ["crop", "flip", "randaugment"],
            "accumulate": 4,
            "precision": "bfloat16",
            "validation": 0.1,
            "optimizer": {"name": "AdamW", "lr": 0.01, "weight_decay": 0.1},
        },
        {"compile": True},
        {"strategy": {"delay": 1}, "optimizer": {"name": "Adam", "lr": 0.01}},
        {"strategy": {"delay": 1}, "codec": {"up": "int8", "down": "int8"}},
        {**BUCKETS, "codec": {"up": "float16", "down": "float32"}},
        {**BUCKETS, "codec": {"up": "int8", "down": "int8"}},
        {**BUCKETS, "codec": {"up": "int8", "down": "lowrank4"}},
    ],
    ids=[
        "lossy weights and Adam",
        "robust, crossing an epoch",
        "batch normalisation",
        "differences",
        "bfloat16",
        "every field of training",
        "compiled",
        "a delay",
        "a delay and differences",
        "several buckets",
        "differences of several buckets",
        "low ranks of several buckets",
    ],
)
def test_every_kind_of_job_matches_from_its_seed_and_from_a_checkpoint(
    plane: ControlPlane, spec: dict[str, Any]
) -> None:
    job = plane.finish(plane.create(**{**DIGITS, **spec}))
    total, middle = job["rounds_total"], job["spec"]["checkpoint_every"]
    kinds = [kind for worker in plane.get(f"/v1/jobs/{job['id']}/workers")["items"] for kind in worker["kinds"]]
    has_compiler = any(map(shutil.which, ("g++", "clang++")))
    assert {"compiler" in kind for kind in kinds} == {"compile" in spec and has_compiler}
    versions, verdict = recomputed(plane, job["id"])
    assert (versions, verdict.outcome) == ([*range(1, total + 1)], "matches")
    versions, verdict = recomputed(plane, job["id"], middle)
    assert (versions, verdict.outcome) == ([*range(middle + 1, total + 1)], "matches")


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("codec", "changes", "learned"),
    [("float32", {}, 0.9), ("int8", {}, 0.9), ("int8", {"delay": 1, "outer_lr": 0.5, "outer_momentum": 0.3}, 0.6)],
    ids=str,
)
def test_replicas_that_step_by_themselves_match_and_miss_no_sample(
    plane: ControlPlane, codec: str, changes: dict[str, Any], learned: float
) -> None:
    strategy = {"kind": "local", "inner_steps": 7, "replicas": 3, "outer_lr": 0.7, "outer_momentum": 0.9, **changes}
    job = plane.finish(plane.create(**WITHOUT_ROUND, strategy=strategy, codec={"up": codec, "down": codec}, epochs=3))
    assert (job["version"], job["accuracy"] > learned) == (15, True)  # 90 micro-batches an epoch are 13 units, 5 rounds
    epochs = plane.get(f"/v1/jobs/{job['id']}/ledger")["epochs"]
    assert [(e["counted"], e["samples"], e["missing"]) for e in epochs] == [(1437, 1437, 0)] * 3
    versions, verdict = recomputed(plane, job["id"])
    assert (versions, verdict.outcome) == ([*range(1, 16)], "matches")
    versions, verdict = recomputed(plane, job["id"], 10)
    assert (versions, verdict.outcome) == ([*range(11, 16)], "matches")


@pytest.mark.long
def test_a_vote_on_signs_learns_matches_and_misses_no_sample(plane: ControlPlane) -> None:
    fields = {**WITHOUT_ROUND, "micro_batches_per_round": 5, "strategy": {"kind": "signsgd", "lr": 0.002}}
    job = plane.finish(plane.create(**fields, epochs=3))
    assert (job["version"], job["accuracy"] > 0.85) == (54, True)  # 90 micro-batches an epoch
    epochs = plane.get(f"/v1/jobs/{job['id']}/ledger")["epochs"]
    assert [(e["counted"], e["samples"], e["missing"]) for e in epochs] == [(1437, 1437, 0)] * 3
    assert "signsgd, learning rate 0.002" in plane.http.get(f"/jobs/{job['id']}").text
    versions, verdict = recomputed(plane, job["id"])
    assert (versions, verdict.outcome) == ([*range(1, 55)], "matches")


@pytest.mark.long
def test_versions_of_late_updates_match_and_miss_no_sample(plane: ControlPlane) -> None:
    strategy = {"kind": "async", "buffer": 3, "max_staleness": 3}
    job_id = plane.create(**WITHOUT_ROUND, strategy=strategy, epochs=10, workers={"min": 2, "max": 2})
    plane.reach(job_id, 10)
    os.kill(plane.pids("worker")[0], signal.SIGKILL)
    job = plane.finish(job_id)
    assert job["accuracy"] > 0.8
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["samples"], e["missing"]) for e in epochs] == [(1437, 1437, 0)] * 10
    late = [version["staleness"] for version in plane.get(f"/v1/jobs/{job_id}/versions", limit=500)["items"]]
    assert any(map(any, late)) and max(max(one, default=0) for one in late) <= 3
    versions, verdict = recomputed(plane, job_id)
    assert (versions, verdict.outcome) == ([*range(1, job["version"] + 1)], "matches")


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", [{"kind": "sync"}, {"kind": "local", "inner_steps": 5, "replicas": 2}], ids=str)
def test_codecs_and_precision_are_chosen_by_what_the_first_workers_measure(
    plane: ControlPlane, strategy: dict[str, Any]
) -> None:
    open_ = {"codec": "auto", "precision": "auto", "workers": {"min": 2, "max": 2}}
    job_id = plane.create(**WITHOUT_ROUND, strategy=strategy, **open_, epochs=2)
    assert plane.job(job_id)["spec"]["codec"] == plane.job(job_id)["spec"]["precision"] == "auto"
    assert "Codecs and precision will be chosen" in plane.http.get(f"/jobs/{job_id}").text
    job = plane.finish(job_id)
    assert job["chosen"].startswith(f"{job['spec']['precision']}, because the slowest worker takes")
    assert job["spec"]["codec"]["up"] in job["chosen"] and "the slowest worker sends" in job["chosen"]
    assert job["chosen"] in plane.http.get(f"/jobs/{job_id}").text
    spec = JobSpec.model_validate(job["spec"])
    assert job["rounds_total"] == spec.rounds_total == job["version"]
    assert strategy["kind"] == "sync" or job["spec"]["strategy"]["inner_steps"] >= 5
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["missing"]) for e in epochs] == [(1437, 0)] * 2
    if spec.codecs.up in WITHOUT_RESIDUAL:
        assert recomputed(plane, job_id)[1].outcome == "matches"


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ({"codec": {"up": "topk", "down": "topk"}}, "what each worker still owed"),
        (
            {"strategy": {"kind": "local", "inner_steps": 5, "inner_state": "kept"}},
            "the inner states that workers kept",
        ),
    ],
    ids=["error feedback", "kept inner state"],
)
def test_what_only_workers_know_cannot_be_recomputed_but_no_sample_is_missing(
    plane: ControlPlane, spec: dict[str, Any], reason: str
) -> None:
    job_id = plane.create(**WITHOUT_ROUND, **spec, epochs=6)
    plane.reach(job_id, 2)
    assert plane.http.post(f"/v1/jobs/{job_id}/pause").status_code == 202
    plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0)
    assert plane.http.post(f"/v1/jobs/{job_id}/resume").status_code == 202
    job = plane.finish(job_id)
    assert job["accuracy"] > 0.7  # error feedback: 0.79 to 0.92, by who took part
    feeds_back = "codec" in spec
    assert (job["residual_resets"] > 0) == feeds_back  # whoever came back after the pause owed nothing any more
    assert ('id="residuals"' in plane.http.get(f"/jobs/{job_id}").text) == feeds_back
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["samples"], e["missing"]) for e in epochs] == [(1437, 1437, 0)] * 6
    with pytest.raises(SpecError, match=reason):
        recomputed(plane, job_id)


@pytest.mark.long
def test_a_job_that_lost_a_worker_and_its_broker_matches_in_both_incarnations(plane: ControlPlane) -> None:
    job_id = plane.create(**{**DIGITS, "rounds": 500})
    plane.until("a checkpoint", lambda: plane.job(job_id)["durable_version"] >= 20)
    os.kill(plane.pids("worker")[0], signal.SIGKILL)
    plane.reach(job_id, plane.job(job_id)["version"] + 10)
    assert plane.http.post(f"/v1/jobs/{job_id}/pause").status_code == 202
    plane.until("no worker", lambda: plane.job(job_id)["workers"] == 0)
    plane.until("everything stored", lambda: not plane.broker().xlen(JobKeys(job_id).events()))
    lose_the_broker(plane)
    assert plane.http.post(f"/v1/jobs/{job_id}/resume").status_code == 202
    job = plane.finish(job_id)
    first, second = (incarnation for incarnation, _, _ in opened(plane, job_id))
    assert first == 1 and second > 1  # an opening that failed counts, too
    versions, verdict = recomputed(plane, job_id)
    assert (versions, verdict.outcome, verdict.mismatches) == ([*range(1, 501)], "matches", ())
    assert verdict.matched + verdict.unrecorded == job["rounds_total"]


@pytest.mark.long
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "spec",
    [
        {"strategy": {"kind": "async", "buffer": 3, "max_staleness": 3}, "epochs": 8},
        {"strategy": {"kind": "local", "inner_steps": 2, "replicas": 3}, "epochs": 12},
        {"codec": {"up": "int8", "down": "int8"}, "epochs": 8},
    ],
    ids=["async", "local", "differences"],
)
def test_a_lost_broker_costs_no_sample_whatever_a_version_is_made_of(plane: ControlPlane, spec: dict[str, Any]) -> None:
    job_id = plane.create(**WITHOUT_ROUND, **spec)
    plane.until("a checkpoint", lambda: plane.job(job_id)["durable_version"] >= 20)
    lose_the_broker(plane)
    job = plane.finish(job_id)
    assert len(opened(plane, job_id)) > 1
    epochs = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["samples"], e["missing"]) for e in epochs] == [(1437, 1437, 0)] * spec["epochs"]
    versions, verdict = recomputed(plane, job_id)
    assert (versions, verdict.outcome) == ([*range(1, job["version"] + 1)], "matches")


def worker_of_first(plane: ControlPlane) -> str:
    return str(next(w["id"] for w in plane.get("/v1/workers")["items"] if w["pid"] == plane.pids("worker")[0]))


def seat_of_first_worker(plane: ControlPlane) -> psutil.Process:
    (seat,) = psutil.Process(plane.pids("worker")[0]).children()
    return seat


def base_of_round(redis: Redis, job_id: str) -> int:
    """The version that the job's round in progress starts from."""
    return int(cast("bytes", redis.hget(JobKeys(job_id).round(), "version")))


def fall_asleep_with_a_lease(plane: ControlPlane, job_id: str) -> None:
    """Suspend the seat of the first worker at a moment when a round that may close without it waits for its unit."""
    worker, plan = worker_of_first(plane), JobSpec.model_validate(plane.job(job_id)["spec"]).plan
    seat, redis, leases = seat_of_first_worker(plane), plane.broker(), JobKeys(job_id).leases()

    def holds() -> bool:
        held: Any = redis.hvals(leases)
        holder = any(lease.endswith(f"|{worker}".encode()) for lease in held)
        return holder and not plan.ends_epoch(base_of_round(redis, job_id))

    for turn in range(1000):
        time.sleep(0.0007 * (turn % 7))  # so long it is awake between two tries
        seat.suspend()
        if holds():
            time.sleep(0.05)  # what it had sent before it fell asleep arrives
            if holds():
                return
        seat.resume()
    pytest.fail("it never held a lease")


@pytest.mark.long
def test_rounds_that_did_not_wait_for_a_sleeper_count_what_is_late_once_and_match(plane: ControlPlane) -> None:
    strategy = {"quorum": 0.5, "backup": False}  # or whoever is awake would make what the sleeper holds
    job_id = plane.create(**{**DIGITS, "rounds": 300, "strategy": strategy, "workers": {"min": 2, "max": 2}})
    plane.reach(job_id, 30)
    fall_asleep_with_a_lease(plane, job_id)
    redis = plane.broker()
    asleep = base_of_round(redis, job_id)
    plane.until("a version without the sleeper", lambda: base_of_round(redis, job_id) > asleep)
    seat_of_first_worker(plane).resume()
    job = plane.finish(job_id)
    plan, page = JobSpec.model_validate(job["spec"]).plan, plane.get(f"/v1/jobs/{job_id}/versions", limit=500)
    late = [m for one in page["items"] for m, _, _ in one["counted"] if m < plan.round(one["version"] - 1).first]
    assert late and page["items"][-1]["version"] == 300
    ledger = plane.get(f"/v1/jobs/{job_id}/ledger")["epochs"]
    assert [(e["counted"], e["missing"]) for e in ledger[:-1]] == [(e["samples"], 0) for e in ledger[:-1]]
    versions, verdict = recomputed(plane, job_id)
    assert (versions, verdict.outcome) == ([*range(1, job["rounds_total"] + 1)], "matches")


def test_what_was_changed_in_the_log_is_a_mismatch_at_its_version(plane: ControlPlane, done: dict[str, Any]) -> None:
    job_id, digest = done["id"], "UPDATE version SET sha256 = ? WHERE job_id = ? AND version = 33"
    recorded = plane.get(f"/v1/jobs/{job_id}/versions", since=32, limit=1)["items"][0]["sha256"]
    write(plane, digest, "f" * 64, job_id)
    code, printed = command(plane, "replay", job_id)
    told = f"version 33: recorded {'f' * 64}, recomputed {recorded}\nfirst mismatch at version 33; 59 of 60 match\n"
    assert (code, printed) == (1, told)
    write(plane, digest, recorded, job_id)
    micro_batch = "UPDATE ledger_entry SET micro_batch = ? WHERE job_id = ? AND version = 45 AND micro_batch = ?"
    write(plane, micro_batch, 999, job_id, 177)
    _, verdict = recomputed(plane, job_id)
    assert (verdict.outcome, [one.version for one in verdict.mismatches]) == ("mismatch", [*range(45, 61)])
    assert recomputed(plane, job_id, last=44)[1].outcome == "matches"
    write(plane, micro_batch, 177, job_id, 999)


def test_a_mismatch_is_excused_where_the_log_names_another_kind_of_machine(
    plane: ControlPlane, done: dict[str, Any]
) -> None:
    job_id, kinds = done["id"], "UPDATE worker_stat SET kinds = ? WHERE job_id = ? AND worker = ?"
    digest = "UPDATE version SET sha256 = ? WHERE job_id = ? AND version = 33"
    version = plane.get(f"/v1/jobs/{job_id}/versions", since=32, limit=1)["items"][0]
    worker = next(w for w in plane.get(f"/v1/jobs/{job_id}/workers")["items"] if w["id"] == version["counted"][0][1])
    (kind,) = worker["kinds"]
    write(plane, kinds, json.dumps([{**kind, "torch": "1.0.0"}]), job_id, worker["id"])
    assert recomputed(plane, job_id)[1].outcome == "matches"  # another kind may well give the same bits
    write(plane, digest, "f" * 64, job_id)
    _, verdict = recomputed(plane, job_id)
    assert (verdict.outcome, verdict.first_mismatch) == ("other kind", 33)
    assert verdict.differences == (f"torch: {kind['torch']} here, 1.0.0 there",)
    write(plane, digest, version["sha256"], job_id)
    write(plane, kinds, json.dumps([kind]), job_id, worker["id"])


def test_a_replay_names_the_versions_that_it_can_start_from(plane: ControlPlane, done: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match="version 30 is not stored: a replay can start from 0, 20, 40, 60"):
        recomputed(plane, done["id"], 30)
    with pytest.raises(SpecError, match="at most 60: 60 to 60"):
        recomputed(plane, done["id"], 60)


@pytest.mark.long
def test_a_fork_goes_on_from_the_bits_of_its_parent_and_outlives_it(plane: ControlPlane, done: dict[str, Any]) -> None:
    at_40 = next(c for c in plane.get(f"/v1/jobs/{done['id']}/checkpoints")["items"] if c["version"] == 40)
    parent = plane.finish(fork(plane, done["id"], version=40, spec={"rounds": 30, "seed": 5})["id"])
    about = {"job_id": done["id"], "version": 40, "sha256": at_40["sha256"], "optimizer": "kept"}
    assert parent["forked_from"] == about
    assert (parent["version"], opened(plane, parent["id"])) == (30, [(1, 0, False)])
    weights = plane.http.get(f"/v1/jobs/{parent['id']}/checkpoints/0")
    assert weights.headers["etag"].strip('"') == at_40["sha256"]
    versions, verdict = recomputed(plane, parent["id"])
    assert (versions, verdict.outcome) == ([*range(1, 31)], "matches")
    child = fork(plane, parent["id"], version=0, optimizer="fresh", spec={"rounds": 10})
    assert plane.http.delete(f"/v1/jobs/{parent['id']}").status_code == 204
    child = plane.finish(child["id"])
    assert child["forked_from"] == {
        "job_id": parent["id"],
        "version": 0,
        "sha256": at_40["sha256"],
        "optimizer": "fresh",
    }
    assert recomputed(plane, child["id"])[1].outcome == "matches"


def test_the_commands_fork_and_show(plane: ControlPlane, done: dict[str, Any]) -> None:
    code, printed = command(plane, "fork", f"{done['id']}@best", "--name", "slower", *CHANGES)
    assert code == 0
    job_id = printed.split()[0]
    made = plane.job(job_id)
    assert (made["name"], made["spec"]["optimizer"]) == ("slower", {"name": "SGD", "lr": 0.01, "momentum": 0.9})
    assert (made["forked_from"]["version"], made["forked_from"]["optimizer"]) == (done["best_version"], "kept")
    _, shown = command(plane, "show", job_id)
    assert f"version {done['best_version']} of job {done['id']}, with kept optimizer" in shown
    code, printed = command(plane, "fork", f"{done['id']}@30")
    assert code == 2 and "has no checkpoint 30" in printed and "/checkpoints" in printed
