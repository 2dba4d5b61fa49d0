"""Writes a NumPy file row by row: it may be larger than memory, and its length need not be known before."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from computeshare.runtime.durability import flush_open


@dataclass(slots=True)
class NpyWriter:
    """The rows of an array (n, *row), written one after the other."""

    file: BinaryIO
    dtype: np.dtype[Any]
    row: tuple[int, ...]
    count: int = 0

    def append(self, rows: npt.NDArray[Any]) -> None:
        """Write rows (k, *row). Raises OSError."""
        assert rows.shape[1:] == self.row
        self.file.write(np.ascontiguousarray(rows, self.dtype).data)
        self.count += len(rows)

    def write_header(self) -> None:
        """Write the header, for as many rows as there are. NumPy leaves room in it for any length of the first axis."""
        shape = (self.count, *self.row)
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        self.file.seek(0)
        np.lib.format.write_array_header_1_0(self.file, header)


@contextmanager
def npy_writer(path: Path, dtype: npt.DTypeLike, row: tuple[int, ...] = ()) -> Iterator[NpyWriter]:
    """A writer of `path`, which appears in one step when the block ends without an error. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as file:  # not mapped: a full disk is an error here, and would be a SIGBUS there
            writer = NpyWriter(file, np.dtype(dtype), row)
            writer.write_header()
            yield writer
            writer.write_header()
            flush_open(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
