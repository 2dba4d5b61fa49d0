"""A replica whose updates are differentially private."""

import secrets
from collections.abc import Callable, Iterable

import numpy as np

from computeshare.jobspec.privacy import Privacy
from computeshare.strategies.averages import clipped
from computeshare.tensors.layout import Layout, Weights
from computeshare.training.work_units import AnyReplica, Compilation, InnerState, Take, Update
from computeshare.types import Vector


class PrivateReplica:
    """Clips each update of another replica and adds noise, before anything of the update leaves this process.

    As in DP-SGD (arXiv:1607.00133), with a micro-batch's mean gradient in place of a sample's. The noise comes from the
    system's randomness and follows from no seed, so a unit's update differs each time. The loss stays here: it would
    tell of the samples without noise. The module must have no floating-point buffers, for the same reason.
    """

    def __init__(self, replica: AnyReplica, privacy: Privacy, layout: Layout) -> None:
        assert privacy.clip is not None and privacy.noise is not None
        assert not layout.buffers, "checked when the job was created"
        self._replica, self._layout, self._clip = replica, layout, privacy.clip
        self._deviation = np.float32(privacy.noise * privacy.clip)
        self._random = np.random.default_rng(secrets.randbits(256))

    @property
    def room(self) -> Vector | None:
        return self._replica.room

    @property
    def kept(self) -> InnerState | None:
        return self._replica.kept

    @property
    def compilation(self) -> Compilation:
        return self._replica.compilation

    def load(self, weights: Weights) -> None:
        self._replica.load(weights)

    def prefetch(self, micro_batches: Iterable[int]) -> None:
        self._replica.prefetch(micro_batches)

    def compute(self, unit: int, goes_on: Callable[[], bool] = lambda: True, take: Take | None = None) -> Update:
        """As `AnyReplica.compute`; all buckets are ready at the end. The loss is 0."""
        update = self._replica.compute(unit, goes_on)
        vector = self._noised(update.vector)
        for bucket, where in enumerate(self._layout.buckets if take else ()):
            assert take
            take(bucket, vector[where])
        return Update(vector, update.buffers, 0.0)

    def _noised(self, vector: Vector) -> Vector:
        (bounded,) = clipped([vector], self._clip)
        noised: Vector = bounded + self._deviation * self._random.standard_normal(len(vector), np.float32)
        return noised
