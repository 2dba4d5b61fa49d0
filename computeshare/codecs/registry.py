"""The codecs there are."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeAlias

from computeshare.codecs.base import Codec
from computeshare.codecs.float32 import Float32
from computeshare.codecs.half_precision import Halves
from computeshare.codecs.int4 import Int4
from computeshare.codecs.int8 import Int8
from computeshare.codecs.lowrank import LowRank
from computeshare.codecs.topk import TopK

EXACT: Codec = Float32()
"""The codec of whatever must arrive bit for bit."""
_ALL: Sequence[Codec] = (
    EXACT,
    Halves("float16", auto_down=("float32", "float16")),
    Halves("bfloat16"),
    Int8(),
    Int4(),
    LowRank(8, auto_down=("int8", "int4", "lowrank8")),
    LowRank(4, auto_down=("lowrank4",)),
    LowRank(2, auto_down=("lowrank2",)),
    TopK(),
    LowRank(1, auto_down=("lowrank1",)),
)
"""From the least lossy to the lossiest, as measured. A new codec is added here, and nowhere else."""
CODECS: Mapping[str, Codec] = {codec.name: codec for codec in _ALL}
WITHOUT_RESIDUAL: Sequence[str] = tuple(name for name, codec in CODECS.items() if not codec.residual)
"""The codecs of messages that can be read by themselves."""
PAIRS: Sequence[tuple[str, str]] = tuple((codec.name, down) for codec in _ALL for down in codec.auto_down)
"""The codecs up and down that `codec: auto` chooses from: from the least lossy pair to the shortest."""
CANDIDATES: Sequence[str] = tuple(name for name in CODECS if any(name in pair for pair in PAIRS))
"""The codecs of these pairs, which workers measure."""

if TYPE_CHECKING:
    CodecName: TypeAlias = str
else:
    CodecName = Literal[tuple(CODECS)]
