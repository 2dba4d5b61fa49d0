"""Which checkpoints lead to where a job stands."""

from computeshare.checkpoints.branch import Branch
from computeshare.types import Token


def token(incarnation: int, version: int) -> Token:
    return Token(incarnation, version, "0" * 16)


def holds(branch: Branch, incarnation: int) -> list[int]:
    """Which of ten versions of an incarnation the branch has."""
    return [version for version in range(10) if branch.holds(token(incarnation, version))]


def test_what_came_after_the_version_that_was_restored_is_given_up() -> None:
    branch = Branch().opened(1, None).opened(2, token(1, 3))
    assert holds(branch, 1) == [0, 1, 2, 3]
    assert holds(branch, 2) == holds(Branch(), 2) == list(range(10))


def test_a_branch_goes_through_all_incarnations_that_led_to_it() -> None:
    branch = Branch().opened(1, token(0, 0)).opened(2, token(1, 3)).opened(3, token(1, 2)).opened(4, token(3, 5))
    assert [holds(branch, incarnation) for incarnation in range(4)] == [[0], [0, 1, 2], [], [0, 1, 2, 3, 4, 5]]


def test_a_job_that_began_again_has_nothing_of_before() -> None:
    branch = Branch().opened(1, None).opened(2, None)
    assert holds(branch, 1) == []


def test_an_incarnation_without_a_record_counts_as_far_as_what_was_restored() -> None:
    branch = Branch().opened(7, token(6, 4))
    assert holds(branch, 5) == holds(branch, 6) == [0, 1, 2, 3, 4]
