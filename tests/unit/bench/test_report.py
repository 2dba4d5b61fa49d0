"""The document that `make bench` writes."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.__main__ import PARTS, Command, run, write
from bench.support.report import Part, Plot, Table, cell, markdown, median, merged, paired, svg
from bench.thin_cases import CASES, specs
from computeshare.jobspec.spec import JobSpec

PART = Part(
    [Table("Rates", ["what", "ours", "DDP"], [["rounds/s", 12.3456, None], ["a | b", 12_345.6, 3]], "A note.")],
    [Plot("rates", "Rates & more", "workers", "rounds/s", {"<ours>": [(1, 2.0), (64, 8.0)]}, True)],
    {"every": [1, 2]},
)


def test_a_table_has_three_digits_and_a_dash_for_what_there_is_not() -> None:
    assert [cell(value) for value in (12.3456, 0.012345, 12_345.6, 7, None, "x")] == [
        *("12.3", "0.0123", "12,346", "7", "-", "x")
    ]
    text = markdown(PART)
    assert "### Rates\n\n| what | ours | DDP |\n| --- | --- | --- |\n| rounds/s | 12.3 | - |\n" in text
    assert "| a \\| b | 12,346 | 3 |" in text and "![Rates & more](rates.svg)" in text


def test_a_row_of_pairs_takes_the_ratio_pair_by_pair() -> None:
    assert paired("rounds/s", [(1.0, 4.0), (2.0, 2.0), (9.0, 3.0)]) == ["rounds/s", 2.0, 3.0, 1.0]


def test_what_one_of_them_did_not_reach_has_no_median() -> None:
    assert median([1.0, None, 3.0]) is None and median([]) is None
    assert paired("seconds", [(1.0, 2.0), (1.0, None)]) == ["seconds", 1.0, None, None]


def test_a_plot_is_well_formed_and_puts_doublings_at_equal_distances() -> None:
    plot = Plot("x", "Rates & more", "workers", "<s>", {"<ours>": [(1, 2.0), (8, 8.0), (64, 4.0)]}, True)
    root = ElementTree.fromstring(svg(plot))
    (line,) = [node for node in root.iter() if node.get("id") == "<ours>"]
    path = next(node for node in line.iter() if node.tag.endswith("path")).attrib["d"]
    points = [tuple(map(float, point.split())) for point in path.removeprefix("M").split("L")]
    assert points[1][0] - points[0][0] == pytest.approx(points[2][0] - points[1][0], abs=0.2)
    assert points[1][1] < points[2][1] < points[0][1]  # upwards is more
    assert {"Rates & more", "<s>", "<ours>"} <= {node.text for node in root.iter()}


def test_a_plot_of_nothing_is_still_a_document() -> None:
    ElementTree.fromstring(svg(Plot("x", "none", "x", "y", {"a": []})))
    ElementTree.fromstring(svg(Plot("x", "one", "x", "y", {"a": [(0.0, 0.0)]})))


def test_a_part_is_the_same_after_it_was_saved(tmp_path: Path) -> None:
    PART.save(tmp_path / "deep" / "part.json")
    again = Part.load(tmp_path / "deep" / "part.json")
    assert markdown(again) == markdown(PART) and svg(again.plots[0]) == svg(PART.plots[0])
    assert markdown(merged([again, PART])).count("### Rates") == 2


def test_a_part_that_fails_or_is_skipped_does_not_hide_the_others(tmp_path: Path) -> None:
    parts = {
        "good": Command("bench.support.report"),
        "bad": Command("no.such.module"),
        "never": Command("bench.links", ("-h",)),
    }
    assert run("bad", True, tmp_path, parts).startswith("FAILED with 1: ")
    assert "No module named" in (tmp_path / "bad.log").read_text()
    PART.save(tmp_path / "good.json")
    (tmp_path / "bad.json").unlink(missing_ok=True)
    text = write(tmp_path, parts).read_text()
    assert "## good" in text and "## bad" not in text and (tmp_path / "rates.svg").exists()


def test_a_part_that_is_measured_again_does_not_show_what_it_found_before(tmp_path: Path) -> None:
    PART.save(tmp_path / "bad.json")
    run("bad", True, tmp_path, {"bad": Command("no.such.module")})
    assert not (tmp_path / "bad.json").exists()


@pytest.mark.parametrize("name", PARTS)
def test_every_part_is_a_module_that_is_there_and_writes_its_findings(name: str) -> None:
    line = PARTS[name].line(quick=True, results=Path("found.json"))
    assert line[:2] == [sys.executable, "-m"] and line[-2:] == ["--json", "found.json"]
    assert Path(*line[2].split(".")).with_suffix(".py").exists()


@pytest.mark.parametrize("name", CASES)
def test_all_in_a_case_see_as_many_samples_a_round_is_made_of(name: str) -> None:
    case = CASES[name]
    documents, peer = specs(case)
    assert documents and peer.micro_batches_per_round == 2
    for document in documents.values():
        plan = JobSpec.model_validate_json(json.dumps(document)).plan
        assert peer.micro_batch == document["micro_batch"]
        for one, rounds in ((plan, document["rounds"]), (peer.plan, peer.rounds_total)) if case.samples else ():
            seen = sum(one.round(version).samples for version in range(rounds))
            assert 0 <= seen - case.samples < one.micro_batch * one.micro_batches_per_round
