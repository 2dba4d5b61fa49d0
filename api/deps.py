"""What routes are given, named once."""

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import Depends, Query, Request

from api.broker import Broker
from api.database import Database
from api.services.bans import Bans
from api.services.control import Control
from api.services.fleet import Fleet
from api.services.forking import Forks
from api.services.health import Health
from api.services.history import History
from api.services.jobs import Jobs
from api.telemetry import Telemetry
from computeshare.settings import Settings


class Services:
    """Everything that routes use, made once per application."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.token = settings.ensure_token()
        self.stopping: Callable[[], bool] = lambda: False
        self.database = Database(settings.sqlite_url)
        self.broker = Broker(settings)
        self.control = Control(self.database, self.broker, settings.artifacts_dir)
        self.jobs = Jobs(self.database, settings.artifacts_dir, self.control.wake)
        self.bans = Bans(self.database, self.control.wake)
        self.history = History(self.database, settings.artifacts_dir)
        self.forks = Forks(self.jobs, self.history, settings.artifacts_dir)
        self.fleet = Fleet(self.database, self.broker)
        self.health = Health(self.database, self.broker, self.control)
        self.telemetry = Telemetry(self.database, self.broker)

    def start(self) -> None:
        """Bring the database up to date, then begin the background work."""
        self.database.migrate()
        self.control.start()

    def stop(self) -> None:
        """End the background work and close every connection."""
        self.control.stop()
        self.broker.close()
        self.database.close()


def services(request: Request) -> Services:
    """The application's services."""
    found: Services = request.app.state.services
    return found


def _one(name: str) -> Any:
    def get(request: Request) -> Any:
        return getattr(request.app.state.services, name)

    return Depends(get)


JobsDep = Annotated[Jobs, _one("jobs")]
BansDep = Annotated[Bans, _one("bans")]
HistoryDep = Annotated[History, _one("history")]
ForksDep = Annotated[Forks, _one("forks")]
FleetDep = Annotated[Fleet, _one("fleet")]
HealthDep = Annotated[Health, _one("health")]
TelemetryDep = Annotated[Telemetry, _one("telemetry")]
DatabaseDep = Annotated[Database, _one("database")]
ServicesDep = Annotated[Services, Depends(services)]

Cursor = Annotated[str | None, Query(max_length=1000, description="next_cursor of the page before")]
Limit = Annotated[int, Query(ge=1, le=500, description="items on a page")]
