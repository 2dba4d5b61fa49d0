"""The limits of a job's rounds."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms on which a job's workers lease and submit.

    A reducer writes them into the round and the scripts read them there, so that no worker sets its own limits.
    """

    backup: bool = True
    """Second leases are given on slow micro-batches."""
    sharers: int = 0
    """How many workers must share a round, each its part at most; 0: any."""
    fewest: int = 1
    """How many workers must be there at a time."""
    unmeasured: int = 0
    """Most units at a time for a worker of unknown speed; 0: its share of the round."""
    limit: int = 0
    """Most bytes of an update; 0: any."""

    def fields(self) -> dict[str, int]:
        """As they stand in the round's hash."""
        return {name: int(value) for name, value in asdict(self).items()}


DEFAULTS = Terms()
