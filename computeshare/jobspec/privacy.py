"""Differential privacy of a job: its option, and what it promises. Pure."""

import math
from typing import Annotated, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import OPTIMIZER, Control
from computeshare.jobspec.part import Part

HIGHEST = 1000.0
"""The largest epsilon that is told apart from none at all."""


class Privacy(Part):
    """Each micro-batch's gradient is clipped and gets Gaussian noise, on the worker that computes it.

    A sample is in one micro-batch of each epoch. Whatever it is, it moves that micro-batch's clipped gradient by at
    most `2 * clip`, so an epoch is one use of the Gaussian mechanism, and `n` epochs are `n` of them.
    """

    clip: Annotated[float | None, Control(OPTIMIZER, "--privacy-clip")] = Field(
        None,
        gt=0,
        le=1_000_000,
        title="Differential privacy: largest norm",
        description="of a micro-batch's gradient; a larger one is scaled down on the worker",
    )
    noise: Annotated[float | None, Control(OPTIMIZER, "--privacy-noise")] = Field(
        None,
        gt=0,
        le=1_000_000,
        title="Differential privacy: noise",
        description="standard deviation of the noise on each value, as a multiple of `clip`",
    )
    delta: float = Field(1e-5, gt=0, lt=0.1, description="probability with which epsilon may be exceeded")

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.clip is None or self.noise is None:
            raise ValueError('privacy needs clip and noise, for example {"clip": 1.0, "noise": 4.0}')
        return self

    def epsilon(self, epochs: int) -> float:
        """The epsilon of (epsilon, delta)-differential privacy for one replaced sample after this many epochs.

        Exact for Gaussian mechanisms one after the other (arXiv:1905.02383, corollary 2.13). `inf`: above `HIGHEST`.
        """
        from scipy.optimize import brentq  # type: ignore[import-untyped]

        assert self.noise is not None
        if epochs <= 0:
            return 0.0
        mu = math.sqrt(epochs) * 2 / self.noise
        if _delta(HIGHEST, mu) > self.delta:
            return math.inf
        if _delta(0.0, mu) <= self.delta:
            return 0.0
        return float(brentq(lambda epsilon: _delta(epsilon, mu) - self.delta, 0.0, HIGHEST))


def _delta(epsilon: float, mu: float) -> float:
    """The delta that belongs to `epsilon` for mechanisms that together are `mu`-Gaussian differentially private."""
    from scipy.special import log_ndtr  # type: ignore[import-untyped]

    return float(math.exp(log_ndtr(mu / 2 - epsilon / mu)) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
