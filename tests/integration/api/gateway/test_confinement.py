"""An invited machine reaches its own workers and the jobs in which these have seats, and nothing else of the broker."""

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError
from websockets.exceptions import ConnectionClosed

from api.gateway.commands.access import LEAVING_S, MOST_READERS, Access
from api.gateway.commands.policy import CommandNeeds
from api.gateway.commands.rates import SELDOM
from api.gateway.commands.scripts import REPORT_BYTES, REPORT_UNIT_BYTES
from api.gateway.refusals import Refusals
from api.http.throttle import Throttle
from computeshare.bundles.exchange import PieceExchange, _Answers
from computeshare.bundles.piece_server import PieceServer
from computeshare.checkpoints.part_score import PartScore
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake, keys
from computeshare.protocol.job_log import tell
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.scripts import Scripts
from computeshare.protocol.worker_session import Draft, Waiting, WorkerSession
from computeshare.queue import Orders, Seat, WorkerInfo, read_orders, recipes, register, score_requests, unregister
from computeshare.queue.rq_keys import RqSeatKeys
from computeshare.queue.score_requests import ScoreRequest
from computeshare.queue.seats import SCORING, SeatQueue
from computeshare.runtime.log_lines import Writer
from computeshare.settings import Settings
from computeshare.transport.connections import connect
from computeshare.transport.forwarder import Forwarder, GatewayAccess
from computeshare.transport.wire import Wire
from computeshare.up.embedded_broker import EmbeddedBroker
from tests.integration.api.gateway.hostile import NONCE, OURS, PROBES, THEIRS, Scene, staged_data, want
from tests.support.gateway import Plane
from tests.support.rounds import PLAN, ZERO, opened, take_seat
from tests.support.served_api import serving
from tests.support.servers import SERVERS, use_server

INFO = WorkerInfo("", "x", "cpu", ("mnist",), {}, 1, "host", 1)
SPEC = JobSpec(dataset="digits", model="mlp")
BYSTANDING = ("cs:gateway-traffic", "cs:control", "cs:release", "cs:workers", "cs:evaluator")
"""Keys that the control plane changes meanwhile."""


@pytest.fixture(scope="module", params=SERVERS)
def stage(
    request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Plane, Redis, GatewayAccess, Scene]]:
    """A gateway before a real broker, a machine that has joined, and others' things in the broker."""
    folder = tmp_path_factory.mktemp("confinement")
    with pytest.MonkeyPatch.context() as patch:
        use_server(request.param, patch)
        broker = EmbeddedBroker.start(folder / "broker.log")
    patch.setattr(PieceServer, "serve", lambda *_: 0)  # which would take wants and answers away
    users = {"redis_url": broker.urls["api"], "gateway_redis_url": broker.urls["worker"]}
    settings = Settings(home=folder / "plane", public_url="https://home.example", **users)
    with serving(settings) as (url, app), connect(broker.url, retries=0) as redis:
        plane = Plane(url, app, settings)
        plane.gateway.refusals = Refusals(10_000)
        plane.gateway._openings = Throttle(1_000_000, 1e-6)
        machine, access = plane.joined(folder / "home")
        scene = Scene(f"{machine}work", "feedbeefwork", JobKeys("mine0000"), JobKeys("other000"), Scripts(redis))
        store = RoundStore(redis, "mine0000")
        store.publish('{"bundle": "sha256:' + "1" * 64 + '"}')
        opened(redis, store, PLAN.round(0))
        for worker, session, seat in ((scene.worker, OURS, scene.seat), (scene.victim, THEIRS, scene.their_seat)):
            assert take_seat(WorkerSession(redis, "mine0000", worker, session), seat) == "running"
        staged_data(redis, scene)
        yield plane, redis, access, scene
    patch.undo()
    broker.stop()


def held(redis: Redis) -> dict[bytes, Any]:
    """All that is in the broker, but for what the control plane changes meanwhile."""
    return {key: redis.dump(key) for key in redis.scan_iter(count=1000) if key.decode() not in BYSTANDING}


@pytest.mark.parametrize("name", PROBES)
def test_a_hostile_operation_is_refused_and_changes_nothing(stage: Any, name: str) -> None:
    plane, redis, access, scene = stage
    commands = PROBES[name](scene)
    before, refused = held(redis), plane.gateway.refusals.counts[scene.worker[:8]]
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        wire = Wire(far)
        *replies, last = wire.exchange([*commands, ["PING"]], raise_errors=False)
        assert last == b"PONG", "the replies are in step"
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        assert errors and any("REFUSED" in str(error) for error in errors), replies
        assert name == "a transaction" or len(errors) == len(replies)
        wire.close()
    assert held(redis) == before
    assert redis.sismember(keys.JOBS, "mine0000")
    assert plane.gateway.refusals.counts[scene.worker[:8]] > refused


def test_a_machine_does_not_learn_where_the_broker_is_nor_stores_a_probe_for_long(stage: Any) -> None:
    _, redis, access, scene = stage
    key = scene.mine.probe(scene.worker)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        assert far.client_info() == {"id": 0, "addr": "gateway:0"}
        assert {"redis_version"} <= far.info("server").keys() <= {"redis_version", "valkey_version", "server_name"}
        assert far.set(key, bytes(3_000_000), px=10**12)
    assert 0 < redis.ttl(key) <= 60
    redis.delete(key)


@pytest.mark.parametrize("name", SELDOM)
def test_a_machine_adds_no_more_than_a_few_events_in_a_row(stage: Any, tmp_path: Path, name: str) -> None:
    """Of those that leave a row in the job's timeline, whatever the session."""
    plane, redis, _, scene = stage
    machine, access = plane.joined(tmp_path)
    own, (most, _) = Scene(f"{machine}work", scene.victim, scene.mine, scene.other, scene.scripts), SELDOM[name]
    redis.hset(scene.mine.seats(), own.worker, own.seat)
    before = redis.xlen(scene.mine.events())
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        sessions: list[Any] = [{"session": f"{number:032x}"} if name == "join" else {} for number in range(most + 5)]
        replies = Wire(far).exchange([own.call(name, **session) for session in sessions], raise_errors=False)
    refused = [reply for reply in replies if isinstance(reply, ResponseError)]
    assert 1 <= len(refused) <= 5 and f"calls {name} too often: try again in" in str(refused[0])
    assert redis.xlen(scene.mine.events()) - before == len(replies) - len(refused)
    redis.hdel(scene.mine.seats(), own.worker)
    redis.hdel(scene.mine.sessions(), own.worker)


@pytest.mark.parametrize(
    ("name", "event", "passes"),
    [
        ("join", "x" * 4000, True),
        ("join", "x" * 4100, False),
        ("leave", "x" * 4100, False),
        ("submit", "x" * (REPORT_BYTES + REPORT_UNIT_BYTES - 20), True),
        ("submit", "x" * (REPORT_BYTES + REPORT_UNIT_BYTES), False),
    ],
)
def test_what_a_worker_says_of_itself_is_short(stage: Any, tmp_path: Path, name: str, event: str, passes: bool) -> None:
    plane, redis, _, scene = stage
    machine, access = plane.joined(tmp_path)
    own = Scene(f"{machine}work", scene.victim, scene.mine, scene.other, scene.scripts)
    redis.hset(scene.mine.seats(), own.worker, own.seat)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        [reply] = Wire(far).exchange([own.call(name, event=json.dumps({"name": event}))], raise_errors=False)
    assert ("REFUSED" in str(reply)) != passes
    redis.hdel(scene.mine.seats(), own.worker)
    redis.hdel(scene.mine.sessions(), own.worker)


def test_what_is_in_a_refused_transaction_is_not_done(stage: Any) -> None:
    _, _, access, scene = stage
    key = scene.mine.probe(scene.worker)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        commands = [["MULTI"], ["SET", key, b"x", "EX", 60], ["DEL", scene.mine.spec()], ["EXEC"], ["GET", key]]
        _, _, refused, done, found = Wire(far).exchange(commands, raise_errors=False)
    assert (
        "REFUSED" in str(refused) and "EXECABORT" in type(done).__name__.upper() + str(done).upper() and found is None
    )


def test_a_machine_without_a_seat_reaches_no_job(stage: Any, tmp_path: Path) -> None:
    plane, redis, _, scene = stage
    machine, access = plane.joined(tmp_path)
    stranger = Scene(f"{machine}work", scene.victim, scene.mine, scene.other, scene.scripts)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        for command in (["GET", scene.mine.spec()], stranger.call("join"), stranger.call("log")):
            [reply] = Wire(far).exchange([command], raise_errors=False)
            assert "no seat in this job" in str(reply)
        redis.hset(scene.mine.seats(), stranger.worker, stranger.seat)
        assert Wire(far).exchange([["GET", scene.mine.spec()]]) == [redis.get(scene.mine.spec())]
        redis.hdel(scene.mine.seats(), stranger.worker)


def test_inline_commands_and_what_is_no_resp_end_the_connection(stage: Any) -> None:
    plane, _, access, _ = stage
    for wrong in (
        b"PING\r\n",
        b"FLUSHALL\r\n",
        b"*1\r\n+PING\r\n",
        b"*0\r\n",
        b"*-1\r\n",
        b"*01\r\n$4\r\nPING\r\n",
        b"*99999\r\n",
    ):
        with plane.open(access) as link:
            link.send(wrong)
            with pytest.raises(ConnectionClosed) as end:
                link.recv(5)
            assert end.value.rcvd is not None and end.value.rcvd.code == 1002


def test_a_machine_that_goes_on_is_cut_off_and_logged_once_a_second(
    stage: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    plane, _, access, _ = stage
    kept, plane.gateway.refusals = plane.gateway.refusals, Refusals(5)
    try:
        with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
            with pytest.raises(RedisError) as end:
                for _ in range(20):
                    with pytest.raises(ResponseError, match="REFUSED"):
                        far.flushall()
            assert isinstance(end.value, RedisConnectionError)
    finally:
        plane.gateway.refusals = kept
    assert 1 <= capfd.readouterr().err.count("refused what a machine sent") <= 3


def test_a_machine_that_is_banned_as_one_worker_is_banned_as_every_other(stage: Any, tmp_path: Path) -> None:
    plane, redis, _, scene = stage
    machine, access = plane.joined(tmp_path)
    first, second = (
        Scene(f"{machine}{name}", scene.victim, scene.mine, scene.other, scene.scripts) for name in ("one1", "two2")
    )
    for each in (first, second):
        redis.hset(scene.mine.seats(), each.worker, each.seat)
    at = [0.0]
    gate, needs = Access(lambda: redis, lambda: at[0]), CommandNeeds(jobs=frozenset([scene.mine.job_id]))
    assert gate.refusal(machine, needs) is None
    try:
        with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
            Wire(far).exchange([["GET", scene.mine.spec()]])
            redis.hset(scene.mine.banned(), first.worker, "bad updates")
            assert Wire(far).exchange([first.call("join")])[0][0] == b"banned"
            assert Wire(far).exchange([second.call("join")])[0][0] == b"banned"
        for at[0] in (LEAVING_S - 1, LEAVING_S + 1):  # until then it may leave
            assert gate.refusal(machine, needs) == (
                None if at[0] < LEAVING_S else "this machine is banned from this job"
            )
    finally:
        redis.hdel(scene.mine.banned(), first.worker)
        redis.hdel(scene.mine.seats(), first.worker, second.worker)


def test_a_machine_has_no_more_than_sixteen_workers_at_a_time(stage: Any, tmp_path: Path) -> None:
    plane, _, _, _ = stage
    machine, access = plane.joined(tmp_path)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        ids = [f"{machine}{number:04}" for number in range(17)]
        replies = Wire(far).exchange([["GET", keys.orders(one)] for one in ids], raise_errors=False)
    assert replies[:16] == [None] * 16 and "16 other workers" in str(replies[16])


def test_a_scoring_seat_opens_nothing_at_the_gateway(stage: Any, tmp_path: Path) -> None:
    """Machines that joined by an invite do not score, even if they got such a seat."""
    plane, redis, _, _ = stage
    machine, access = plane.joined(tmp_path)
    seat = Seat(f"{machine}abcdef", "unscored", SCORING, 1)
    SeatQueue(redis).enqueue(seat)
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        with pytest.raises(ResponseError, match="no seat in this job"):
            RoundStore(far, seat.job).spec()
        with pytest.raises(ResponseError, match="REFUSED"):
            score_requests.take(far, seat)
        request = ScoreRequest(id="0" * 32, token=str(ZERO), part="test", files="sha256:" + "0" * 64)
        with pytest.raises(ResponseError, match="REFUSED"):
            score_requests.answer(far, seat, request, PartScore(loss=0.0, metrics={}, samples=1))
    assert redis.exists(JobKeys(seat.job).score_answer(request.id)) == 0


def test_a_machine_fetches_by_no_more_than_a_few_processes_at_a_time(stage: Any, tmp_path: Path) -> None:
    _, redis, access, scene = stage
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        names = [f"{scene.worker}-{number:016x}" for number in range(MOST_READERS + 5)]
        wants = [["HSET", keys.BUNDLE_WANTS, name, want("1" * 64)] for name in names]
        replies = Wire(far).exchange(wants, raise_errors=False)
        assert replies[:MOST_READERS] == [1] * MOST_READERS
        assert all("within a minute: wait" in str(error) for error in replies[MOST_READERS:])
        assert Wire(far).exchange([["GET", keys.orders(scene.worker)]]) == [None], "workers are counted by themselves"
    redis.hdel(keys.BUNDLE_WANTS, *names)


def test_a_worker_may_do_all_that_it_needs(stage: Any, tmp_path: Path) -> None:
    """Each thing that a worker ever does with the broker, by the classes with which it does them."""
    plane, redis, _, _ = stage
    machine, access = plane.joined(tmp_path)
    worker, seat = f"{machine}abcdef", f"{machine}abcdef-fresh000-1-1"
    store = RoundStore(redis, "fresh000")
    store.publish('{"bundle": "sha256:' + "7" * 64 + '"}')
    reducer = opened(redis, store, PLAN.round(0))
    reducer.redis.rpush(reducer.keys.chain(), str(ZERO))
    SeatQueue(redis).enqueue(Seat.parse(seat))
    redis.acl_log_reset()
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        handshake.check(far, "worker")
        register(far, replace(INFO, id=worker))
        assert read_orders(far, worker) == Orders()
        rounds, session = RoundStore(far, "fresh000"), WorkerSession(far, "fresh000", worker, OURS)
        assert rounds.spec() and recipes.is_signed(far, "fresh000", SPEC, "token") is False
        session.put_probe(bytes(1_000_000))
        session.take_probe()
        session.report("{}")
        assert session.join(seat, {"name": "x"}) == "running"
        found, grant = session.pull(str(ZERO), 1)
        assert found == [b"weights 0"] and grant.answer == "leased"
        session.follow("", str(ZERO), 1)
        session.stage(NONCE, grant.micro_batches[0], {0: bytes(2_000_000)}, str(ZERO))
        assert reducer.offers()[grant.micro_batches[0]].worker == worker
        assert reducer.draft(ZERO, "d" * 32, 0, b"drafted")
        assert session.drafted(10) == [(str(ZERO), "d" * 32, 0)]
        room = [memoryview(bytearray(10))]
        draft = Draft(str(ZERO), "d" * 32, {0: session.read_draft("d" * 32, [0], room)[0] or b""})
        assert bytes(draft.parts[0]) == b"drafted"
        assert session.pull(str(ZERO), 1, room, draft)[0] == [b"weights 0"], "it was no draft"
        assert session.extend(grant.micro_batches, NONCE) == "running"
        session.unstage(NONCE, grant.micro_batches)
        updates = [(unit, [b"update"], 0.5) for unit in grant.micro_batches]
        receipt = session.submit(str(ZERO), NONCE, updates, {}, and_wait=Waiting(10, 1))
        assert receipt.outcome == "accepted" and session.waited(str(ZERO)).answer in ("leased", "wait")
        assert session.wait(10) is None and session.wait_for(str(ZERO), Waiting(10, 1)).answer in ("leased", "wait")
        session.doubt(str(ZERO), again=False)
        assert rounds.append("unfit", {"worker": worker, "session": OURS, "reason": "x", "name": "x", "device": "x"})
        tell(far, "fresh000", Writer(worker, "x"), event="a line")
        assert redis.xlen(store.keys.logs()) == 1
        session.leave("done")
        rounds.remove_worker(worker, "its process died")
        exchange = PieceExchange(far, "sha256:" + "7" * 64, lambda: True, worker)
        assert exchange._exchange("8" * 64, ["9" * 64], memoryview(bytearray(1)), _Answers()) is None
        exchange.close()
        assert dict(far.info("server"))
        unregister(far, worker)
    assert plane.gateway.refusals.counts[machine] == 0
    assert redis.acl_log() == []


@pytest.mark.parametrize("what", ["a function", "callbacks", "data that inflate", "an error that inflates", "no date"])
def test_what_a_machine_writes_into_its_own_rq_job_runs_nowhere(stage: Any, tmp_path: Path, what: str) -> None:
    """The control plane reads these hashes, too: whoever may write one must not make it run or unpack anything."""
    _, redis, access, scene = stage
    mark, seat = tmp_path / "ran", Seat.parse(scene.seat)
    call = ["computeshare.worker.seat.seat.serve", None, [scene.seat], {}]
    if what == "a function":
        call = ["os.system", None, [f"touch {mark}"], {}]
    data = b"[" + bytes(60_000_000) if what == "data that inflate" else json.dumps(call).encode()
    fields = {"data": zlib.compress(data), "status": "failed", "origin": seat.worker}
    if what == "callbacks":
        fields |= {"success_callback_name": "os.system", "stopped_callback_name": "os.system"}
    if what == "an error that inflates":
        fields["exc_info"] = zlib.compress(bytes(60_000_000))
    if what == "no date":
        fields["created_at"] = "yesterday"
    with Forwarder(access) as forwarder, connect(forwarder.redis_url, retries=0) as far:
        assert far.hset(RqSeatKeys(scene.seat).job(), mapping=fields)  # type: ignore[arg-type]
    before = psutil.Process().memory_info().rss
    seats = SeatQueue(redis)
    assert seats.state([seat]) == {scene.seat: "failed"}
    seats.forget(seat)
    assert not mark.exists() and not redis.exists(RqSeatKeys(scene.seat).job())
    assert psutil.Process().memory_info().rss - before < 30_000_000
