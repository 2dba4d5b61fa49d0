"""Counts the bytes of each machine that uses a gateway. The sums are in the broker, for any number of gateways."""

from collections import Counter
from collections.abc import Callable

from redis import Redis
from redis.exceptions import RedisError

from computeshare.errors import ComputeShareError
from computeshare.protocol.keys import GATEWAY_TRAFFIC

UP, DOWN = "up", "down"


class Traffic:
    """A gateway's counts since the last `flush`."""

    def __init__(self, broker: Callable[[], Redis]) -> None:
        self._broker = broker
        self._counts: Counter[str] = Counter()

    def add(self, machine_id: str, direction: str, count: int) -> None:
        """Count bytes: `up` from the machine to the broker, `down` to the machine."""
        self._counts[f"{machine_id}:{direction}"] += count

    def flush(self) -> None:
        """Add the counts to the sums in the broker; during an outage they are kept for the next time."""
        counts, self._counts = self._counts, Counter()
        if not counts:
            return
        try:
            with self._broker().pipeline() as pipeline:
                for field, count in counts.items():
                    pipeline.hincrby(GATEWAY_TRAFFIC, field, count)
                pipeline.execute()
        except (RedisError, ComputeShareError):
            self._counts.update(counts)


def sums(broker: Callable[[], Redis]) -> dict[str, int]:
    """The sums of all gateways, by `ID:up` and `ID:down`; empty during an outage of the broker."""
    try:
        found: dict[bytes, bytes] = broker().hgetall(GATEWAY_TRAFFIC)  # type: ignore[assignment]
    except (RedisError, ComputeShareError):
        return {}
    return {field.decode(errors="replace"): int(value) for field, value in found.items() if value.isdigit()}


def forget(broker: Callable[[], Redis], machine_id: str) -> None:
    """Delete a machine's sums, if the broker answers."""
    try:
        broker().hdel(GATEWAY_TRAFFIC, f"{machine_id}:{UP}", f"{machine_id}:{DOWN}")
    except (RedisError, ComputeShareError):
        return
