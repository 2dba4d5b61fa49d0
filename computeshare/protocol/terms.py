"""A reducer's terms for its job's workers: limits on leases and submissions, and the same frozen parameters."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Terms:
    """The limits that the scripts enforce on a job's leases and submissions.

    The reducer writes the limits into the round and the scripts read them there, so no worker sets its own limits.
    """

    backup: bool = True
    """Whether slow micro-batches are leased to a second worker."""
    sharers: int = 0
    """Machines that must share a version, none with more than an equal share (rounded up); 0: no limit."""
    fewest: int = 1
    """Sessions that must exist before units are leased; with `sharers`, on as many machines."""
    unmeasured: int = 0
    """Maximum units per lease for a worker of unknown speed; 0: its share of the round."""
    limit: int = 0
    """Maximum bytes of an update; 0: no limit."""
    audit: float = 0
    """Share of units that a second machine of the same kind computes as well; 0: none."""
    secret: str = ""
    """Decides which units these are; known to the reducer alone, so that no worker can foresee them."""
    frozen: str = ""
    """Digest of the parameters that are not trained, as every worker must have built them; empty: there are none."""
    parts: int = 0
    """Maximum parts of an update; 0: no limit."""
    peers: bool = False
    """Whether an update is also kept as its worker's newest for other workers to read; then leases are single units."""

    singles: bool = False
    """Whether leases are single units, for any worker that asks: each is computed by a chain of workers."""
    delay: bool = False
    """Whether a round's units are leased while the round before is reduced: with a delay or an overlap."""

    def fields(self) -> dict[str, int | float | str]:
        """The fields of the round's hash."""
        return {name: int(value) if isinstance(value, bool) else value for name, value in asdict(self).items()}


DEFAULTS = Terms()
