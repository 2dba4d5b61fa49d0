"""The most memory that a process took."""

import os
import subprocess
import sys

import pytest

from bench.memory import Growth, Memory, forget_peak, peak, tell, tell_growth
from computeshare.jobspec.spec import JobSpec

MB = 1_000_000
TAKES_AND_GIVES_BACK = """
import sys
for line in sys.stdin:
    taken = b"x" * int(line)
    del taken
    print("done", flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux notes the most a process had")
def test_memory_that_was_given_back_is_in_the_peak_until_it_is_forgotten() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", TAKES_AND_GIVES_BACK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout

        def take(size: int) -> None:
            assert process.stdin and process.stdout
            print(size, file=process.stdin, flush=True)
            assert process.stdout.readline() == "done\n"

        take(1)
        idle = forget_peak(process.pid)
        take(200 * MB)
        assert 195 * MB <= peak(process.pid) - idle < 220 * MB
        again = forget_peak(process.pid)
        take(50 * MB)
        assert 45 * MB <= peak(process.pid) - again < 70 * MB
        process.stdin.close()


def test_above_idle_is_told_for_those_that_were_there_before() -> None:
    memory = Memory(idle={"reducer": {1: 500 * MB, 2: 400 * MB}})
    memory.peak = {"reducer": {1: 520 * MB, 2: 480 * MB}, "seat": {3: 900 * MB}}
    assert memory.above_idle("reducer") == 80 * MB  # the other one had more to begin with
    assert memory.above_idle("seat") is None
    spec = JobSpec(dataset="mnist", model="lenet5", micro_batches_per_round=2)
    rows = {row[0]: row for row in tell(memory, spec).tables[0].rows}
    assert rows["reducer"][1:5] == [2, 500.0, 520.0, 80.0]
    assert rows["seat"] == ["seat", 1, None, 900.0, None, None]


def test_growth_is_from_the_second_tenth_of_a_long_job_to_its_last() -> None:
    growth = Growth()
    growth.seen[("seat", 1)] = [(units, (100 + 50 * (units > 50) + units) * MB) for units in range(0, 1001, 10)]
    growth.seen[("seat", 2)] = [(0, 7 * MB), (50, 7 * MB)]
    growth.seen[("late", 3)] = [(1000, 7 * MB)]
    assert growth.of("seat", 1) == (300 * MB, 1100 * MB)
    assert growth.of("seat", 2) is None and growth.of("late", 3) is None
    (row,) = tell_growth(growth, 1000, 2.0).tables[0].rows
    assert row == ["seat", 300.0, 1100.0, pytest.approx(266.7, abs=0.1)]


def test_growth_looks_at_processes_that_are_there() -> None:
    growth = Growth()
    growth.look({"test": [os.getpid(), 2**22 + 1]}, 5)
    assert [(role, pid) for role, pid in growth.seen] == [("test", os.getpid())]
    assert growth.seen["test", os.getpid()][0][1] > 10 * MB
