"""The weight of a stale update. Pure."""

import math
from typing import Literal

Weighting = Literal["constant", "inverse", "inverse_sqrt"]


def weight(weighting: Weighting, versions: int) -> float:
    """The weight, from 0 to 1, of an update that was computed on weights `versions` versions before the current ones.

    `inverse_sqrt` is FedBuff's (Nguyen et al., arXiv:2106.06639), `inverse` that of staleness-aware SGD (Zhang et al.,
    arXiv:1511.05950), one later so that a fresh update has weight 1. Raises ValueError: `versions` is negative.
    """
    if versions < 0:
        raise ValueError(f"an update cannot be {-versions} versions ahead")
    match weighting:
        case "constant":
            return 1.0
        case "inverse":
            return 1 / (1 + versions)
        case "inverse_sqrt":
            return 1 / math.sqrt(1 + versions)
