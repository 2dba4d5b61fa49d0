"""Measures a worker before a job's codecs or precision are chosen: link, speed, the cost of each codec."""

import os
import time
from collections.abc import Mapping

import numpy as np

from computeshare.codecs.base import Codec
from computeshare.codecs.measured_link import Coded, MeasuredLink
from computeshare.codecs.messages import UpdateEncoder, decode_update, feedback_of
from computeshare.codecs.registry import CANDIDATES, CODECS
from computeshare.protocol.worker_session import WorkerSession
from computeshare.tensors.layout import Layout
from computeshare.training.work_units import Compute
from computeshare.types import Precision, Vector

LARGEST_PROBE = 8 << 20
SMALLEST_PROBE = 64 << 10
LONG_ENOUGH_S = 1.0
MOST_MICRO_BATCHES = 64
TURNS = 2
"""How often each of several precisions is timed; the best time counts."""


def measure(session: WorkerSession, computes: Mapping[Precision, Compute], layout: Layout) -> MeasuredLink:
    """Time micro-batches, every candidate codec on the resulting update, and the link. Takes a few seconds.

    Args:
        computes: the computation in each precision that is to be compared; at least one.
    """
    seconds = {precision: float("inf") for precision in computes}
    for _ in range(TURNS if len(computes) > 1 else 1):  # in turns: a machine's speed drifts
        for precision, compute in computes.items():
            took, vector, buffers = speed(compute)
            seconds[precision] = min(seconds[precision], took)
    messages = {name: coded(CODECS[name], vector, buffers, layout) for name in CANDIDATES}
    up, down = link(session)
    return MeasuredLink(
        compute_s=min(seconds.values()),
        precisions=seconds,
        up_bytes_per_s=up,
        down_bytes_per_s=down,
        messages=messages,
    )


def speed(compute: Compute) -> tuple[float, Vector, Vector]:
    """Seconds for a micro-batch, after a warm-up; and the last update (d,) and buffers (b,)."""
    compute([0])
    count, took = 1, 0.0
    while took < LONG_ENOUGH_S and count < MOST_MICRO_BATCHES:
        count *= 4
        began = time.perf_counter()
        vector, buffers = compute(range(count))
        took = time.perf_counter() - began
    return took / count, vector, buffers


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
