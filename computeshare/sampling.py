"""Which samples belong to which micro-batch, and which micro-batches to which round. Pure.

Any machine computes the same answer from `(seed, epoch)`, so no data travels. A round never crosses an
epoch; an epoch's last micro-batch and last round may be short.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """The epoch's order: a permutation of `range(samples)`, shape (samples,).

    Sorts raw Philox output, which NumPy keeps stable across its versions (its `permutation` is not).
    """
    raw = np.random.Philox(key=[seed, epoch]).random_raw(samples)
    order = np.argsort(raw, kind="stable")
    order.setflags(write=False)
    return order


@dataclass(frozen=True, slots=True)
class Round:
    """What turns `version` into `version + 1`: `count` micro-batches from number `first` on."""

    version: int
    epoch: int
    first: int
    count: int
    samples: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job's division of `samples` per epoch into micro-batches and rounds."""

    seed: int
    samples: int
    micro_batch: int
    micro_batches_per_round: int

    @property
    def micro_batches_per_epoch(self) -> int:
        return -(-self.samples // self.micro_batch)

    @property
    def rounds_per_epoch(self) -> int:
        return -(-self.micro_batches_per_epoch // self.micro_batches_per_round)

    def round(self, version: int) -> Round:
        """The round that starts from `version`."""
        epoch, index = divmod(version, self.rounds_per_epoch)
        start = index * self.micro_batches_per_round
        count = min(self.micro_batches_per_round, self.micro_batches_per_epoch - start)
        first = epoch * self.micro_batches_per_epoch + start
        samples = sum(self.size(m) for m in range(first, first + count))
        return Round(version, epoch, first, count, samples)

    def size(self, micro_batch: int) -> int:
        """How many samples the micro-batch with this number holds."""
        start = micro_batch % self.micro_batches_per_epoch * self.micro_batch
        return min(self.micro_batch, self.samples - start)

    def indices(self, micro_batch: int) -> npt.NDArray[np.int64]:
        """The samples of the micro-batch with this number, shape (size,)."""
        epoch, index = divmod(micro_batch, self.micro_batches_per_epoch)
        start = index * self.micro_batch
        return permutation(self.seed, epoch, self.samples)[start : start + self.micro_batch]

    def generator_seed(self, micro_batch: int) -> int:
        """The seed for dropout and augmentation in this micro-batch: 63 bits of `(seed, micro_batch)`."""
        mixed = np.random.SeedSequence([self.seed, micro_batch]).generate_state(1, np.uint64)[0]
        return int(mixed) >> 1
