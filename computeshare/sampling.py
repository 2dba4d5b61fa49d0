"""Which samples belong to which micro-batch, and which micro-batches to which round. Pure.

Any machine computes the same answer from `(seed, epoch)`, so no data travels. A round never crosses an
epoch; an epoch's last micro-batch and last round may be short.
"""

from collections.abc import Sequence
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
    """What turns `version` into `version + 1`: `count` micro-batches from number `first` on, after those `carried`
    over from the round before, which had closed without them.
    """

    version: int
    epoch: int
    first: int
    count: int
    samples: int
    carried: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        return len(self.carried) + self.count

    @property
    def micro_batches(self) -> list[int]:
        """All of them, ascending."""
        return [*sorted(self.carried), *range(self.first, self.first + self.count)]


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

    def round(self, version: int, carried: Sequence[int] = ()) -> Round:
        """The round that starts from `version`, with what the one before left over."""
        epoch, index = divmod(version, self.rounds_per_epoch)
        start = index * self.micro_batches_per_round
        count = min(self.micro_batches_per_round, self.micro_batches_per_epoch - start)
        first = epoch * self.micro_batches_per_epoch + start
        samples = sum(self.size(m) for m in (*carried, *range(first, first + count)))
        return Round(version, epoch, first, count, samples, tuple(carried))

    @property
    def last_round_count(self) -> int:
        """How many micro-batches an epoch's last round has."""
        return self.round(self.rounds_per_epoch - 1).count

    def ends_epoch(self, version: int) -> bool:
        """Whether the round that starts from `version` is its epoch's last."""
        return (version + 1) % self.rounds_per_epoch == 0

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
