"""What a comparison over thin links says, given its runs."""

from dataclasses import replace

import pytest

from bench.links import Shape
from bench.support.course import Course, Point
from bench.thin import Found, Run, tell
from bench.thin_cases import CASES, selected

CASE = replace(CASES["resnet18-20mbit"], shape=Shape(8, 20))
"""A link that carries a megabyte a second."""


def run_of(samples_per_s: float, busy: float = 0.5, megabytes_up: float = 1.0, lost: int = 0) -> Run:
    """A run of one round a second, in which two workers send so much up and half of it goes down."""
    points = [
        Point(
            version, version, int(version * samples_per_s), version * 1e6 * megabytes_up, version * 5e5 * megabytes_up
        )
        for version in range(1, 11)
    ]
    return Run(Course(tuple(points)), busy, lost=lost)


def told(ours: dict[str, list[Run]], peers: dict[str, list[Run]]) -> tuple[str, dict[str, dict[str, object]]]:
    """The note under the table, and its cells by row and column."""
    (table,) = tell("a case", CASE, Found(ours, peers, {})).tables
    return table.note, {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}


def test_our_fastest_is_compared_run_by_run_with_the_best_peer_and_with_plain_ddp() -> None:
    ours = {"slow": [run_of(10)] * 3, "fast": [run_of(100), run_of(300), run_of(200, lost=1)]}
    peers = {"DDP": [run_of(10)] * 3, "local SGD, 50 steps": [run_of(50), run_of(60), run_of(50)]}
    note, _ = told(ours, peers)
    assert note == (
        "fast: 4 times local SGD, 50 steps, the best peer (2 to 5); 20 times DDP, with its defaults (10 to 30). "
        "Runs: 3; workers taken for dead: 1."
    )


def test_plain_ddp_is_named_once_where_it_is_the_best_peer_or_did_not_take_part() -> None:
    alone, _ = told({"ours": [run_of(20)]}, {"DDP": [run_of(10)]})
    assert alone.count("times") == 1 and "2 times DDP, the best peer" in alone
    without, _ = told({"ours": [run_of(20)]}, {"DDP, fp16 hook": [run_of(40)]})
    assert without.count("times") == 1 and "0.5 times DDP, fp16 hook, the best peer" in without
    assert told({"ours": [run_of(20)]}, {})[0] == "ours: no peer. Runs: 1; workers taken for dead: 0."


def test_configurations_are_selected_by_name_and_an_unknown_name_is_told() -> None:
    ours = {"sync": {"codec": "auto"}, "local": {}}
    assert selected(ours, None) == ours
    assert [*selected(ours, ["local"])] == ["local"]
    with pytest.raises(SystemExit, match=r"no such configuration: \['locl'\]; there are \['sync', 'local'\]"):
        selected(ours, ["locl"])


def test_a_rounds_time_is_told_as_a_multiple_of_computing_and_the_longer_way() -> None:
    """Half a second of computing, a worker's half megabyte or more at a megabyte a second, 20 ms of round trip."""
    _, cells = told({"half": [run_of(10)], "longer": [run_of(10, 0.18, 1.6)]}, {"DDP": [run_of(10, 0.0, 4.0)]})
    column = "round's time by the formula"
    assert cells["ComputeShare: half"][column] == pytest.approx(1 / (0.5 + 0.5 + 0.02))
    assert cells["ComputeShare: longer"][column] == pytest.approx(1 / (0.18 + 0.8 + 0.02))
    assert cells["DDP"][column] == pytest.approx(1 / 2.02)


def test_accuracy_after_equal_samples_is_that_without_a_link_where_a_peer_was_scored_so() -> None:
    def scored(*accuracies: float) -> list[Run]:
        runs = [run_of(10) for _ in accuracies]
        return [
            replace(run, course=replace(run.course, accuracy={10: at}))
            for run, at in zip(runs, accuracies, strict=True)
        ]

    ours, peers = scored(0.9, 0.7, 0.8), [run_of(5)] * 3
    found = Found({"ours": ours}, {"DDP": peers}, {"DDP": scored(0.5, 0.6, 0.4)})
    (table,) = tell("a case", replace(CASE, score_every=1), found).tables
    cells = {str(row[0]): dict(zip(table.columns, row, strict=True)) for row in table.rows}
    after, between = "accuracy after 100 samples, %", "range of accuracy"
    assert (cells["ComputeShare: ours"][after], cells["ComputeShare: ours"][between]) == (pytest.approx(80), "70 to 90")
    assert (cells["DDP"][after], cells["DDP"][between]) == (pytest.approx(50), "40 to 60")

    unscored = replace(found, ours={"ours": [*ours[:2], run_of(10)]})
    (table,) = tell("a case", replace(CASE, score_every=1), unscored).tables
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert (row[after], row[between]) == (None, None)
