"""A process that sends garbage, lies or nothing gets no further than a RecipeError."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from random import Random

import pytest

from computeshare.errors import ComputeShareError, Interrupted, RecipeError, RecipeUnfit
from computeshare.tensors.layout import Layout
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import SocketChannel
from computeshare.training.recipe_process.connection import ProcessConnection
from computeshare.training.recipe_process.replica import RecipeReplica, walk
from computeshare.training.recipe_process.shared_vectors import SharedVectors, allocate
from computeshare.types import Vector
from tests.support.fake_process import Child, Killed, framed, said

LAYOUT = Layout.build(
    iter([("weight", (1 << 17,), "parameter"), ("bias", (7,), "parameter"), ("mean", (3,), "buffer")])
)
STEPS = 1
BUILT = messages.Built(compiler="", trouble="", is_kept=True)
Serve = Callable[..., tuple[RecipeReplica, SharedVectors, Killed]]


@pytest.fixture
def served() -> Iterator[Serve]:
    """Builds a replica whose process is a function in a thread."""
    ends: list[socket.socket] = []
    threads: list[threading.Thread] = []

    def serve(child: Child, limit_s: float = 5.0) -> tuple[RecipeReplica, SharedVectors, Killed]:
        ours, theirs = socket.socketpair()
        ends.extend((ours, theirs))

        def run() -> None:
            with contextlib.suppress(OSError):
                child(theirs)

        threads.append(threading.Thread(target=run))
        threads[-1].start()
        shared, killed = SharedVectors(allocate(LAYOUT), LAYOUT), Killed(theirs)
        connection = ProcessConnection(SocketChannel(ours), killed, limit_s)
        return RecipeReplica(connection, shared, LAYOUT, lambda unit: STEPS, BUILT, lambda peak: None), shared, killed

    yield serve
    for one in ends:
        one.close()
    for thread in threads:
        thread.join()


COMPUTED = {"say": "computed", "loss": 0.5, "peak_bytes": 1}
WRONG = {
    "nothing": b"",
    "noise": Random(0).randbytes(10_000),
    "zeros": bytes(100),
    "a huge head": framed(b"", sizes=(2**32 - 1, 0)),
    "a huge body": framed(b"{}", sizes=(2, 2**63)),
    "a body that nobody asked for": framed(json.dumps(COMPUTED).encode(), b"x"),
    "no JSON": framed(b"{"),
    "no UTF-8": framed(b'{"say": "\xff"}'),
    "deep JSON": framed(b"[" * 100_000),
    "a pickle": framed(b"\x80\x04\x95\x0b\x00\x00\x00\x00\x00\x00\x00\x8c\x02os\x94\x8c\x06system\x94\x93\x94."),
    "nothing of ours": said(say="hello"),
    "another answer": said(say="done"),
    "a bucket too many": said(say="bucket", number=3),
    "a negative bucket": said(say="bucket", number=-1),
    "a bucket twice": said(say="bucket", number=0) * 2,
    "the buffers twice": said(say="bucket", number=2) * 2,
    "buckets left out": said(say="bucket", number=0) + said(**COMPUTED),
    "a step too many": said(say="step", number=1),
    "a loss in words": said(**COMPUTED | {"loss": "low"}),
    "a negative peak": said(**COMPUTED | {"peak_bytes": -1}),
    "a field too many": said(**COMPUTED | {"more": 1}),
    "a long error": said(say="failed", kind="RecipeError", message="x" * 3000),
    "an error of another kind": said(say="failed", kind="SystemExit", message="\x1b[2Jgone"),
}


@pytest.mark.parametrize("sent", WRONG.values(), ids=WRONG)
def test_garbage_is_an_error_of_the_recipe(served: Serve, sent: bytes) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(sent)
        end.shutdown(socket.SHUT_WR)

    replica, _, killed = served(child)
    with pytest.raises(RecipeError) as told:
        replica.compute(0, take=lambda *_: None)
    assert "\x1b" not in str(told.value)
    if sent != WRONG["an error of another kind"]:
        with pytest.raises(RecipeError):
            replica.compute(1)
        assert killed.times


@pytest.mark.parametrize("seed", range(30))
def test_answers_with_random_damage_raise_or_are_taken(served: Serve, seed: int) -> None:
    random = Random(seed)
    stream = bytearray(said(say="bucket", number=1) + said(say="bucket", number=0) + said(**COMPUTED))
    for _ in range(random.randint(1, 4)):
        match random.randint(0, 2):
            case 0:
                stream[random.randrange(len(stream))] = random.randrange(256)
            case 1:
                del stream[random.randrange(len(stream)) :]
                stream += random.randbytes(8)
            case 2:
                place = random.randrange(len(stream))
                stream[place:place] = random.randbytes(random.randint(1, 20))

    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(stream)
        end.shutdown(socket.SHUT_WR)

    replica, _, _ = served(child)
    try:
        assert isinstance(replica.compute(0, take=lambda *_: None).loss, float)
    except ComputeShareError as error:
        assert isinstance(error, RecipeError)


def test_buckets_are_copies_which_the_process_cannot_change(served: Serve) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(said(say="bucket", number=1) + said(say="bucket", number=0) + said(**COMPUTED))

    replica, shared, _ = served(child)
    shared.update[:] = 1
    found: dict[int, Vector] = {}

    def take(number: int, values: Vector) -> None:
        found[number] = values
        shared.update[:] = 2

    assert replica.compute(0, take=take).loss == 0.5
    shared.update[:] = 3
    assert [set(found[1]), set(found[0])] == [{1.0}, {2.0}]


def test_an_error_in_what_was_not_waited_for_comes_with_the_next_call_and_ends_the_process(served: Serve) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(said(say="failed", kind="RecipeError", message="recipe.py, line 3") + said(**COMPUTED) * 2)

    replica, _, killed = served(child)
    replica.prefetch([1])
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"recipe\.py, line 3"):
            replica.compute(1)
    assert killed.times


def test_what_the_machine_lacks_stays_so_in_what_was_not_waited_for(served: Serve) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        end.sendall(said(say="failed", kind="RecipeUnfit", message="no memory") + said(**COMPUTED) * 2)

    replica, _, _ = served(child)
    replica.prefetch([1])
    for _ in range(2):
        with pytest.raises(RecipeUnfit, match="no memory"):
            replica.compute(1)


def test_a_silent_process_is_ended_in_time(served: Serve) -> None:
    over = threading.Event()
    replica, _, killed = served(lambda end: over.wait(20), 0.3)
    started = time.monotonic()
    with pytest.raises(RecipeError, match="took more than 0 s"):
        replica.compute(0)
    over.set()
    assert killed.times and time.monotonic() - started < 10


def test_steps_must_go_on_to_be_waited_for(served: Serve) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        for _ in range(100):
            end.sendall(said(say="step", number=1))

    replica, shared, killed = served(child)
    with pytest.raises(RecipeError, match="out of turn"):
        walk(replica._connection, shared, [0, 1, 2], "float32")
    assert killed.times


def test_work_is_called_off_by_a_flag(served: Serve) -> None:
    seen: list[bool] = []

    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        until = time.monotonic() + 10
        while not (called := shared.is_called_off) and time.monotonic() < until:
            time.sleep(0.01)
        seen.append(called)
        end.sendall(said(say="failed", kind="Interrupted", message="the work was called off"))

    asked = iter([True, True])
    replica, shared, killed = served(child)
    with pytest.raises(Interrupted):
        replica.compute(0, lambda: next(asked, False))
    assert seen == [True] and not killed.times


def test_a_large_state_is_refused_before_it_is_read(served: Serve) -> None:
    def child(end: socket.socket) -> None:
        end.recv(1 << 16)
        head = json.dumps({"say": "state", "is_there": True}).encode()
        end.sendall(framed(head, sizes=(len(head), 1 << 40)))

    replica, _, killed = served(child)
    with pytest.raises(RecipeError, match="a message of"):
        replica.dump()
    assert killed.times
