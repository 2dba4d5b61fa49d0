"""What tests of chains of workers share."""

from tests.support.chain_runs import run  # noqa: F401
from tests.support.job_reducer import start  # noqa: F401
