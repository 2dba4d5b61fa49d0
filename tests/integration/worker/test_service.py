"""A service of a worker that was invited."""

from pathlib import Path

import httpx2
import pytest
import typer

from computeshare.runtime.signatures import SigningKey
from computeshare.settings import Settings
from computeshare.terminal.command import run
from computeshare.worker.invite import introduction
from computeshare.worker.process import command
from tests.support.served_api import serving


def test_the_link_in_an_invited_workers_service_lets_nobody_in_any_more(
    tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path / "plane", redis_url=redis_url, token="secret")
    home = tmp_path / "worker"
    app = typer.Typer()
    app.command()(command)
    with serving(settings) as (url, _):
        headers = {"Authorization": "Bearer secret"}
        link = httpx2.post(f"{url}/v1/invites", json={"queue": "mnist"}, headers=headers).json()["url"]
        assert run(app, ["--join", link, "--home", str(home), "--print-service", "systemd"]) == 0
        assert f"--join {link} --home {home}" in capsys.readouterr().out
        thief = introduction("thief", link.rpartition("/")[2], SigningKey.new())
        assert "was already used" in httpx2.post(link, json=thief).json()["detail"]
        assert run(app, ["--join", link, "--home", str(home), "--print-service", "systemd"]) == 0  # as it starts again


def test_a_machine_at_the_gateway_serves_no_other_queue_than_its_invites(
    tmp_path: Path, redis_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(home=tmp_path / "plane", redis_url=redis_url, token="secret")
    app = typer.Typer()
    app.command()(command)
    with serving(settings) as (url, _):
        made = httpx2.post(f"{url}/v1/invites", json={"queue": "mnist"}, headers={"Authorization": "Bearer secret"})
        flags = ["--join", made.json()["url"], "--home", str(tmp_path / "worker"), "--device", "cpu"]
        assert run(app, [*flags, "--queue", "mnist", "--queue", "other"]) != 0
    assert "this machine's invite is for the queue mnist" in " ".join(capsys.readouterr().err.split())
