"""Runs tests of the scripts with one script altered, in processes forked from one that has collected them.

    python -m tests.support.mutation < mutants.json

The input is a list of [script, source], the output a list of exit codes, the first for the scripts as they are: 0, all
tests passed; 1, one failed; anything else is no verdict. A broker that a mutant has left unable to answer is replaced
before the next mutant, which would fail whatever it is. A mutant meets the tests that call its script (no other could
notice), those that noticed its fellows first, until one fails. As a plugin, this module stands in for the folder's
conftest, whose imports take longer than the tests.
"""

import contextlib
import json
import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing.sharedctypes import RawArray
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import RedisError

from computeshare.protocol import scripts
from computeshare.protocol.scripts import Script, Scripts
from computeshare.transport.connections import connect
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.support.rounds import join, reducer, store  # noqa: F401

TESTS = tuple(
    f"tests/integration/protocol/rounds/test_{which}.py"
    for which in (
        "peers",
        "placements",
        "delay",
        "drafts",
        "rounds",
        "checks",
        "quorum",
        "bad_workers",
        "windows",
        "news",
        "terms",
        "backlog",
        "doubts",
        "shares",
        "audits",
    )
)
OPTIONS = ("--noconftest", "--assert=plain", "--tb=no", "-p", "no:cacheprovider", "--timeout=20")
PROCESSES = 2
NO_VERDICT = 70
NOBODY = -1
URL = pytest.StashKey[str]()


class Trials:
    """Stands in for pytest's loop over the tests: once for the scripts as they are, then once for each mutant."""

    def __init__(self, mutants: Sequence[tuple[str, str]], brokers: list[EmbeddedBroker]) -> None:
        """`brokers`: one for each mutant that is tried at a time."""
        self.mutants, self.brokers = mutants, brokers
        self.codes = [NO_VERDICT] * (1 + len(mutants))
        self._callers: dict[str, list[int]] = {}
        self._killers = RawArray("i", [NOBODY] * len(mutants))
        self._running: dict[int, tuple[int, int]] = {}
        """By process: the numbers of its mutant and of its broker."""

    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[URL] = self.brokers[0].url

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self._run_unaltered(session)
        for number in range(len(self.mutants) if self.codes[0] == 0 else 0):
            if len(self._running) == len(self.brokers):
                self._reap()
            self._fork(session, number)
        while self._running:
            self._reap()
        return True

    def _run_unaltered(self, session: pytest.Session) -> None:
        """All tests; remembers which of them call which script, those that call little else first."""
        called: Counter[str] = Counter()
        shares: dict[str, dict[int, float]] = {}
        unaltered = Scripts.digest

        def digest(scripts: Scripts, name: str) -> str:
            called[name] += 1
            return unaltered(scripts, name)

        Scripts.digest = digest  # type: ignore[method-assign]
        for index, item in enumerate(session.items):
            called.clear()
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            for script, times in called.items():
                shares.setdefault(script, {})[index] = times / called.total()
        Scripts.digest = unaltered  # type: ignore[method-assign]
        self._callers = {script: sorted(among, key=among.__getitem__, reverse=True) for script, among in shares.items()}
        self.codes[0] = min(session.testsfailed, 1)

    def _order(self, number: int) -> list[int]:
        """Numbers of the tests that call a mutant's script, those that noticed another mutant of it first."""
        script = self.mutants[number][0]
        fellows = [self._killers[i] for i, mutant in enumerate(self.mutants) if mutant[0] == script]
        killers = [index for index in dict.fromkeys(reversed(fellows)) if index != NOBODY]
        return [*killers, *(index for index in self._callers.get(script, []) if index not in killers)]

    def _fork(self, session: pytest.Session, number: int) -> None:
        order = self._order(number)
        place = min({*range(len(self.brokers))} - {place for _, place in self._running.values()})
        if process := os.fork():
            self._running[process] = number, place
            return
        session.config.stash[URL] = self.brokers[place].url
        code = NO_VERDICT
        with contextlib.suppress(BaseException):
            code = self._try(session, number, order)
        os._exit(code)

    def _try(self, session: pytest.Session, number: int, order: Sequence[int]) -> int:
        session.config.pluginmanager.unregister(name="terminalreporter")
        _alter(*self.mutants[number])
        session.testsfailed = 0
        for index in order:
            item = session.items[index]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            if session.testsfailed:
                self._killers[number] = index
                return 1
        return 0

    def _reap(self) -> None:
        process = 0
        while process not in self._running:  # a broker may have ended too
            process, status = os.wait()
        number, place = self._running.pop(process)
        self.codes[1 + number] = os.waitstatus_to_exitcode(status)
        if not _answers(self.brokers[place]):
            self.brokers[place].stop()
            self.brokers[place] = EmbeddedBroker.start(self.brokers[place].log_path)


def _answers(broker: EmbeddedBroker) -> bool:
    """Whether a command gets through: a mutant's script may run for ever."""
    client = Redis.from_url(broker.url, socket_timeout=2)
    try:
        return bool(client.set("probe", ""))
    except RedisError:
        return False
    finally:
        client.close()


def _alter(name: str, source: str) -> None:
    unaltered, altered = scripts.script, Script(name, source)
    scripts.script = lambda asked: altered if asked == name else unaltered(asked)  # type: ignore[assignment]


@pytest.fixture
def redis_url(pytestconfig: pytest.Config) -> str:
    return pytestconfig.stash[URL]


@pytest.fixture
def redis(redis_url: str) -> Iterator[Redis]:
    client = connect(redis_url, retries=0)
    yield client
    client.close()


@pytest.fixture
def job_id() -> str:
    return secrets.token_hex(4)


def main() -> None:
    """Read mutants, try each, and print the exit codes."""
    mutants = [(script, source) for script, source in json.load(sys.stdin)]
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        brokers = [EmbeddedBroker.start(Path(folder) / f"broker-{place}.log") for place in range(PROCESSES)]
        try:
            trials = Trials(mutants, brokers)
            pytest.main([*OPTIONS, *TESTS], plugins=[sys.modules[__name__], trials])
        finally:
            for broker in brokers:
                broker.stop()
    print(json.dumps(trials.codes))


if __name__ == "__main__":
    main()
