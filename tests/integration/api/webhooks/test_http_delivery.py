"""Notifications on their way to a real receiver: each arrives, whatever fails in between, and goes nowhere else."""

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import event, select
from standardwebhooks import Webhook as Signer

from api.database import Database
from api.errors import NotFound
from api.jobs.service import Jobs
from api.tables import Event
from api.webhooks import notifier, webhook_events
from api.webhooks.address_guard import networks_of
from api.webhooks.http_delivery import DeliveryOutcome, Poster
from api.webhooks.notifier import Notifier
from api.webhooks.schemas import DeliveryPublic, EventName, WebhookChange, WebhookRequest, WebhookWithSecret
from api.webhooks.service import WebhookService
from api.webhooks.webhook_events import DELIVERY, Notices
from computeshare.jobspec.spec import JobSpec
from tests.support.failpoints import apart
from tests.support.scheduling_clock import Clock
from tests.support.wait import wait_until
from tests.support.webhook_receiver import HANG, TRICKLE, Receiver, receiving

ADDRESS = "http://control.test:8000"
HERE = networks_of("127.0.0.1")
SPEC = JobSpec(dataset="digits", model="mlp", queue="q", rounds=2)


class Post:
    """Jobs, webhooks, and the loop that delivers, on one database."""

    def __init__(self, database: Database, folder: Path, timeout_s: float = 5.0) -> None:
        self.database, self.notices = database, Notices(lambda: ADDRESS)
        self.jobs = Jobs(database, folder, before_delete=self.notices.spread)
        self.notifier = Notifier(database, self.notices, Poster(HERE, timeout_s=timeout_s))
        self.webhooks = WebhookService(database, self.notices, HERE, hurry=self.notifier.hurry)

    def hook(self, receiver: Receiver, *events: EventName, **given: Any) -> WebhookWithSecret:
        wanted = {"events": list(events)} if events else {}
        return self.webhooks.create(WebhookRequest(url=receiver.url, **wanted, **given))

    def cancelled(self) -> str:
        job_id = self.jobs.create(SPEC).id
        self.jobs.cancel(job_id)
        return job_id

    def turn(self) -> None:
        """One turn of the loop, and until everyone it serves has been served."""
        self.notifier.step()
        wait_until(lambda: not any(thread.is_alive() for thread in self.notifier._serving.values()))

    def log(self, hook: WebhookWithSecret) -> list[DeliveryPublic]:
        return self.webhooks.deliveries(hook.id).items


@pytest.fixture
def time_passes(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that decides what is due."""
    clock = Clock(1_800_000_000_000)
    for module in (webhook_events, notifier):
        monkeypatch.setattr(module, "now_ms", clock)
    return clock


@pytest.fixture
def post(database: Database, tmp_path: Path, time_passes: Clock) -> Iterator[Post]:
    post = Post(database, tmp_path)
    yield post
    post.notifier.close()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as one:
        yield one


def test_an_event_is_delivered_once_signed_and_says_what_it_is_about(post: Post, receiver: Receiver) -> None:
    hook = post.hook(receiver, "cancelled")
    job_id = post.cancelled()
    for _ in range(3):
        post.turn()
    (heard,) = receiver.heard
    content = Signer(hook.secret or "").verify(heard.body, heard.headers)
    assert content["type"] == "cancelled" and content["id"] == heard.headers["webhook-id"]
    assert content["job"] == {
        "id": job_id,
        "title": "mlp on digits",
        "status": "cancelled",
        "version": 0,
        "rounds_total": 2,
        "accuracy": None,
        "test_loss": None,
        "tested": None,
        "reason": "Cancelled by a user",
        "error": None,
        "url": f"{ADDRESS}/jobs/{job_id}",
    }
    (delivery,) = post.log(hook)
    assert (delivery.id, delivery.state, delivery.next_attempt_at) == (content["id"], "delivered", None)
    assert [attempt.status for attempt in delivery.attempts] == [204]


def test_what_fails_comes_again_under_the_same_id_until_it_arrives(
    post: Post, receiver: Receiver, time_passes: Clock
) -> None:
    receiver.statuses = [500, 503, 200]
    hook = post.hook(receiver, "cancelled")
    post.cancelled()
    post.turn()
    assert post.webhooks.show(hook.id).trouble == "answered 500"
    post.turn()
    assert len(receiver.heard) == 1, "it came again before its time"
    for pause_s in (11, 66):
        time_passes.ms += 1000 * pause_s
        post.turn()
    (delivery,) = post.log(hook)
    assert [attempt.status for attempt in delivery.attempts] == [500, 503, 200] and delivery.state == "delivered"
    assert {heard.headers["webhook-id"] for heard in receiver.heard} == {delivery.id}
    assert len({heard.body for heard in receiver.heard}) == 1
    assert post.webhooks.show(hook.id).trouble is None


def test_what_never_arrives_is_given_up_and_can_be_sent_again(
    post: Post, receiver: Receiver, time_passes: Clock
) -> None:
    receiver.statuses = [404]
    hook = post.hook(receiver, "cancelled")
    post.cancelled()
    for _ in range(10):
        post.turn()
        time_passes.ms += 24 * 3600 * 1000
    (delivery,) = post.log(hook)
    assert (delivery.state, len(delivery.attempts), len(receiver.heard)) == ("failed", 7, 7)
    receiver.statuses = [200]
    assert post.webhooks.redeliver(hook.id, delivery.id).state == "pending"
    post.turn()
    assert post.log(hook)[0].state == "delivered" and len(receiver.heard) == 8
    assert receiver.heard[-1].headers["webhook-id"] == delivery.id


def test_a_ping_is_tried_once(post: Post, receiver: Receiver) -> None:
    receiver.statuses = [500]
    hook = post.hook(receiver)
    post.webhooks.ping(hook.id)
    post.turn()
    assert post.log(hook)[0].state == "failed"
    receiver.statuses = [200]
    post.webhooks.ping(hook.id)
    post.turn()
    content = Signer(hook.secret or "").verify(receiver.heard[-1].body, receiver.heard[-1].headers)
    assert (content["type"], content["job"]) == ("ping", None)


def test_a_receiver_that_keeps_failing_is_asked_ever_more_seldom_until_a_user_asks(
    post: Post, receiver: Receiver, time_passes: Clock
) -> None:
    receiver.statuses = [500]
    hook = post.hook(receiver, "cancelled")
    for _ in range(20):
        post.cancelled()
    for _ in range(120):  # a minute
        post.turn()
        time_passes.ms += 500
    assert 5 <= len(receiver.heard) <= 8
    receiver.statuses = [200]
    post.turn()
    assert len(receiver.heard) <= 8, "it was not left alone"
    ping = post.webhooks.ping(hook.id)
    post.turn()
    assert post.webhooks.delivery(hook.id, ping.id).state == "delivered"


@pytest.mark.parametrize("behaviour", [HANG, TRICKLE], ids=["silent", "trickling"])
def test_a_receiver_that_is_silent_or_trickles_costs_no_more_than_the_time_it_has(
    behaviour: int, database: Database, tmp_path: Path
) -> None:
    post = Post(database, tmp_path, timeout_s=0.4)
    with receiving(behaviour) as slow:
        hook = post.hook(slow, "cancelled")
        post.cancelled()
        started = time.monotonic()
        post.turn()
        assert 0.4 <= time.monotonic() - started < 5
        (attempt,) = post.log(hook)[0].attempts
        assert attempt.status is None and attempt.error == "no answer within 0.4 s"


def test_a_slow_receiver_holds_nobody_else_up(post: Post, receiver: Receiver) -> None:
    with receiving(HANG) as slow:
        first, other = post.hook(slow, "cancelled"), post.hook(receiver, "cancelled")
        for _ in range(3):
            post.cancelled()
        post.notifier.step()
        wait_until(lambda: {delivery.state for delivery in post.log(other)} == {"delivered"})
        wait_until(lambda: len(slow.heard) == 1)
        post.notifier.step()
        assert len(slow.heard) == 1, "one receiver is asked for one thing at a time"
        assert {delivery.state for delivery in post.log(first)} == {"pending"}


def test_a_redirect_is_not_followed(post: Post, receiver: Receiver) -> None:
    with receiving(302) as crossing:
        crossing.headers = {"Location": receiver.url}
        hook = post.hook(crossing, "cancelled")
        post.cancelled()
        post.turn()
    (attempt,) = post.log(hook)[0].attempts
    assert attempt.status == 302 and "redirects are not followed" in (attempt.error or "")
    assert receiver.heard == []


def test_a_receiver_that_is_gone_is_asked_no_more(post: Post, receiver: Receiver) -> None:
    receiver.statuses = [410]
    hook = post.hook(receiver, "cancelled")
    for _ in range(3):
        post.cancelled()
    post.turn()
    post.turn()
    shown = post.webhooks.show(hook.id)
    assert (shown.active, shown.trouble, shown.pending) == (False, "answered 410 Gone: it wants no more", 0)
    assert {delivery.state for delivery in post.log(hook)} == {"dropped"} and len(receiver.heard) == 1
    post.cancelled()
    post.turn()
    receiver.statuses = [200]
    post.webhooks.change(hook.id, WebhookChange(active=True))
    post.turn()
    assert len(receiver.heard) == 1, "what happened while it was off is not made up for"
    post.cancelled()
    post.turn()
    assert len(receiver.heard) == 2


def test_a_late_answer_of_the_old_address_says_nothing_of_the_new_one(post: Post, receiver: Receiver) -> None:
    hook = post.hook(receiver, "cancelled")
    post.cancelled()
    with post.database.write() as session:
        post.notices.spread(session)
    due = post.notifier._next(hook.id)
    assert due is not None
    post.webhooks.change(hook.id, WebhookChange(url=f"{receiver.url}/new"))
    post.notifier._note(due, DeliveryOutcome(410, "answered 410", 0.1))
    shown = post.webhooks.show(hook.id)
    assert (shown.active, shown.trouble, shown.pending) == (True, None, 1)


def test_proxies_of_the_environment_are_not_asked(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    post.hook(receiver, "cancelled")
    post.cancelled()
    post.turn()
    assert len(receiver.heard) == 1


# Where it goes


def changing(*answers: Sequence[str]) -> Callable[[str, int], Sequence[str]]:
    """A resolver that gives another answer each time."""
    left = list(answers)
    return lambda host, port: left.pop(0)


def test_a_name_that_leads_home_once_it_was_checked_is_refused_at_the_delivery(
    database: Database, tmp_path: Path, receiver: Receiver
) -> None:
    post = Post(database, tmp_path)
    resolve = changing(["93.184.216.34"], ["127.0.0.1"])
    post.webhooks = WebhookService(database, post.notices, [], resolve)
    post.notifier = Notifier(database, post.notices, Poster([], resolve))
    hook = post.webhooks.create(
        WebhookRequest(url=receiver.url.replace("127.0.0.1", "rebinding.test"), events=["cancelled"])
    )
    post.cancelled()
    post.turn()
    (attempt,) = post.log(hook)[0].attempts
    assert "rebinding.test has the address 127.0.0.1" in (attempt.error or "") and attempt.status is None
    assert receiver.heard == []


def test_the_connection_goes_to_the_address_that_was_checked_without_looking_again(receiver: Receiver) -> None:
    url = receiver.url.replace("127.0.0.1", "rebinding.test")
    asked = Poster(HERE, changing(["127.0.0.1"])).post(url, {}, b"{}")  # a second look would raise
    assert asked.delivered and receiver.heard[0].headers["Host"].startswith("rebinding.test:")


def test_the_next_address_is_tried_where_one_does_not_answer(receiver: Receiver) -> None:
    url = receiver.url.replace("127.0.0.1", "several.test")
    allowed = networks_of("127.0.0.0/8")
    assert Poster(allowed, changing(["127.0.0.9", "127.0.0.1"])).post(url, {}, b"{}").delivered


def test_an_address_of_the_newer_internet_is_reached_too() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        heard: list[bytes] = []

        def answer() -> None:
            with server.accept()[0] as connection:
                heard.append(connection.recv(10_000))
                connection.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = server.getsockname()[1]
        outcome = Poster(networks_of("::1")).post(f"http://[::1]:{port}/hook", {}, b"{}")
        thread.join(10)
    assert outcome.delivered and f"Host: [::1]:{port}".encode() in heard[0]


def test_a_host_that_is_not_there_is_said(receiver: Receiver) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused = Poster(HERE).post(f"http://127.0.0.1:{port}/", {}, b"{}")
    assert refused.status is None and "refused" in (refused.error or "")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        garbage = threading.Thread(target=lambda: silent.accept()[0].sendall(b"\x00garbage\r\n\r\n"))
        garbage.start()
        answered = Poster(HERE, timeout_s=1).post(f"http://127.0.0.1:{silent.getsockname()[1]}/", {}, b"{}")
        garbage.join()
    assert answered.status is None and answered.error


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for hook.test with its key, in one file."""
    path = tmp_path_factory.mktemp("tls") / "hook.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hook.test"]
    command += ["-addext", "subjectAltName=DNS:hook.test", "-keyout", str(path), "-out", str(path) + ".crt"]
    subprocess.run(command, check=True, capture_output=True)
    path.write_text(path.read_text() + Path(str(path) + ".crt").read_text())
    return path


def test_the_certificate_must_be_for_the_hosts_name_though_the_connection_goes_to_an_address(certificate: Path) -> None:
    serving = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    serving.load_cert_chain(certificate)
    named: list[str | None] = []
    serving.sni_callback = lambda _socket, name, _context: named.append(name)
    trusting = ssl.create_default_context(cafile=str(certificate))
    with receiving(tls=serving) as receiver:
        for host, right in (("hook.test", True), ("other.test", False)):
            poster = Poster(HERE, changing(["127.0.0.1"]), tls=trusting)
            outcome = poster.post(receiver.url.replace("127.0.0.1", host), {}, b"{}")
            assert outcome.delivered is right, outcome
        assert named == ["hook.test", "other.test"]
        stranger = Poster(HERE, changing(["127.0.0.1"])).post(receiver.url.replace("127.0.0.1", "hook.test"), {}, b"{}")
        assert "CERTIFICATE_VERIFY_FAILED" in (stranger.error or "")
        assert len(receiver.heard) == 1


# What is written down


def test_a_webhook_is_told_of_its_job_or_queue_from_its_creation_on(post: Post, receiver: Receiver) -> None:
    post.cancelled()
    mine = post.jobs.create(SPEC).id
    by_job = post.hook(receiver, "cancelled", job_id=mine)
    by_queue = post.hook(receiver, "created", "cancelled", queue="elsewhere")
    post.cancelled()
    post.jobs.cancel(mine)
    post.turn()
    assert [delivery.job_id for delivery in post.log(by_job)] == [mine]
    assert post.log(by_queue) == []
    other = post.jobs.create(SPEC.model_copy(update={"queue": "elsewhere"})).id
    post.turn()
    assert [(d.event, d.job_id) for d in post.log(by_queue)] == [("created", other)]


def test_a_change_holds_for_what_happens_after_it(post: Post, receiver: Receiver) -> None:
    hook = post.hook(receiver, "created")
    post.cancelled()
    post.webhooks.change(hook.id, WebhookChange(events=["cancelled"]))
    post.turn()
    assert [delivery.event for delivery in post.log(hook)] == ["created"]
    post.cancelled()
    post.turn()
    assert [delivery.event for delivery in post.log(hook)] == ["cancelled", "created"]


def test_what_a_job_said_is_delivered_though_the_job_was_deleted_at_once(post: Post, receiver: Receiver) -> None:
    hook = post.hook(receiver, "cancelled")
    job_id = post.cancelled()
    post.jobs.delete(job_id)
    post.turn()
    content = Signer(hook.secret or "").verify(receiver.heard[0].body, receiver.heard[0].headers)
    assert (content["job"]["id"], content["job"]["status"]) == (job_id, "cancelled")


def test_a_deleted_webhook_is_told_nothing_and_leaves_nothing(
    post: Post, receiver: Receiver, database: Database
) -> None:
    hook = post.hook(receiver, "cancelled")
    post.cancelled()
    with database.write() as session:
        post.notices.spread(session)
    post.webhooks.delete(hook.id)
    post.turn()
    with database.engine.connect() as connection:
        assert receiver.heard == [] and connection.execute(select(DELIVERY)).all() == []


def test_a_webhook_goes_with_its_job_once_nothing_waits_for_it(post: Post, receiver: Receiver) -> None:
    job_id = post.jobs.create(SPEC).id
    mine, others = post.hook(receiver, "cancelled", job_id=job_id), post.hook(receiver, "cancelled")
    post.jobs.cancel(job_id)
    post.notifier.tidy()
    post.jobs.delete(job_id)
    post.notifier.tidy()
    assert len(post.webhooks.list().items) == 2, "what waits is delivered first"
    post.turn()
    post.notifier.tidy()
    assert [hook.id for hook in post.webhooks.list().items] == [others.id] and len(receiver.heard) == 2
    with pytest.raises(NotFound):
        post.webhooks.show(mine.id)


def test_where_the_control_plane_is_is_looked_up_once_however_much_is_told(database: Database, tmp_path: Path) -> None:
    post = Post(database, tmp_path)
    asked: list[str] = []

    def address() -> str:
        asked.append(ADDRESS)
        return ADDRESS

    post.webhooks.create(WebhookRequest(url="http://127.0.0.1:9/", events=["created", "cancelled"]))
    for _ in range(3):
        post.cancelled()
    with database.write() as session:
        assert Notices(address).spread(session) == 6
    assert asked == [ADDRESS]


def test_what_is_shown_of_all_webhooks_is_one_query_and_not_what_was_sent(post: Post, receiver: Receiver) -> None:
    hooks = [post.hook(receiver, "cancelled") for _ in range(3)]
    jobs = [post.cancelled() for _ in range(4)]
    post.turn()
    asked: list[str] = []
    event.listen(post.database.engine, "before_cursor_execute", lambda *given: asked.append(given[2]))
    shown = post.webhooks.overview(2)
    assert {hook.id: [d.job_id for d in log] for hook, log in shown} == {h.id: jobs[:1:-1] for h in hooks}
    read = [statement for statement in asked if "delivery.attempts" in statement]
    assert len(read) == 1 and not any("delivery.body" in statement for statement in asked)


def test_of_too_many_that_wait_the_oldest_are_dropped(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook_events, "MOST_PENDING", 3)
    receiver.statuses = [500]
    hook = post.hook(receiver, "cancelled")
    jobs = [post.cancelled() for _ in range(5)]
    post.turn()
    states = {delivery.job_id: delivery.state for delivery in post.log(hook)}
    assert [states[job] for job in jobs] == ["dropped", "dropped", "pending", "pending", "pending"]


def test_the_log_is_thinned_and_what_waits_is_kept(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch, time_passes: Clock
) -> None:
    monkeypatch.setattr(notifier, "KEPT", 2)
    receiver.statuses = [500, 200]
    hooks = [post.hook(receiver, "cancelled"), post.hook(receiver, "cancelled")]
    first = post.cancelled()
    post.turn()
    later = [post.cancelled() for _ in range(4)]
    time_passes.ms += 1000
    post.turn()
    assert post.notifier.tidy() == 5
    logs = [[(delivery.job_id, delivery.state) for delivery in post.log(hook)] for hook in hooks]
    waiting = next(log for log in logs if (first, "pending") in log)
    assert waiting == [(later[3], "delivered"), (later[2], "delivered"), (first, "pending")]
    assert all(log[:2] == waiting[:2] for log in logs)


def test_a_delivery_that_cannot_be_noted_is_not_repeated_without_end(
    post: Post, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = post.hook(receiver, "cancelled")
    post.cancelled()

    def full(*_: object) -> None:
        raise OSError("the disk is full")

    with monkeypatch.context() as broken:
        broken.setattr(notifier, "note", full)
        for _ in range(5):
            post.turn()
    assert len(receiver.heard) == 1 and post.log(hook)[0].state == "pending"


def test_looking_for_news_writes_nothing(post: Post, receiver: Receiver, database: Database) -> None:
    hook = post.hook(receiver, "cancelled")
    for number in range(50):
        job_id = post.jobs.create(SPEC).id
        with database.write() as session:
            session.add(Event(job_id=job_id, type="version", at_ms=number, data={}))
    path = Path(str(database.engine.url.database) + "-wal")
    before = path.stat().st_size, path.stat().st_mtime_ns
    for _ in range(5):
        post.turn()
    assert (path.stat().st_size, path.stat().st_mtime_ns) == before
    post.cancelled()
    post.turn()
    assert len(post.log(hook)) == 1


# A control plane that dies


@pytest.mark.parametrize("point", ["before_notice", "after_notice"])
def test_killed_between_the_event_and_its_delivery_it_is_delivered_by_the_next(
    point: str, tmp_path: Path, receiver: Receiver
) -> None:
    url = f"sqlite:///{tmp_path / 'killed.db'}"
    first = Database(url)
    first.migrate()
    post = Post(first, tmp_path)
    hook, job_id = post.hook(receiver, "cancelled"), post.cancelled()
    first.close()

    def die() -> None:
        Post(Database(url), tmp_path).notifier.step()
        time.sleep(60)  # a thread delivers, and dies

    assert apart(die, f"{point}=kill") == -signal.SIGKILL
    sent = len(receiver.heard)
    assert sent == (1 if point == "after_notice" else 0)
    second = Database(url)
    with second.engine.connect() as connection:
        assert connection.scalars(select(DELIVERY.c.state)).all() == ["pending"]
    post = Post(second, tmp_path)
    post.turn()
    post.turn()
    contents = [Signer(hook.secret or "").verify(heard.body, heard.headers) for heard in receiver.heard]
    assert len(contents) == sent + 1 and len({content["id"] for content in contents}) == 1
    assert contents[0]["job"]["id"] == job_id and post.log(hook)[0].state == "delivered"
    second.close()


def test_killed_before_anything_is_written_about_it_it_is_delivered_by_the_next(
    tmp_path: Path, receiver: Receiver
) -> None:
    """The event is all there is: it is stored, and the process dies before it looks for webhooks."""
    url = f"sqlite:///{tmp_path / 'killed.db'}"
    database = Database(url)
    database.migrate()
    hook = Post(database, tmp_path).hook(receiver, "cancelled")
    database.close()

    def die() -> None:
        Post(Database(url), tmp_path).cancelled()
        os.kill(os.getpid(), signal.SIGKILL)

    assert apart(die, "") == -signal.SIGKILL
    again = Database(url)
    post = Post(again, tmp_path)
    post.turn()
    (heard,) = receiver.heard
    assert json.loads(heard.body)["type"] == "cancelled" and post.log(hook)[0].state == "delivered"
    again.close()
