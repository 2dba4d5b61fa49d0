"""Data sets' files as they are published."""

import struct

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


def idx_bytes(array: Bytes) -> bytes:
    return struct.pack(f">I{array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def pickled_batch(images: Bytes, labels: list[int]) -> bytes:
    """A batch as CIFAR-10's authors pickled it, with Python 2: protocol 2, byte strings, NumPy 1's module names."""
    data = images.tobytes()
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01"
    array += (
        b"M"
        + struct.pack("<H", len(images))
        + b"M"
        + struct.pack("<H", 3072)
        + b"\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
    )
    array += (
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89T" + struct.pack("<I", len(data)) + data + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."
