"""When a worker rests: hours, power, battery; and what it makes of flags that make no sense."""

import sys
from datetime import datetime, timedelta
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from computeshare.errors import SettingsError
from computeshare.host import linux_power
from computeshare.host.availability import Minder, Naps, read_power
from computeshare.host.rest_policy import UNKNOWN, Manners, Power, RestDecision, manners_of, may_work, parse_hours

NOON = datetime(2030, 5, 4, 12, 0)


def at(hour: int, minute: int = 0) -> datetime:
    return NOON.replace(hour=hour, minute=minute)


def test_without_manners_it_works_always() -> None:
    assert may_work(Manners(), Power(False, 1.0), NOON) == RestDecision(True)
    assert may_work(Manners(), UNKNOWN, NOON) == RestDecision(True)


@pytest.mark.parametrize(
    ("moment", "works"),
    [(at(21, 59), False), (at(22), True), (at(23, 59), True), (at(0), True), (at(6, 59), True), (at(7), False)],
    ids=str,
)
def test_hours_over_midnight(moment: datetime, works: bool) -> None:
    assert may_work(manners_of(hours=["22-07"]), UNKNOWN, moment).work is works


def test_several_windows_and_when_the_next_one_opens() -> None:
    manners = manners_of(hours=["12:30-13", "18-20:15,22:30-07"])
    assert [may_work(manners, UNKNOWN, at(*time)).work for time in [(12, 29), (12, 30), (13, 0), (19, 0)]] == [
        False,
        True,
        False,
        True,
    ]
    assert may_work(manners, UNKNOWN, at(13)) == RestDecision(False, "outside its hours until 18:00", at(18))
    assert may_work(manners, UNKNOWN, at(20, 15)).until == at(22, 30)
    morning = may_work(manners_of(hours=["1-2"]), UNKNOWN, at(13))
    assert morning.until == at(1) + timedelta(days=1)


def test_a_window_may_end_with_the_day() -> None:
    manners = manners_of(hours=["22-24"])
    assert [may_work(manners, UNKNOWN, moment).work for moment in (at(21), at(23, 59), at(0))] == [False, True, False]


@given(st.integers(0, 1439), st.integers(0, 1439), st.integers(0, 1439))
def test_a_window_and_its_complement_share_every_minute_out(start: int, end: int, minute: int) -> None:
    if start == end:
        return
    moment = NOON.replace(hour=minute // 60, minute=minute % 60)
    (window,) = parse_hours([f"{start // 60}:{start % 60:02}-{end // 60}:{end % 60:02}"])
    (rest,) = parse_hours([f"{end // 60}:{end % 60:02}-{start // 60}:{start % 60:02}"])
    assert window.holds(moment) != rest.holds(moment)
    assert moment < window.opens(moment) <= moment + timedelta(days=1)
    assert window.holds(window.opens(moment))


def test_only_on_power_rests_on_battery_and_where_nobody_knows_it_works() -> None:
    manners = manners_of(only_on_power=True)
    assert may_work(manners, Power(False, 99.0), NOON).reason == "on battery until it is plugged in"
    assert may_work(manners, Power(True, 99.0), NOON).work
    assert may_work(manners, Power(None, 99.0), NOON).work
    assert may_work(manners, UNKNOWN, NOON).work


def test_a_battery_between_its_thresholds_does_not_make_it_waver() -> None:
    manners, decision = manners_of(battery_stop=30, battery_start=50), RestDecision(True)
    seen = []
    for plugged, percent in [(False, 40), (False, 31), (False, 30), (False, 31), (True, 49), (True, 50), (False, 45)]:
        decision = may_work(manners, Power(plugged, percent), NOON, decision)
        seen.append(decision.reason)
    assert seen == ["", "", "on battery until 50 %", "on battery until 50 %", "charging until 50 %", "", ""]


def test_a_battery_that_is_to_be_charged_is_remembered_through_other_reasons() -> None:
    manners = Manners(False, 30.0, 50.0, parse_hours(["22-07"]))
    low = may_work(manners, Power(False, 20.0), at(6, 59))
    closed = may_work(manners, Power(True, 35.0), at(12), low)
    assert (closed.reason, closed.charging) == ("outside its hours until 22:00", True)
    assert may_work(manners, Power(True, 40.0), at(23), closed).reason == "charging until 50 %"
    assert may_work(manners, Power(True, 40.0), at(23)).work


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 100)), min_size=1, max_size=30))
def test_it_never_works_at_the_lower_threshold_nor_rests_at_the_upper(course: list[tuple[bool, float]]) -> None:
    manners, decision = manners_of(battery_stop=30, battery_start=50), RestDecision(True)
    for plugged, percent in course:
        before, decision = decision, may_work(manners, Power(plugged, percent), NOON, decision)
        assert decision.work or percent < 50
        assert not decision.work or percent > 30
        assert decision.work == before.work or not 30 < percent < 50


@pytest.mark.parametrize("text", ["", "22", "22-", "25-07", "22:60-07", "7-7", "24-7", "22-07;", "a-b", "-1-7", "1-2,"])
def test_hours_that_are_none_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="hours"):
        parse_hours([text])


def test_thresholds_that_make_no_sense_are_refused() -> None:
    with pytest.raises(SettingsError, match="needs --battery-stop"):
        manners_of(battery_start=50)
    with pytest.raises(SettingsError, match="must be above"):
        manners_of(battery_stop=50, battery_start=50)
    with pytest.raises(SettingsError, match="must be above"):
        manners_of(battery_stop=100)
    assert manners_of(battery_stop=30).battery_start == 40 and manners_of(battery_stop=95).battery_start == 100


def test_a_minder_looks_at_power_and_clock_and_sleep_comes_first() -> None:
    power = [Power(False, 20.0)]
    minder = Minder(manners_of(battery_stop=30, battery_start=50), lambda: power[0], lambda: NOON)
    assert minder.resting == ""
    minder.look()
    assert (minder.resting, minder.power) == ("on battery until 50 %", Power(False, 20.0))
    minder.asleep = True
    assert minder.resting == "its machine sleeps"
    minder.asleep, power[0] = False, Power(True, 60.0)
    minder.look()
    assert minder.resting == ""


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir(exist_ok=True)
    for file, text in files.items():
        (folder / name / file).write_text(f"{text}\n")


@pytest.mark.skipif(sys.platform != "linux", reason="batteries are files on Linux alone")
def test_power_is_read_from_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linux_power, "FOLDER", tmp_path)
    assert read_power() == UNKNOWN
    supply(tmp_path, "ADP1", type="Mains", online="0")
    assert read_power() == UNKNOWN
    supply(tmp_path, "BAT0", type="Battery", capacity="37", status="Discharging")
    assert read_power() == Power(False, 37.0)
    supply(tmp_path, "ADP1", online="1")
    assert read_power() == Power(True, 37.0)
    supply(tmp_path, "BAT1", type="Battery", scope="System", capacity="63", status="Full")
    assert read_power() == Power(True, 50.0)
    supply(tmp_path, "BAT1", capacity="unreadable")
    assert read_power() == UNKNOWN
    monkeypatch.setattr(linux_power, "FOLDER", tmp_path / "nothing")
    assert read_power() == UNKNOWN


@pytest.mark.parametrize("status", ["Discharging", "Charging"])
def test_the_battery_of_a_mouse_is_none_of_its_machines(status: str, tmp_path: Path) -> None:
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", capacity="5", status=status)
    assert linux_power.read(tmp_path) == UNKNOWN
    supply(tmp_path, "macsmc-battery", type="Battery", capacity="80", status="Not charging")
    assert linux_power.read(tmp_path) == Power(True, 80.0)


@pytest.mark.parametrize(("status", "plugged"), [("Discharging", False), ("Full", True), ("Unknown", None)])
def test_without_a_mains_supply_the_battery_tells(status: str, plugged: bool | None, tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", capacity="50", status=status)
    assert linux_power.read(tmp_path).plugged is plugged


def test_a_call_that_fails_inside_is_no_news_of_power(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise TypeError

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(psutil, "sensors_battery", fails, raising=False)
    assert read_power() == UNKNOWN


def test_a_nap_is_what_one_clock_has_more_than_the_other() -> None:
    always, awake = [1000.0], [10.0]
    naps = Naps(lambda: always[0], lambda: awake[0])
    always[0], awake[0] = 1002.0, 12.0
    assert naps.slept_s() == 0
    always[0], awake[0] = 4604.0, 14.0
    assert naps.slept_s() == pytest.approx(3600)
    assert naps.slept_s() == 0


def test_the_systems_clocks_tell_of_no_sleep_while_it_is_awake() -> None:
    naps = Naps()
    assert all(naps.slept_s() < 0.5 for _ in range(100))
