"""The files of jobs in examples/ are jobs."""

from pathlib import Path

import pytest

from computeshare.cli.jobs import spec_options

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_file_of_a_job_is_a_job(path: Path) -> None:
    assert spec_options.check(spec_options.parse(path.read_text(), path.name)).rounds_total > 0
