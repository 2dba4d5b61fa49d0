"""Differential privacy of a job. Pure."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from computeshare.jobspec.controls import OPTIMIZER, Control
from computeshare.jobspec.part import Part


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
