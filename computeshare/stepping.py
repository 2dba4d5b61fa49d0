"""From one version to the next, as every reducer goes: pure but for the optimizer, which steps in place."""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from computeshare.codecs import CODECS
from computeshare.codecs.messages import decode_weights, encode_weights
from computeshare.layout import Layout, Weights
from computeshare.spec import JobSpec
from computeshare.strategies import sync
from computeshare.training.optimizers import ServerOptimizer
from computeshare.types import Vector


@dataclass(frozen=True, slots=True)
class Held:
    """A version: its full-precision parameters (d,) and the weights as workers hold them."""

    master: Vector
    weights: Weights


class Steps:
    """One job's steps; the optimizer's state is that of the version before the next step."""

    def __init__(self, spec: JobSpec, layout: Layout) -> None:
        factor = spec.micro_batches_per_round if spec.lr_scaling == "linear" else 1
        self.optimizer = ServerOptimizer(layout, spec.optimizer, factor)
        self._spec, self._down, self._layout = spec, CODECS[spec.codec.down], layout

    def start(self, weights: Weights, state: bytes = b"") -> Held:
        """Begin at a version's weights and the reducer's state beside them; without one, with a fresh optimizer.

        Raises: ArtifactError, or struct.error: the state is damaged.
        """
        if not state:
            return self._held(weights.parameters, weights)
        (length,) = struct.unpack_from("<Q", state)
        self.optimizer.load(state[8 + length :])
        master = np.frombuffer(state, np.float32, length // 4, 8) if length else weights.parameters
        return self._held(master, weights)

    def step(self, base: Held, parts: Iterable[tuple[Vector, Vector]], samples: Sequence[int]) -> Held:
        """The version after `base`.

        Args:
            parts: the version's decoded updates (d,), each with its buffers (b,), in micro-batch order; read once.
            samples: how many samples each stands for.
        """
        buffers = sync.Mean(sum(samples))

        def updates() -> Iterator[Vector]:
            for (update, buffer), count in zip(parts, samples, strict=True):
                buffers.add(buffer, count)
                yield update

        gradient = sync.combine(self._spec.strategy, updates(), samples, self._spec.workers.min)
        master = self.optimizer.step(base.master, gradient)
        mean = buffers.value if self._layout.buffers else base.weights.buffers
        return self._held(master, Weights(master, mean, self._layout.counted(base.weights.counters)))

    def _held(self, master: Vector, weights: Weights) -> Held:
        full = Weights(master, weights.buffers, weights.counters)
        if self._down.exact:
            return Held(master, full)
        return Held(master, decode_weights(self._down, encode_weights(self._down, full), self._layout))
