"""An image file as raw pixels."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from computeshare.errors import InputError

Shape = tuple[int, int, int]


def read(path: Path, shape: Shape) -> npt.NDArray[np.uint8]:
    """The image in a file, of any size and mode, as pixels (channels, height, width) from 0 to 255.

    It is turned upright, and resized and cropped about its centre. Raises InputError, as `upright`.
    """
    return pixels(upright(path), shape)


def upright(path: Path) -> Image.Image:
    """The image in a file, decoded, with at most 8 bits per channel, and turned as its EXIF data say; transparency is
    ignored.

    Raises: InputError: the file is missing, is no image that Pillow reads, is damaged or too large.
    """
    try:
        with Image.open(path) as opened:
            return ImageOps.exif_transpose(_in_8_bits(opened))
    except UnidentifiedImageError as error:
        raise InputError("it is not an image in a format that Pillow reads") from error
    except Image.DecompressionBombError as error:
        raise InputError("it has too many pixels: make it smaller") from error
    except (OSError, SyntaxError, ValueError, EOFError) as error:  # Pillow raises SyntaxError for a broken PNG
        reason = error.strerror if isinstance(error, OSError) and error.strerror else error
        raise InputError(f"it cannot be read: {reason}") from error


def pixels(image: Image.Image, shape: Shape) -> npt.NDArray[np.uint8]:
    """An image resized and cropped about its centre, as (channels, height, width) from 0 to 255.

    Raises: OSError, SyntaxError, ValueError: it cannot be decoded.
    """
    channels, height, width = shape
    fitted = ImageOps.fit(image.convert("RGB" if channels == 3 else "L"), (width, height), Image.Resampling.BILINEAR)
    return np.array(fitted).reshape(height, width, channels).transpose(2, 0, 1)


def _in_8_bits(image: Image.Image) -> Image.Image:
    """Pillow clips 16-bit values at 255 when it converts an image; here they are scaled."""
    if image.mode == "F":
        raise InputError("its pixels are floating-point numbers without a known range: save it with 8 bits")
    if image.mode.startswith("I"):
        return Image.fromarray((np.asarray(image).astype(np.int64).clip(0, 65_535) >> 8).astype(np.uint8))
    return image
