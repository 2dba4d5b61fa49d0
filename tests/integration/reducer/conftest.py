"""What tests of the reducer share."""

from tests.support.job_reducer import start  # noqa: F401
