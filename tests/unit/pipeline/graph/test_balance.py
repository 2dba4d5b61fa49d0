"""Where a model is cut: the largest stage is as small as can be."""

import itertools
import random

import pytest

from computeshare.pipeline.graph.balance import Segment, balanced, shares


def largest(segments: list[Segment], starts: list[int]) -> float:
    parts = shares(segments)
    return max(sum(parts[start:stop]) for start, stop in itertools.pairwise([0, *starts, len(segments)]))


def test_no_other_cuts_make_the_largest_stage_smaller() -> None:
    draw = random.Random(3)
    for _ in range(50):
        segments = [Segment(draw.randint(0, 9), draw.randint(0, 9), draw.randint(0, 9)) for _ in range(7)]
        stages = draw.randint(2, 5)
        found = balanced(segments, stages)
        others = itertools.combinations(range(1, 7), stages - 1)
        assert largest(segments, found) == pytest.approx(min(largest(segments, [*one]) for one in others))
        assert found == balanced(segments, stages) == sorted({*found})


def test_of_equal_cuts_the_one_with_less_data_across_is_taken() -> None:
    around = [Segment(4, 4), Segment(0, 0, 9), Segment(0, 0, 2), Segment(4, 4, 5)]
    assert balanced(around, 2) == [2]


def test_memory_counts_as_much_as_work() -> None:
    assert balanced([Segment(8, 1), Segment(1, 1), Segment(1, 8)], 2) in ([1], [2])
    assert balanced([Segment(1, 0), Segment(1, 0), Segment(1, 0), Segment(1, 9)], 2) == [3]


def test_each_stage_has_weights() -> None:
    bare = Segment(1, 1, weights=0)
    segments = [bare, Segment(9, 9), bare, Segment(1, 1), Segment(1, 1), bare]
    assert balanced(segments, 3) == [2, 4]
    with pytest.raises(ValueError, match="3 segments with weights do not make 4 stages"):
        balanced(segments, 4)


def test_more_stages_than_segments_is_an_error() -> None:
    with pytest.raises(ValueError, match="2 segments with weights do not make 3 stages"):
        balanced([Segment(1, 1), Segment(1, 1)], 3)
