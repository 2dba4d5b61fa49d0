"""The dependencies of the routes, for FastAPI's injection."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Query, Request

from api.access.audit import AuditLog
from api.access.credentials import Credentials
from api.access.links import Links
from api.access.tokens import Tokens
from api.broker import Broker
from api.database import Database
from api.datasets.samples import Samples
from api.datasets.service import Datasets
from api.fleet.contributions import Contributions
from api.fleet.invites import InviteService
from api.fleet.service import Fleet
from api.gateway.app import gateway_of
from api.http.tls import Certificate
from api.jobs.event_feeds import Feeds
from api.jobs.forks import Forks
from api.jobs.history import History
from api.jobs.service import Jobs
from api.jobs.submissions import Submissions
from api.logs.reader import Logs
from api.pages.shared_view import shared_event, shared_json
from api.recipes.service import Recipes
from api.recipes.trials import RecipeTrials
from api.scheduler.bans import Bans
from api.system.background import Background
from api.system.health import HealthService
from api.system.telemetry import Telemetry
from api.text.service import Texts
from api.webhooks.address_guard import networks_of
from api.webhooks.http_delivery import Poster
from api.webhooks.notifier import Notifier
from api.webhooks.service import WebhookService
from api.webhooks.webhook_events import Notices
from computeshare.bundles.store import BundleStore
from computeshare.errors import SettingsError
from computeshare.settings import Settings


class Services:
    """The objects that routes use, created once per application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.token, key = settings.ensure_token(), settings.ensure_signing_key()
        self.stopping: Callable[[], bool] = lambda: False
        self.database = Database(settings.sqlite_url, settings.database_file.backups)
        self.tokens, self.links = Tokens(self.database), Links(self.database)
        self.credentials = Credentials(self.token, self.tokens, self.links)
        self.audit = AuditLog(self.database)
        self.broker = Broker(settings)
        self.notices = Notices(lambda: _address(settings))
        allowed = networks_of(settings.webhook_networks)
        notifier = Notifier(self.database, self.notices, Poster(allowed))
        self.webhooks = WebhookService(self.database, self.notices, allowed, hurry=notifier.hurry)
        self.bundles = BundleStore(settings.bundles_dir)
        self.control = Background(
            self.database, self.broker, settings.artifacts_dir, notifier, self.bundles, settings.copy_to, key
        )
        wake, spread = self.control.wake, self.notices.spread
        self.recipes = Recipes(self.database)
        trials = RecipeTrials(self.recipes, self.bundles, settings.recipes)
        self.datasets = Datasets(self.database, self.bundles)
        self.dataset_samples = Samples(self.bundles)
        self.gateway = gateway_of(settings, self.database, self.broker)
        self.invites = InviteService(
            self.database,
            settings.public_redis_url,
            settings.resolve_public_url(),
            self.broker.client,
            key.public,
        )
        self.jobs = Jobs(
            self.database,
            settings.artifacts_dir,
            wake,
            spread,
            settings.data_dir,
            trials,
            self.datasets,
            self.invites.have_joined,
        )
        self.bans = Bans(self.database, self.control.wake)
        self.history = History(self.database, settings.artifacts_dir)
        self.submissions = Submissions(self.database)
        self.texts = Texts(self.jobs, self.history, self.broker)
        self.feeds = Feeds(self.jobs, self.history, self._is_stopping)
        self.shared_feeds = Feeds(self.jobs, self.history, self._is_stopping, shared_json, shared_event)
        self.logs = Logs(self.database)
        self.forks = Forks(self.jobs, self.history, settings.artifacts_dir)
        self.contributions = Contributions(self.database, settings.person)
        self.fleet = Fleet(self.database, self.broker, self.control.wake, settings.person)
        certificate = Certificate.of(settings)
        self.invites.fingerprint = certificate.fingerprint if certificate else ""
        self.invites.key_pin = certificate.key_pin if certificate else ""
        self.health = HealthService(self.database, self.broker, self.control, settings.run_path, settings.evaluator)
        self.telemetry = Telemetry(self.database, self.broker)

    def _is_stopping(self) -> bool:
        return self.stopping()  # which is set after everything here was made

    def start(self) -> None:
        """Migrate the database, then start the background loops."""
        self.database.migrate()
        self.control.start()

    def stop(self) -> None:
        """Stop the background loops and close every connection."""
        self.control.stop()
        self.broker.close()
        self.database.close()


def services(request: Request) -> Services:
    """The application's services."""
    found: Services = request.app.state.services
    return found


def _address(settings: Settings) -> str | None:
    """The control plane's URL, for links in notifications; None if it is not known."""
    try:
        return settings.resolve_url()
    except SettingsError:
        return None


def _one(name: str) -> Any:
    def get(request: Request) -> Any:
        return getattr(request.app.state.services, name)

    return Depends(get)


JobsDep = Annotated[Jobs, _one("jobs")]
BansDep = Annotated[Bans, _one("bans")]
HistoryDep = Annotated[History, _one("history")]
SubmissionsDep = Annotated[Submissions, _one("submissions")]
RecipesDep = Annotated[Recipes, _one("recipes")]
LogsDep = Annotated[Logs, _one("logs")]
ForksDep = Annotated[Forks, _one("forks")]
InvitesDep = Annotated[InviteService, _one("invites")]
TokensDep = Annotated[Tokens, _one("tokens")]
LinksDep = Annotated[Links, _one("links")]
AuditDep = Annotated[AuditLog, _one("audit")]
ContributionsDep = Annotated[Contributions, _one("contributions")]
FleetDep = Annotated[Fleet, _one("fleet")]
WebhooksDep = Annotated[WebhookService, _one("webhooks")]
DatasetsDep = Annotated[Datasets, _one("datasets")]
SamplesDep = Annotated[Samples, _one("dataset_samples")]
HealthDep = Annotated[HealthService, _one("health")]
TelemetryDep = Annotated[Telemetry, _one("telemetry")]
BundlesDep = Annotated[BundleStore, _one("bundles")]
TextsDep = Annotated[Texts, _one("texts")]
ServicesDep = Annotated[Services, Depends(services)]

Cursor = Annotated[str | None, Query(max_length=1000, description="`next_cursor` of the previous page")]
Limit = Annotated[int, Query(ge=1, le=500, description="items on a page")]
