"""A worker's measurements, from which the reducer chooses the codecs and precision of a job that leaves them open."""

from collections.abc import Mapping
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from computeshare.codecs.registry import CodecName
from computeshare.types import Precision


class Coded(BaseModel):
    """The cost of one update with one codec."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int = Field(ge=0, description="size of the encoded update in bytes")
    encode_s: float = Field(ge=0, allow_inf_nan=False, description="seconds to encode, error feedback included")
    decode_s: float = Field(ge=0, allow_inf_nan=False, description="seconds to decode")


class MeasuredLink(BaseModel):
    """One worker's measurements of its machine and its link."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    compute_s: float = Field(gt=0, allow_inf_nan=False, description="seconds for a micro-batch")
    precisions: Mapping[Precision, Annotated[float, Field(gt=0, allow_inf_nan=False)]] = Field(
        {}, description="seconds for a micro-batch in each precision that was tried: with auto, in each that fits"
    )
    up_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    down_bytes_per_s: float = Field(gt=0, allow_inf_nan=False)
    messages: Mapping[CodecName, Coded] = Field(description="cost of one update with each candidate codec")


def shown(value: float) -> str:
    """A measured value for people: three significant digits, and from 1,000 on all before the point."""
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"
