"""Write and read the outcomes of partitions: a Parquet file for each bucket, and a manifest of all partitions."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

from shoal.data.parquet.files import is_local, resolve
from shoal.kinds.partitions.keys import key_column, key_text, keys_in
from shoal.kinds.partitions.partition_messages import Outcome
from shoal.lazy_imports import fs, pa, pc, pq
from shoal.new_files import complete_file
from shoal.training import locations
from shoal.training.reporting import say

ROW_GROUP_BYTES = 32 * 2**20
"""Bytes of values and logs after which a row group of a result file is complete. A worker keeps this much in memory,
and a reader of one value reads one row group."""

KEEP_EVERY_S = 4.0
"""Seconds for which an outcome may be only in the memory of a worker. The guide promises that an attempt that continues
a killed one repeats at most the last 5 s. A file per partition would cost more than a short function."""

_MOST_UNKEPT_BYTES = 4 * ROW_GROUP_BYTES
"""Bytes of such outcomes at which a worker writes them earlier."""

_PARTITIONS = b"shoal.partitions"
"""Key of the metadata of a file under which it has the number of its partitions."""

_BUCKET, _KEPT = "bucket-", "kept-"
"""Beginnings of the names of result files, and of files with outcomes of buckets that have not ended."""

MANIFEST = "manifest.parquet"


def work_folder_in(attempt_folder: str) -> str:
    """Return the path or URI of the folder with rows and results in the artifact folder of an attempt."""
    return f"{attempt_folder}/partitions"


def remove_tree(folder: str) -> None:
    """Remove a folder of the job with all its files, if it exists. A link is not followed."""
    filesystem, root = locations.filesystem(folder)
    if locations.is_local(filesystem):
        if Path(root).is_dir() and not Path(root).is_symlink():
            shutil.rmtree(root)
        return
    # The files are removed one by one, because `rm` treats some characters of a name as a pattern.
    for path in filesystem.find(root):
        filesystem.rm_file(path)


def file_name(bucket: int) -> str:
    """Return the name of the result file of a bucket."""
    return f"{_BUCKET}{bucket:05d}.parquet"


def _schema(key_type: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            ("key", key_type),
            ("status", pa.string()),
            ("attempts", pa.int32()),
            ("rows", pa.int64()),
            ("seconds", pa.float64()),
            ("metrics", pa.string()),
            ("error", pa.string()),
            ("kind", pa.string()),
            ("sha256", pa.string()),
            ("size_bytes", pa.int64()),
            ("log", pa.large_string()),
            ("value", pa.large_binary()),
        ]
    )


_IN_FILES_ONLY = ("log", "value")


def discard_leftovers(folder: str) -> None:
    """Remove the half-written files of killed workers, and kept outcomes of buckets that have a result file."""
    filesystem, root = resolve(folder)
    found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
    paths = {info.base_name: info.path for info in found if info.base_name.startswith((".", _KEPT))}
    complete = complete_files(folder) if any(name.startswith(_KEPT) for name in paths) else {}
    for name, path in paths.items():
        if name.startswith(".") or _bucket_of(name) in complete:
            filesystem.delete_file(path)


def forget_failed(folder: str) -> None:
    """Remove the outcomes of failed partitions, so that an attempt repeats these partitions and no others."""
    filesystem, root = resolve(folder)
    found = [
        table for part in (_BUCKET, _KEPT) for tables in _summaries(folder, part, None).values() for table in tables
    ]
    for table in found:
        succeeded = table.column("status").to_pylist().count("succeeded")
        if succeeded == len(table):
            continue
        name = table.column("file")[0].as_py()
        path, kept = f"{root}/{name}", _kept_name(_bucket_of(name))
        with (
            pq.ParquetFile(filesystem.open_input_file(path)) as file,
            _outcome_file(folder, kept, table.schema.field("key").type, succeeded) as write,
        ):
            for group in range(file.num_row_groups):
                rows = file.read_row_group(group)
                write(rows.filter(pc.equal(rows.column("status"), "succeeded")))
        filesystem.delete_file(path)


def _kept_name(bucket: int) -> str:
    """Return a new name for a file with outcomes of a bucket that has not ended."""
    return f"{_KEPT}{bucket:05d}-{uuid.uuid4().hex}.parquet"


def _bucket_of(name: str) -> int:
    """Return the number of the bucket in the name of a file."""
    return int(name.split("-")[1].removesuffix(".parquet"))


class ResultWriter:
    """Writer of the result file of a bucket. The file gets its name when it is complete.

    Until then, the outcomes are also kept in small files, one every `KEEP_EVERY_S`, so that a worker that continues
    after a kill does not repeat them.

    Args:
        folder: Folder or URI of the result files.
        bucket: Number of the bucket.
        key_type: Type of the keys.
        kept: Names of the files in which an earlier worker has kept outcomes of the bucket.

    Attributes:
        ended: Texts of the keys of these outcomes.
    """

    def __init__(self, folder: str, bucket: int, key_type: pa.DataType, kept: Sequence[str] = ()) -> None:
        self._folder = folder
        self._filesystem, self._root = resolve(folder)
        self._bucket = bucket
        self._key_type = key_type
        self._kept = [f"{self._root}/{name}" for name in kept]
        self._earlier = _kept_tables(self._filesystem, self._kept, key_type)
        self.ended = frozenset(text for table in self._earlier for text in _texts(table))
        self._pending: list[Outcome] = []
        self._pending_bytes = 0
        self._unkept: list[Outcome] = []
        self._unkept_bytes = 0
        self._unkept_since = 0.0
        self._file = contextlib.ExitStack()
        self._write_rows: Callable[[pa.Table], None] | None = None
        self._partitions = 0

    def expect(self, partitions: int) -> None:
        """Set the number of partitions of the bucket, by which readers see that the file is complete."""
        self._partitions = partitions

    def add(self, outcome: Outcome) -> None:
        """Add the outcome of a partition."""
        size = len(outcome.log) + (len(outcome.value.content) if outcome.value else 0)
        if not self._unkept:
            self._unkept_since = monotonic()
        self._unkept.append(outcome)
        self._unkept_bytes += size
        self._pending.append(outcome)
        self._pending_bytes += size
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._write()
        self.keep()

    def keep(self) -> None:
        """Write the outcomes that are only in memory into a small file, if it is time."""
        is_due = self._unkept_bytes >= _MOST_UNKEPT_BYTES or monotonic() - self._unkept_since >= KEEP_EVERY_S
        if not self._unkept or not is_due:
            return
        name = _kept_name(self._bucket)
        try:
            with _outcome_file(self._folder, name, self._key_type, len(self._unkept)) as write:
                write(_table(self._unkept, self._key_type))
        except OSError as error:
            say(f"outcomes of partitions could not be kept, which is tried again later: {error}")
            self._unkept_since = monotonic()
            return
        self._kept.append(f"{self._root}/{name}")
        self._unkept, self._unkept_bytes = [], 0

    def close(self) -> None:
        """Write the rest, give the file its name, and remove the small files."""
        self._write()
        self._file.close()
        for path in self._kept:
            with contextlib.suppress(OSError):  # what is left is not read any more
                self._filesystem.delete_file(path)

    def _write(self) -> None:
        if self._write_rows is None:
            file = _outcome_file(self._folder, file_name(self._bucket), self._key_type, self._partitions)
            self._write_rows = self._file.enter_context(file)
            for table in self._earlier:
                self._write_rows(table)
            self._earlier = []
        if self._pending or not self._partitions:
            self._write_rows(_table(self._pending, self._key_type))
        self._pending, self._pending_bytes = [], 0


@contextlib.contextmanager
def _outcome_file(
    folder: str, name: str, key_type: pa.DataType, partitions: int
) -> Iterator[Callable[[pa.Table], None]]:
    """Yield the function that writes a row group into a Parquet file of outcomes, which gets its name when it is
    complete.

    Args:
        folder: Folder or URI of the file.
        name: Name of the file.
        key_type: Type of the keys.
        partitions: Number of outcomes.
    """
    filesystem, root = resolve(folder)
    schema = _schema(key_type).with_metadata({_PARTITIONS: str(partitions).encode()})
    with (
        complete_file(filesystem, f"{root}/{name}", is_local=is_local(folder)) as stream,
        # Values are often compressed already, and models of a few kilobytes gain nothing from dictionaries.
        pq.ParquetWriter(stream, schema, use_dictionary=["status", "kind"]) as writer,
    ):
        yield lambda table: writer.write_table(table, row_group_size=max(1, len(table)))


def _kept_tables(filesystem: Any, paths: Sequence[str], key_type: pa.DataType) -> list[pa.Table]:
    """Read files of kept outcomes into tables of about `ROW_GROUP_BYTES`, each with the first outcome of each key."""
    schema, seen = _schema(key_type), set[str]()
    tables: list[pa.Table] = []
    for path in paths:
        try:
            with pq.ParquetFile(filesystem.open_input_file(path)) as file:
                table = _first_of_keys(file.read().cast(schema), seen)
        except (OSError, pa.ArrowException):  # removed by the worker that has completed the bucket, or damaged
            continue
        if tables and tables[-1].nbytes + table.nbytes < ROW_GROUP_BYTES:
            table = pa.concat_tables([tables.pop(), table])
        tables.append(table)
    return tables


def _first_of_keys(table: pa.Table, seen: set[str]) -> pa.Table:
    """Return the rows of a table whose keys are not in `seen`, and add their texts to it. Two workers may have kept
    outcomes of one partition if the first one was thought to be lost."""
    places = []
    for place, text in enumerate(_texts(table)):
        if text not in seen:
            seen.add(text)
            places.append(place)
    return table.take(pa.array(places, pa.int64()))


def _texts(table: pa.Table) -> list[str]:
    return [key_text(key) for key in keys_in(table.column("key"))]


def _table(outcomes: Sequence[Outcome], key_type: pa.DataType) -> pa.Table:
    values = [None if each.value is None else each.value.content for each in outcomes]
    same = ("status", "attempts", "rows", "seconds", "error", "log")
    columns = {name: [getattr(each, name) for each in outcomes] for name in same} | {
        "key": key_column((each.key for each in outcomes), key_type),
        "metrics": [json.dumps(each.metrics) for each in outcomes],
        "kind": [None if each.value is None else each.value.kind for each in outcomes],
        "sha256": [None if value is None else hashlib.sha256(value).hexdigest() for value in values],
        "size_bytes": [0 if value is None else len(value) for value in values],
        "value": values,
    }
    return pa.table(columns, _schema(key_type))


def complete_files(folder: str, key_type: pa.DataType | None = None) -> dict[int, pa.Table]:
    """Return what the complete result files of a folder say of their partitions, without logs and values, by bucket.

    The tables also have the columns ``file``, ``row_group`` and ``row``, the place of each partition. If `key_type` is
    given, files with keys of another type are left out.
    """
    return {bucket: tables[0] for bucket, tables in _summaries(folder, _BUCKET, key_type).items()}


def kept_outcomes(folder: str, key_type: pa.DataType) -> dict[int, pa.Table]:
    """Return the same of the outcomes that workers have kept of buckets that have not ended, one per partition."""
    found = {}
    for bucket, tables in _summaries(folder, _KEPT, key_type).items():
        seen: set[str] = set()
        found[bucket] = pa.concat_tables([_first_of_keys(table, seen) for table in tables])
    return found


def _summaries(folder: str, beginning: str, key_type: pa.DataType | None) -> dict[int, list[pa.Table]]:
    """Return what the complete files whose names begin with a text say of their partitions, by bucket."""
    filesystem, root = resolve(folder)
    found: dict[int, list[pa.Table]] = {}
    for info in filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True)):
        name = info.base_name
        has_outcomes = info.is_file and name.startswith(beginning) and name.endswith(".parquet")
        if has_outcomes and (table := _summary(filesystem, info.path, key_type)) is not None:
            found.setdefault(_bucket_of(name), []).append(table)
    return found


def _summary(filesystem: Any, path: str, key_type: pa.DataType | None) -> pa.Table | None:
    try:
        with pq.ParquetFile(filesystem.open_input_file(path)) as file:
            expected = (file.schema_arrow.metadata or {}).get(_PARTITIONS)
            groups = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
            found = file.schema_arrow.field("key").type
            if expected is None or sum(groups) != int(expected) or (key_type is not None and found != key_type):
                return None
            columns = [name for name in _schema(found).names if name not in _IN_FILES_ONLY]
            table = file.read([*columns]).replace_schema_metadata(None)
    except (OSError, pa.ArrowException, KeyError):
        return None  # half-written, or of another version
    name = path.rpartition("/")[2]
    table = table.append_column("file", pa.array([name] * len(table), pa.string()))
    table = table.append_column(
        "row_group", pa.array([i for i, rows in enumerate(groups) for _ in range(rows)], pa.int32())
    )
    return table.append_column("row", pa.array([row for rows in groups for row in range(rows)], pa.int32()))


def manifest_of(tables: Iterable[pa.Table]) -> bytes:
    """Return the content of the manifest, a Parquet file with a row for each partition, in the order of the keys."""
    table = pa.concat_tables(tables)
    by_key = pa.table({str(index): part for index, part in enumerate(table.column("key").flatten())})
    order = [(name, "ascending") for name in by_key.column_names]
    positions = pc.sort_indices(by_key, sort_keys=order)
    with io.BytesIO() as file:
        pq.write_table(table.take(positions), file)
        return file.getvalue()
