"""A job's life as the training system would tell it: events in its stream, checkpoints on disk. Nothing is trained."""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from redis import Redis

from computeshare.checkpoints.store import Artifacts
from computeshare.jobspec.sampling_plan import Plan
from computeshare.protocol.keys import JobKeys
from computeshare.types import Token
from tests.support.checkpoints import write_checkpoint

WEIGHTS = b"weights of a test, %d"


class Feed:
    """Writes what happens in one job; `now_ms` is the time of its next event."""

    def __init__(self, redis: Redis, job: dict[str, Any], artifacts: Path, now_ms: int, samples: int) -> None:
        spec = job["spec"]
        self.redis, self.job_id, self.now_ms = redis, job["id"], now_ms
        self.plan = Plan(spec["seed"], samples, spec["micro_batch"], spec["micro_batches_per_round"])
        self.artifacts, self.version, self.metric = artifacts, 0, job["metric"]
        self.workers: list[str] = []

    def token(self, version: int | None = None) -> Token:
        version = self.version if version is None else version
        return Token(1, version, hashlib.sha256(WEIGHTS % version).hexdigest()[:16])

    def tell(self, kind: str, **data: Any) -> None:
        fields: Any = {"type": kind, "at": self.now_ms, "data": json.dumps(data)}
        self.redis.xadd(JobKeys(self.job_id).events(), fields)

    def opened(self) -> None:
        digest = hashlib.sha256(WEIGHTS % 0).hexdigest()
        self.tell("reducer", host="studio", pid=4242, fence=1)
        about = {"version": 0, "incarnation": 1, "sha256": digest, "restored": False}
        self.tell("opened", token=str(self.token()), parameters=61_706, bytes=246_824, **about)

    def joined(self, worker: str, name: str, device: str) -> None:
        self.workers.append(worker)
        about = {"session": f"{worker}-1", "seat": f"{worker}-{self.job_id}-1-1", "name": name, "device": device}
        self.tell("joined", worker=worker, **about)

    def left(self, worker: str, reason: str) -> None:
        self.workers.remove(worker)
        self.tell("left", worker=worker, session=f"{worker}-1", reason=reason)

    def submission(self, worker: str, micro_batch: int, outcome: str = "accepted") -> None:
        base = str(self.token())
        counted = [micro_batch] if outcome == "accepted" else []
        seconds = {"waiting": 0.001, "computing": 0.004, "encoding": 0.001, "uploading": 0.002}
        about = {"session": f"{worker}-1", "nonce": f"{worker}-{micro_batch}-{outcome}", "base": base, "current": base}
        sent = {"micro_batches": [micro_batch], "counted": counted, "bytes_up": 38_000, "bytes_down": 90_000}
        self.tell("submission", worker=worker, outcome=outcome, seconds=seconds, **about, **sent)

    def versions(self, number: int, every_ms: int = 50) -> None:
        """So many rounds, each worker taking its turn."""
        for _ in range(number):
            self.now_ms += every_ms
            done, counted = self.plan.round(self.version), []
            for micro_batch in range(done.first, done.first + done.count):
                worker = self.workers[micro_batch % len(self.workers)]
                self.submission(worker, micro_batch)
                counted.append([micro_batch, worker, self.plan.size(micro_batch)])
            base, self.version = self.token(), self.version + 1
            about = {"base": str(base), "version": self.version, "epoch": done.epoch, "counted": counted}
            sha256 = hashlib.sha256(WEIGHTS % self.version).hexdigest()
            self.tell("version", token=str(self.token()), loss=self.loss(), sha256=sha256, seconds={}, **about)

    def loss(self) -> float:
        """Falls, with the noise that a batch's loss has."""
        noise = 0.35 * math.sin(self.version * 12.9898) * math.sin(self.version * 78.233)
        return (2.3 * math.exp(-self.version / 90) + 0.09) * (1 + noise)

    def checkpoint(self) -> None:
        sha256, path = hashlib.sha256(WEIGHTS % self.version).hexdigest(), str(self.token())
        tensors = {"weight": np.full(1, self.version, np.float32)}
        artifacts = Artifacts(self.artifacts, self.job_id)
        write_checkpoint(artifacts, self.token(), tensors, b"state of a test", sha256, 0, 0)
        self.tell("checkpoint", token=path, version=self.version, sha256=sha256, bytes=246_824, path=path)

    def scored(self, accuracy: float | None = None, version: int | None = None, **more: Any) -> None:
        version = self.version if version is None else version
        accuracy = 0.99 - 0.9 * math.exp(-version / 80) if accuracy is None else accuracy
        loss = 2.2 * math.exp(-version / 90) + 0.08
        found = {"loss": loss, "accuracy": accuracy} if self.metric == "accuracy" else {"loss": loss}
        self.tell("scored", token=str(self.token(version)), version=version, samples=10_000, **found, **more)
