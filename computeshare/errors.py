"""ComputeShare's errors: each named for its cause, with a message that says what to do."""


class ComputeShareError(Exception):
    """Base of the errors that this package raises deliberately."""


class SpecError(ComputeShareError):
    """A job's specification cannot be carried out; the message names the field and what is allowed."""


class SettingsError(ComputeShareError):
    """A setting is missing or wrong."""


class Unreachable(SettingsError):
    """No control plane or broker is known, or none answers at the known address."""


class NoToken(SettingsError):
    """No token is configured."""


class BrokerError(ComputeShareError):
    """The Redis or Valkey server cannot be started or reached."""


class NoEvaluator(ComputeShareError):
    """No evaluator runs, or none has time, to do what was asked."""


class ScorerGone(ComputeShareError):
    """The worker that was to score a checkpoint is gone, or scores no more: another one may score it."""


class VersionError(ComputeShareError):
    """This process and the control plane have incompatible versions."""


class Unfit(ComputeShareError):
    """This machine cannot take part in a job: its device computes wrongly, or has too little memory for it."""


class DatabaseDamaged(ComputeShareError):
    """The control plane's database file is damaged; the message says what to do."""


class DatabaseLost(ComputeShareError):
    """The control plane's database file was removed or replaced while open: further writes would be lost."""


class DatasetError(ComputeShareError):
    """A data set is missing, incomplete or damaged."""


class BundleError(ComputeShareError):
    """A bundle's files are incomplete, damaged or cannot be stored."""


class BundleMissing(BundleError):
    """There is no such bundle here."""


class PieceDamaged(BundleError):
    """A piece's bytes are not what its name says."""


class RecipeError(ComputeShareError):
    """A recipe cannot be read, or its code fails; the message names the file and the line."""


class RecipeUnfit(RecipeError, Unfit):
    """A recipe cannot run on this machine, though it may on others: packages, memory or its owner's consent lack."""


class Unconfined(ComputeShareError):
    """This machine has no means to confine a recipe; the message says what to install."""


class InputError(ComputeShareError):
    """A file that a user gave to a model is not what the model takes."""


class PackageMissing(ComputeShareError):
    """A package that ComputeShare does not install by itself is missing; the message says how to install it."""


class CodecError(ComputeShareError):
    """A received blob is malformed: size, header, checksum, length or values."""


class ShapeError(ComputeShareError):
    """Two vectors that should match differ in shape."""


class ArtifactError(ComputeShareError):
    """A checkpoint on disk is missing or damaged."""


class ReplayError(ComputeShareError):
    """A job cannot be recomputed from its log and its checkpoints."""


class RoundError(ComputeShareError):
    """A step of the round protocol was refused because the job had moved on."""


class DamagedRound(RoundError):
    """The broker's data about a job's round are impossible: anyone with write access to the broker can change them."""


class LostClaim(RoundError):
    """Another reducer has taken over, or the job is gone."""


class Fenced(RoundError):
    """A newer session or reducer has replaced this one."""


class Banned(Fenced):
    """Too many of this worker's updates were refused: it may not take part until somebody lifts the ban."""


class JobGone(RoundError):
    """The job is not open: it ended, was deleted, or the broker lost it."""


class Diverged(ComputeShareError):
    """Training produced non-finite values."""


class JobFailed(ComputeShareError):
    """A job that was waited for failed or was cancelled: `status` says which, `why` holds the reported reason."""

    def __init__(self, job_id: str, status: str, why: str) -> None:
        super().__init__(
            f"job {job_id} {'was cancelled' if status == 'cancelled' else status}: {why}".removesuffix(": ")
        )
        self.job_id, self.status, self.why = job_id, status, why


class Interrupted(ComputeShareError):
    """A transfer or computation was stopped because its result is no longer wanted."""


class FailpointError(ComputeShareError):
    """A failpoint failed, as a test had requested."""


class ApiError(ComputeShareError):
    """The control plane answered with an error; `status` is the HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status
