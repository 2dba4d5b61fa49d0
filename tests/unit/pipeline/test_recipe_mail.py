"""The mail of a recipe's process: only messages between its stages and others' pass, and errors end nothing else."""

import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from computeshare.errors import Interrupted, RecipeError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.chains.stage_weights import StageParts
from computeshare.pipeline.partition import StageFacts, StagePlan
from computeshare.pipeline.recipes.process import RecipeStages
from computeshare.strategies.base import MAIL_BYTES
from computeshare.tensors.layout import Layout
from computeshare.training.recipe_process.channel import Closed, SocketChannel
from computeshare.training.recipe_process.connection import ProcessConnection
from computeshare.training.recipe_process.shared_vectors import SharedVectors, allocate
from computeshare.types import Blob
from tests.support.fake_process import Killed, framed, said

LAYOUT = replace(Layout.build(iter([("one", (4,), "parameter"), ("two", (4,), "parameter")])), cuts=(4,))
PLAN = StagePlan(("b",), (StageFacts(("one",), (), ("a",), 4), StageFacts(("two",), (), ("b",), 4)))
STAGE = {"stage": 0, "loss": None, "forward_s": 1.0, "backward_s": 2.0, "most_in_flight": 1, "sent_bytes": 3}
COMPUTED = {"say": "stages_computed", "stages": [STAGE], "peak_bytes": 1}
BUCKET = said(say="bucket", number=0)
POSTED = b'{"say": "posted", "stage": 1, "tag": "f0.0"}'


class Box:
    """A mailbox that keeps what is sent, and has one answer."""

    def __init__(self, answer: Blob | Exception = b"gradient") -> None:
        self.sent: list[tuple[int, str, bytes]] = []
        self._answer = answer

    def send(self, stage: int, tag: str, message: Blob) -> None:
        self.sent.append((stage, tag, bytes(message)))

    def receive(self, stage: int, tag: str) -> Blob:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


Talk = Callable[[SocketChannel, socket.socket], object]
Serve = Callable[[Talk], tuple[RecipeStages, Killed]]


@pytest.fixture
def served() -> Iterator[Serve]:
    """Stages whose process is a function in a thread: it is called when a unit is to be computed."""
    ours, theirs = socket.socketpair()
    threads: list[threading.Thread] = []

    def serve(talk: Talk) -> tuple[RecipeStages, Killed]:
        def run() -> None:
            channel = SocketChannel(theirs, None)
            try:
                channel.receive(1 << 20, 0)
                talk(channel, theirs)
                theirs.shutdown(socket.SHUT_WR)
            except (Closed, OSError):
                pass

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        killed = Killed(theirs)
        connection = ProcessConnection(SocketChannel(ours), killed, 5.0)
        shared = SharedVectors(allocate(LAYOUT), LAYOUT)
        parts = StageParts(LAYOUT, PLAN, range(1))
        return RecipeStages(connection, shared, parts, Plan(0, 64, 8, 2, accumulate=4), lambda peak: None), killed

    yield serve
    ours.close()
    for thread in threads:
        thread.join()
    theirs.close()


def test_messages_pass_both_ways(served: Serve) -> None:
    heard = []

    def talk(channel: SocketChannel, end: socket.socket) -> None:
        channel.send(POSTED, [b"activations"])
        end.sendall(said(say="wanted", stage=0, tag="b1.0"))
        heard.append(channel.receive(1 << 20, 1 << 20))
        end.sendall(BUCKET + said(**COMPUTED))

    stages, killed = served(talk)
    box, buckets = Box(), list[int]()
    (update,) = stages.compute(0, box, take=lambda bucket, values: buckets.append(bucket))
    assert box.sent == [(1, "f0.0", b"activations")] and buckets == [0] and not killed.times
    assert heard == [(b'{"do":"delivered"}', b"gradient")]
    assert (update.stage, update.busy_s, update.sent_bytes) == (0, 3.0, 3)


WRONG = {
    "to a stage it holds": said(say="posted", stage=0, tag="f0.0"),
    "to no stage": said(say="posted", stage=2, tag="f0.0"),
    "for another's stage": said(say="wanted", stage=1, tag="f0.0"),
    "a piece too many": said(say="posted", stage=1, tag="f0.4"),
    "a gradient to a later stage": said(say="posted", stage=1, tag="b0.0"),
    "another's activations": said(say="posted", stage=1, tag="f1.0"),
    "a huge message for a piece": framed(POSTED, sizes=(len(POSTED), MAIL_BYTES + 1)),
    "a tag of ours": said(say="posted", stage=1, tag="order"),
    "a tag with a line": said(say="posted", stage=1, tag="f0.0\n"),
    "a huge message": framed(POSTED, sizes=(len(POSTED), 1 << 40)),
    "another's bucket": said(say="bucket", number=1),
    "no bucket": said(**COMPUTED),
    "another's stage": BUCKET + said(**COMPUTED | {"stages": [STAGE | {"stage": 1}]}),
    "a stage twice": BUCKET + said(**COMPUTED | {"stages": [STAGE, STAGE]}),
    "no time": BUCKET + said(**COMPUTED | {"stages": [STAGE | {"forward_s": -1.0}]}),
    "endless time": BUCKET + said(**COMPUTED | {"stages": [STAGE | {"forward_s": 1e300}]}),
}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG)
def test_a_process_that_lies_about_its_stages_is_told_as_the_recipes_error(served: Serve, sent: bytes) -> None:
    stages, _ = served(lambda channel, end: end.sendall(sent))
    box = Box()
    with pytest.raises(RecipeError):
        stages.compute(0, box)
    assert box.sent == []


@pytest.mark.parametrize("says", ["interrupted", "computed"])
def test_the_mailboxs_error_is_raised_once_the_process_has_answered(served: Serve, says: str) -> None:
    heard = []

    def talk(channel: SocketChannel, end: socket.socket) -> None:
        for piece in range(2):  # the second is not asked for any more
            end.sendall(said(say="wanted", stage=0, tag=f"b1.{piece}"))
            heard.append(channel.receive(1 << 20, 1 << 20)[0])
        failed = said(say="failed", kind="Interrupted", message="the work was called off")
        end.sendall(failed if says == "interrupted" else BUCKET + said(**COMPUTED))

    stages, killed = served(talk)
    with pytest.raises(MemoryError, match="full"):
        stages.compute(0, Box(MemoryError("full")))
    assert heard == [b'{"do":"called_off"}'] * 2 and not killed.times


def test_a_bucket_that_cannot_be_passed_on_calls_the_unit_off_and_costs_the_process_nothing(served: Serve) -> None:
    heard = []

    def talk(channel: SocketChannel, end: socket.socket) -> None:
        end.sendall(BUCKET + said(say="wanted", stage=0, tag="b1.0"))
        heard.append(channel.receive(1 << 20, 1 << 20)[0])
        end.sendall(said(say="failed", kind="Interrupted", message="the work was called off"))

    def take(bucket: int, values: object) -> None:
        raise MemoryError("full")

    stages, killed = served(talk)
    with pytest.raises(MemoryError, match="full"):
        stages.compute(0, Box(), take=take)
    assert heard == [b'{"do":"called_off"}'] and not killed.times


def test_a_message_passes_once(served: Serve) -> None:
    def talk(channel: SocketChannel, end: socket.socket) -> None:
        channel.send(POSTED, [b"activations"])
        channel.send(POSTED, [b"activations"])

    stages, killed = served(talk)
    box = Box()
    with pytest.raises(RecipeError, match="mail that its stages cannot have"):
        stages.compute(0, box)
    assert len(box.sent) == 1 and killed.times


def test_a_process_that_gives_up_what_is_wanted_is_told_as_the_recipes_error(served: Serve) -> None:
    failed = said(say="failed", kind="Interrupted", message="the work was called off")
    stages, _ = served(lambda channel, end: end.sendall(failed))
    with pytest.raises(RecipeError, match="gave a unit up that was wanted"):
        stages.compute(0, Box())


def test_what_is_called_off_before_is_not_begun(served: Serve) -> None:
    stages, killed = served(lambda channel, end: None)
    with pytest.raises(Interrupted):
        stages.compute(0, Box(), lambda: False)
    killed.end()
