"""What tests of a seat share."""

from tests.support.job_reducer import start  # noqa: F401
