"""ComputeShare from Python: `ComputeShare` and the jobs it hands out; below them `Client`, a method a REST call.

Everything is synchronous but `Job.stream`. What is refused raises `Problem`, which names the field; where nothing
answers, `NoServer` says what to start.
"""

from computeshare.answers import Checkpoint, EpochLedger, Event, JobWorker, Problem, Submission
from computeshare.client.job import Job
from computeshare.client.jobs import JobList, Jobs
from computeshare.client.metrics import Metrics, Point
from computeshare.client.reaching import NoServer
from computeshare.client.rest import Client
from computeshare.client.session import ComputeShare, reach
from computeshare.errors import ArtifactError, ComputeShareError, JobFailed, SettingsError

__all__ = [
    "ArtifactError",
    "Checkpoint",
    "Client",
    "ComputeShare",
    "ComputeShareError",
    "EpochLedger",
    "Event",
    "Job",
    "JobFailed",
    "JobList",
    "JobWorker",
    "Jobs",
    "Metrics",
    "NoServer",
    "Point",
    "Problem",
    "SettingsError",
    "Submission",
    "reach",
]
