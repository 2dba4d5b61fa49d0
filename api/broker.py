"""The control plane's connection to the broker: found late, and found again."""

from redis import Redis

from computeshare.settings import Settings
from computeshare.transport.connections import connect


class Broker:
    """Hands out one client per process; a call during an outage fails at once, and the caller says so."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: tuple[str, Redis] | None = None

    def client(self) -> Redis:
        """The client for where the broker is now. Raises SettingsError where that is not known."""
        url = self._settings.resolve_redis_url()
        if self._client is None or self._client[0] != url:
            self.close()
            self._client = (url, connect(url, retries=0))
        return self._client[1]

    def close(self) -> None:
        if self._client:
            self._client[1].close()
            self._client = None
