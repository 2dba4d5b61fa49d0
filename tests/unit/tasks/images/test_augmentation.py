"""Augmentation: torchvision's transformations, each sample's drawn from its own seed."""

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from computeshare.jobspec.sampling_plan import Plan
from computeshare.tasks.images.augmentation import augment, drawn
from computeshare.tasks.images.classification import ImageClassification

SHAPES = [(1, 8, 8), (1, 28, 28), (3, 32, 32), (3, 20, 12)]
PLAN = Plan(seed=5, samples=100, micro_batch=16, micro_batches_per_round=2)


def images(shape: tuple[int, int, int], count: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), np.uint8)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_crop_and_flip_equal_torchvisions_functions_on_each_image(shape: tuple[int, int, int]) -> None:
    raw, seeds = images(shape), PLAN.sample_seeds(0)
    _, height, width = shape
    rows, columns = height // 8, max(1, width // 8)
    numbers = [drawn(seeds, place, count) for place, count in enumerate((2 * rows + 1, 2 * columns + 1, 2))]
    expected = []
    for image, top, left, mirrored in zip(torch.from_numpy(raw), *numbers, strict=True):
        padded = v2.functional.pad(image, [columns, rows])
        cut = v2.functional.crop(padded, int(top), int(left), height, width)
        expected.append(v2.functional.horizontal_flip(cut) if mirrored else cut)
    np.testing.assert_array_equal(augment(raw, seeds, ["crop", "flip"]), torch.stack(expected).numpy())
    assert len(set(zip(*(one.tolist() for one in numbers), strict=True))) > 5, "the draws do not differ"


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32)], ids=str)
def test_randaugment_is_torchvisions_with_the_samples_seed(shape: tuple[int, int, int]) -> None:
    raw, seeds = images(shape), PLAN.sample_seeds(0)
    state = torch.get_rng_state()
    got = augment(raw, seeds, ["randaugment"])
    assert torch.equal(torch.get_rng_state(), state)
    for image, seed, result in zip(raw, seeds.tolist(), got, strict=True):
        torch.manual_seed(seed)
        expected = v2.RandAugment()(Image.fromarray(image.transpose(1, 2, 0).squeeze()))
        np.testing.assert_array_equal(np.asarray(expected).reshape(*shape[1:], -1).transpose(2, 0, 1), result)


def test_images_with_few_levels_keep_their_units() -> None:
    raw = images((1, 8, 8)) % 17
    got = augment(raw, PLAN.sample_seeds(0), ["randaugment"], scale=16)
    assert got.max() <= 16 and (got != raw).any()


@pytest.mark.parametrize("names", [["crop", "flip"], ["flip", "randaugment"]])
def test_a_sample_is_changed_alike_at_any_place_of_a_batch(names: list[str]) -> None:
    split = ImageClassification("mnist", "lenet5", (1, 28, 28), augment=names).noise(100, 0)
    samples, seeds = PLAN.indices(1), PLAN.sample_seeds(1)
    whole, _ = split.batch(samples, seeds)
    backwards, _ = split.batch(samples[::-1], seeds[::-1])
    alone, _ = split.batch(samples[3:4], seeds[3:4])
    assert torch.equal(whole, backwards.flip(0)) and torch.equal(whole[3:4], alone)


def test_scoring_sees_images_as_they_are() -> None:
    plain, changed = (
        ImageClassification("mnist", "lenet5", (1, 28, 28), augment=names).noise(100, 0) for names in ([], ["crop"])
    )
    assert torch.equal(plain.batch(np.arange(9))[0], changed.batch(np.arange(9))[0])


def test_a_samples_seed_depends_on_epoch_and_sample_alone() -> None:
    regrouped = Plan(seed=5, samples=100, micro_batch=33, micro_batches_per_round=1)
    by_sample = [
        {s: seed for m in numbers for s, seed in zip(plan.indices(m).tolist(), plan.sample_seeds(m), strict=True)}
        for plan, numbers in [(PLAN, range(7)), (regrouped, range(4)), (PLAN, range(7, 14))]
    ]
    assert by_sample[0] == by_sample[1] != by_sample[2]
    assert len(set(by_sample[0].values())) == 100
