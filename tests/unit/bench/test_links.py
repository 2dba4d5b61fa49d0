"""Thin links: what is asked for is what a plain transfer gets, and nothing stays behind. Needs root."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench.links import NoLinks, Shape, links, missing
from bench.transfer import BYTES, measure

pytestmark = pytest.mark.skipif(missing() is not None, reason=missing() or "")
PAYLOAD = 1448 / 1514
"""Share of a full frame on the link that is TCP's payload."""


def ours() -> str:
    """Namespaces and devices of this process that there are."""
    listed = subprocess.run("ip netns list; ip -o link", shell=True, capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if f"cs{os.getpid()}" in line)


@pytest.mark.parametrize("between", [False, True])
def test_a_link_has_the_rate_asked_for_in_both_directions(between: bool) -> None:
    with links(2, Shape(20.0, between=between)) as made:
        before = made.each[1].moved()
        found = measure(made.each[1], made.each[0] if between else None, made.host)
        moved = made.each[1].moved()
    assert 0.6 * 20 * PAYLOAD < found["up_mbit"] < 1.1 * 20 * PAYLOAD, found
    assert 0.6 * 20 * PAYLOAD < found["down_mbit"] < 1.1 * 20 * PAYLOAD, found
    assert BYTES / PAYLOAD < moved.up - before.up < 1.15 * BYTES / PAYLOAD
    assert BYTES / PAYLOAD < moved.down - before.down < 1.15 * BYTES / PAYLOAD
    assert not ours()


@pytest.mark.parametrize("between", [False, True])
def test_the_round_trip_is_longer_by_what_was_asked_for(between: bool) -> None:
    with links(2, Shape(0.0, 20.0, between)) as made:
        found = measure(made.each[1], made.each[0] if between else None, made.host)
    assert 20 <= found["rtt_ms"] < 30, found
    assert not ours()


def test_a_block_that_fails_leaves_nothing_behind() -> None:
    with pytest.raises(KeyError), links(2, Shape(5.0, 20.0)), links(1, Shape(5.0), 1):
        assert len(ours().splitlines()) == 3 + 3 + 2  # namespaces, the links' outer ends, bridges
        raise KeyError
    assert not ours()


def test_what_a_killed_process_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    script = (
        "import subprocess, time\n"
        "from bench.links import Shape, links\n"
        "with links(1, Shape(5.0)) as made:\n"
        "    sleeper = subprocess.Popen(made.each[0].inside(['sleep', '1000']))\n"
        "    print(sleeper.pid, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    killed = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert killed.stdout
    sleeper = int(killed.stdout.readline())
    killed.kill()
    killed.wait()
    killed.stdout.close()
    with links(1, Shape(5.0)):
        listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert f"cs{killed.pid}" not in listed
    deadline = time.monotonic() + 10
    while Path(f"/proc/{sleeper}/cmdline").exists() and b"sleep" in Path(f"/proc/{sleeper}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "a process in a removed namespace runs on"
        time.sleep(0.05)


def test_links_that_cannot_be_made_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NoLinks, match="need root"), links(1, Shape(5.0)):
        pass
