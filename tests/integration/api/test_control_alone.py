"""The control plane's loops where no broker is known."""

from pathlib import Path

from api.broker import Broker
from api.database import Database
from api.jobs.service import Jobs
from api.system.background import Background
from api.webhooks.address_guard import networks_of
from api.webhooks.http_delivery import Poster
from api.webhooks.notifier import Notifier
from api.webhooks.schemas import WebhookRequest
from api.webhooks.service import WebhookService
from api.webhooks.webhook_events import Notices
from computeshare.bundles.store import BundleStore
from computeshare.jobspec.spec import JobSpec
from computeshare.settings import Settings
from tests.support.wait import wait_until
from tests.support.webhook_receiver import receiving

HERE = networks_of("127.0.0.1")


def test_notifications_go_out_though_no_broker_is_known(database: Database, tmp_path: Path) -> None:
    notices = Notices()
    notifier = Notifier(database, notices, Poster(HERE))
    broker, bundles = Broker(Settings(home=tmp_path, redis_url=None)), BundleStore(tmp_path / "bundles")
    control = Background(database, broker, tmp_path / "artifacts", notifier, bundles)
    with receiving() as receiver:
        WebhookService(database, notices, HERE).create(WebhookRequest(url=receiver.url, events=["created"]))
        Jobs(database, tmp_path / "artifacts").create(JobSpec(dataset="digits", model="mlp", rounds=1))
        control.start()
        try:
            wait_until(lambda: receiver.heard)
            assert not control.leading and "no broker is known" in (control.trouble() or "")
        finally:
            control.stop()
