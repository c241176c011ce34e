"""Files of Delta, Iceberg and Hudi tables are not read as Parquet, because deleted rows would come back."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from pyarrow.fs import FileSystemHandler, FSSpecHandler, PyFileSystem

from shoal.data import DataConnector
from shoal.errors import DataError

LOGS = {"Delta": "_delta_log/00000000000000000000.json", "Iceberg": "metadata/v1.metadata.json", "Hudi": ".hoodie/a"}


@pytest.fixture(params=LOGS)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """The kind of a table with one partition, and the folder that contains the table ``orders``."""
    folder = tmp_path / "orders/data/day=1"
    folder.mkdir(parents=True)
    pq.write_table(pa.table({"x": [1.0]}), folder / "a.parquet")
    log = tmp_path / "orders" / LOGS[request.param]
    log.parent.mkdir()
    log.write_text("{}")
    return request.param, tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "",
        "orders",
        "orders/data",
        "orders/data/day=1",
        "orders/data/day=1/a.parquet",
        "orders/data/*",
        "*/data/**/*.parquet",
        "o*/data/day=1/a.parquet",
    ],
)
def test_every_path_into_a_table_is_refused(lake: tuple[str, Path], path: str) -> None:
    kind, folder = lake
    call = "from_dataframe" if kind == "Hudi" else f'from_{kind.lower()} with .*format="{kind.lower()}"'
    with pytest.raises(DataError, match=rf"orders is a table of {kind} .*deleted.*{call}"):
        DataConnector.from_parquet(folder / path).num_rows()


def test_tables_are_found_by_fsspec(lake: tuple[str, Path]) -> None:
    kind, folder = lake
    memory = fsspec.filesystem("memory")
    memory.put(str(folder / "orders"), f"/lake-{kind}/orders", recursive=True)
    try:
        for path in ("", "/orders/data/day=1/a.parquet", "/*/data/*"):
            with pytest.raises(DataError, match=f"orders is a table of {kind}"):
                DataConnector.from_parquet(f"memory://lake-{kind}{path}").num_rows()
    finally:
        memory.rm(f"/lake-{kind}", recursive=True)


def test_an_arrow_dataset_of_a_table_needs_the_table_s_library(lake: tuple[str, Path]) -> None:
    kind, folder = lake
    file = str(folder / "orders/data/day=1/a.parquet")
    with pytest.raises(DataError, match=f"orders is a table of {kind}"):
        DataConnector.from_dataset(pads.dataset([file], format="parquet"))

    # Stands for the filesystem that deltalake gives to its datasets.
    local = FSSpecHandler(fsspec.filesystem("file"))
    methods = {name: staticmethod(getattr(local, name)) for name in FileSystemHandler.__abstractmethods__}
    handler = type("Handler", (FileSystemHandler,), {**methods, "__eq__": lambda self, other: self is other})()
    own = pads.dataset([file], format="parquet", filesystem=PyFileSystem(handler))
    assert DataConnector.from_dataset(own).num_rows() == 1


def test_other_folders_named_metadata_are_no_tables(tmp_path: Path) -> None:
    (tmp_path / "metadata").mkdir()
    (tmp_path / "metadata/columns.json").write_text("{}")
    pq.write_table(pa.table({"x": [1.0]}), tmp_path / "a.parquet")
    assert DataConnector.from_parquet(tmp_path / "a.parquet").num_rows() == 1
    assert DataConnector.from_dataset(pads.dataset(tmp_path / "a.parquet")).num_rows() == 1
