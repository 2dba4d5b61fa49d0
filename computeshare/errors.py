"""The errors of ComputeShare: each named for its cause, each saying what to do."""


class ComputeShareError(Exception):
    """Base of every error that this package raises on purpose."""


class SpecError(ComputeShareError):
    """A job's specification cannot be carried out; the message names the field and what is allowed."""


class SettingsError(ComputeShareError):
    """A setting is missing or wrong."""


class Unreachable(SettingsError):
    """No control plane or broker is known, or none answers there."""


class NoToken(SettingsError):
    """There is no token to send."""


class BrokerError(ComputeShareError):
    """The Redis or Valkey server cannot be started or reached."""


class VersionError(ComputeShareError):
    """This process and the control plane are of versions that do not understand each other."""


class Unfit(ComputeShareError):
    """This machine cannot take part in a job: its device computes wrongly, or has too little memory for it."""


class DatabaseDamaged(ComputeShareError):
    """The control plane's database file cannot be read as one; the message says what to do."""


class DatabaseLost(ComputeShareError):
    """The control plane's database file is no longer the one that was opened: what is written would be lost."""


class DatasetError(ComputeShareError):
    """A data set is missing, incomplete or not what it claims to be."""


class CodecError(ComputeShareError):
    """A blob is not what its sender claims: size, header, checksum, length or values."""


class ShapeError(ComputeShareError):
    """Two vectors that belong together differ in shape."""


class ArtifactError(ComputeShareError):
    """A checkpoint on disk is missing or damaged."""


class ReplayError(ComputeShareError):
    """A job cannot be recomputed from what its log and its checkpoints hold."""


class RoundError(ComputeShareError):
    """A step of the round protocol was refused because the job had moved on."""


class DamagedRound(RoundError):
    """What the broker holds of a job's round cannot be: whoever can write to the broker can write anything there."""


class LostClaim(RoundError):
    """Another reducer has taken over, or the job is gone."""


class Fenced(RoundError):
    """A newer session or reducer has taken this one's place."""


class Banned(Fenced):
    """Too many of this worker's updates were refused: it may not take part until somebody lifts the ban."""


class JobGone(RoundError):
    """The job is not open: it ended, was deleted, or the broker lost it."""


class Diverged(ComputeShareError):
    """The training itself produced values that are not finite."""


class JobFailed(ComputeShareError):
    """A job that was waited for failed, or was cancelled; `status` says which, `why` what was told of it."""

    def __init__(self, job_id: str, status: str, why: str) -> None:
        super().__init__(
            f"job {job_id} {'was cancelled' if status == 'cancelled' else status}: {why}".removesuffix(": ")
        )
        self.job_id, self.status, self.why = job_id, status, why


class Interrupted(ComputeShareError):
    """A transfer, or work, was cut short because whoever wanted it no longer does."""


class FailpointError(ComputeShareError):
    """A test asked for a failure here."""


class ApiError(ComputeShareError):
    """The control plane answered with a problem; carries the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
