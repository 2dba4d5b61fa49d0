"""Parts of the next version that are read before its commit."""

from collections.abc import Iterator

import pytest

from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.worker_session import NO_DRAFT, WorkerSession
from computeshare.worker.seat.drafts.draft_reader import DraftReader
from tests.support.rounds import ONE, ZERO, Join
from tests.support.wait import wait_until

ROOM = [memoryview(bytearray(10)) for _ in range(3)]


@pytest.fixture
def reader(join: Join) -> Iterator[DraftReader]:
    first = join("a")
    own = WorkerSession(first.redis, first.keys.job_id, "a", first.session_id)
    with DraftReader(own) as reader:
        yield reader


def test_it_reads_the_parts_of_the_version_that_is_wanted(reader: DraftReader, reducer: ReducerSession) -> None:
    assert reducer.draft(ZERO, "f" * 32, 2, b"early")
    reader.begin(str(ZERO), ROOM)
    reader.begin(str(ZERO), ROOM)
    assert reducer.draft(ZERO, "f" * 32, 1, b"later")
    wait_until(lambda: reader._parts.keys() == {1, 2}, 5)
    draft = reader.take()
    assert (draft.token, draft.name) == (str(ZERO), "f" * 32)
    assert {part: bytes(blob) for part, blob in draft.parts.items()} == {1: b"later", 2: b"early"}
    assert reader.take() == NO_DRAFT


def test_parts_that_are_told_before_they_are_wanted_are_read_once_they_are(
    reader: DraftReader, reducer: ReducerSession
) -> None:
    reader.begin("another", ROOM)
    assert reducer.draft(ZERO, "f" * 32, 2, b"early")
    wait_until(lambda: bool(reader._told), 5)
    reader.begin(str(ZERO), ROOM)
    wait_until(lambda: reader._parts.keys() == {2}, 5)
    assert bytes(reader.take().parts[2]) == b"early" and reader._told == []


def test_a_newer_draft_takes_the_place_of_one_that_was_given_up(reader: DraftReader, reducer: ReducerSession) -> None:
    reader.begin(str(ZERO), ROOM)
    reducer.draft(ZERO, "a" * 32, 1, b"old 1")
    reducer.draft(ZERO, "a" * 32, 2, b"old 2")
    wait_until(lambda: reader._parts.keys() == {1, 2}, 5)
    reducer.draft(ZERO, "b" * 32, 1, b"new 1")
    wait_until(lambda: reader._name == "b" * 32, 5)
    draft = reader.take()
    assert {part: bytes(blob) for part, blob in draft.parts.items()} == {1: b"new 1"}
    assert draft.bytes == len(b"old 1" + b"old 2" + b"new 1") and reader.take().bytes == 0


def test_parts_of_another_version_or_of_none_are_left_out(reader: DraftReader, reducer: ReducerSession) -> None:
    reader.begin(str(ONE), ROOM)
    reducer.draft(ZERO, "a" * 32, 1, b"another")
    told = {"token": str(ONE), "name": "c" * 32, "part": "1"}
    reducer.redis.xadd(reducer.keys.drafts(), told)  # type: ignore[arg-type]
    reducer.redis.xadd(reducer.keys.drafts(), told | {"part": "7"})  # type: ignore[arg-type]
    wait_until(lambda: reader._name == "c" * 32, 5)
    assert reader.take() == NO_DRAFT


def test_what_cannot_be_read_is_left_to_the_commit(reader: DraftReader, reducer: ReducerSession) -> None:
    reader.begin(str(ZERO), ROOM)
    reducer.redis.set(reducer.keys.drafts(), "no stream")
    reducer.redis.delete(reducer.keys.drafts())
    reducer.draft(ZERO, "a" * 32, 0, b"longer than the room")
    reducer.draft(ZERO, "a" * 32, 1, b"fits")
    wait_until(lambda: bool(reader._parts), 5)
    assert reader.take().parts.keys() == {1}
