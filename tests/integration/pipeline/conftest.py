"""What tests of chains of workers share."""

from tests.support.job_reducer import start  # noqa: F401
