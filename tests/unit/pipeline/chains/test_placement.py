"""Which workers hold which stages: within their memory, the slowest as fast as can be, and no change without a gain."""

import itertools
import random

import pytest

from computeshare.pipeline.chains.placement import (
    Held,
    Placement,
    StageDemand,
    StageWorker,
    chain_seconds,
    circumstances,
    place,
    successor,
)

STAGES = [StageDemand(100, 1.0)] * 4


def member(name: str, room: int = 0, rate: float = 0.0) -> StageWorker:
    return StageWorker(name, f"session of {name}", room, rate)


def runs(chain: tuple[Held, ...]) -> dict[str, tuple[int, int]]:
    return {held.worker: (held.first, held.stop) for held in chain}


def test_a_worker_is_a_member_with_the_memory_and_the_rate_that_it_tells() -> None:
    assert StageWorker.parse("a", "session of a", b'{"room_bytes":100,"rate":2.5}') == member("a", 100, 2.5)
    assert StageWorker.parse("a", "session of a", '{"room_bytes":0,"rate":0}') == member("a")


@pytest.mark.parametrize(
    "about",
    [
        *(f'{{"room_bytes":0,"rate":{rate}}}' for rate in ("1e999", "-1", "NaN", "1e308", "1e-320", "null", "9" * 400)),
        *(f'{{"room_bytes":{room},"rate":1}}' for room in ("1e999", "-1", "NaN", "[]", "9" * 400)),
        *("{}", "[]", "no JSON", "[" * 60_000),
    ],
    ids=lambda about: about[:30],
)
def test_a_worker_that_tells_nonsense_is_no_member(about: str) -> None:
    assert StageWorker.parse("a", "session of a", about) is None


def test_one_worker_holds_all_stages() -> None:
    (chain,) = place([member("a")], STAGES, 1)
    assert runs(chain) == {"a": (0, 4)}


def test_fewer_workers_than_stages_hold_several_by_speed() -> None:
    (chain,) = place([member("slow", rate=1), member("fast", rate=3)], STAGES, 1)
    lengths = {held.worker: held.stop - held.first for held in chain}
    assert lengths == {"slow": 1, "fast": 3}


def test_a_worker_holds_no_more_than_its_memory() -> None:
    (chain,) = place([member("small", 100, 9), member("large", 300, 1)], STAGES, 1)
    lengths = {held.worker: held.stop - held.first for held in chain}
    assert lengths == {"small": 1, "large": 3}


def test_stages_that_do_not_fit_are_placed_nowhere() -> None:
    assert place([member("a", 100), member("b", 200)], STAGES, 1) == ()
    assert place([], STAGES, 1) == ()


def test_twice_as_many_workers_form_two_chains_but_no_more_than_there_are_micro_batches() -> None:
    members = [member(name) for name in "abcdefgh"]
    chains = place(members, STAGES, 2)
    assert [len(chain) for chain in chains] == [4, 4]
    assert {held.worker for chain in chains for held in chain} == {*"abcdefgh"}
    assert len(place(members, STAGES, 1)) == 1
    assert len(place(members[:7], STAGES, 2)) == 1, "seven workers are no two chains"


def test_every_chain_has_all_stages_in_order_whatever_the_workers() -> None:
    draw = random.Random(7)
    for _ in range(200):
        stages = [StageDemand(draw.randrange(1, 50), draw.uniform(0.1, 3)) for _ in range(draw.randrange(2, 7))]
        names = draw.sample("abcdefghij", draw.randrange(1, 9))
        members = [member(one, draw.choice([0, 40, 90, 200]), draw.choice([0.0, 1.0, 5.0])) for one in names]
        most = draw.randrange(1, 4)
        chains = place(members, stages, most)
        assert chains == place(members[::-1], stages, most) and len(chains) <= most
        rooms = {one.worker: one.room_bytes for one in members}
        for chain in chains:
            assert [chain[0].first, *(one.stop for one in chain)] == [*(one.first for one in chain), len(stages)]
            for held in chain:
                needed = sum(stages[one].bytes for one in held.stages)
                assert not rooms[held.worker] or needed <= rooms[held.worker]
        everyone = [held.worker for chain in chains for held in chain]
        assert len(everyone) == len({*everyone})


def test_no_other_division_of_a_chain_is_faster() -> None:
    stages = [StageDemand(1, work) for work in (1.0, 3.0, 2.0, 1.5)]
    members = [member("a", rate=2), member("b", rate=1), member("c", rate=1.5)]
    (chain,) = place(members, stages, 1)
    found = chain_seconds(chain, members, stages)
    for order in itertools.permutations(members):
        for first, second in itertools.combinations_with_replacement(range(5), 2):
            stops = [0, first, second, 4]
            other = max(
                sum(one.work for one in stages[start:stop]) / worker.rate
                for worker, (start, stop) in zip(order, itertools.pairwise(stops), strict=True)
            )
            assert found <= other + 1e-9


def placed(members: list[StageWorker], number: int = 1) -> Placement:
    return Placement(number, place(members, STAGES, 1))


def test_a_worker_that_went_is_replaced_at_once() -> None:
    old = placed([member("a"), member("b")])
    new = successor(old, [member("a"), member("c")], STAGES, 1)
    assert new and new.number == 2 and {held.worker for held in new.chains[0]} == {"a", "c"}
    alone = successor(old, [member("b")], STAGES, 1)
    assert alone and runs(alone.chains[0]) == {"b": (0, 4)}


def test_a_placement_without_its_workers_is_given_up_even_if_the_stages_do_not_fit_the_rest() -> None:
    old = placed([member("a", 200), member("b", 200)])
    new = successor(old, [member("b", 200)], STAGES, 1)
    assert new and new.chains == ()
    assert successor(new, [member("b", 200)], STAGES, 1) is None


def test_a_gain_counts_once_workers_are_measured() -> None:
    old = placed([member("a"), member("b")])
    new = successor(old, [member("a", rate=1), member("b", rate=3)], STAGES, 1)
    assert new and runs(new.chains[0])["b"] in ((0, 3), (1, 4))


def test_a_worker_that_is_twice_as_fast_gets_the_larger_of_two_stages() -> None:
    unequal = [StageDemand(1, 2.0), StageDemand(1, 4.0)]
    for fast in "ab":
        members = [member(one, rate=2.0 if one == fast else 1.0) for one in "ab"]
        (chain,) = place(members, unequal, 1)
        assert runs(chain)[fast] == (1, 2) and len(chain) == 2


def test_another_placement_is_looked_for_when_others_come_or_speeds_change() -> None:
    now = circumstances([member("a", 9, 100.0), member("b", 9, 100.0)])
    assert circumstances([member("a", 9, 101.0), member("b", 9, 99.0)]) == now
    assert circumstances([member("a", 9, 100.0), member("b", 9, 30.0)]) != now
    assert circumstances([member("a", 9, 100.0), member("b", 9)]) != now, "not measured"
    assert circumstances([member("a", 9, 100.0), member("b", 9, 100.0), member("c", 9)]) != now


def test_a_faster_worker_that_came_later_is_given_stages() -> None:
    slow = [member("a", rate=1), member("b", rate=1)]
    old = placed(slow)
    assert successor(old, [*slow, member("c")], STAGES, 1) is None, "not measured, it counts as one of them"
    new = successor(old, [*slow, member("c", rate=4)], STAGES, 1)
    assert new and runs(new.chains[0])["c"] in ((0, 3), (1, 4))


def test_a_placement_stays_without_a_gain() -> None:
    old = placed([member("a"), member("b")])
    assert successor(old, [member("a", rate=1), member("b", rate=1.1)], STAGES, 1) is None


def test_a_plan_is_read_as_it_was_written() -> None:
    old = placed([member("a"), member("b")])
    assert Placement.parse(1, old.dump(), len(STAGES)) == old
    assert Placement.parse(0, "", len(STAGES)) == Placement(0)
    assert Placement.parse(1, '{"chains":[]}', len(STAGES)) == Placement(1)


def test_a_plan_without_all_stages_in_order_is_none() -> None:
    (chain,) = placed([member("a"), member("b")]).chains
    for wrong in (chain[:1], chain[1:], chain[::-1], (*chain, chain[-1]), ()):
        assert Placement.parse(1, Placement(1, (wrong,)).dump(), len(STAGES)) is None
