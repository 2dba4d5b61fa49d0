"""Submissions of a peer, whose weights contain all of its earlier updates: none counts after one that does not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from computeshare.errors import Interrupted
from computeshare.gossip.peer_replica import Mark
from computeshare.protocol.worker_session import Receipt
from computeshare.tensors.layout import Weights
from computeshare.worker.seat.overlap.update_uploads import Uploads

ACCEPTED, LATE = (Receipt(outcome, "", "running", "") for outcome in ("accepted", "stale"))


def mark(units: int) -> Mark:
    none = np.empty(0, np.float32)
    return Mark(Weights(none, none, np.empty(0, np.int64)), units, none, "0")


class Session:
    """A session whose broker gives these answers in turn."""

    def __init__(self, *answers: Receipt | Exception) -> None:
        self.keys = SimpleNamespace(job_id="job")
        self.answers, self.submitted, self.released = [*answers], list[str](), list[tuple[int, ...]]()

    def submit(self, token: str, *_: object) -> Receipt:
        self.submitted.append(token)
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def release(self, units: tuple[int, ...]) -> None:
        self.released.append(units)

    def unstage(self, *_: object) -> None: ...


def sent(session: Session, *tokens: str, peer: bool = True) -> Uploads:
    """Uploads that have been given a submission for each token, computed on it."""
    encoder: Any = SimpleNamespace(buckets=1, parts=1)
    silent: Any = SimpleNamespace(extend=lambda *_: "running")
    any_session: Any = session
    uploads = Uploads(any_session, encoder, silent)
    for number, token in enumerate(tokens):
        uploads.send(uploads.begin((number,), token), {}, mark(number) if peer else None)
    return uploads


@pytest.mark.parametrize("answer", [LATE, Interrupted("called off")])
def test_after_an_update_that_does_not_count_later_ones_are_handed_back_until_the_peer_has_gone_back(
    answer: Receipt | Exception,
) -> None:
    session = Session(ACCEPTED, answer, ACCEPTED)
    uploads = sent(session, "first", "second", "third")
    lost = uploads.take_back()
    for _ in range(2):  # the second may not have been answered at the first look
        uploads.begin((9,), "token")
        lost = lost or uploads.take_back()
    assert lost and lost.units == 1, "the weights before the second"
    assert session.submitted == ["first", "second"] and session.released == [(2,)]
    assert uploads.take_back() is None
    uploads.send(uploads.begin((3,), "fourth"), {}, mark(1))
    uploads.begin((4,), "token")
    uploads.begin((5,), "token")
    assert session.submitted == ["first", "second", "fourth"]


def test_after_an_error_nothing_is_sent_that_contains_the_update() -> None:
    session = Session(RedisConnectionError("gone"), ACCEPTED)
    uploads = sent(session, "first", "second")
    with pytest.raises(RedisConnectionError):
        uploads.begin((9,), "token")
    uploads.__exit__(None, None, None)
    assert session.submitted == ["first"] and session.released == [(1,)]


def test_an_update_of_before_a_restore_stops_none_of_after_it() -> None:
    session = Session(LATE, ACCEPTED)
    uploads = sent(session)
    uploads.send(uploads.begin((0,), "first"), {}, mark(0))
    uploads.send(uploads.begin((1,), "restored"), {}, replace(mark(0), incarnation="1"))
    uploads.begin((2,), "token")
    uploads.begin((3,), "token")
    assert session.submitted == ["first", "restored"] and session.released == []


def test_others_send_on() -> None:
    session = Session(ACCEPTED, LATE, ACCEPTED)
    uploads = sent(session, "first", "second", "third", peer=False)
    for _ in range(2):
        uploads.begin((9,), "token")
    assert uploads.take_back() is None
    assert session.submitted == ["first", "second", "third"] and session.released == []
