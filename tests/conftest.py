"""What tests of every kind share."""

import os
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import structlog

from tests.support import sample
from tests.support.requirements import lacking

hypothesis.settings.register_profile("suite", deadline=None)  # the first example may import torch
hypothesis.settings.load_profile("suite")
LONG_TESTS, E2E_FILES = 1, 1
"""Of the long tests outside tests/e2e, and of the files in it, so many run with the whole suite."""
SLOW_SHARE = 0.25
"""Of the slow tests, so much runs with the whole suite."""
ALWAYS = ("test_bits.py", "test_pages.py")
"""The files in tests/e2e that always run: the promise of equal bits, and the job's page."""
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ],  # with all local variables, as by default, an error takes seconds to print
    logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),  # stdout is what a command answers
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what this commit's sample does not take: of the cases of a test; where nobody named files or tests,
    also of long and of slow tests, and of end-to-end files.
    """
    if sample.WHOLE:
        return
    left_out = _cases_left_out(items)
    is_whole = config.args_source is pytest.Config.ArgsSource.TESTPATHS and not config.option.keyword
    if is_whole:
        e2e = {item for item in items if item.nodeid.startswith("tests/e2e/")}
        left_out |= _files_left_out([item for item in e2e if item.path.name not in ALWAYS], E2E_FILES, "e2e")
        kept = [item for item in items if item not in left_out]
        long = [item for item in kept if item.get_closest_marker("long") and item not in e2e]
        slow = [item for item in kept if item.get_closest_marker("slow") and item not in long]
        left_out.update({*long}.difference(sample.of(long, LONG_TESTS, "long")))
        left_out.update({*slow}.difference(sample.of(slow, round(len(slow) * SLOW_SHARE), "slow")))
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]


def _cases_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Of the cases of a test marked `sampled(count)`, all but so many."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if marker := item.get_closest_marker("sampled"):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    kept = {item for (name, count), several in cases.items() for item in sample.of(several, count, name)}
    return {item for several in cases.values() for item in several} - kept


def _files_left_out(items: list[pytest.Item], count: int, name: str) -> set[pytest.Item]:
    """Those of the tests that are not in the sample of `count` files."""
    kept = sample.of(sorted({item.path for item in items}), count, name)
    return {item for item in items if item.path not in kept}


def _data_dir() -> Path:
    """COMPUTESHARE_DATA, else shared/data beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    return Path(os.environ.get("COMPUTESHARE_DATA") or beside)


@pytest.fixture(scope="session")
def shakespeare_dir() -> Path:
    """The folder that has tinyshakespeare's text."""
    folder = _data_dir()
    if not (folder / "tinyshakespeare" / "input.txt").is_file():
        lacking(f"no tinyshakespeare/input.txt in {folder}: set COMPUTESHARE_DATA to a folder that has it")
    return folder


@pytest.fixture(scope="session")
def mnist_dir() -> Path:
    """Where real MNIST is, in torchvision's layout."""
    folder = _data_dir()
    if not (folder / "MNIST" / "raw" / "train-images-idx3-ubyte").is_file():
        message = f"no MNIST in {folder}: set COMPUTESHARE_DATA to a folder that holds it in torchvision's layout"
        lacking(message)
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread in torch: another number gives other bits."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
