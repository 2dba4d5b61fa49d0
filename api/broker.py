"""The control plane's connection to the broker, made at first use and again when the broker's address changes."""

from redis import Redis

from computeshare.settings import Settings
from computeshare.transport.connections import connect


class Broker:
    """Provides one Redis client per process. The client does not retry: a call during an outage fails at once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._client: tuple[str, Redis] | None = None

    def client(self) -> Redis:
        """A client for the broker's present address. Raises Unreachable: it is not known."""
        url = self._settings.resolve_redis_url("api")
        if self._client is None or self._client[0] != url:
            self.close()
            self._client = (url, connect(url, retries=0))
        return self._client[1]

    def close(self) -> None:
        if self._client:
            self._client[1].close()
            self._client = None
