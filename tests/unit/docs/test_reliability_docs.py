"""The table of failures names a test for each, and the tests are there."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
ROWS = re.findall(r"^\| (\d+) \|(.*)\|$", (ROOT / "docs" / "reliability.md").read_text(), re.MULTILINE)


def test_every_failure_has_its_row_and_says_what_happens() -> None:
    assert len(ROWS) >= 26 and [int(number) for number, _ in ROWS] == list(range(1, len(ROWS) + 1))
    for number, row in ROWS:
        failure, behaviour, test = (cell.strip() for cell in row.split("|"))
        assert failure and behaviour and test, f"row {number}"


def test_every_test_that_a_row_names_is_there() -> None:
    for number, row in ROWS:
        named = re.findall(r"`([\w/]+\.py)::(\w+)`", row)
        assert named, f"row {number} names no test"
        for path, name in named:
            source = (ROOT / "tests" / path).read_text()
            assert f"\ndef {name}(" in source, f"row {number}: {path} has no {name}"
