"""What a seat's process tells its worker, over a real pipe, and the line that is made of it."""

import io
import json
import os
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from computeshare.host.iokit import CAN_SLEEP, HAS_WOKEN, WILL_NOT_SLEEP, WILL_SLEEP, follow, react
from computeshare.host.sleep_inhibitor import awake_command, stay_awake
from computeshare.worker.live_line import live_line
from computeshare.worker.seat.progress_pipe import DESCRIPTOR, LONGEST, SeatLink, SeatProgress, Speed, Teller
from tests.support.wait import wait_until

WORKING = SeatProgress("working", "lenet5 on mnist", 120, 500, 64_000, 2_000_000, 4_000_000)


def spawn(link: SeatLink, program: str, *arguments: str) -> None:
    """Run a program as a seat's process is, to its end."""
    with link.ends() as (variables, actions):
        environment = {**os.environ, **variables}
        command = [sys.executable, "-c", program, *arguments]
        pid = os.posix_spawn(sys.executable, command, environment, file_actions=actions)
    os.waitpid(pid, 0)


def listening() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "listening"]


@pytest.mark.parametrize("title", ["x" * 500, "\N{GRINNING FACE}" * 200, '"\\' * 100, "\x00\x1b[31m\n" * 50, "\ud800"])
def test_whatever_a_job_is_called_a_line_fits_into_a_pipe_at_once(title: str) -> None:
    line = SeatProgress("working", title, *[2**63] * 7).encode()
    assert len(line) <= LONGEST and line.count(b"\n") == 1
    found = SeatProgress.decode(line)
    assert found is not None and found.bytes_down == 2**63 and found.title.isprintable()


@pytest.mark.parametrize(
    "line", [b"", b"\n", b"[]", b"{}", b"\xff", b'{"state": 1}', b'{"state":"a","title":"","version":"x"}']
)
def test_what_says_nothing_is_nothing(line: bytes) -> None:
    assert SeatProgress.decode(line) is None


def test_a_seats_process_is_heard_and_so_is_what_it_prints() -> None:
    link, words = SeatLink(), []
    link.echo = words.append
    told = threading.Event()
    hear = link.hear
    link.hear = lambda progress: (hear(progress), told.set())[0]  # type: ignore[method-assign]
    program = (
        "import os, sys; os.write(int(os.environ[sys.argv[1]]), sys.argv[2].encode());"
        "print('out'); print('err', file=sys.stderr)"
    )
    spawn(link, program, DESCRIPTOR, WORKING.encode().decode())
    assert told.wait(20) and link.progress == WORKING
    for thread in listening():
        thread.join(20)
    assert sorted(words) == ["err", "out"]
    link.over()
    assert link.progress is None and link.is_loading


def test_a_seat_that_is_over_is_not_heard_any_more() -> None:
    link = SeatLink()
    with link.ends() as (variables, _):
        late = os.dup(int(variables[DESCRIPTOR]))
    link.over()
    os.write(late, WORKING.encode())
    os.close(late)
    for thread in listening():
        thread.join(20)
    assert link.progress is None


def test_a_seat_never_waits_for_a_worker_that_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setenv(DESCRIPTOR, str(writing))
    teller = Teller(lambda: WORKING)
    for _ in range(2000):  # far more than a pipe holds
        teller.tell()
    os.set_blocking(reading, False)
    held = os.read(reading, 1 << 20)
    assert 0 < len(held) < 2000 * len(WORKING.encode())
    assert all(SeatProgress.decode(line) == WORKING for line in held.splitlines())
    os.close(reading)
    teller.tell()  # nor does it mind that nobody is there


def test_a_process_that_no_worker_listens_to_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DESCRIPTOR, raising=False)

    def look() -> SeatProgress:
        raise AssertionError

    Teller(look).tell()


def test_speed_is_taken_over_the_last_seconds() -> None:
    now = [0.0]
    link = SeatLink(lambda: now[0])
    assert link.speed() == Speed()
    for second in range(20):
        now[0] = float(second)
        link.hear(SeatProgress("working", "", second, 100, 1000 * second, 10 * second, 20 * second))
    assert link.speed() == Speed(1000, 10, 20)
    now[0] += 60
    assert link.speed() == Speed()


def text(*arguments: object) -> str:
    return live_line(*arguments).plain  # type: ignore[arg-type]


def test_the_line_says_job_version_and_speeds() -> None:
    line = text(WORKING, Speed(1240.4, 1_200_000, 2_300_000), "")
    assert line == "▶ lenet5 on mnist  version 120 of 500  1,240 samples/s  ↑ 1.2 MB/s  ↓ 2.3 MB/s"


def test_the_line_says_what_else_it_does_or_waits_for() -> None:
    assert text(None, Speed(), "") == "○ waiting for a seat"
    assert text(SeatProgress("loading", "mlp on digits"), Speed(), "") == "… mlp on digits  loading"
    fetching = SeatProgress("loading", "recipe a1b2", fetched=120_400_000, wanted=1_300_000_000)
    few = replace(fetching, fetched=120_000, wanted=369_400)
    assert "fetching data: 120 of 369 kB" in text(few, Speed(), "")
    assert text(fetching, Speed(bytes_down=2e6), "") == "… recipe a1b2  fetching data: 120 of 1,300 MB  ↓ 2.0 MB/s"
    assert SeatProgress.decode(fetching.encode()) == fetching
    assert text(None, Speed(), "on battery until 50 %") == "‖ resting: on battery until 50 %  "
    assert text(SeatProgress("scoring", "mlp on digits"), Speed(), "") == "◆ mlp on digits  about to score versions"
    scoring = text(SeatProgress("scoring", "mlp on digits", 20, 40), Speed(), "")
    assert scoring == "◆ mlp on digits  scoring version 20 of 40"
    leaving = text(WORKING, Speed(), "", "finishing this work unit, Ctrl-C again to quit now")
    assert leaving.startswith("finishing this work unit, Ctrl-C again to quit now  ▶ lenet5")


def test_a_hostile_title_is_not_obeyed_and_the_line_stays_one() -> None:
    hostile = SeatProgress("working\x1b[2J", "[bold]\x1b[2J\nx", 1, 2)
    line = live_line(hostile, Speed(), "a\nb")
    assert "\x1b" not in line.plain and "\n" not in line.plain and "[bold]" in line.plain
    assert len(Console(width=30, file=io.StringIO()).render_lines(line)) == 1


def test_each_system_is_kept_awake_by_its_own_tool() -> None:
    assert awake_command("darwin", 42) == ["caffeinate", "-i", "-w", "42"]
    assert "systemd-inhibit" in awake_command("linux")[2] and "--what=sleep:idle" in awake_command("linux")
    assert awake_command("sunos5") == []


@pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux alone")
@pytest.mark.parametrize("knows", [True, False], ids=["systemd 257", "before"])
def test_the_owner_may_have_the_machine_sleep_where_systemd_knows_how(
    knows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool, told = tmp_path / "systemd-inhibit", tmp_path / "told"
    refuses = 'case "$1" in --mode=*) exit 1;; esac; ' if not knows else ""
    tool.write_text(f'#!/bin/sh\n{refuses}echo "$1" > {told}.part; mv {told}.part {told}; exec cat\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    keeper = stay_awake()
    assert keeper is not None and keeper.stdin is not None
    wait_until(told.exists)
    assert told.read_text() == ("--mode=block-weak\n" if knows else "--what=sleep:idle\n")
    keeper.stdin.close()  # as when the process ends
    assert keeper.wait(20) == 0


def test_every_question_of_a_macs_power_manager_is_answered_even_if_giving_back_fails() -> None:
    seen: list[str] = []

    def fails() -> None:
        seen.append("before")
        raise OSError

    with pytest.raises(OSError):
        react(WILL_SLEEP, fails, lambda: None, lambda: seen.append("allowed"))
    for message in (CAN_SLEEP, HAS_WOKEN, WILL_NOT_SLEEP, 0xE0000320):
        react(message, fails, lambda: seen.append("after"), lambda: seen.append("allowed"))
    assert seen == ["before", "allowed", "allowed", "after", "after"]


@pytest.mark.skipif(sys.platform == "darwin", reason="there it listens for ever")
def test_where_there_is_no_iokit_that_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="no IOKit here"):
        follow(lambda: None, lambda: None)


def test_a_line_is_json_that_others_can_read() -> None:
    assert json.loads(WORKING.encode())["version"] == 120
