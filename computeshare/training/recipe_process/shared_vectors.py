"""The vectors that a seat and a recipe's process share: mapped by both, of sizes that follow from the layout."""

import fcntl
import mmap
import os
import secrets
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from computeshare.tensors.layout import Layout, Weights
from computeshare.types import Counters, Vector

_PAGE = 1 << 14


class SharedVectors:
    """Weights on their way down, an update on its way up, and a flag.

    What the other process may write is copied before it is used: it may change at any time.
    """

    def __init__(self, descriptor: int, layout: Layout) -> None:
        """Map the memory of a descriptor, which must have `size_of(layout)` bytes."""
        places, size = _places(layout)
        self._map = mmap.mmap(descriptor, size)
        self.parameters: Vector = self._vector(places["parameters"], np.float32)
        """(d,) of the weights."""
        self.buffers: Vector = self._vector(places["buffers"], np.float32)
        """(b,) of the weights."""
        self.counters: Counters = self._vector(places["counters"], np.int64)
        """(c,) of the weights."""
        self.update: Vector = self._vector(places["update"], np.float32)
        """(d,) of a unit."""
        self.new_buffers: Vector = self._vector(places["new_buffers"], np.float32)
        """(b,) after a unit."""
        self._flag: npt.NDArray[np.uint8] = self._vector(places["flag"], np.uint8)

    @property
    def is_called_off(self) -> bool:
        """Whether the unit is no longer wanted."""
        return bool(self._flag[0])

    @is_called_off.setter
    def is_called_off(self, value: bool) -> None:
        self._flag[0] = value

    def begin(self, goes_on: Callable[[], bool]) -> Callable[[], None]:
        """Begin a unit, which is wanted; returns a function that, called meanwhile, tells whether it still is."""
        self.is_called_off = False

        def look() -> None:
            self.is_called_off = not goes_on()

        return look

    @property
    def weights(self) -> Weights:
        """The weights, in shared memory."""
        return Weights(self.parameters, self.buffers, self.counters)

    def put(self, weights: Weights) -> None:
        """Copy weights into shared memory, but for parameters that are there already."""
        if weights.parameters is not self.parameters:
            np.copyto(self.parameters, weights.parameters)
        np.copyto(self.buffers, weights.buffers)
        np.copyto(self.counters, weights.counters)

    def clear(self) -> None:
        """Give the memory back, where the system can: all values are zero then."""
        if hasattr(mmap, "MADV_REMOVE"):
            self._map.madvise(mmap.MADV_REMOVE)

    def _vector(self, place: slice, kind: type) -> npt.NDArray[Any]:
        return np.frombuffer(self._map, kind, (place.stop - place.start) // np.dtype(kind).itemsize, place.start)


def allocate(layout: Layout) -> int:
    """A descriptor of shared memory for a layout, which has no name and cannot be made smaller: reading beyond its end
    would kill the process that trusts in its size.
    """
    _, size = _places(layout)
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("recipe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor
    import _posixshmem  # type: ignore[import-not-found] # macOS sets the size of such memory once and for all

    name = f"/recipe-{secrets.token_hex(8)}"
    descriptor = int(_posixshmem.shm_open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    _posixshmem.shm_unlink(name)
    os.ftruncate(descriptor, size)
    return descriptor


def _places(layout: Layout) -> tuple[Mapping[str, slice], int]:
    """Where each vector lies, in bytes, and the size of all."""
    sizes = {
        "parameters": 4 * layout.parameters,
        "buffers": 4 * layout.buffers,
        "counters": 8 * layout.counters,
        "update": 4 * layout.parameters,
        "new_buffers": 4 * layout.buffers,
        "flag": 1,
    }
    places, start = {}, 0
    for name, size in sizes.items():
        places[name] = slice(start, start + size)
        start += -(-size // _PAGE) * _PAGE
    return places, start
