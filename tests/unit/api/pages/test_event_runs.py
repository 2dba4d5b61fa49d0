"""How a timeline is folded and grouped."""

from datetime import UTC, datetime

from api.pages.explanations import GROUPS, LONGEST_RUN, groups_of, runs
from api.schemas import EventPublic
from api.text_format import _SENTENCES


def events(*types: str) -> list[EventPublic]:
    return [EventPublic(id=n, type=kind, at=datetime.now(UTC), data={}) for n, kind in enumerate(types)]


def test_long_runs_of_checkpoints_and_scores_are_one_and_all_else_is_itself() -> None:
    found = runs(events("joined", *["checkpoint", "scored"] * 3, "left", *["scored"] * LONGEST_RUN))
    assert [(len(run.events), run.told) for run in found] == [
        (1, ""),
        (6, "6 checkpoints and scores"),
        (1, ""),
        *[(1, "")] * LONGEST_RUN,
    ]


def test_nothing_is_lost_or_moved() -> None:
    some = events(*["reassigned"] * 9, "scored", *["checkpoint"] * 5, "joined")
    assert [event for run in runs(some) for event in run.events] == some


def test_every_event_has_a_group_and_every_group_has_known_events() -> None:
    assert [groups_of(one) for one in events("joined", "banned", "scored", "failed", "created")] == [
        ["workers"],
        ["workers", "problems"],
        ["checkpoints"],
        ["problems"],
        ["job"],
    ]
    assert {kind for kinds in GROUPS.values() for kind in kinds} <= _SENTENCES.keys()
