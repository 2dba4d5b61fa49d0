"""What becomes of a job's events while no control plane takes them: one test per rule of the scripts."""

import json
from typing import Any

import pytest
from redis import Redis

from computeshare.protocol import reducer_session
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from tests.support.rounds import ONE, ZERO, Join, commit, events, fill

SECONDS = {"waiting": 0.1, "computing": 0.2, "encoding": 0.01, "uploading": 0.02}
RIGHT: dict[str, Any] = {"outcome": "stale", "worker": "a", "nonce": "n", "base": str(ZERO), "current": str(ONE)}
RIGHT |= {"micro_batches": [1], "counted": [], "bytes_up": 10, "bytes_down": 20, "seconds": SECONDS}


@pytest.fixture(autouse=True)
def bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reducer_session, "EVENTS_KEPT", 4)
    monkeypatch.setattr(reducer_session, "EVENTS_FOLDED", 3)


@pytest.fixture
def quiet(reducer: ReducerSession) -> ReducerSession:
    """A reducer whose job has told of nothing that is still there, on a broker that it knows."""
    reducer.fold()
    reducer.take("0-0", 100)
    reducer.redis.xtrim(reducer.keys.events(), 0, approximate=False)
    reducer.redis.unlink(reducer.keys.backlog())
    return reducer


def tell(store: RoundStore, kind: str = "submission", /, at: int = 7, **data: Any) -> str:
    fields: Any = {"type": kind, "at": at, "data": json.dumps((RIGHT if kind == "submission" else {}) | data)}
    return str(store.redis.xadd(store.keys.events(), fields).decode())  # type: ignore[union-attr]


def all_of(store: RoundStore) -> list[tuple[str, str]]:
    """Id and type of everything, the oldest first."""
    keys = (store.keys.backlog(), store.keys.events())
    entries: list[Any] = [entry for key in keys for entry in store.redis.xrange(key)]  # type: ignore[union-attr]
    return [(stream_id.decode(), fields[b"type"].decode()) for stream_id, fields in entries]


def folded(store: RoundStore) -> dict[str, Any]:
    """The only counts that were folded."""
    entries: Any = store.redis.xrange(store.keys.backlog())
    (only,) = [json.loads(fields[b"data"]) for _, fields in entries if fields[b"type"] == b"folded"]
    return dict(only)


def test_events_beyond_the_bound_are_folded_into_counts_in_their_place(quiet: ReducerSession) -> None:
    first = tell(quiet, worker="a", outcome="accepted", counted=[1], micro_batches=[1, 2, 3], late=[2])
    version = tell(quiet, "version")
    last = tell(quiet, worker="b", bytes_up=2**29 + 1, at=9)
    kept = [tell(quiet) for _ in range(3)]
    assert quiet.fold() == 0
    kept.append(tell(quiet))
    assert quiet.fold() == 3 and quiet.fold() == 0
    assert all_of(quiet) == [(version, "version"), (last, "folded"), *((one, "submission") for one in kept)]
    assert quiet.redis.xrange(quiet.keys.backlog())[-1][1][b"at"] == b"9"  # type: ignore[index]
    of_a = {"accepted": 1, "bytes_up": 10, "bytes_down": 20}
    of_b = {"stale": 1, "bytes_up": 2**29 + 1, "bytes_down": 20}
    counts = {"first": first, "submissions": 2, "workers": {"a": of_a, "b": of_b}, "again": [[3, 1]]}
    assert folded(quiet) == counts


def test_what_came_again_counts_for_nothing_each_time(quiet: ReducerSession) -> None:
    for _ in range(2):
        tell(quiet, outcome="duplicate", micro_batches=[5, 5])
    for _ in range(5):
        tell(quiet)
    quiet.fold()
    assert folded(quiet)["again"] == [[5, 2]]
    assert folded(quiet)["workers"]["a"] == {"duplicate": 2, "stale": 1, "bytes_up": 30, "bytes_down": 60}


def test_what_was_read_or_lay_there_when_the_broker_started_is_moved_as_it_is(
    redis: Redis, quiet: ReducerSession
) -> None:
    read = [tell(quiet) for _ in range(2)]
    assert len(quiet.take("0-0", 100)) == 2
    unread = tell(quiet)
    for _ in range(4):
        tell(quiet)
    quiet.fold()
    assert all_of(quiet)[:3] == [*((one, "submission") for one in read), (unread, "folded")]
    redis.hset(quiet.keys.taken(), "run", "the one before")
    for _ in range(3):
        tell(quiet)
    quiet.fold()
    assert [kind for _, kind in all_of(quiet)[3:6]] == ["submission"] * 3
    assert redis.hget(quiet.keys.taken(), "run") == redis.info("server")["run_id"].encode()  # type: ignore[index]


def test_what_is_read_again_from_the_beginning_was_read_up_to_where_it_was_before(
    redis: Redis, quiet: ReducerSession
) -> None:
    told = [tell(quiet) for _ in range(10)]
    assert [stream_id.decode() for stream_id, _ in quiet.take("0-0", 100)] == told
    assert [stream_id.decode() for stream_id, _ in quiet.take(told[0], 2)] == told[1:3]
    assert redis.hget(quiet.keys.taken(), "upto") == told[-1].encode()
    assert quiet.take(told[-1], 2) == []


def test_the_backlog_is_read_first(quiet: ReducerSession) -> None:
    for _ in range(8):
        tell(quiet, "version")
    quiet.fold()
    found = quiet.take("0-0", 5)
    assert [stream_id.decode() for stream_id, _ in found] == [stream_id for stream_id, _ in all_of(quiet)[:5]]
    assert found[0][1] == {b"type": b"version", b"at": b"7", b"data": b"{}"}


def test_a_refused_submission_is_counted_as_refused_and_one_that_may_be_is_not_folded(
    reducer: ReducerSession, join: Join, quiet: ReducerSession
) -> None:
    session = join("a")
    reducer.take("0-0", 100)
    report = {"bytes_up": 6, "bytes_down": 7, "seconds": SECONDS}
    for nonce, micro_batch in (("good", 0), ("bad", 1), ("open", 2)):
        session.lease(str(ZERO))
        assert session.submit(str(ZERO), nonce, [(micro_batch, [b"update"], 0.5)], report).outcome == "accepted"
    received = reducer.progress()[1]
    reducer.redis.hdel(reducer.keys.received(), "0")  # as a commit counts it
    for _ in range(4):
        tell(reducer, "version")
    reducer.refuse(ZERO, received[1], "checksum", "lost")
    reducer.redis.xtrim(reducer.keys.events(), 8, approximate=False)  # without who joined
    reducer.fold()
    assert folded(reducer)["workers"] == {"a": {"accepted": 1, "refused": 1, "bytes_up": 12, "bytes_down": 14}}
    assert [kind for _, kind in all_of(reducer)][:2] == ["folded", "submission"]


def test_what_the_next_round_has_received_may_still_be_refused_and_is_not_folded(quiet: ReducerSession) -> None:
    quiet.redis.hset(quiet.keys.early(), "4", json.dumps({"nonce": "early"}))
    told = [tell(quiet, nonce="early"), *(tell(quiet) for _ in range(7))]
    assert quiet.fold() == 3
    assert all_of(quiet)[:2] == [(told[0], "submission"), (told[2], "folded")]


def test_a_fenced_reducer_folds_nothing(redis: Redis, quiet: ReducerSession) -> None:
    for _ in range(10):
        tell(quiet)
    assert quiet.renew(0) and ReducerSession(redis, quiet.job_id, "second").claim("host", 2, 60_000)
    assert quiet.fold() == 0 and redis.xlen(quiet.keys.events()) == 11


def test_a_stream_whose_ids_went_back_is_left_alone(redis: Redis, quiet: ReducerSession) -> None:
    redis.xadd(quiet.keys.backlog(), {"type": "version"}, id="99999999999999-0")
    for _ in range(10):
        tell(quiet)
    assert quiet.fold() == 0 and redis.xlen(quiet.keys.events()) == 10


@pytest.mark.parametrize(
    "odd",
    [
        {"worker": "\x00"},
        {"worker": "w" * 101},
        {"worker": 5},
        {"nonce": None},
        {"bytes_up": 2**30},
        {"bytes_up": -1},
        {"bytes_down": 0.5},
        {"seconds": 1},
        {"seconds": SECONDS | {"waiting": "long"}},
        {"micro_batches": [-1]},
        {"micro_batches": "all"},
        {"counted": None},
        {"late": "some"},
        {"outcome": "odd"},
        {"base": "1.2.short"},
        {"at": "never"},
    ],
)
def test_a_submission_that_is_not_as_it_should_be_spoils_no_counts(quiet: ReducerSession, odd: dict[str, Any]) -> None:
    tell(quiet)
    strange = tell(quiet, **odd)
    for _ in range(5):
        tell(quiet)
    quiet.fold()
    assert (strange, "submission") in all_of(quiet)
    assert folded(quiet)["workers"] == {"a": {"stale": 2, "bytes_up": 20, "bytes_down": 40}}


# What a checkpoint reads


def test_commits_are_read_on_from_where_they_were_read_to_and_let_go_of_once_stored(
    redis: Redis, reducer: ReducerSession, join: Join, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []
    unaltered = reducer.history._read_after
    monkeypatch.setattr(reducer.history, "_read_after", lambda after: read.append(after) or unaltered(after))
    assert reducer.history.commits(1) == ([], False)  # of version 0, without an incarnation
    fill(join, reducer)
    commit(reducer, ONE)
    assert [entry["data"]["version"] for entry in reducer.history.commits(1)[0]] == [1]
    reducer.fold()
    newest = reducer.redis.xinfo_stream(reducer.keys.events())["last-generated-id"].decode()  # type: ignore[index]
    read.clear()
    assert [entry["data"]["version"] for entry in reducer.history.commits(1)[0]] == [1] and read == [newest.encode()]
    redis.xtrim(reducer.keys.events(), 0, approximate=False)
    redis.xtrim(reducer.keys.backlog(), 0, approximate=False)
    assert reducer.history.commits(1) == ([], False)
    assert events(reducer, "version") == []


def test_commits_of_a_broker_that_went_back_are_read_anew(redis: Redis, reducer: ReducerSession, join: Join) -> None:
    fill(join, reducer)
    commit(reducer, ONE)
    before = reducer.history.commits(1)[0]
    entries: Any = redis.xrange(reducer.keys.events())
    redis.delete(reducer.keys.events())
    redis.xadd(reducer.keys.events(), entries[0][1], id="1-0")
    assert before and reducer.history.commits(1)[0] == []
