"""Which samples belong to which micro-batch, which micro-batches to which unit, and which units to which round. Pure.

Any machine computes the same answer from `(seed, epoch)`, so no indices are sent. A unit is the work behind one
update, leased as a whole: one micro-batch, or the `inner_steps` consecutive micro-batches of a replica of local SGD.
Micro-batches and units are numbered across the job. Neither a unit nor a round crosses an epoch; an epoch's last round,
its last unit and its last micro-batch may be short.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

Seeds = npt.NDArray[np.uint64]


@lru_cache(maxsize=4)
def permutation(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """The epoch's order: a permutation of `range(samples)`, shape (samples,).

    Sorts raw Philox output, which NumPy keeps stable across its versions (its `permutation` is not).
    """
    raw = np.random.Philox(key=[seed, epoch]).random_raw(samples)
    order = np.argsort(raw, kind="stable")
    order.setflags(write=False)
    return order


_HOLDOUT = 2**63 - 1
"""A number that no epoch has: its permutation decides which samples are held out."""


def held_out(samples: int, fraction: float) -> int:
    """The number of samples to hold out of a training set, for the JobSpec's `validation`."""
    return round(samples * fraction)


def parted(samples: int, fraction: float) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """The training samples and the held-out samples of a training set, as ascending indices.

    They depend only on the set's size and the fraction. The samples of a smaller fraction are part of a larger
    fraction's, so that a fork with another seed is never validated on samples that its weights were trained on.
    """
    order, count = permutation(0, _HOLDOUT, samples), held_out(samples, fraction)
    return np.sort(order[count:]), np.sort(order[:count])


@lru_cache(maxsize=4)
def sample_seeds(seed: int, epoch: int, samples: int) -> Seeds:
    """64 random bits for each sample of an epoch, shape (samples,): raw Philox output that `permutation` never uses."""
    seeds = np.random.Philox(key=[seed, epoch], counter=[0, 0, 0, 1]).random_raw(samples)
    seeds.setflags(write=False)
    return seeds


@dataclass(frozen=True, slots=True)
class Round:
    """The round that makes `version + 1` from `version`: the units `carried` over from the previous round, which closed
    without them, and `count` units from number `first` on.
    """

    version: int
    epoch: int
    first: int
    count: int
    samples: int
    carried: tuple[int, ...] = ()
    wanted: int | None = None
    """The number of units that make the version, in order of arrival; None: all."""
    ahead: int = 0
    """The number of units, following these, that are leased once all of these are: with a delay or an overlap, the next
    round's.
    """

    @property
    def needed(self) -> int:
        """The number of units that make the version."""
        return self.total if self.wanted is None else self.wanted

    @property
    def total(self) -> int:
        return len(self.carried) + self.count

    def behind(self, cursor: int) -> "Round":
        """The rest of a window, from unit `cursor` on."""
        return replace(self, first=cursor, count=self.first + self.count - cursor)

    @property
    def units(self) -> list[int]:
        """All units of the round, ascending."""
        return [*sorted(self.carried), *range(self.first, self.first + self.count)]


@dataclass(frozen=True, slots=True)
class Plan:
    """The whole job's division of `samples` per epoch into micro-batches, units and rounds.

    `micro_batches_per_round` is a multiple of `inner_steps`, the micro-batches of a unit; `micro_batch`, in samples, is
    a multiple of `accumulate`, the pieces that it is computed in.
    """

    seed: int
    samples: int
    micro_batch: int
    micro_batches_per_round: int
    inner_steps: int = 1
    accumulate: int = 1

    @property
    def micro_batches_per_epoch(self) -> int:
        return -(-self.samples // self.micro_batch)

    @property
    def units_per_epoch(self) -> int:
        return -(-self.micro_batches_per_epoch // self.inner_steps)

    @property
    def units_per_round(self) -> int:
        return self.micro_batches_per_round // self.inner_steps

    @property
    def rounds_per_epoch(self) -> int:
        return -(-self.units_per_epoch // self.units_per_round)

    @property
    def samples_per_round(self) -> float:
        """The mean number of samples in a round: an epoch's last round may be short."""
        return self.samples / self.rounds_per_epoch

    def round(self, version: int, carried: Sequence[int] = ()) -> Round:
        """The round that starts from `version`, with the units `carried` over from the previous round."""
        epoch, index = divmod(version, self.rounds_per_epoch)
        start = index * self.units_per_round
        count = min(self.units_per_round, self.units_per_epoch - start)
        first = epoch * self.units_per_epoch + start
        samples = sum(self.unit_size(unit) for unit in (*carried, *range(first, first + count)))
        return Round(version, epoch, first, count, samples, tuple(carried))

    def window(self, version: int) -> Round:
        """The round that starts from `version` with all units of the epoch, of which it needs as many as a `round`."""
        own = self.round(version)
        first = own.epoch * self.units_per_epoch
        return Round(version, own.epoch, first, self.units_per_epoch, own.samples, wanted=own.count)

    @property
    def last_round_count(self) -> int:
        """The number of units in an epoch's last round."""
        return self.round(self.rounds_per_epoch - 1).count

    def round_of(self, unit: int) -> int:
        """The version that the round of the unit with this number starts from."""
        epoch, index = divmod(unit, self.units_per_epoch)
        return epoch * self.rounds_per_epoch + index // self.units_per_round

    def ends_epoch(self, version: int) -> bool:
        """Whether the round that starts from `version` is its epoch's last."""
        return (version + 1) % self.rounds_per_epoch == 0

    def epoch_of(self, unit: int) -> int:
        """The epoch that the unit with this number belongs to."""
        return unit // self.units_per_epoch

    def micro_batches(self, unit: int) -> range:
        """The numbers of the micro-batches of the unit with this number, in the order they are stepped through."""
        epoch, index = divmod(unit, self.units_per_epoch)
        before = epoch * self.micro_batches_per_epoch
        start = index * self.inner_steps
        stop = min(start + self.inner_steps, self.micro_batches_per_epoch)
        return range(before + start, before + stop)

    def unit_size(self, unit: int) -> int:
        """The number of samples in the unit with this number."""
        micro_batches = self.micro_batches(unit)
        start = micro_batches.start % self.micro_batches_per_epoch * self.micro_batch
        return min(len(micro_batches) * self.micro_batch, self.samples - start)

    def size(self, micro_batch: int) -> int:
        """The number of samples in the micro-batch with this number."""
        start = micro_batch % self.micro_batches_per_epoch * self.micro_batch
        return min(self.micro_batch, self.samples - start)

    def indices(self, micro_batch: int) -> npt.NDArray[np.int64]:
        """The samples of the micro-batch with this number, shape (size,)."""
        epoch, index = divmod(micro_batch, self.micro_batches_per_epoch)
        start = index * self.micro_batch
        return permutation(self.seed, epoch, self.samples)[start : start + self.micro_batch]

    def pieces(self, micro_batch: int) -> list[slice]:
        """The slices in which a micro-batch is computed: equal sizes, except the last one of a short micro-batch."""
        size, step = self.size(micro_batch), self.micro_batch // self.accumulate
        return [slice(start, min(start + step, size)) for start in range(0, size, step)]

    def sample_seeds(self, micro_batch: int) -> Seeds:
        """A seed for each sample of the micro-batch with this number, shape (size,), by epoch and sample."""
        epoch = micro_batch // self.micro_batches_per_epoch
        return sample_seeds(self.seed, epoch, self.samples)[self.indices(micro_batch)]

    def position(self, micro_batch: int) -> float:
        """Rounds from version 0 to the step on this micro-batch, with the share of its unit's steps before it."""
        epoch, index = divmod(micro_batch, self.micro_batches_per_epoch)
        unit, step = divmod(index, self.inner_steps)
        return self.round_of(epoch * self.units_per_epoch + unit) + step / self.inner_steps

    def generator_seed(self, micro_batch: int) -> int:
        """The seed for dropout in this micro-batch: 63 bits of `(seed, micro_batch)`."""
        return _mixed(self.seed, micro_batch)

    def stage_seed(self, micro_batch: int, piece: int, stage: int) -> int:
        """As `generator_seed`, for a piece of this micro-batch in one stage of a model that is split."""
        return _mixed(self.seed, micro_batch, piece, stage)


@lru_cache(64)
def _mixed(*numbers: int) -> int:
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1
