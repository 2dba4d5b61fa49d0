"""Raw images to what a model sees."""

import numpy as np
import pytest
import torch

from computeshare.tasks.images.transforms import Normaliser, fit

RAW = np.random.default_rng(0).integers(0, 256, (5, 1, 28, 28), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (5, 3, 32, 32), dtype=np.uint8)


def test_normalised_values_are_those_of_the_usual_transforms() -> None:
    images = Normaliser.build((1, 28, 28), 255.0, (0.1307,), (0.3081,))(RAW)
    expected = (torch.from_numpy(RAW).float() / 255 - 0.1307) / 0.3081
    assert images.dtype == torch.float32
    torch.testing.assert_close(images, expected, rtol=1e-6, atol=1e-6)


def test_channels_are_normalised_each_by_its_own_constants() -> None:
    images = Normaliser.build((3, 32, 32), 255.0, (0.5, 0.4, 0.3), (0.1, 0.2, 0.4))(COLOUR)
    scaled = COLOUR.astype(np.float32) / 255
    for channel, (mean, std) in enumerate([(0.5, 0.1), (0.4, 0.2), (0.3, 0.4)]):
        np.testing.assert_allclose(images[:, channel].numpy(), (scaled[:, channel] - mean) / std, rtol=1e-4, atol=1e-5)


def test_the_raw_images_are_left_as_they_were() -> None:
    before = RAW.copy()
    Normaliser.build((3, 32, 32), 255.0, (0.1307,), (0.3081,))(RAW)
    assert np.array_equal(RAW, before)


def test_grey_becomes_colour_by_repetition_with_the_same_constants() -> None:
    grey = Normaliser.build((1, 28, 28), 255.0, (0.1307,), (0.3081,))(RAW)
    colour = Normaliser.build((3, 28, 28), 255.0, (0.1307,), (0.3081,))(RAW)
    assert torch.equal(colour, grey.expand(5, 3, 28, 28))


def test_colour_becomes_grey_by_its_luma() -> None:
    pure = torch.eye(3).reshape(3, 3, 1, 1)  # a red, a green and a blue pixel
    torch.testing.assert_close(fit(pure, (1, 1, 1)).flatten(), torch.tensor([0.299, 0.587, 0.114]))


@pytest.mark.parametrize(("height", "width", "top", "left"), [(32, 32, 2, 2), (28, 55, 0, 13), (55, 29, 13, 0)])
def test_images_that_grow_by_less_than_two_are_framed_in_zeros(height: int, width: int, top: int, left: int) -> None:
    images = torch.from_numpy(RAW).float()
    framed = fit(images, (1, height, width))
    assert framed.shape == (5, 1, height, width)
    assert torch.equal(framed[:, :, top : top + 28, left : left + 28], images)
    assert framed.sum() == images.sum()


@pytest.mark.parametrize(("height", "width"), [(56, 56), (14, 14), (32, 14), (224, 224)])
def test_other_sizes_are_resized_and_keep_the_mean(height: int, width: int) -> None:
    images = torch.full((2, 1, 28, 28), 3.0)
    resized = fit(images, (1, height, width))
    assert resized.shape == (2, 1, height, width)
    torch.testing.assert_close(resized, torch.full_like(resized, 3.0))


def test_fitting_gives_the_same_bits_whatever_else_is_in_the_batch() -> None:
    normalise = Normaliser.build((1, 48, 72), 255.0, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26))
    assert torch.equal(normalise(COLOUR)[3:4], normalise(COLOUR[3:4]))
