"""Rows that shoal stages: equal rows in equal order give equal row groups and one digest, whatever they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from shoal.data import DataConnector, row_writer
from shoal.data.dataset_spec import DatasetSpec
from shoal.data.row_copies import copy_rows

ROWS = 70_000
TABLE = pa.table(
    {
        "i": pa.array([None if i % 7 == 3 else i for i in range(ROWS)], pa.int32()),
        "x": pa.array([i / 8 for i in range(ROWS)], pa.float32()),
        "t": pa.array([None if i % 11 == 5 else f"{i:05d}é" for i in range(ROWS)]),
    }
)


def groups(connector: DataConnector) -> list[int]:
    return [group.rows for group in connector.source.row_groups()]


def test_all_forms_of_a_table_have_one_digest_and_equal_row_groups(tmp_path: Path) -> None:
    engine = sa.create_engine(f"sqlite:///{tmp_path}/rows.db")
    TABLE.to_pandas().convert_dtypes().to_sql("rows", engine, index=False)
    wide = TABLE.cast(
        pa.schema([("i", pa.int64()), ("x", pa.float64()), ("t", pa.dictionary(pa.int32(), pa.string()))])
    )
    forms = [
        DataConnector.from_dataframe(TABLE),
        DataConnector.from_dataframe(wide),
        DataConnector.from_dataframe(pa.RecordBatchReader.from_batches(TABLE.schema, TABLE.to_batches(1_001))),
        DataConnector.from_dataframe(TABLE.to_pandas(types_mapper=pd.ArrowDtype)),
        DataConnector.from_dataset(pads.dataset(TABLE)),
        DataConnector.from_sql("SELECT * FROM rows ORDER BY rowid", engine),
    ]
    engine.dispose()

    assert [groups(form) for form in forms] == [[32_768, 32_768, 4_464]] * len(forms)
    assert len({form.digest() for form in forms}) == 1
    [stored, _] = forms[0].random_split([0.5, 0.5]), forms[0].write_times()
    assert len({forms[0].digest(), *(part.digest() for part in stored)}) == 3
    path = tmp_path / "plain.parquet"
    pq.write_table(TABLE, path)
    assert DataConnector.from_parquet(path, filters=[("x", ">=", 0)]).digest() == forms[0].digest()


NESTED = pa.table(
    {
        "text": ["é" * (i * 37 % 400) if i % 5 else None for i in range(200)],
        "struct": [{"a": i, "b": "x" * i} if i % 3 else None for i in range(200)],
        "list": [[1, None] * (i % 4) if i % 6 else None for i in range(200)],
        "texts": [["a", None, "bc" * i] if i % 6 else None for i in range(200)],
        "map": pa.array([[("k", i)] * (i % 3) for i in range(200)], pa.map_(pa.string(), pa.int64())),
        "fixed": pa.array([[1.0, 2.0]] * 200, pa.list_(pa.float32(), 2)),
    }
)
WIDER: dict[str, Any] = {
    "text": pa.string_view(), "list": pa.large_list(pa.int32()), "fixed": pa.list_(pa.float64(), 2),
}  # fmt: skip


def test_row_groups_are_bounded_in_bytes_and_do_not_depend_on_batches_or_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_writer, "GROUP_BYTES", 2_000)
    wider = NESTED.cast(pa.schema([field.with_type(WIDER.get(field.name, field.type)) for field in NESTED.schema]))
    found = set()
    for number, (table, batch_rows) in enumerate([(NESTED, 200), (NESTED, 7), (wider, 64)]):
        row_writer.write_rows(table.to_batches(batch_rows), table.schema, str(tmp_path), number)
        metadata = pq.read_metadata(tmp_path / f"part-{number:05d}.parquet")
        rows = tuple(metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        found.add((rows, metadata.metadata[row_writer.STORED]))

    [(rows, _)] = found
    assert sum(rows) == 200 and len(set(rows)) > 3
    assert pq.read_table(tmp_path / "part-00000.parquet").equals(NESTED)


def test_a_stored_digest_is_not_taken_over_by_files_of_others(tmp_path: Path) -> None:
    staged = DataConnector.from_dataframe(pa.table({"x": [1, 2]}))
    copied = pq.read_table(staged.staging)
    other = copied.set_column(0, "x", pa.array([1, 3]))
    pq.write_table(other, tmp_path / "a.parquet")
    assert DataConnector.from_parquet(tmp_path / "a.parquet").digest() != staged.digest()
    assert DataConnector.from_dataframe(other).digest() not in (staged.digest(), None)
    assert DataConnector.from_dataframe(copied).digest() == staged.digest()


def test_a_copy_of_parquet_files_keeps_pandas_index_and_types(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": pd.array([1, None], "Int64")}, index=pd.Index([5, 6], name="k"))
    (tmp_path / "copy").mkdir()
    frame.to_parquet(tmp_path / "a.parquet")
    copy_rows(DatasetSpec.parse({"paths": [str(tmp_path / "a.parquet")]}), None, str(tmp_path / "copy"))
    pd.testing.assert_frame_equal(DataConnector.from_parquet(tmp_path / "copy").to_pandas(), frame)
