"""The Python client: `ComputeShare` and its `Job` objects; below them `Client`, with a method for each REST call.

Everything is synchronous except `Job.stream`. A refused request raises `Problem`, which names the wrong field; a
control plane that does not answer raises `NoServer`, which says what to start.
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
from computeshare.errors import (
    ArtifactError,
    ComputeShareError,
    JobFailed,
    PackageMissing,
    SettingsError,
    ShapeError,
    SpecError,
)

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
    "PackageMissing",
    "Point",
    "Problem",
    "SettingsError",
    "ShapeError",
    "SpecError",
    "Submission",
    "reach",
]
