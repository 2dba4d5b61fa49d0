"""What must start fast starts fast."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module", ["api", "api.main", "computeshare.cli.main", "computeshare.worker.process", "computeshare.queue"]
)
def test_importing_it_does_not_import_torch(module: str) -> None:
    program = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
