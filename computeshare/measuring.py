"""What a worker measures before a job's codecs are chosen: its link to the broker, its speed, the size of an update."""

import os
import time
from collections.abc import Callable

from computeshare.choosing import CANDIDATES, Measured
from computeshare.codecs import CODECS
from computeshare.codecs.messages import encode_update
from computeshare.layout import Layout
from computeshare.rounds import Member
from computeshare.types import Vector

LARGEST_PROBE = 8 << 20
SMALLEST_PROBE = 64 << 10
LONG_ENOUGH_S = 1.0
TIMES = 3

Compute = Callable[[int], tuple[Vector, Vector]]
"""A micro-batch's update (d,) and buffers (b,)."""


def measure(member: Member, compute: Compute, layout: Layout) -> Measured:
    """Compute a few micro-batches, encode the last one's update by every candidate, and try the link."""
    compute(0)  # the first one takes longer
    began = time.perf_counter()
    for micro_batch in range(1, TIMES + 1):
        vector, buffers = compute(micro_batch)
    compute_s = (time.perf_counter() - began) / TIMES
    messages = {name: encode_update(CODECS[name], vector, buffers, layout, 0) for name in CANDIDATES}
    up, down = link(member)
    sizes = {name: sum(map(len, message)) for name, message in messages.items()}
    return Measured(compute_s=compute_s, up_bytes_per_s=up, down_bytes_per_s=down, message_bytes=sizes)


def link(member: Member) -> tuple[float, float]:
    """Bytes per second to the broker and back: ever larger probes, until one takes long enough to tell."""
    data = memoryview(os.urandom(LARGEST_PROBE))
    size, took = SMALLEST_PROBE, 0.0
    while True:
        began = time.perf_counter()
        member.put_probe(data[:size])
        took = time.perf_counter() - began
        if took >= LONG_ENOUGH_S or size == LARGEST_PROBE:
            break
        size = min(LARGEST_PROBE, size * (2 if took > LONG_ENOUGH_S / 8 else 8))
    up = size / took
    began = time.perf_counter()
    member.take_probe()
    return up, size / (time.perf_counter() - began)
