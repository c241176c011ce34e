"""Arrow to NumPy: values, nulls, layout."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.numpy_columns import to_matrix, to_vector

COLUMNS = {
    "int": pa.array([1, None, -3], pa.int64()),
    "uint": pa.array([1, 2, 255], pa.uint8()),
    "float": pa.array([0.5, None, math.nan], pa.float64()),
    "half": pa.array(np.array([0.5, 1, 2], np.float16)),
    "bool": pa.array([True, None, False]),
    "bits": pa.array([True, False, True]),
    "null": pa.nulls(3),
}


def test_values_nulls_and_layout() -> None:
    table = pa.table(COLUMNS)
    matrix = to_matrix(table, ["bool", "int", "uint", "float", "half", "bits", "null"])
    assert matrix.dtype == np.float32 and matrix.flags.c_contiguous and matrix.shape == (3, 7)
    nan = np.nan
    expected = [[1, 1, 1, 0.5, 0.5, 1, nan], [nan, nan, 2, nan, 1, 0, nan], [0, -3, 255, nan, 2, 1, nan]]
    np.testing.assert_array_equal(matrix, np.array(expected, np.float32))


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_vector_is_the_matrix_column(name: str, dtype: str) -> None:
    table = pa.table(COLUMNS)
    vector = to_vector(table, name, dtype)
    assert vector.dtype == dtype and vector.shape == (3,)
    np.testing.assert_array_equal(vector.astype("float32"), to_matrix(table, [name])[:, 0])


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.one_of(st.none(), st.integers(-1000, 1000)), max_size=30), max_size=5), st.integers(1, 9))
def test_chunks_and_blocks_make_no_difference(chunks: list[list[int | None]], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal.data.numpy_columns._BLOCK_ROWS", block)
        flat = [value for chunk in chunks for value in chunk]
        table = pa.table({"a": pa.chunked_array(chunks, pa.int32()), "b": pa.array(range(len(flat)), pa.int64())})
        matrix = to_matrix(table.slice(1), ["b", "a"])
    expected = [[i, np.nan if v is None else v] for i, v in enumerate(flat)][1:]
    np.testing.assert_array_equal(matrix, np.array(expected, np.float32).reshape(-1, 2))
    np.testing.assert_array_equal(to_vector(table.slice(1), "a"), matrix[:, 1])


def test_empty_table() -> None:
    table = pa.table({"a": pa.array([], pa.int64())})
    assert to_matrix(table, ["a"]).shape == (0, 1) and to_vector(table, "a").shape == (0,)


def test_pandas_is_not_imported(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1.5, 2.0], "b": [1, None], "c": [True, None]}), tmp_path / "x.parquet")
    code = f"""
import sys
import pyarrow.parquet as pq
from shoal.data.numpy_columns import to_matrix, to_vector
table = pq.ParquetFile({str(tmp_path / "x.parquet")!r}).read_row_group(0)
print(to_matrix(table, ["a", "b", "c"]).tolist(), to_vector(table, "b").tolist(), "pandas" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[[1.5, 1.0, 1.0], [2.0, nan, nan]] [1.0, nan] False"
