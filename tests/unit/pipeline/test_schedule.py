"""In which order a worker computes the pieces on its stages."""

import itertools

import pytest

from computeshare.pipeline.schedule import Kind, Operation, most_in_flight, operations

CASES = [*itertools.product(("gpipe", "1f1b"), (1, 2, 3, 5), (1, 2, 4, 9))]


def groups(stages: int) -> list[list[range]]:
    """All ways to share out consecutive stages."""
    found = []
    for borders in itertools.product((False, True), repeat=stages - 1):
        ends = [0, *(place for place, border in enumerate(borders, 1) if border), stages]
        found.append([range(start, stop) for start, stop in itertools.pairwise(ends)])
    return found


@pytest.mark.parametrize(("kind", "stages", "pieces"), CASES)
def test_no_sharing_of_stages_waits_for_itself_and_pieces_keep_their_order(
    kind: Kind, stages: int, pieces: int
) -> None:
    """Each worker does its next operation as soon as what it needs was done: all of them come to an end."""
    for shared in groups(stages):
        orders = [operations(kind, held, stages, pieces) for held in shared]
        done: list[Operation] = []
        while any(orders):
            ready = [order for order in orders if order and needs(order[0], stages) <= {*done}]
            assert ready, (shared, orders)
            done.append(ready[0].pop(0))
        assert len(done) == len({*done}) == 2 * stages * pieces
        for stage in range(stages):
            for direction in ("forward", "backward"):
                own = [one.piece for one in done if one.stage == stage and one.direction == direction]
                assert own == [*range(pieces)]


def needs(one: Operation, stages: int) -> set[Operation]:
    if one.direction == "forward":
        return {Operation("forward", one.stage - 1, one.piece)} if one.stage else set()
    after = {Operation("backward", one.stage + 1, one.piece)} if one.stage < stages - 1 else set()
    return {Operation("forward", one.stage, one.piece), *after}


@pytest.mark.parametrize(("kind", "stages", "pieces"), CASES)
def test_a_worker_keeps_as_many_pieces_as_is_foretold(kind: Kind, stages: int, pieces: int) -> None:
    for held in {held for shared in groups(stages) for held in shared}:
        kept, most = 0, 0
        for one in operations(kind, held, stages, pieces):
            if one.stage == held.start:
                kept += 1 if one.direction == "forward" else -1
                most = max(most, kept)
        assert most == most_in_flight(kind, held, stages, pieces)


def test_1f1b_keeps_fewer_pieces_than_gpipe() -> None:
    assert [most_in_flight("1f1b", range(stage, stage + 1), 3, 8) for stage in range(3)] == [3, 2, 1]
    assert [most_in_flight("gpipe", range(stage, stage + 1), 3, 8) for stage in range(3)] == [8, 8, 8]


def test_the_order_of_a_stage_in_the_middle() -> None:
    order = operations("1f1b", range(1, 2), 3, 3)
    assert [f"{one.direction[0]}{one.piece}" for one in order] == ["f0", "f1", "b0", "f2", "b1", "b2"]
