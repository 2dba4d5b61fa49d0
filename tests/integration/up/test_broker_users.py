"""What the broker refuses to each role, and that nobody is let in without a user."""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis import Redis
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import Script, script
from computeshare.queue.rq_keys import SUSPENDED, RqKeys, RqSeatKeys
from computeshare.settings import BrokerUser
from computeshare.up.broker_users import RULES, main
from computeshare.up.embedded_broker import EmbeddedBroker, find_server
from tests.support.servers import SERVERS, use_server
from tests.support.wait import wait_until

ROOT = Path(__file__).resolve().parents[3]
JOB, RQ, SEAT = JobKeys("abcd1234"), RqKeys("worker1"), RqSeatKeys("worker1-abcd1234-0-1")
TOKEN = "1.1.aaaaaaaaaaaaaaaa"
ROLES: tuple[BrokerUser, ...] = ("api", "reducer", "evaluator", "worker")
SERVER = """
FLUSHALL|FLUSHALL ASYNC|FLUSHDB|KEYS *|CONFIG GET *|CONFIG SET dir /tmp|CONFIG SET requirepass x|CONFIG REWRITE
CONFIG RESETSTAT|ACL LIST|ACL GETUSER owner|ACL SETUSER x on|ACL SETUSER worker +@all|ACL DELUSER owner|ACL SAVE
ACL LOAD|ACL LOG|ACL LOG RESET|EVAL return 0|EVAL_RO return 0|SCRIPT FLUSH|SCRIPT KILL|SCRIPT EXISTS x|FUNCTION LIST
FUNCTION FLUSH|FUNCTION DUMP|FUNCTION LOAD x|FCALL f 0|FCALL_RO f 0|CLIENT LIST|CLIENT KILL TYPE normal|CLIENT PAUSE 1
CLIENT UNPAUSE|CLIENT NO-EVICT ON|CLIENT UNBLOCK 1|MONITOR|SWAPDB 0 1|SHUTDOWN NOSAVE|SAVE|BGSAVE|BGREWRITEAOF
LASTSAVE|REPLICAOF NO ONE|REPLICAOF h 1|SLAVEOF h 1|SYNC|PSYNC ? -1|REPLCONF ack 1|FAILOVER|ROLE|MIGRATE h 1 k 0 1
RESTORE k 0 x|MODULE LIST|CLUSTER RESET|SLOWLOG GET|SLOWLOG LEN|SLOWLOG RESET|LATENCY RESET|LATENCY DOCTOR
PFDEBUG GETREG k|PFSELFTEST
"""
"""Commands that no role is allowed. (DEBUG and MODULE LOAD are refused to everybody.)"""
REWRITTEN = (
    *(JOB.weights(TOKEN), JOB.delta(TOKEN), JOB.state(TOKEN), JOB.draft("d"), JOB.chain(), JOB.steps(), JOB.drafts()),
    *(JOB.recipe(), JOB.recipe_signature(), JOB.origin(), JOB.stages(), JOB.reducer(), JOB.strikes(), JOB.taken()),
    *(keys.CONTROL_LOCK, keys.RELEASE, keys.GATEWAYS, keys.GATEWAY_TRAFFIC, keys.gateway("g"), keys.orders("worker1")),
    *(keys.bundle_piece("p"), keys.bundle_offers("d"), "another", SUSPENDED, RQ.queue(), SEAT.job()),
    *(JOB.seats(), JOB.measured("worker1"), JOB.mail("s"), JOB.placement(), JOB.inner("worker1:s"), JOB.round()),
    *(keys.worker("worker1"), keys.text_answer("t"), keys.text_request("t"), keys.EVALUATOR, keys.JOBS),
    *(JOB.scoring(TOKEN), JOB.score_answer("r"), JOB.update(TOKEN, 0), JOB.staged("worker1:n:0"), JOB.leases()),
    *(JOB.spec(), JOB.fence(), JOB.news(TOKEN), JOB.banned()),
)
"""Keys whose writers not every role is."""
OF_ITS_OWN: dict[BrokerUser, tuple[str, ...]] = {
    "api": REWRITTEN,
    "reducer": (
        *(JOB.weights(TOKEN), JOB.delta(TOKEN), JOB.state(TOKEN), JOB.draft("d"), JOB.chain(), JOB.steps()),
        *(JOB.drafts(), JOB.stages(), JOB.reducer(), JOB.strikes(), JOB.taken(), JOB.round(), JOB.update(TOKEN, 0)),
        *(JOB.staged("worker1:n:0"), JOB.leases(), keys.JOBS, JOB.spec(), JOB.fence(), JOB.news(TOKEN), JOB.banned()),
    ),
    "evaluator": (*(keys.text_answer("t"), keys.text_request("t"), keys.EVALUATOR, keys.JOBS, JOB.scoring(TOKEN)),),
    "worker": (
        *(RQ.queue(), SEAT.job(), JOB.measured("worker1"), JOB.mail("s"), JOB.placement()),
        *(JOB.inner("worker1:s"), JOB.round(), keys.worker("worker1"), JOB.score_answer("r")),
        *(JOB.update(TOKEN, 0), JOB.staged("worker1:n:0"), JOB.leases()),
    ),
}
UNREAD: dict[BrokerUser, tuple[str, ...]] = {
    "api": (),
    "reducer": (
        RQ.queue(),
        SEAT.job(),
        keys.text_request("t"),
        keys.GATEWAY_TRAFFIC,
        keys.orders("worker1"),
        "another",
    ),
    "evaluator": (RQ.queue(), SEAT.job(), keys.GATEWAY_TRAFFIC, keys.orders("worker1"), keys.worker("w"), "another"),
    "worker": (keys.text_request("t"), keys.GATEWAY_TRAFFIC, keys.CONTROL_LOCK, keys.JOBS, "another"),
}
CALLED: dict[BrokerUser, str] = {
    "reducer": "announce ban claim close close_audit commit discard dispute draft fold keep log open refuse republish "
    "finish",
    "evaluator": "announce log renew",
    "worker": "announce doubt extend hand_over join lease leave log offer place release submit take_over",
}
NOT_CALLED: dict[BrokerUser, str] = {
    "reducer": "join hand_over take_over place renew",
    "evaluator": "commit open submit join lease discard keep claim",
    "worker": "commit open claim keep fold ban refuse draft pardon close renew",
}
"""Scripts whose keys include some that the role may not write."""


@pytest.fixture(scope="module", params=SERVERS)
def broker(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBroker]:
    with pytest.MonkeyPatch.context() as patch:
        use_server(request.param, patch)
        broker = EmbeddedBroker.start(tmp_path_factory.mktemp("users") / "broker.log")
        yield broker
        broker.stop()


@pytest.fixture
def login(broker: EmbeddedBroker) -> Iterator[Callable[[BrokerUser], Redis]]:
    with closing(Redis.from_url(broker.url)) as owner:
        owner.acl_log_reset()
        owner.flushall()
    clients = []

    def log_in(user: BrokerUser) -> Redis:
        clients.append(Redis.from_url(broker.urls[user]))
        return clients[-1]

    yield log_in
    for one in clients:
        one.close()


def hostile(role: BrokerUser) -> list[list[str]]:
    """Commands that a role is to be refused."""
    own, others = OF_ITS_OWN[role][0], [one for one in REWRITTEN if one not in OF_ITS_OWN[role]]
    commands = [line.split() for line in SERVER.replace("\n", "|").split("|") if line]
    for key in others:
        commands += [["SET", key, "x"], ["UNLINK", key], ["RENAME", own, key], ["COPY", own, key]]
    commands += [[read, key] for key in UNREAD[role] for read in ("GET", "TYPE", "DUMP")]
    if role in ("evaluator", "worker"):
        commands += [["SCAN", "0"], ["RANDOMKEY"]]
    if role != "api":
        commands += [["SUBSCRIBE", "any"], ["PSUBSCRIBE", "*"], ["PUBLISH", "any", "x"]]
    return commands


@pytest.mark.parametrize("role", ROLES)
def test_a_role_is_refused_what_it_does_not_need(role: BrokerUser, login: Callable[[BrokerUser], Redis]) -> None:
    commands, client = hostile(role), login(role)
    assert len(commands) >= 60
    allowed = []
    for command in commands:
        try:
            client.execute_command(*command)
        except NoPermissionError:
            continue
        except RedisError as error:
            allowed.append((command, str(error)))
        else:
            allowed.append((command, ""))
    assert allowed == []


def keys_of(called: Script) -> list[str]:
    """The keys of a job that a script is called with, without other versions' and units'."""
    fixed = [getattr(JOB, name.removesuffix("_key"))() for name in called.of_job]
    claim = [JOB.scoring(TOKEN)] if called.name == "renew" else []
    return [*fixed, *claim, *(JOB.staged("worker1:n:0") for name in called.keys.single if name.startswith("staged"))]


@pytest.mark.parametrize("role", CALLED)
def test_a_role_may_call_its_scripts_and_none_that_write_what_it_may_not(
    role: BrokerUser, login: Callable[[BrokerUser], Redis]
) -> None:
    client = login(role)

    def is_refused(name: str) -> bool:
        called = script(name)
        digest = client.script_load("return 0")
        try:
            client.evalsha(str(digest), len(keys_of(called)), *keys_of(called))
        except NoPermissionError:
            return True
        return False

    assert [name for name in CALLED[role].split() if is_refused(name)] == []
    assert [name for name in NOT_CALLED[role].split() if not is_refused(name)] == []


def test_a_script_has_no_more_rights_than_its_caller(login: Callable[[BrokerUser], Redis]) -> None:
    client = login("worker")
    digest = str(client.script_load('return redis.call("HSET", ARGV[1], "0", "x")'))
    assert client.evalsha(digest, 0, JOB.round()) == 1
    for key in (JOB.weights(TOKEN), "another"):
        with pytest.raises(RedisError, match=r"ACL failure|can't access"):
            client.evalsha(digest, 0, key)


def test_nobody_is_let_in_without_a_user_of_its_own(broker: EmbeddedBroker) -> None:
    path, words = str(broker.place.folder / "broker.sock"), [broker.place.password]
    words += [url.split(":")[2].split("@")[0] for url in broker.urls.values()]
    assert len({*words}) == len(RULES)
    for user in ("default", None):
        for word in {*words, "", None}:
            client = Redis(unix_socket_path=path, username=user, password=word)
            with closing(client), pytest.raises(AuthenticationError):
                client.ping()
    for user, url in broker.urls.items():
        with closing(Redis.from_url(url)) as client:
            assert client.acl_whoami() == user
        for other in RULES:
            if other != user:
                wrong = Redis.from_url(url.replace(f"unix://{user}:", f"unix://{other}:"))
                with closing(wrong), pytest.raises(AuthenticationError):
                    wrong.ping()


def test_users_are_there_again_when_the_broker_comes_back_empty(broker: EmbeddedBroker) -> None:
    os.kill(broker.pid, signal.SIGKILL)
    wait_until(lambda: broker.poll() is not None)
    broker.spawn()

    def is_there(url: str) -> bool:
        try:
            with closing(Redis.from_url(url)) as client:
                return bool(client.ping())
        except RedisError:
            return False

    wait_until(lambda: all(map(is_there, broker.urls.values())))
    with closing(Redis.from_url(broker.urls["worker"])) as client, pytest.raises(NoPermissionError):
        client.flushall()


def test_the_broker_of_the_containers_has_the_same_users(tmp_path: Path) -> None:
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    command = compose["valkey"]["command"][2].replace("$$", "$").replace("/etc/valkey.conf", "docker/valkey.conf")
    words = {f"{user.upper()}_PASSWORD": f"word-of-{user}" for user in ROLES}
    assert {*compose["valkey"]["environment"]} == {*words}
    made = ["sh", "-c", command.replace("exec valkey-server -", "cat")]
    config = subprocess.run(
        made, cwd=ROOT, env={**os.environ, **words}, check=True, capture_output=True, text=True
    ).stdout
    place = f"unixsocket {tmp_path}/broker.sock\nport 0\n"
    server = subprocess.Popen([find_server(), "-"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert server.stdin is not None
        with server.stdin as text:
            text.write(config + place)
        wait_until((tmp_path / "broker.sock").exists)
        for user in ROLES:
            own = Redis(unix_socket_path=f"{tmp_path}/broker.sock", username=user, password=f"word-of-{user}")
            with closing(own) as client:
                assert client.acl_whoami() == user
    finally:
        server.kill()
        server.wait()
    for user in ROLES:
        address = compose[user]["environment"]["COMPUTESHARE_REDIS_URL"]
        assert address == f"redis://{user}:${{{user.upper()}_PASSWORD:-computeshare}}@valkey:6379/0"
    assert "home:/home/computeshare/home" not in compose["worker"]["volumes"]


def test_the_printed_lines_have_a_password_of_their_own_for_each_user(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--variables"])
    assert (ROOT / "docker" / "valkey.conf").read_text().endswith(capsys.readouterr().out)
    main([])
    lines = capsys.readouterr().out.splitlines()
    addresses = {user: next(line for line in lines if line.startswith(f"# {user}: ")) for user in RULES}
    for user, rules in RULES.items():
        word = addresses[user].split(":")[3].split("@")[0]
        assert len(word) == 48 and f"user {user} on >{word} {rules}" in lines
    assert len({*addresses.values()}) == 5 and "user default off" in lines
