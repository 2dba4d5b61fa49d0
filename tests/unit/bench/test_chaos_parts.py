"""What `make chaos` runs again and what it does not."""

from pathlib import Path

import pytest

from bench import chaos
from bench.support import results


def entry(part: str, first: int, sources: str, passed: bool = True) -> dict[str, object]:
    return {"part": part, "first": first, "sources": sources, "passed": passed, "seconds": 60.0}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def test_what_passed_on_these_sources_is_not_due_again(log: Path) -> None:
    digests = {name: part.digest() for name, part in chaos.PARTS.items()}
    name = "simulated schedules"
    results.append(log, entry(name, 0, digests[name]))
    results.append(log, entry(name, 500, digests[name], passed=False))
    results.append(log, entry(name, 1000, "other sources"))
    done = chaos.results(digests, log)
    due = [first for part, first in chaos.due(done) if part == name]
    assert due[:3] == [500, 1000, 1500] and len(due) == 19
    line = next(line for line in chaos.table(done).splitlines() if line.startswith(name))
    assert line.split()[2:6] == ["500", "500", "10,000", "2.0"] and "FAILED" in line


def test_a_result_holds_for_the_sources_of_its_part_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for path in ("computeshare/codecs/float32.py", "api/main.py"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("before")
    monkeypatch.setattr(results, "ROOT", tmp_path)
    blobs, kills = chaos.PARTS["damaged blobs"], chaos.PARTS["kill schedules"]
    before = blobs.digest(), kills.digest()
    (tmp_path / "api" / "main.py").write_text("after")
    assert blobs.digest() == before[0] and kills.digest() != before[1]
    (tmp_path / "computeshare" / "codecs" / "float32.py").write_text("after")
    assert blobs.digest() != before[0]


@pytest.mark.parametrize("name", chaos.PARTS)
def test_every_part_names_a_test_its_variable_and_sources_that_are_there(name: str) -> None:
    part = chaos.PARTS[name]
    assert part.total % part.step == 0
    assert [pattern for pattern in part.sources if not list(results.ROOT.glob(pattern))] == []
    assert not part.counted_by or part.counted_by in (results.ROOT / part.test).read_text()


def test_a_percentile_is_one_of_the_values() -> None:
    fifty = [float(value) for value in range(1, 51)]
    assert results.percentile(fifty, 0.95) == 48.0
    assert results.percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert results.percentile([7.0], 0.95) == 7.0
