"""The most memory that a process took."""

import subprocess
import sys

import pytest

from bench.memory import Memory, forget_peak, peak, tell
from computeshare.spec import JobSpec

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
