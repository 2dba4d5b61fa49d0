"""The epsilon of a private job's differential privacy."""

import math
from functools import lru_cache

from computeshare.jobspec.privacy import Privacy

HIGHEST = 1000.0
"""The largest epsilon that is told apart from none at all."""


@lru_cache(1024)
def epsilon(privacy: Privacy, epochs: int) -> float | None:
    """The epsilon of (epsilon, delta)-differential privacy for one replaced sample after this many epochs.

    Exact for Gaussian mechanisms one after the other (arXiv:1905.02383, corollary 2.13). None: above `HIGHEST`.
    """
    from scipy.optimize import brentq  # type: ignore[import-untyped]  # takes a third of a second: for private jobs only

    assert privacy.noise is not None
    if epochs <= 0:
        return 0.0
    mu = math.sqrt(epochs) * 2 / privacy.noise
    if _delta(HIGHEST, mu) > privacy.delta:
        return None
    if _delta(0.0, mu) <= privacy.delta:
        return 0.0
    return float(brentq(lambda guess: _delta(guess, mu) - privacy.delta, 0.0, HIGHEST))


def _delta(epsilon: float, mu: float) -> float:
    """The delta that belongs to `epsilon` for mechanisms that together are `mu`-Gaussian differentially private."""
    from scipy.special import log_ndtr  # type: ignore[import-untyped]

    return float(math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
