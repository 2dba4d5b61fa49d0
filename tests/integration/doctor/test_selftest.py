"""`computeshare doctor --selftest`: each part with what it really tries, and what it says where that goes wrong."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from computeshare.doctor import selftest
from computeshare.doctor.selftest import Ground, TrialPart
from computeshare.errors import BrokerError
from computeshare.runtime import durability
from computeshare.settings import Settings

pytestmark = pytest.mark.slow

WRONG = """
import sys

if sys.orig_argv[-2:] == ["computeshare.doctor.trial", "gradients"]:
    from torch import nn

    right, calls = nn.Conv2d.forward, {}

    def forward(self, images):
        found = right(self, images)
        calls[self] = calls.get(self, 0) + 1
        return found + 0.01 * (found - found.detach()) if calls[self] > 1 else found

    nn.Conv2d.forward = forward
"""
LEAKS = """
import sys

if sys.orig_argv[-2:] == ["computeshare.doctor.trial", "memory"]:
    from torch import nn

    right, kept = nn.Conv2d.forward, []

    def forward(self, images):
        kept.append(bytes(20_000))
        return right(self, images)

    nn.Conv2d.forward = forward
"""


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    for name in [name for name in os.environ if name.startswith("COMPUTESHARE_")]:
        monkeypatch.delenv(name)
    made = Ground(Settings(home=tmp_path / "home"), tmp_path, "cpu")
    yield made
    made.close()


def with_fault(folder: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has the processes that are started begin with this."""
    (folder / "sitecustomize.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_a_real_worker_spawns_a_real_seat_that_leaves_when_it_is_asked(ground: Ground) -> None:
    status, finding, advice = selftest.seat(ground)
    assert (status, advice) == ("ok", ""), finding
    assert "spawned seat ready in" in finding and "the worker ended with code 0" in finding


def test_a_worker_that_does_not_start_fails_with_the_end_of_its_log(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(
        tmp_path, "import sys\nif 'computeshare.worker.process' in sys.orig_argv: sys.exit('no such luck')", monkeypatch
    )
    status, finding, advice = selftest.seat(ground)
    assert status == "failed" and "the worker ended with code 1" in finding and "no such luck" in finding and advice


def test_values_go_through_a_broker_of_its_own_by_both_ways(ground: Ground) -> None:
    status, finding, _ = selftest.sockets(ground)
    assert status == "ok" and "unix: answers in" in finding and "TCP: answers in" in finding
    assert finding.endswith("TCP is found beside unix")


def test_a_device_that_is_wrong_from_the_second_call_on_fails_for_every_model_with_convolutions(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_fault(tmp_path, WRONG, monkeypatch)
    status, finding, advice = selftest.gradients(ground)
    assert status == "failed" and "--device cpu" in advice
    wrong = ("lenet5", "simplenet", "resnet18", "mobilenet_v3_small")
    assert [name for name in ("mlp", *wrong) if f"computes {name} wrongly: gradient 2" in finding] == [*wrong]


@pytest.mark.long
def test_this_machine_does_not_grow_over_2000_units_and_a_leak_is_found(
    ground: Ground, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, finding, _ = selftest.memory(ground)
    assert status == "ok" and finding.startswith("2000 units in"), finding
    with_fault(tmp_path, LEAKS, monkeypatch)
    status, finding, advice = selftest.memory(ground)
    assert status == "failed" and advice, finding


@pytest.mark.parametrize("part", [selftest.sleep, selftest.power, selftest.service, selftest.flushes])
def test_the_other_parts_say_what_they_found_on_this_machine(part: selftest.Try, ground: Ground) -> None:
    status, finding, advice = part(ground)
    assert status in ("ok", "not on this machine") and finding and not advice


def test_a_disk_that_cannot_be_flushed_whole_fails(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durability, "FULL_FSYNC", -1)  # as on a Mac whose file system refuses it
    status, finding, advice = selftest.flushes(ground)
    assert (status, finding.startswith("fsync alone, for F_FULLFSYNC: ")) == ("failed", True)
    assert "COMPUTESHARE_HOME" in advice
    assert not list(ground.settings.home.glob(".selftest-*"))


def test_a_part_that_breaks_has_failed_and_the_next_ones_are_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Ground) -> selftest.Outcome:
        raise BrokerError("no Valkey or Redis server was found")

    monkeypatch.setattr(selftest, "PARTS", {"sockets": broken, "power": selftest.power})
    first, second = selftest.run(Settings(home=tmp_path))
    assert (first.status, first.finding) == ("failed", "BrokerError: no Valkey or Redis server was found")
    assert first.advice and second.status != "failed"


def test_the_transcript_is_plain_and_the_exit_code_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [TrialPart("seat", "ok", "ready", "", 1.5), TrialPart("power", "not on this machine", "no battery")]
    assert selftest.summary(parts) == "1 ok, 0 failed, 1 not on this machine"
    assert selftest.line(parts[0]) == "ok      seat          1.5 s  ready"
    failed = TrialPart("memory", "failed", "grew", "report this", 2.0)
    assert selftest.line(failed).splitlines()[1].strip() == "what to do: report this"
    assert selftest.document([*parts, failed], ["a", "b"])["ok"] is False
    # the whole command, with parts that take no time
    only = "from computeshare.doctor import selftest as s; s.PARTS = {n: s.PARTS[n] for n in ('power', 'durability')}; "
    command = [sys.executable, "-c", only + "from computeshare.cli.main import main; main()", "doctor", "--selftest"]
    environment = {**os.environ, "COMPUTESHARE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.splitlines()[0].startswith("ComputeShare ")
    assert done.stdout.splitlines()[-1].startswith("1 ok, 0 failed") and "\x1b" not in done.stdout
    as_json = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, check=False)
    assert [part["name"] for part in json.loads(as_json.stdout)["parts"]] == ["power", "durability"]
