"""When a recipe's job is given up, and how long its workers wait."""

import pytest

from api.scheduler.recipe_seats import Failure, RecipeJob, hopeless, left_out, without_package
from computeshare.queue import WorkerInfo

JOB = RecipeJob("j1", "default", "sha256:" + "a1" * 32)


def failed(*workers: str) -> list[Failure]:
    return [Failure("j1", worker, f"line {number}", 1000 * number) for number, worker in enumerate(workers)]


@pytest.mark.parametrize(
    ("workers", "able", "why"),
    [
        ("aa", "a", None),
        ("aaa", "a", "line 2"),
        ("aaaaa", "ab", None),
        ("aab", "ab", "line 2"),
        ("abc", "ab", "line 2"),
        ("aaa", "", None),
        ("abc", "abcdefgh", "line 2"),
        ("aabb", "abcdefgh", None),
    ],
    ids=[
        "too few",
        "one worker",
        "not on the other",
        "on both",
        "on one that has left",
        "nobody is there",
        "on three of many",
        "on two of many",
    ],
)
def test_a_job_is_given_up_once_its_recipe_failed_on_all_workers_or_on_three(
    workers: str, able: str, why: str | None
) -> None:
    names = {"a": "mac-a", "b": "mac-b", "c": "mac-c"}
    given_up = hopeless(failed(*workers), [JOB], {"j1": set(able)}, set(), names)
    assert given_up.keys() == ({"j1"} if why else set())
    if why:
        told = f"({len(set(workers))}), last on mac-{workers[-1]}: {why}. Mend it"
        assert told in given_up["j1"] and "recipes check --confined" in given_up["j1"]


def test_a_job_is_not_given_up_while_a_worker_trains_it() -> None:
    found, able = failed(*"abc"), {"j1": set("abcd")}
    assert not hopeless(found, [JOB], able, {("j1", "d")}, {})
    assert hopeless(found, [JOB], able, {("another", "d")}, {})


def test_the_workers_of_one_machine_do_not_end_a_job_that_others_can_serve() -> None:
    found, able = failed("aaaaaaaa0001", "aaaaaaaa0002", "aaaaaaaa0003"), {"aaaaaaaa0001", "bbbbbbbbgood"}
    assert not hopeless(found, [JOB], {"j1": able}, set(), {})
    assert hopeless(found, [JOB], {"j1": able - {"bbbbbbbbgood"}}, set(), {})


def test_a_worker_waits_longer_with_every_failure() -> None:
    for times, seconds in ((1, 10), (2, 30), (3, 60), (9, 600)):
        found = failed(*"a" * times)
        end_ms = found[-1].at_ms + 1000 * seconds
        for now_ms, paused in ((end_ms - 1, {("j1", "a")}), (end_ms, set())):
            troubles, pairs = left_out(found, {"a": "mac"}, now_ms)
            assert (troubles, pairs) == ({("j1", "a"): f"the recipe failed on mac: line {times - 1}"}, paused)


def test_workers_that_are_away_are_not_named() -> None:
    assert left_out(failed("a"), {}, 0) == ({}, set())


def test_a_worker_without_the_recipes_package_or_with_another_version_is_told_what_to_install() -> None:
    def worker(name: str, *queues: str, **packages: str) -> WorkerInfo:
        return WorkerInfo(name * 12, name, "cpu", queues, {}, 1, "host", 1, packages=packages)

    workers = [
        worker("a", "q", blobs="mine 1.0"),
        worker("b", "q", blobs="mine 0.9"),
        worker("c", "q"),
        worker("d", "r"),
    ]
    job, other = RecipeJob("job", "q", "package:blobs", "mine 1.0"), RecipeJob("other", "q", "sha256:aa")
    assert without_package([job, other], workers) == {
        ("job", "b" * 12): "b has mine 0.9, and the job needs mine 1.0: "
        "install mine==1.0 there, then start the worker again",
        ("job", "c" * 12): "c has no recipe blobs: install mine==1.0 there, then start the worker again",
    }
