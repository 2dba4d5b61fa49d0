"""Events as the scripts append them, for tests of those who read them."""

import json
from typing import Any

from redis import Redis

from computeshare.jobspec.sampling_plan import Plan
from computeshare.protocol.keys import JobKeys

WORKERS = ("aaaaaaaaaaaa", "bbbbbbbbbbbb")
SECONDS = {"waiting": 0.1, "computing": 0.2, "encoding": 0.01, "uploading": 0.02}


def token(version: int, incarnation: int = 1) -> str:
    return f"{incarnation}.{version}.{version:016x}"


class Feed:
    """Writes one job's events; time passes 100 ms a round, from a fixed moment on."""

    def __init__(self, redis: Redis, job_id: str, plan: Plan) -> None:
        self.redis, self.keys, self.plan = redis, JobKeys(job_id), plan
        self.at_ms = 1_700_000_000_000
        self.incarnation = 1
        self.version = 0

    def send(self, kind: str, /, **data: Any) -> str:
        fields: Any = {"type": kind, "at": self.at_ms, "data": json.dumps(data)}
        stream_id: Any = self.redis.xadd(self.keys.events(), fields)
        return str(stream_id.decode())

    def open(self, version: int = 0, incarnation: int = 1, restored: bool = False) -> None:
        self.version, self.incarnation = version, incarnation
        about = {"token": token(version, incarnation), "version": version, "incarnation": incarnation}
        self.send("opened", **about, sha256=f"{version:064x}", restored=restored, parameters=100, bytes=400)

    def join(self, worker: str = WORKERS[0], name: str = "mac", session: str = "s1") -> None:
        self.send("joined", worker=worker, session=session, seat=f"{worker}-job-1-1", name=name, device="cpu")

    def submit(
        self, micro_batch: int, worker: str = WORKERS[0], outcome: str = "accepted", nonce: str | None = None
    ) -> str:
        counted = [micro_batch] if outcome == "accepted" else []
        current = token(self.version, self.incarnation)
        nonce = nonce or f"{self.incarnation}-{micro_batch}-{worker}-{outcome}"
        about = {"outcome": outcome, "current": current, "counted": counted, "worker": worker, "session": "s1"}
        about |= {"nonce": nonce, "base": current, "micro_batches": [micro_batch]}
        return self.send("submission", **about, bytes_up=1000, bytes_down=2000, seconds=SECONDS)

    def commit(self, loss: float = 1.0, worker: str = WORKERS[0], submissions: bool = True, **told: Any) -> None:
        """One round: all its submissions, then the version."""
        done = self.plan.round(self.version)
        micro_batches = range(done.first, done.first + done.count)
        if submissions:
            for micro_batch in micro_batches:
                self.submit(micro_batch, worker)
        base = token(self.version, self.incarnation)
        self.version += 1
        self.at_ms += 100
        about = {"token": token(self.version, self.incarnation), "version": self.version, "base": base}
        counted = [[m, worker, self.plan.size(m)] for m in micro_batches]
        seconds = dict.fromkeys(("gather", "decode", "combine", "step", "publish"), 0.001)
        about |= {"epoch": done.epoch, "sha256": f"{self.version:064x}", "counted": counted, "seconds": seconds}
        self.send("version", **about, loss=loss, **told)

    def save(self) -> None:
        about = {"token": token(self.version, self.incarnation), "version": self.version}
        self.send("checkpoint", **about, sha256=f"{self.version:064x}", bytes=400, path=about["token"])

    def score(self, accuracy: float = 0.9, version: int | None = None, **more: Any) -> None:
        version = self.version if version is None else version
        about = {"token": token(version, self.incarnation), "version": version}
        self.send("scored", **about, loss=0.5, accuracy=accuracy, samples=360, **more)
