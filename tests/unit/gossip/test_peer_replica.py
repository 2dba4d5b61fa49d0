"""Peers average weights of their own: what they publish, with whom, and what a failure changes."""

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import wait as wait_for
from threading import Event

import numpy as np
import pytest
from redis.exceptions import ConnectionError as RedisConnectionError
from structlog.testing import capture_logs

from computeshare.codecs.messages import encode_update
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import Interrupted
from computeshare.gossip.exchange import LEAST, ExchangeReport, Partners
from computeshare.gossip.peer_replica import PeerReplica
from computeshare.gossip.peer_weights import PublishedNotice
from computeshare.strategies.gossip import GossipStrategy
from computeshare.tensors.layout import Layout, Tensor, Weights
from computeshare.training.work_units import Compilation, Take, Update
from computeshare.types import Message, Vector

SIZE = 6
LAYOUT = Layout((Tensor("w", (SIZE,), "parameter", 0, SIZE), Tensor("mean", (2,), "buffer", 0, 2)))
PLAIN = {"outer_lr": 1, "outer_momentum": 0}
FIRST, SECOND, RESTORED = "1.0.aaaaaaaaaaaaaaaa", "1.1.bbbbbbbbbbbbbbbb", "2.1.bbbbbbbbbbbbbbbb"


def vector(value: float) -> Vector:
    return np.full(SIZE, value, np.float32)


def weights(value: float) -> Weights:
    return Weights(vector(value), np.full(2, value, np.float32), np.zeros(0, np.int64))


class Stepper:
    """A replica whose unit moves all its weights up by one."""

    kept = room = None
    compilation = Compilation()

    def __init__(self) -> None:
        self.loaded = weights(0)
        self.interrupted = False

    def load(self, weights: Weights) -> None:
        self.loaded = weights

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        raise AssertionError("nobody knows which units come next")

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        if self.interrupted:
            raise Interrupted("called off")
        return Update(vector(-1), self.loaded.buffers + 1, 0.5)


class Board:
    """Other peers' published weights."""

    def __init__(self, **others: tuple[str, Message]) -> None:
        self.published = {name: PublishedNotice(token, 7, 0.25, 0) for name, (token, _) in others.items()}
        self.messages = {name: message for name, (_, message) in others.items()}
        self.error: Exception | None = None
        self.open = Event()
        self.open.set()

    def others(self) -> Mapping[str, PublishedNotice]:
        return self.published

    def read(self, worker: str, parts: int) -> tuple[PublishedNotice, Message] | None:
        self.open.wait(30)
        if self.error:
            raise self.error
        return self.published[worker], self.messages[worker]


def message(difference: float, buffers: float = 0.0) -> Message:
    return encode_update(EXACT, vector(difference), np.full(2, buffers, np.float32), LAYOUT, 0)


def peer(board: Board, token: str = FIRST, **fields: object) -> tuple[PeerReplica, Stepper, list[str]]:
    """A peer that has loaded zeros as version `token`; the list holds the token of the next version to load."""
    stepper, current = Stepper(), [token]
    strategy = GossipStrategy.model_validate({**PLAIN, "timeout_ms": 20_000, **fields})
    found = PeerReplica(
        stepper, strategy, board, Partners("own", 0, strategy.matching), EXACT, LAYOUT, lambda: current[0]
    )
    found.load(weights(0))
    return found, stepper, current


def has_read(found: PeerReplica) -> None:
    """Wait until a peer has read what it asked for."""
    coming = found.exchange._coming
    assert coming
    wait_for([coming], 30)


def test_alone_it_steps_from_its_own_weights_and_publishes_the_difference_from_the_version() -> None:
    found, _, current = peer(Board())
    assert found.compute(0).vector.tolist() == [-1] * SIZE
    assert found.compute(1).vector.tolist() == [-2] * SIZE
    current[0] = SECOND
    found.load(weights(10))
    taken: dict[int, Vector] = {}
    update = found.compute(2, take=lambda bucket, values: taken.update({bucket: values.copy()}))
    assert update.vector.tolist() == [7] * SIZE == taken[0].tolist(), "10 of the reference, less 3 of its own"
    assert update.buffers.tolist() == [3, 3] and update.loss == 0.5
    assert found.report() == ExchangeReport()


def test_it_starts_from_anothers_weights_and_averages_with_them() -> None:
    board = Board(other=(FIRST, message(-8, 4)))
    found, stepper, _ = peer(board, factor=0.25)
    board.messages["other"] = message(-13, 9)
    assert found.compute(0).vector.tolist() == [-9] * SIZE
    assert stepper.loaded.parameters.tolist() == [8] * SIZE
    update = found.compute(1)
    assert stepper.loaded.parameters.tolist() == [10] * SIZE, "a quarter of the way from 9 to 13"
    assert update.vector.tolist() == [-11] * SIZE and update.buffers.tolist() == [7, 7]
    has_read(found)
    report = found.report()
    assert report.met == {"peer": "other", "share": 0.25, "distance": 4.0}
    assert report.bytes == 3 * sum(map(len, message(-8, 4))), "when it started, and after each unit"
    assert found.report() == ExchangeReport()


def test_weights_that_come_a_unit_late_are_averaged_with_its_own_of_when_it_asked() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, stepper, _ = peer(board, factor=0.25)
    board.messages["other"] = message(-13)
    board.open.clear()
    found.compute(0)
    assert found.compute(1).vector.tolist() == [-10] * SIZE, "it does not wait for long"
    board.open.set()
    has_read(found)
    assert found.compute(2).vector.tolist() == [-11.5] * SIZE
    assert stepper.loaded.parameters.tolist() == [10.5] * SIZE, "half a quarter of the way from 9 to 13, and a unit"


@pytest.mark.parametrize(
    ("fields", "share"),
    [
        ({"factor": 0.3}, 0.3),
        ({"interpolation": "clock"}, 7 / 8),
        ({"interpolation": "loss"}, 0.5 / 0.75),
        ({"factor": 0.3, "divergence_threshold": 2.0}, 0.3 * 0.25),
        ({"factor": 0.3, "divergence_threshold": 0.4}, 0.3),
    ],
)
def test_the_share_follows_from_units_and_losses(fields: dict[str, object], share: float) -> None:
    found, _, _ = peer(Board(other=(FIRST, message(-8))), **fields)
    found.compute(0)
    found.compute(1)
    assert found.report().met["share"] == pytest.approx(share, abs=1e-4)


def test_the_way_to_the_other_is_clipped() -> None:
    found, _, _ = peer(Board(other=(FIRST, message(-100))), max_norm=SIZE**0.5, factor=1.0)
    found._own = weights(0)
    found.compute(0)
    assert found.compute(1).vector == pytest.approx(vector(-3))


def test_without_exchanges_it_goes_its_own_way() -> None:
    found, _, _ = peer(Board(other=(FIRST, message(-8))), fetch_probability=0)
    found._own = weights(0)
    assert [found.compute(unit).vector[0] for unit in range(3)] == [-1, -2, -3]
    assert found.report().met == {}


def test_the_way_to_another_has_no_part_in_the_momentum() -> None:
    steps = {"outer_lr": 0.5, "outer_momentum": 0.9}
    alone, _, _ = peer(Board(), **steps)
    found, _, _ = peer(Board(other=(FIRST, message(-100))), **steps)
    found._own = weights(0)
    before = expected = 0.0
    for unit in range(4):
        after = -alone.compute(unit).vector[0]
        expected = (expected + 100) / 2 if unit else expected
        expected += after - before
        before = after
        assert found.compute(unit).vector == pytest.approx(vector(-expected), rel=1e-6)


def test_a_units_outer_step_has_nesterov_momentum() -> None:
    found, _, _ = peer(Board(), outer_lr=0.5, outer_momentum=0.9)
    torch = pytest.importorskip("torch")
    slow = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([slow], lr=0.5, momentum=0.9, nesterov=True)
    for unit in range(4):
        slow.grad = -torch.ones(SIZE)  # where it was, less where a unit has led
        optimizer.step()
        assert found.compute(unit).vector == pytest.approx(-slow.detach().numpy(), rel=1e-6)


def test_what_did_not_count_is_undone() -> None:
    found, stepper, _ = peer(Board(), outer_momentum=0.5)
    found.compute(0)
    mark = found.mark()
    before = found.compute(1).vector
    found.go_back(mark)
    assert np.array_equal(found.compute(1).vector, before)
    mark = found.mark()
    stepper.interrupted = True
    with pytest.raises(Interrupted):
        found.compute(2)
    found.go_back(mark)
    stepper.interrupted = False
    assert found.compute(2).vector[0] < before[0]


def test_after_a_restore_all_start_from_the_version() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, stepper, current = peer(board)
    found.compute(0)
    has_read(found)
    board.published.clear()
    current[0] = RESTORED
    found.load(weights(5))
    found.compute(1)
    assert stepper.loaded.parameters.tolist() == [5] * SIZE


@pytest.mark.parametrize(
    "error", [RedisConnectionError("gone"), Interrupted("called off"), None], ids=["broker", "interrupt", "not finite"]
)
def test_an_exchange_that_fails_costs_nothing_but_the_others_score(error: Exception | None) -> None:
    board = Board(other=(FIRST, message(np.nan)))
    board.error = error
    found, _, _ = peer(board)
    assert [found.compute(unit).vector[0] for unit in range(2)] == [-1, -2]
    assert found.exchange.partners._scores == {"other": 0.25}, "when it started, and now"


def test_weights_too_large_to_average_with_are_left_out() -> None:
    board = Board()
    found, _, _ = peer(board)
    board.published["other"], board.messages["other"] = PublishedNotice(FIRST, 7, 0.25, 0), message(-3e38)
    assert [found.compute(unit).vector[0] for unit in range(3)] == [-1, -2, -3]
    assert found.report().met == {}


def test_weights_from_another_reference_are_left_out_and_cost_no_score() -> None:
    found, _, _ = peer(Board(other=(SECOND, message(-8))))
    assert [found.compute(unit).vector[0] for unit in range(3)] == [-1, -2, -3]
    assert found.exchange.partners._scores == {}


def test_a_peer_that_joins_begins_with_any_whose_reference_it_has() -> None:
    others = {f"away{number}": (SECOND, message(-1)) for number in range(9)} | {"other": (FIRST, message(-8))}
    found, stepper, _ = peer(Board(**others))
    found.compute(0)
    assert stepper.loaded.parameters.tolist() == [8] * SIZE


def test_a_peer_that_joins_passes_over_weights_that_are_not_valid_or_just_replaced() -> None:
    bad = {f"bad{number}": (FIRST, message(np.nan)) for number in range(4)}
    board = Board(**bad, moved=(FIRST, message(-1)), other=(FIRST, message(-8)))
    read = board.read
    moved = PublishedNotice(SECOND, 7, 0.25, 0), message(-1)
    board.read = lambda worker, parts: moved if worker == "moved" else read(worker, parts)  # type: ignore[method-assign]
    found, stepper, _ = peer(board)
    found.compute(0)
    assert stepper.loaded.parameters.tolist() == [8] * SIZE


def test_what_cannot_be_decoded_is_told_and_seldom() -> None:
    found, _, _ = peer(Board(other=(SECOND, message(-8))))
    with capture_logs() as told:
        for unit in range(5):
            found.compute(unit)
    assert [(one["event"], one["version"]) for one in told] == [("no exchange", SECOND)]
    assert found._remarks.passes("no exchange") is None and found._remarks._held["no exchange"] == 4, "all are counted"


def test_after_a_restore_nobody_is_blamed_for_what_is_no_longer_wanted() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, stepper, current = peer(board)
    board.error = RedisConnectionError("gone")
    found.compute(0)
    has_read(found)
    board.error, board.published, current[0] = None, {}, RESTORED
    found.load(weights(5))
    found.compute(1)
    assert stepper.loaded.parameters.tolist() == [5] * SIZE
    assert found.exchange.partners._scores == {"other": 1.0}


def test_a_version_that_is_loaded_again_is_still_one_reference() -> None:
    found, _, current = peer(Board())
    for token in (FIRST, SECOND, SECOND, FIRST, RESTORED, SECOND, FIRST):
        current[0] = token
        found.load(weights(5))
    assert found.compute(0).vector.tolist() == [-1] * SIZE


def test_weights_that_were_asked_for_in_a_lost_unit_are_averaged_with_those_of_before_it() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, stepper, _ = peer(board, factor=0.5)
    found.compute(0)
    mark = found.mark()
    found.compute(1)  # asks from the weights after it
    has_read(found)
    found.go_back(mark)
    found.compute(1)
    assert stepper.loaded.parameters.tolist() == [(9 + 8) / 2] * SIZE, "half the way from 9 to 8"


def test_a_unit_that_is_lost_reports_no_exchange() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, stepper, _ = peer(board)
    found.compute(0)
    mark = found.mark()
    stepper.interrupted = True
    with pytest.raises(Interrupted):
        found.compute(1)
    found.go_back(mark)
    assert found.report().met == {}


def test_weights_from_a_version_that_is_loaded_after_they_were_read_are_used() -> None:
    found, _, current = peer(Board(other=(SECOND, message(-8))))
    found.compute(0)
    has_read(found)
    current[0] = SECOND
    found.load(weights(0))
    assert found.compute(1).vector.tolist() == [-5.5] * SIZE, "between 1 and 8, and a step"


def test_an_earlier_version_is_still_the_reference_when_its_memory_holds_the_next() -> None:
    board = Board(other=(FIRST, message(-8)))
    found, _, current = peer(board)
    memory = weights(0)
    current[0] = SECOND
    found.load(memory)
    current[0] = SECOND.replace("1.1", "1.2")
    memory.parameters[...] = 50
    found.load(memory)
    found._own = weights(0)
    board.published["other"], board.messages["other"] = PublishedNotice(SECOND, 7, 0.25, 0), message(-4)
    found.compute(0)
    assert found.compute(1).vector.tolist() == [50 - 3.5] * SIZE, "from 50, between 1 and 4, and a step"


def test_who_answers_late_is_not_waited_for_and_is_asked_again_when_it_has_answered() -> None:
    board = Board(other=(FIRST, message(-8)))
    board.open.clear()
    found, _, _ = peer(board, timeout_ms=20)
    assert found.compute(0).vector.tolist() == [-1] * SIZE
    assert found.compute(1).vector.tolist() == [-2] * SIZE
    assert found.exchange.partners._scores == {"other": 0.5}, "asked once"
    board.open.set()
    late = found.exchange.late
    assert late
    late.result(30)
    found.exchange.averaging = GossipStrategy(timeout_ms=20_000)
    found.compute(2)
    has_read(found)
    assert found.compute(3).vector.tolist() == [-6.5] * SIZE, "between 3 and 8, and a step"


def test_where_the_last_answer_took_long_the_next_one_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("computeshare.gossip.peer_replica.PATIENCE_S", 10)
    board = Board(other=(FIRST, message(-8)))
    found, _, _ = peer(board)
    board.open.clear()
    found.exchange._took_s = 3600.0
    found.compute(0)
    assert found.compute(1).vector.tolist() == [-10] * SIZE, "8 and two steps, and no average"
    assert found.report().waited_s < 5
    board.open.set()
    has_read(found)
    assert found.exchange._took_s < 3600


def test_slow_peers_are_chosen_seldom_and_never_given_up() -> None:
    partners = Partners("own", 3, "random")
    for _ in range(50):
        partners.note("slow", succeeded=False)
    chosen = [partners.choose({"fast": 0, "slow": 0}, 0) for _ in range(2000)]
    assert partners._scores["slow"] == LEAST
    assert 5 < chosen.count("slow") < 120
    for _ in range(50):
        partners.note("slow", succeeded=True)
    assert partners._scores["slow"] == 1.0


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8])
def test_pairs_are_mutual_and_change(count: int) -> None:
    names = [f"peer{number}" for number in range(count)]
    everyone = {name: Partners(name, 1, "pairs") for name in names}
    met: dict[str, set[str]] = {name: set() for name in names}
    for units in range(120):
        chosen = {name: one.choose({n: units for n in names if n != name}, units) for name, one in everyone.items()}
        assert sum(other is None for other in chosen.values()) == count % 2
        for name, other in chosen.items():
            if other:
                assert chosen[other] == name
                met[name].add(other)
    assert all(len(others) == count - 1 for others in met.values()), "everyone meets everyone"


@pytest.mark.parametrize("speeds", [(1.0, 1.0, 1.0, 1.0), (1.0, 0.8, 0.6, 0.4, 1.0, 0.8, 0.6, 0.4)])
def test_pairs_are_mostly_mutual_though_peers_join_late_and_are_not_equally_fast(speeds: tuple[float, ...]) -> None:
    everyone = {f"peer{number}": Partners(f"peer{number}", 1, "pairs") for number in range(len(speeds))}
    made, published, chosen = dict.fromkeys(everyone, 0), dict.fromkeys(everyone, 0), dict[str, str | None]()
    due = {name: 7.3 * number for number, name in enumerate(everyone)}
    mutual = asked = 0
    while asked < 2000:
        name = min(due, key=lambda one: due[one])
        others = {other: units for other, units in published.items() if other != name and other in chosen}
        chosen[name] = other = everyone[name].choose(others, made[name])
        asked += 1
        mutual += other is not None and chosen[other] == name
        published[name], made[name] = made[name], made[name] + 1
        due[name] += 1 / speeds[int(name[4:])]
    assert mutual > 0.65 * asked, "by chance, 0.33 of four peers and 0.14 of eight"


def test_a_lossy_codec_rounds_the_difference_and_no_more() -> None:
    difference = np.linspace(-1, 1, SIZE, dtype=np.float32) * 1e-3
    board = Board(other=(FIRST, encode_update(CODECS["int8"], difference, np.zeros(2, np.float32), LAYOUT, 0)))
    stepper = Stepper()
    replica = PeerReplica(
        stepper, GossipStrategy(), board, Partners("own", 0, "random"), CODECS["int8"], LAYOUT, lambda: FIRST
    )
    replica.load(weights(100))
    replica.compute(0)
    assert stepper.loaded.parameters == pytest.approx(100 - difference, abs=1e-3 / 127 + 1e-5)


@pytest.mark.parametrize("entry", [b"", b"x", b"t|1|nan|5", b"t|x|1.0|5", b"t|1|1.0", b"\xff|1|1.0|5"])
def test_an_entry_that_no_script_wrote_is_none(entry: bytes) -> None:
    assert PublishedNotice.parse(entry) is None
    assert PublishedNotice.parse(b"t|12|0.5|99") == PublishedNotice("t", 12, 0.5, 99)
