"""Measures a worker before a job's codecs are chosen: link to the broker, computing speed, cost of each codec."""

import os
import time
from collections.abc import Callable, Sequence

import numpy as np

from computeshare.codecs.base import Codec
from computeshare.codecs.measured_link import Coded, MeasuredLink
from computeshare.codecs.messages import UpdateEncoder, decode_update, feedback_of
from computeshare.codecs.registry import CANDIDATES, CODECS
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors.layout import Layout
from computeshare.types import Vector

LARGEST_PROBE = 8 << 20
SMALLEST_PROBE = 64 << 10
LONG_ENOUGH_S = 1.0
MOST_MICRO_BATCHES = 64

Compute = Callable[[Sequence[int]], tuple[Vector, Vector]]
"""Computes some micro-batches; returns the update (d,) and the buffers (b,)."""


def measure(session: WorkerSession, compute: Compute, layout: Layout) -> MeasuredLink:
    """Time micro-batches, every candidate codec on the resulting update, and the link. Takes a few seconds."""
    compute([0])  # warm-up
    count, took = 1, 0.0
    while took < LONG_ENOUGH_S and count < MOST_MICRO_BATCHES:
        count *= 4
        began = time.perf_counter()
        vector, buffers = compute(range(count))
        took = time.perf_counter() - began
    messages = {name: coded(CODECS[name], vector, buffers, layout) for name in CANDIDATES}
    up, down = link(session)
    return MeasuredLink(compute_s=took / count, up_bytes_per_s=up, down_bytes_per_s=down, messages=messages)


def coded(codec: Codec, vector: Vector, buffers: Vector, layout: Layout) -> Coded:
    """Size and times of encoding and decoding an update (d,) with its buffers (b,), after a warm-up."""
    encoder, out = UpdateEncoder(codec, layout, feedback_of(codec, layout)), np.empty_like(vector)
    for _ in range(2):
        began = time.perf_counter()
        message = encoder.whole(vector, buffers, 0)
        encoded = time.perf_counter()
        decode_update(codec, message, layout, out)
        decoded = time.perf_counter()
    return Coded(size=sum(map(len, message)), encode_s=encoded - began, decode_s=decoded - encoded)


def link(session: WorkerSession) -> tuple[float, float]:
    """Bytes per second to and from the broker, by growing probes until sending takes `LONG_ENOUGH_S`."""
    data = memoryview(os.urandom(LARGEST_PROBE))
    size, took = SMALLEST_PROBE, 0.0
    while True:
        began = time.perf_counter()
        session.put_probe(data[:size])
        took = time.perf_counter() - began
        if took >= LONG_ENOUGH_S or size == LARGEST_PROBE:
            break
        size = min(LARGEST_PROBE, size * (2 if took > LONG_ENOUGH_S / 8 else 8))
    up = size / took
    began = time.perf_counter()
    session.take_probe()
    return up, size / (time.perf_counter() - began)
