"""Layouts: a state dict in flat vectors and back."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest

from computeshare.errors import ShapeError
from computeshare.tensors.layout import BUCKET, LEAST_BUCKET, Digest, Layout, Weights

LAYOUT = Layout.build(
    iter(
        [
            ("conv.weight", (2, 3), "parameter"),
            ("bn.running_mean", (2,), "buffer"),
            ("bn.num_batches_tracked", (), "counter"),
            ("table.index", (3,), "counter"),
            ("head.bias", (4,), "parameter"),
        ]
    )
)
WEIGHTS = Weights(np.arange(10, dtype=np.float32), np.float32([7, 8]), np.array([5, 0, 1, 2], np.int64))


def test_views_are_the_state_dict_without_copies() -> None:
    views = LAYOUT.views(WEIGHTS)
    assert list(views) == [t.name for t in LAYOUT.tensors]
    assert views["head.bias"].tolist() == [6, 7, 8, 9]
    assert all(view.base is not None for view in views.values())


def test_gathering_the_views_gives_the_weights_back() -> None:
    again = LAYOUT.gather(LAYOUT.views(WEIGHTS))
    assert LAYOUT.digest(again) == LAYOUT.digest(WEIGHTS)
    again.parameters[0] = 99
    assert WEIGHTS.parameters[0] == 0


def test_only_batch_counters_count() -> None:
    assert LAYOUT.counted(WEIGHTS.counters).tolist() == [6, 0, 1, 2]
    assert WEIGHTS.counters.tolist() == [5, 0, 1, 2]


def test_every_value_matters_to_the_digest() -> None:
    for kind, index in [("parameter", 9), ("buffer", 0), ("counter", 3)]:
        changed = WEIGHTS.copy()
        changed.vector(kind)[index] += 1  # type: ignore[arg-type, index, operator]
        assert LAYOUT.digest(changed) != LAYOUT.digest(WEIGHTS)


@pytest.mark.parametrize("cuts", [[], [6], [1, 5, 7], [0, 0, 10], [*range(10)]], ids=str)
def test_a_digest_is_the_same_however_the_parameters_come(cuts: list[int]) -> None:
    digest = Digest(LAYOUT, WEIGHTS.buffers, WEIGHTS.counters)
    for start, stop in zip([0, *cuts], [*cuts, 10], strict=True):
        digest.add(WEIGHTS.parameters[start:stop])
    bytes_in_order = b"".join(view.tobytes() for view in LAYOUT.views(WEIGHTS).values())
    assert digest.hexdigest() == hashlib.sha256(bytes_in_order).hexdigest() == LAYOUT.digest(WEIGHTS)


def test_a_digest_of_what_stands_after_the_parameters_has_it_all() -> None:
    layout = Layout.build(iter([("w", (2,), "parameter"), ("b", (2,), "buffer"), ("n", (), "counter")]))
    weights = Weights(np.float32([1, 2]), np.float32([3, 4]), np.array([5], np.int64))
    bytes_in_order = b"".join(view.tobytes() for view in layout.views(weights).values())
    assert layout.digest(weights) == hashlib.sha256(bytes_in_order).hexdigest()


@pytest.mark.parametrize("count", [0, 9, 11])
def test_a_digest_of_too_few_or_too_many_parameters_is_refused(count: int) -> None:
    digest = Digest(LAYOUT, WEIGHTS.buffers, WEIGHTS.counters)
    digest.add(np.zeros(count, np.float32))
    with pytest.raises(ShapeError, match=f"of {count} parameters do not fit a layout of 10"):
        digest.hexdigest()


def test_weights_of_another_layout_are_refused() -> None:
    with pytest.raises(ShapeError, match="do not fit"):
        LAYOUT.digest(Weights(WEIGHTS.parameters[:9], WEIGHTS.buffers, WEIGHTS.counters))
    with pytest.raises(ShapeError, match="not those of this model"):
        LAYOUT.gather({**LAYOUT.views(WEIGHTS), "more": np.zeros(1)})


def test_a_bucket_begins_at_each_cut_and_buckets_cover_all_parameters() -> None:
    size = 4 * BUCKET + 7
    whole = Layout.build(iter([("w", (size,), "parameter")]))
    assert [bucket.start for bucket in whole.buckets] == [*range(0, size, BUCKET)]
    cuts = (5, BUCKET + 5, BUCKET + 6)
    cut = replace(whole, cuts=cuts)
    assert [bucket.start for bucket in cut.buckets] == [0, 5, BUCKET + 5, *range(BUCKET + 6, size, BUCKET)]
    assert [bucket.stop for bucket in cut.buckets] == [bucket.start for bucket in cut.buckets[1:]] + [size]
    assert sum(cut.bucket_sizes) == size and max(cut.bucket_sizes) <= BUCKET
    assert Layout(()).bucket_sizes == (0,)


@pytest.mark.parametrize(
    ("size", "buckets", "largest"),
    [
        (1, 1, 1),
        (LEAST_BUCKET, 1, LEAST_BUCKET),
        (LEAST_BUCKET + 1, 2, LEAST_BUCKET),
        (400_000, 4, LEAST_BUCKET),
        (4 * LEAST_BUCKET + 4, 4, LEAST_BUCKET + 1),
        (3_000_001, 4, 750_001),
        (4 * BUCKET, 4, BUCKET),
        (4 * BUCKET + 1, 5, BUCKET),
    ],
)
def test_a_model_has_four_buckets_unless_they_would_be_too_small_or_too_large(
    size: int, buckets: int, largest: int
) -> None:
    sizes = Layout.build(iter([("w", (size,), "parameter")])).bucket_sizes
    assert (len(sizes), max(sizes), sum(sizes)) == (buckets, largest, size)
