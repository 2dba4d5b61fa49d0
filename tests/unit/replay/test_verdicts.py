"""What a replay makes of digests and kinds, and which versions it takes: pure."""

from typing import Any

import pytest

from computeshare.cli.jobs.replay import mismatch_line
from computeshare.errors import SpecError
from computeshare.replay.replay import Checked, Kinds, bounds, judge, kind_differences
from computeshare.types import Kind
from tests.support.http_answers import job

HERE: Kind = {"device": "cpu", "torch": "2.15.0", "threads": 1}
OTHER: Kind = {**HERE, "torch": "2.14.0"}
ALIKE = Kinds({"a": [HERE], "b": [HERE]}, HERE)
MIXED = Kinds({"a": [HERE], "b": [OTHER]}, HERE)


def checked(version: int, same: bool | None = True, *workers: str) -> Checked:
    """A version that came out the same, or not, or has no record."""
    return Checked(version, None if same is None else "aa" if same else "bb", "aa", frozenset(workers or "a"))


def test_versions_without_a_record_neither_match_nor_differ() -> None:
    verdict = judge([checked(1), checked(2, None), checked(3)], ALIKE, HERE, HERE)
    assert (verdict.outcome, verdict.matched, verdict.unrecorded, verdict.mismatches) == ("matches", 2, 1, ())


def test_the_first_of_several_mismatches_is_named() -> None:
    verdict = judge([checked(1), checked(2, False), checked(3), checked(4, False)], ALIKE, HERE, HERE)
    assert (verdict.outcome, verdict.first_mismatch, verdict.matched) == ("mismatch", 2, 2)
    assert [one.version for one in verdict.mismatches] == [2, 4]
    assert mismatch_line(verdict.mismatches[0]) == "version 2: recorded bb, recomputed aa"


def test_another_kind_that_took_no_part_in_a_version_excuses_nothing() -> None:
    versions = [checked(1, True, "b"), checked(2, False, "a"), checked(3, False, "b")]
    assert judge(versions, MIXED, HERE, HERE).outcome == "mismatch"


@pytest.mark.parametrize("before", [checked(1, True, "a"), checked(1, None, "a")])
def test_another_kind_that_took_part_excuses_a_mismatch_and_is_named(before: Checked) -> None:
    verdict = judge([before, checked(2, False, "a", "b")], MIXED, HERE, HERE)
    assert (verdict.outcome, verdict.differences) == ("other kind", ("torch: 2.15.0 here, 2.14.0 there",))


def test_another_kind_in_a_version_without_a_record_excuses_what_follows_from_it() -> None:
    versions = [checked(1), checked(2, None, "b"), checked(3, False, "a")]
    assert judge(versions, MIXED, HERE, HERE).outcome == "other kind"


def test_a_worker_whose_kind_is_not_recorded_excuses_nothing() -> None:
    assert judge([checked(1, False, "a")], Kinds({"a": []}, None), HERE, HERE).outcome == "mismatch"


def test_a_worker_that_was_two_kinds_of_machine_excuses() -> None:
    kinds = Kinds({"a": [OTHER, HERE]}, HERE)
    assert judge([checked(1, False, "a")], kinds, HERE, HERE).outcome == "other kind"


def test_a_reducer_of_another_kind_excuses() -> None:
    verdict = judge([checked(1, False)], Kinds({"a": [HERE]}, OTHER), HERE, HERE)
    assert (verdict.outcome, verdict.differences) == ("other kind", ("reducer's torch: 2.15.0 here, 2.14.0 there",))


def test_a_kind_that_says_more_is_another_one() -> None:
    assert kind_differences(HERE, {**HERE, "cuda": "13.2"}) == ["cuda: none here, 13.2 there"]
    assert kind_differences(HERE, dict(reversed(HERE.items()))) == []


@pytest.mark.parametrize(
    ("status", "first", "last", "found"),
    [
        ("running", 0, None, (0, 20)),
        ("paused", 5, None, (5, 20)),
        ("completed", 0, None, (0, 25)),
        ("failed", 0, 25, (0, 25)),
        ("running", 3, 4, (3, 4)),
    ],
)
def test_a_replay_goes_to_the_newest_version_that_cannot_be_done_again(
    status: Any, first: int, last: int | None, found: tuple[int, int]
) -> None:
    assert bounds(job(status=status), first, last) == found


@pytest.mark.parametrize(("first", "last"), [(0, 21), (20, None), (7, 7), (9, 3), (-1, 5)])
def test_a_range_that_is_none_is_answered_with_those_there_are(first: int, last: int | None) -> None:
    with pytest.raises(SpecError, match="at most 20"):
        bounds(job(), first, last)


def test_a_job_that_has_nothing_durable_is_not_replayed() -> None:
    with pytest.raises(SpecError, match="no durable version yet"):
        bounds(job(durable_version=0), 0, None)
