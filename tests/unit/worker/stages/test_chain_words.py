"""What the workers of a chain say to each other: read as it was written, and garbage is an error of the message."""

import json
from typing import Any

import numpy as np
import pytest

from computeshare.codecs import frame
from computeshare.codecs.registry import EXACT
from computeshare.errors import CodecError
from computeshare.worker.stages.chain_replica import LeaderOrder, StageShare

SAID: dict[str, Any] = {"worker": "a", "first": 1, "stop": 2, "busy_s": 0.5, "mail_bytes": 3, "memory_bytes": 4}
SAID |= {"loss": 1.5, "sent_bytes": 5}
BUFFERS = np.arange(3, dtype=np.float32)


def body(said: Any) -> bytes:
    text = said if isinstance(said, str) else json.dumps(said)
    return frame.join([text.encode(), EXACT.encode(BUFFERS)])


def test_what_a_worker_says_is_read_as_it_was_written() -> None:
    share, order = StageShare(**SAID), LeaderOrder(7, "leader", f"1.2.{'0' * 16}", 3)
    found, buffers = StageShare.parse(share.dump(BUFFERS), 3)
    assert found == share and np.array_equal(buffers, BUFFERS)
    assert LeaderOrder.parse(order.dump()) == order


@pytest.mark.parametrize(
    "said",
    [
        *(SAID | {name: wrong} for name in ("first", "busy_s", "mail_bytes") for wrong in (-1, "x", [], 1e300)),
        *(SAID | {"busy_s": wrong} for wrong in (float("inf"), float("nan"))),
        SAID | {"loss": "low"},
        {name: value for name, value in SAID.items() if name != "sent_bytes"},
        *("[]", "null", "no JSON", "[" * 60_000, json.dumps(SAID).replace("0.5", "1e999")),
    ],
    ids=lambda said: str(said)[:60],
)
def test_a_share_that_is_none_is_an_error_of_the_message(said: Any) -> None:
    with pytest.raises(CodecError, match="malformed"):
        StageShare.parse(body(said), 3)
