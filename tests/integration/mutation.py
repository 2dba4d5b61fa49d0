"""Runs tests of the scripts with one script altered, in processes forked from one that has imported everything.

    python -m tests.integration.mutation < mutants.json

The input is a list of [script, source] (null for the scripts as they are), the output a list of pytest's exit codes.
As a plugin, this module stands in for the folder's conftest, whose imports take longer than the tests.
"""

import contextlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence

import hypothesis  # noqa: F401  # before the forks: pytest loads its plugin
import pytest
from redis import Redis

from computeshare.broker import connect
from computeshare.embedded import EmbeddedBroker
from computeshare.rounds.channel import Scripts
from tests.integration.opening import claim, join, store  # noqa: F401

TESTS = tuple(f"tests/integration/test_rounds{which}.py" for which in ("", "_checks", "_quorum", "_bad_workers"))
ENOUGH = {"close": TESTS[2:3], "discard": TESTS[2:3], "pardon": TESTS[3:4]}
"""Scripts that one file is all about."""
PROCESSES = 2


def main() -> None:
    """Read mutants, run the tests against each, at most two at a time, and print the exit codes."""
    mutants = json.load(sys.stdin)
    codes: dict[int, int] = {}
    running: dict[int, int] = {}
    for index, mutant in enumerate(mutants):
        running[_fork(mutant)] = index
        if len(running) == PROCESSES:
            _reap(running, codes)
    while running:
        _reap(running, codes)
    print(json.dumps([codes[index] for index in range(len(mutants))]))


def _fork(mutant: Sequence[str] | None) -> int:
    process = os.fork()
    if process:
        return process
    code = 70  # what is not pytest's own answer is no verdict
    with contextlib.suppress(BaseException):
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):
            os.dup2(nowhere, descriptor)
        if mutant:
            _alter(*mutant)
        options = [
            "--noconftest",
            "-x",
            "--assert=plain",
            "--tb=no",
            "-p",
            __spec__.name,
            "-p",
            "no:cacheprovider",
            "--timeout=20",
        ]
        code = int(pytest.main([*options, *ENOUGH.get(mutant[0] if mutant else "", TESTS)]))
    os._exit(code)


def _reap(running: dict[int, int], codes: dict[int, int]) -> None:
    process, status = os.wait()
    codes[running.pop(process)] = os.waitstatus_to_exitcode(status)


def _alter(name: str, source: str) -> None:
    unaltered = Scripts._load

    def load(self: Scripts, asked: str) -> str:
        if asked != name:
            return unaltered(self, asked)
        self._digests[name] = str(self._redis.script_load(source))
        return self._digests[name]

    Scripts._load = load  # type: ignore[method-assign, assignment]


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = EmbeddedBroker.start(tmp_path_factory.mktemp("broker") / "broker.log")
    yield broker.url
    broker.stop()


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = connect(redis_url, retries=0)
    yield client
    client.close()


@pytest.fixture
def job_id() -> str:
    return secrets.token_hex(4)


if __name__ == "__main__":
    main()
