"""Processes end with the one that started them."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.skipif(sys.platform == "darwin", reason="no fork server there")
@pytest.mark.slow
def test_a_process_whose_fork_server_died_before_it_could_look_ends_too() -> None:
    command = [sys.executable, "-m", "tests.support.late_child"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "ended with its parent\n", done.stdout + done.stderr
