"""A machine gets in by a signature over what the gateway has just drawn, and by no other; its key can be replaced, and
its access ends.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
import typer
from redis import Redis
from sqlalchemy import update
from websockets.exceptions import ConnectionClosed

from api.database import now_ms
from api.gateway.app import ASKED_OF_MACHINE, GatewayLimits
from api.gateway.relay import REVOKED, SLOW
from api.scheduler.machines import INVITE
from computeshare.errors import SettingsError, Unreachable
from computeshare.runtime.signatures import SigningKey
from computeshare.terminal.command import run
from computeshare.transport.connections import connect
from computeshare.transport.forwarder import ADMITTED, Forwarder, GatewayAccess
from computeshare.worker.invite import join, replace_key
from computeshare.worker.process import command
from tests.support.gateway import Plane, refusal
from tests.support.wait import wait_until

PING, PONG = b"*1\r\n$4\r\nPING\r\n", b"+PONG\r\n"


def answered(plane: Plane, access: GatewayAccess, answer: bytes | str) -> tuple[int, str]:
    """The code and the words by which the gateway refuses an answer to its challenge."""
    link = plane.asked(access)
    assert len(link.recv(5)) == 32
    link.send(answer)
    return refusal(lambda: link.recv(5))


def test_only_a_signature_over_this_challenge_by_this_machines_key_opens(plane: Plane, tmp_path: Path) -> None:
    _, mine = plane.joined(tmp_path / "mine")
    _, other = plane.joined(tmp_path / "other")
    first, second = plane.asked(mine), plane.asked(mine)
    challenge, another, theirs = first.recv(5, False), second.recv(5, False), plane.asked(other).recv(5, False)
    assert len({challenge, another, theirs}) == 3
    proof = mine.proof(mine.key.current(), challenge)
    first.send(proof)
    assert first.recv(5) == ADMITTED
    wrong: dict[str, bytes | str] = {
        "a replay": proof,
        "of another machine's challenge": mine.proof(mine.key.current(), theirs),
        "for another purpose": bytes.fromhex(mine.key.current().sign("join", mine.machine, challenge.hex())),
        "nothing": b"",
        "too short": proof[:-1],
        "too long": proof + b"\0",
        "text": proof.hex(),
        "a command": PING,
        "large": bytes(500_000),
    }
    for name, answer in wrong.items():
        code, words = answered(plane, mine, answer)
        assert (code, "ask for a new invite" in words) == (REVOKED, True), name
    second.send(other.proof(other.key.current(), another))  # in place of this machine's
    assert refusal(lambda: second.recv(5))[0] in (REVOKED, SLOW)
    assert refusal(lambda: plane.open(mine, other.key.current()))[0] in (REVOKED, SLOW)
    assert refusal(lambda: plane.open(replace(other, machine=mine.machine)))[0] in (REVOKED, SLOW)
    first.send(PING)
    assert first.recv(5) == PONG
    with plane.open(other) as link:
        link.send(PING)
        assert link.recv(5) == PONG


def test_wrong_signatures_are_slowed_down_and_right_ones_are_not(plane: Plane, tmp_path: Path) -> None:
    _, access = plane.joined(tmp_path)
    stranger = SigningKey.new()
    wait_until(lambda: refusal(lambda: plane.open(access, stranger)) == (SLOW, TOO_MANY))
    with plane.open(access):
        pass


TOO_MANY = "too many failed attempts from this address: try again later"


def test_a_machine_that_does_not_answer_is_let_go_and_holds_nobody_up(
    plane: Plane, tmp_path: Path, redis: Redis
) -> None:
    machine, access = plane.joined(tmp_path)
    plane.gateway._limits = GatewayLimits(answer_s=0.3, per_machine=1)
    silent = plane.asked(access)
    assert len(silent.recv(5)) == 32
    with plane.open(access):  # one that has not proved anything takes no machine's place
        code, words = refusal(lambda: silent.recv(5))
        assert (code, "in time" in words) == (SLOW, True)
        assert plane.gateway.connections[machine] == 1
    assert not plane.gateway._asked


def test_nobody_shuts_others_out_by_challenges_without_an_answer(plane: Plane, tmp_path: Path) -> None:
    _, mine = plane.joined(tmp_path / "mine")
    _, other = plane.joined(tmp_path / "other")
    silent = [plane.asked(mine) for _ in range(ASKED_OF_MACHINE)]
    assert all(len(one.recv(5)) == 32 for one in silent)
    code, words = refusal(lambda: plane.asked(mine).recv(5))
    assert (code, "still to answer" in words) == (SLOW, True)
    with plane.open(other):
        pass
    for one in silent:
        one.close()


def test_access_that_was_given_for_days_ends(plane: Plane, tmp_path: Path) -> None:
    machine, access = plane.joined(tmp_path, days=7)
    shown = plane.owner.get(f"/v1/invites/{machine}").json()
    assert shown["access_ends_at"] > shown["expires_at"]
    with plane.open(access) as link:
        link.send(PING)
        assert link.recv(5) == PONG
        with plane.app.state.services.database.writing() as connection:
            connection.execute(update(INVITE).values(access_ends_ms=now_ms()))
        with pytest.raises(ConnectionClosed) as end:
            link.recv(5)
        assert end.value.rcvd is not None and end.value.rcvd.code == REVOKED
    assert refusal(lambda: plane.open(access))[0] == 401
    assert plane.owner.get(f"/v1/invites/{machine}").json()["status"] == "ended"
    with pytest.raises(SettingsError, match="ask for a new invite"):
        replace_key(access)


def test_a_replaced_key_opens_nothing_and_running_workers_use_the_new_one(plane: Plane, tmp_path: Path) -> None:
    machine, access = plane.joined(tmp_path)
    old = access.key.current()
    reasons: list[str] = []
    with plane.open(access) as stolen, Forwarder(access, reasons.append) as forwarder:
        redis = connect(forwarder.redis_url)
        assert redis.ping()
        replace_key(access)
        with pytest.raises(ConnectionClosed):
            while True:
                stolen.send(PING)
                stolen.recv(5)
        assert redis.ping() and reasons == []
        redis.close()
    new = access.key.current()
    assert new.public != old.public and not list(tmp_path.rglob("*.next"))
    assert refusal(lambda: plane.open(access, old))[0] == REVOKED
    with plane.open(access):
        pass
    url = f"{plane.url}/join/machines/{machine}/key"
    again = {"public_key": old.public, "signature": old.sign("rotate", machine, old.public)}
    replayed = {"public_key": new.public, "signature": old.sign("rotate", machine, new.public)}
    assert httpx2.post(url, json=again).status_code == 404
    assert httpx2.post(url, json=replayed).status_code == 204  # which changes nothing
    replace_key(access)
    assert httpx2.post(url, json=replayed).status_code == 404
    entries = plane.owner.get("/v1/audit", params={"action": "machine.key"}).json()["items"]
    assert [(one["subject"], one["actor"]) for one in entries] == [(machine, "an invited machine")] * 2


def test_the_worker_replaces_its_key_by_a_flag(
    plane: Plane, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COMPUTESHARE_REDIS_URL", raising=False)
    app = typer.Typer()
    app.command()(command)
    _, access = plane.joined(tmp_path / "far")
    old = access.key.current()
    assert run(app, ["--rotate-key", "--home", str(tmp_path / "far")]) == 0
    told = capsys.readouterr()
    assert "accepts this machine's new key" in told.out
    assert not [key for key in (old, access.key.current()) if key._text() in told.out + told.err]
    assert refusal(lambda: plane.open(access, old))[0] == REVOKED
    near = tmp_path / "near"
    monkeypatch.setattr(plane.app.state.services.invites, "_broker_url", "redis://192.0.2.1:6379/0")
    join(plane.invite()[1], "mac", near)
    assert run(app, ["--rotate-key", "--home", str(near)]) == 2
    assert "has no key" in capsys.readouterr().err


@pytest.mark.parametrize("arrives", [True, False], ids=["answer lost", "request lost"])
def test_a_machine_gets_in_whatever_was_lost_while_its_key_was_replaced(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    _, access = plane.joined(tmp_path)
    old, post = access.key.current(), httpx2.post

    def cut_off(*arguments: Any, **named: Any) -> None:
        if arrives:
            post(*arguments, **named)
        raise httpx2.ReadTimeout("lost")

    with monkeypatch.context() as patch:
        patch.setattr(httpx2, "post", cut_off)
        for _ in range(2):
            with pytest.raises(Unreachable, match="no control plane answers"):
                replace_key(access)
    new = access.key.next()
    assert access.key.current().public == old.public
    reasons: list[str] = []
    with Forwarder(access, reasons.append) as forwarder, connect(forwarder.redis_url) as redis:
        assert redis.ping() and reasons == []
    assert access.key.current().public == (new if arrives else old).public
    replace_key(access)
    assert access.key.current().public != old.public
    with plane.open(access):
        pass
