from pathlib import Path

import numpy as np
import pytest

from computeshare.tensors.npy_writer import npy_writer


@pytest.mark.parametrize("rows", [0, 1, 12_345])
def test_numpy_maps_what_was_written_row_by_row(tmp_path: Path, rows: int) -> None:
    path = tmp_path / "folder" / "rows.npy"
    values = np.arange(rows * 6, dtype="<u2").reshape(rows, 2, 3)
    with npy_writer(path, "<u2", (2, 3)) as writer:
        for start in range(0, rows, 1000):
            writer.append(values[start : start + 1000])
    found = np.load(path, mmap_mode="r", allow_pickle=False)
    assert found.dtype == np.dtype("<u2")
    assert np.array_equal(found, values)


def test_an_error_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), npy_writer(tmp_path / "rows.npy", np.uint8) as writer:
        writer.append(np.zeros(3, np.uint8))
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
