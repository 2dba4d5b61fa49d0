"""Host names, derived keys, and failed tries."""

import asyncio
import socket
from collections import Counter
from collections.abc import Sequence

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Message, Receive, Scope, Send

from api.access.credentials import matches
from api.access.tokens import cookie_of, login_key_of
from api.http.security import TRIES, Guard, allowed_hosts
from computeshare.settings import login_path
from tests.support.coroutines import asynchronously


def own_names(bind_host: str, others: tuple[str, ...] = ()) -> Guard:
    hosts = allowed_hosts(bind_host, others)
    return Guard(app=None, credentials=None, hosts=hosts, login_page=None, explain=None, gateway=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["localhost", "localhost:8000", "127.0.0.1:8000", "[::1]:8000", "LOCALHOST"])
def test_loopback_names_are_ours(host: str) -> None:
    assert own_names("127.0.0.1")._is_own_name(host)


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "10.0.0.5",
        "[::1",
        "localhost@evil.example",
        "localhost/static/",
        "localhost?/static/",
        "localhost#",
        "::",
    ],
)
def test_other_names_are_not(host: str) -> None:
    assert not own_names("127.0.0.1")._is_own_name(host)


def test_bound_and_given_names_are_ours() -> None:
    guard = own_names("192.168.1.5", ("train.example",))
    assert guard._is_own_name("192.168.1.5:8000") and guard._is_own_name("train.example")


def test_bound_to_every_address_addresses_and_the_own_name_are_ours_and_no_others() -> None:
    guard = own_names("0.0.0.0")
    assert guard._is_own_name("10.0.0.5:8000") and guard._is_own_name(socket.gethostname())
    assert not guard._is_own_name("evil.example")


def test_derived_keys_differ_and_do_not_hold_the_token() -> None:
    keys = {login_key_of("secret"), cookie_of(login_key_of("secret")), login_key_of("other")}
    assert len(keys) == 3 and not any("secret" in key for key in keys)
    assert login_path("secret") == f"/login?key={login_key_of('secret')}"


def test_comparison_takes_any_text() -> None:
    assert matches("a", "a") and not matches("\ud800", "a") and not matches("ä", "a")


async def statuses(guard: Guard, keys: Sequence[str]) -> Counter[int]:
    """The status codes of logins with these keys from one address, all at the same time."""
    found: Counter[int] = Counter()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            found[message["status"]] += 1

    async def receive() -> Message:
        return {"type": "http.request"}

    headers, client = [(b"host", b"localhost")], ("10.0.0.1", 1)
    about = {"type": "http", "method": "GET", "path": "/login", "headers": headers, "client": client, "scheme": "http"}
    await asyncio.gather(*(guard({**about, "query_string": f"key={key}".encode()}, receive, send) for key in keys))
    return found


def test_tries_at_the_same_time_are_counted_before_they_are_answered() -> None:
    async def login(scope: Scope, receive: Receive, send: Send) -> None:
        await asyncio.sleep(0)  # all others are here before the first is answered
        status = 303 if scope["query_string"] == b"key=right" else 403
        await PlainTextResponse("", status)(scope, receive, send)

    def explain(_: Request, error: Exception) -> Response:
        return PlainTextResponse(str(error), getattr(error, "status", 500))

    guard = Guard(login, None, frozenset({"localhost"}), None, explain, login)  # type: ignore[arg-type]

    async def one_after_another() -> Counter[int]:
        return sum([await statuses(guard, ["right"]) for _ in range(3 * TRIES)], Counter())

    assert asynchronously(one_after_another()) == {303: 3 * TRIES}
    assert asynchronously(statuses(guard, ["right"] * 100)) == {303: 100}  # a class behind one address
    assert asynchronously(statuses(guard, ["wrong"] * 900)) == {403: TRIES, 429: 900 - TRIES}
