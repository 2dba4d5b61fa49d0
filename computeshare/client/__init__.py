"""ComputeShare from Python: `ComputeShare` and the jobs it hands out; below them `Client`, a method a REST call.

Everything is synchronous but `Job.stream`. What is refused raises `Problem`, which names the field; where nothing
answers, `NoServer` says what to start.
"""

from computeshare.client.api.address import NoServer
from computeshare.client.api.calls import Client
from computeshare.client.api.models import (
    Checkpoint,
    EpochLedger,
    Estimate,
    Event,
    JobWorker,
    LogLine,
    Problem,
    Submission,
)
from computeshare.client.job import Job
from computeshare.client.jobs import JobList, Jobs
from computeshare.client.metrics import Metrics, Point
from computeshare.client.session import ComputeShare, reach
from computeshare.errors import ArtifactError, ComputeShareError, JobFailed, SettingsError

__all__ = [
    "ArtifactError",
    "Checkpoint",
    "Client",
    "ComputeShare",
    "ComputeShareError",
    "EpochLedger",
    "Estimate",
    "Event",
    "Job",
    "JobFailed",
    "JobList",
    "JobWorker",
    "Jobs",
    "LogLine",
    "Metrics",
    "NoServer",
    "Point",
    "Problem",
    "SettingsError",
    "Submission",
    "reach",
]
