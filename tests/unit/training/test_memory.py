"""What a process says of its own memory."""

import subprocess
import sys

from computeshare.training.memory import peak_resident_bytes

TOLD = "from computeshare.training.memory import peak_resident_bytes; print(peak_resident_bytes())"


def test_the_peak_is_that_of_the_process_whatever_its_parent_holds() -> None:
    ballast = b"x" * 2_000_000_000
    found = int(subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True).stdout)
    assert 5_000_000 < found < len(ballast) / 2
    assert peak_resident_bytes() >= len(ballast)
