"""What signals mean to a process."""

import subprocess
import sys

import pytest

STOPPING = "from computeshare.runtime.processes import stop_event; asked = stop_event().is_set"
TAKING_SEATS = """
from computeshare.worker.rq_worker import SeatWorker
asks = []
class Worker(SeatWorker):
    def request_stop(self, *_): asks.append(1)
Worker.__new__(Worker)._install_signal_handlers()
asked = lambda: bool(asks)
"""


@pytest.mark.parametrize("program", [STOPPING, TAKING_SEATS], ids=["service", "worker"])
@pytest.mark.parametrize(("before", "heeded"), [("SIG_DFL", True), ("SIG_IGN", False)])
def test_a_closed_terminal_ends_a_process_unless_it_was_started_to_outlive_it(
    program: str, before: str, heeded: bool
) -> None:
    lines = [
        "import signal",
        f"signal.signal(signal.SIGHUP, signal.{before})",
        program,
        "signal.raise_signal(signal.SIGHUP)",
        f"assert asked() is {heeded}",
        "signal.raise_signal(signal.SIGTERM) if not asked() else None",
        "assert asked()",
    ]
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True, timeout=60)
