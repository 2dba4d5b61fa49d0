"""Real processes under seeded schedules of SIGKILL, SIGSTOP and failpoints: every version is that of a calm run.

A schedule is a burst of faults on a running job, or on one that is just created, and the check that all is as it should
be once they are over. A job goes through several of them, until it ends; the job of an even seed has a delay.

COMPUTESHARE_KILLS sets how many schedules (4), COMPUTESHARE_SEED the first one (another for each commit): to repeat a
failure, set the seed it names and one schedule. (What coincides is up to the machine: it may take several tries.)
"""

import os
import random
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from bench.faults import Faults
from bench.stage import Stage, stage
from tests.support import sample

pytestmark = pytest.mark.e2e
SCHEDULES = int(os.environ.get("COMPUTESHARE_KILLS", "4"))
FIRST_SEED = sample.seed()
PATIENCE_S = 90.0
"""Within which a job has to end once nothing fails any more."""
PROGRESS = 5
"""Versions that have to come out after the faults for a job to count as going on."""
ROUNDS = 600
OVER = ("finished", "completed")
"""What the rounds of a job are called once the last one is committed, and once that is durable and scored."""
SPEC: dict[str, Any] = {
    "dataset": "digits",
    "model": "mlp",
    "micro_batch": 16,
    "micro_batches_per_round": 6,
    "optimizer": {"name": "SGD", "lr": 0.05, "momentum": 0.9},
    "rounds": ROUNDS,
    "checkpoint_every": 100,
    "evaluate_every": 0,
    "threads": 1,
}
DELAYED: dict[str, Any] = {**SPEC, "strategy": {"kind": "sync", "delay": 1}}
"""Units of two rounds are out at once, and what comes early for the next round waits apart."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with stage(tmp_path_factory.mktemp("home"), workers=3) as made:
        yield made
        assert made.stop() == 0
        assert made.orphans() == []


@pytest.fixture(scope="module")
def calm(up: Stage) -> dict[int, str]:
    return digests_of(up, SPEC)


def digests_of(up: Stage, spec: dict[str, Any]) -> dict[int, str]:
    """The digest of every version of a job that nothing happens to."""
    job_id = up.create(spec)
    job = up.finish(job_id, 3 * PATIENCE_S)  # on a busy machine most of it is the workers' start
    assert job["status"] == "completed", job
    digests = {version: sha256 for version, sha256, _ in versions(up, job_id)}
    assert digests[ROUNDS] == job["weights_sha256"] and len(digests) == ROUNDS
    return digests


def versions(up: Stage, job_id: str) -> list[tuple[int, str, bool]]:
    """Every version of a job that was ever published, its digest, and whether it was lost and done again."""
    with closing(sqlite3.connect(f"file:{up.home / 'computeshare.db'}?mode=ro", uri=True)) as database:
        query = "SELECT version, sha256, voided FROM version WHERE job_id = ? AND version > 0"
        return [(version, sha256, bool(voided)) for version, sha256, voided in database.execute(query, [job_id])]


class Campaign:
    """Schedules on one stage after another, on as few jobs as they fit on: starting workers takes longest."""

    def __init__(self, up: Stage, spec: dict[str, Any], calm: dict[int, str]) -> None:
        self.up, self.spec, self.calm = up, spec, calm
        self.job_id = ""

    def run(self, seed: int) -> None:
        """One schedule. Raises AssertionError, which names the seed and what was done."""
        if not self.job_id:
            self.job_id = self.up.create(self.spec)
        durable = self.up.job(self.job_id)["durable_version"] or 0
        faults = Faults(self.up, random.Random(seed), self.job_id)
        try:
            self._hurt(faults)
            faults.calm()
            self._go_on()
            self._verify(durable)
        except Exception as error:
            told = "\n  ".join(faults.told)
            where = f"seed {seed}, job {self.job_id}, logs in {self.up.home}"
            raise AssertionError(f"{where}: {error!r}\n  {told}") from error
        finally:
            faults.calm()

    def end(self) -> None:
        """Let the last job finish. Raises AssertionError."""
        if self.job_id:
            self.up.finish(self.job_id, PATIENCE_S, self.up.tend)
            self._verify(0)

    def _hurt(self, faults: Faults) -> None:
        """A handful of faults at random times, as long as the job has not ended."""
        for _ in range(faults.rng.randint(2, 6)):
            pause = time.monotonic() + faults.rng.uniform(0.1, 1.2)
            while time.monotonic() < pause:
                self.up.tend()
                time.sleep(0.05)
            state = self.up.rounds(self.job_id)
            if state and state.status in OVER:
                return
            faults.strike()

    def _go_on(self) -> None:
        """Return once the job has advanced without faults, or ended."""
        first, deadline = None, time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            self.up.tend()
            state = self.up.rounds(self.job_id)
            if state and state.status in OVER:
                self.up.finish(self.job_id, PATIENCE_S, self.up.tend)
                return
            if state:
                first = state.version if first is None or state.version < first else first
                if state.version >= first + PROGRESS:
                    return
            time.sleep(0.02)
        raise AssertionError(f"no progress within {PATIENCE_S:.0f} s without faults: {self.up.rounds(self.job_id)}")

    def _verify(self, durable: int) -> None:
        """So far, or at its end, the job is as one that went through nothing."""
        job = self.up.job(self.job_id)
        assert job["status"] in ("queued", "running", "completed"), job
        assert (job["durable_version"] or 0) >= durable, f"version {durable} was durable: {job}"
        published = versions(self.up, self.job_id)
        wrong = [version for version, sha256, _ in published if sha256 != self.calm[version]]
        assert not wrong, f"versions {wrong} have other weights than the calm run's"
        standing = [version for version, _, voided in published if not voided]
        assert len(standing) == len(set(standing)), "a version was published twice"
        for epoch in self.up.ledger(self.job_id):
            assert (epoch["counted"], epoch["missing"]) == (epoch["samples"], 0), epoch
        assert (orphans := self.up.orphans()) == [], f"orphans: {orphans}"
        if job["status"] == "completed":
            assert (job["version"], job["durable_version"]) == (ROUNDS, ROUNDS)
            assert job["weights_sha256"] == self.calm[ROUNDS]
            self.job_id = ""


@pytest.mark.timeout(420 + (2 * PATIENCE_S) * (SCHEDULES + 2))
def test_whatever_is_killed_every_version_is_the_calm_runs_and_every_sample_counts_once(
    up: Stage, calm: dict[int, str]
) -> None:
    seeds = range(FIRST_SEED, FIRST_SEED + SCHEDULES)
    for spec, rest in ((SPEC, 1), (DELAYED, 0)):
        if mine := [seed for seed in seeds if seed % 2 == rest]:
            campaign = Campaign(up, spec, calm if spec is SPEC else digests_of(up, spec))
            for seed in mine:
                campaign.run(seed)
            campaign.end()


@pytest.mark.timeout(420)
def test_a_worker_that_slept_goes_on_with_the_current_version(up: Stage, calm: dict[int, str]) -> None:
    job_id = up.create({**SPEC, "rounds": 100_000})
    deadline = time.monotonic() + PATIENCE_S
    while len(taking_part(up, job_id)) < 3:
        assert time.monotonic() < deadline, taking_part(up, job_id)
        up.tend()
        time.sleep(0.1)
    seat = up.seats()[0]
    sleeper = f"hand-{[worker.pid for worker in up.workers].index(seat.ppid())}"
    seat.send_signal(signal.SIGSTOP)
    asleep_at = version_of(up, job_id)
    while up.job(job_id)["version"] < asleep_at + 2:  # then what it had sent is counted, and told
        assert time.monotonic() < deadline, "nobody went on"
        time.sleep(0.05)
    before = taking_part(up, job_id)[sleeper]
    while version_of(up, job_id) < asleep_at + 20:  # the others go on without it
        assert time.monotonic() < deadline, "nobody went on"
        time.sleep(0.05)
    assert taking_part(up, job_id)[sleeper] == before
    seat.send_signal(signal.SIGCONT)
    woken = time.monotonic()
    while taking_part(up, job_id).get(sleeper, 0) <= before:
        assert time.monotonic() - woken < 20, "it never took part again"
        time.sleep(0.05)
    assert seat.is_running()  # and by the same process
    up.call("POST", f"/v1/jobs/{job_id}/cancel")
    assert up.finish(job_id, PATIENCE_S)["status"] == "cancelled"
    assert all(sha256 == calm[version] for version, sha256, _ in versions(up, job_id) if version <= ROUNDS)
    ledger = up.ledger(job_id)  # once: versions from before the cancellation may be told after it
    assert [(e["counted"], e["missing"]) for e in ledger] == [(e["samples"], 0) for e in ledger]


def taking_part(up: Stage, job_id: str) -> dict[str, int]:
    """Micro-batches accepted from each worker that takes part now, by its name."""
    workers = up.call("GET", f"/v1/jobs/{job_id}/workers")["items"]
    return {worker["name"]: worker["accepted"] for worker in workers if worker["active"]}


def version_of(up: Stage, job_id: str) -> int:
    state = up.rounds(job_id)
    return state.version if state else 0
