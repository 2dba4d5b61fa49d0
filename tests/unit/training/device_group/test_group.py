"""Several devices share out a lease's units; one that fails stops alone."""

import threading
from typing import Any, cast

import pytest

from computeshare.errors import Interrupted
from computeshare.training.device_group.group import DeviceGroup
from computeshare.training.devices import Gpu, of_best_kind, words_of
from computeshare.training.work_units import AnyReplica


class Device:
    """Records its units, or raises `error`; with `meeting`, its first unit waits for the other device's first."""

    def __init__(self, error: Exception | None = None, meeting: threading.Barrier | None = None) -> None:
        self.error, self.meeting, self.units = error, meeting, list[int]()
        self.has_met = False

    def work(self, unit: int) -> None:
        if self.meeting and not self.has_met:
            self.has_met = True
            self.meeting.wait(10)
        if self.error:
            raise self.error
        self.units.append(unit)


def group(*devices: Device) -> DeviceGroup:
    return DeviceGroup([cast(AnyReplica, one) for one in devices], [f"cuda:{i}" for i in range(len(devices))])


def work(device: Any, unit: int) -> None:
    device.work(unit)


def test_two_devices_compute_at_once_and_each_unit_once() -> None:
    meeting = threading.Barrier(2)
    devices = Device(meeting=meeting), Device(meeting=meeting)
    both = group(*devices)
    both.compute([4, 5, 6, 7], work)
    assert sorted(devices[0].units + devices[1].units) == [4, 5, 6, 7]
    assert sum(both.units) == 4 and all(both.units)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failed_devices_units_go_to_the_other(failing: int) -> None:
    meeting = threading.Barrier(2)
    devices = [Device(meeting=meeting), Device(meeting=meeting)]
    devices[failing].error = RuntimeError("out of memory")
    both = group(*devices)
    both.compute([0, 1, 2], work)
    assert sorted(devices[1 - failing].units) == [0, 1, 2]
    assert both.stopped == {failing: "RuntimeError: out of memory"} and both.working == [1 - failing]
    both.compute([3], work)
    assert devices[1 - failing].units[-1] == 3


def test_the_error_of_the_last_device_is_raised() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        group(Device(RuntimeError("out of memory")), Device(RuntimeError("out of memory"))).compute([0, 1], work)
    with pytest.raises(RuntimeError, match="out of memory"):
        group(Device(RuntimeError("out of memory"))).compute([0], work)


def test_called_off_work_stops_no_device() -> None:
    meeting = threading.Barrier(2)
    both = group(Device(meeting=meeting), Device(Interrupted("called off"), meeting))
    with pytest.raises(Interrupted):
        both.compute([0, 1, 2], work)
    assert not both.stopped


def test_of_unequal_gpus_the_newest_kind_is_used() -> None:
    gpus = [Gpu(0, "T4", 7.5, 16), Gpu(1, "H100", 9.0, 80), Gpu(2, "T4", 7.5, 16), Gpu(3, "H100", 9.0, 80)]
    assert [one.index for one in of_best_kind(gpus)] == [1, 3]


def test_equal_devices_are_counted_in_words() -> None:
    assert words_of(["cuda:0 (NVIDIA H100)", "cuda:1 (NVIDIA H100)"]) == "cuda (2 x NVIDIA H100)"
    assert words_of(["cuda:1 (NVIDIA H100)"]) == "cuda:1 (NVIDIA H100)"
