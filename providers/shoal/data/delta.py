"""List the files of a Delta table with the library deltalake, at a version or a time."""

from __future__ import annotations

import json
import os
import re
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from shoal.data.connections import in_storage, refusal, split_storage, storage_options
from shoal.data.filters import Filters, columns_of, parse_moment
from shoal.data.listing import DataFile, Listing, TableLister
from shoal.data.parquet.files import join, resolve, split_query
from shoal.data.parquet.footers import DELTA_NAME, FIELD_ID
from shoal.errors import DataAccessError, DataError, MissingExtraError, ShoalError
from shoal.lazy_imports import fs, np, pa
from shoal.secrets.redaction import redact

if TYPE_CHECKING:
    from deltalake import DeltaTable

_LOG = "_delta_log"
_ENVIRONMENT = threading.Lock()
"""Lock of loads: some change the environment of the process; see `_storage_options`."""
_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "typeWidening-preview",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
"""Reader features of the Delta protocol that this module supports."""
_DROP = "rewrite the table without it (in Spark: ALTER TABLE ... DROP FEATURE, or CREATE TABLE ... AS SELECT)"
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_HADOOP = {"s3a": "s3", "s3n": "s3"}
"""Scheme of a URI that Spark writes into the log -> the scheme that Arrow knows."""
# The log rounds times down to milliseconds.
_ROUNDED = timedelta(milliseconds=1)


class DeltaFiles(TableLister):
    """Lister of a Delta table. A version is a number."""

    @property
    def options(self) -> dict[str, Any]:
        """The options of a `DatasetSpec` that describe the table."""
        return {"format": "delta", "version": self.version, "as_of": self.as_of}

    def find_version(self) -> tuple[int, str]:
        """Return the number of the version that the log has now, and the id of the table: a new table at the same path
        begins at version 0 again."""
        table = self._load()
        return table.version(), str(table.metadata().id)

    def list_files(self, filters: Filters | None) -> Listing:
        """List the files of the version, with the statistics of the filters' columns in the log.

        Raises:
            DataError: There is no such table or version, or the table uses a feature that shoal does not support.
        """
        table = self._load()
        mode = table.metadata().configuration.get("delta.columnMapping.mode", "none")
        schema = pa.schema([_column_in_files(field, mode) for field in pa.schema(table.schema().to_arrow())])
        root = table.table_uri.rstrip("/") + "/"
        deleted = self._deleted(table, root)
        named = [schema.field(name) for name in columns_of(filters or ()) if name in schema.names]
        files = []
        for added in pa.table(table.get_add_actions()).to_pylist():
            path = self._path(added["path"], root)
            files.append(
                DataFile(
                    path,
                    added["size_bytes"],
                    added["modification_time"] * 10**6,
                    added.get("partition") or {},
                    deleted.pop(path, None),
                    _bounds(added, named),
                )
            )
        if deleted:
            raise DataError(f"the Delta table {self.path} deletes rows of files that it does not list: {min(deleted)}")
        files.sort(key=lambda file: file.path)
        return Listing(tuple(files), schema, str(table.version()), remaining=self._remaining)

    def _load(self) -> DeltaTable:
        """Load the log of the version, and check the features that a reader of the table has to support."""
        try:
            from deltalake import DeltaTable
            from deltalake.exceptions import DeltaError
        except ImportError as error:
            raise MissingExtraError("deltalake", "delta") from error
        storage, address = split_storage(self.path)
        head, _, query = split_query(address)
        version = self.version
        assert not isinstance(version, str)  # refused by `DatasetSpec`
        try:
            with _ENVIRONMENT, _storage_options(storage, query) as options:
                table = DeltaTable(head, version=version, storage_options=options)
            if self.as_of is not None:
                version = self._version_at(parse_moment(self.as_of), table.metadata().configuration)
                table.load_as_version(version)
        except ShoalError:
            raise
        except (DeltaError, OSError, ValueError) as error:
            raise self._problem(version, error) from None
        unknown = sorted(set(table.protocol().reader_features or ()) - _FEATURES)
        if unknown:
            raise DataError(
                f"the Delta table {self.path} uses {', '.join(unknown)}, which shoal cannot read: {_DROP}, or read it "
                "with Spark and write Parquet files"
            )
        return table

    def _problem(self, version: int | None, error: Exception) -> DataError:
        """Return the error for a table that deltalake could not load."""
        if refused := refusal(self.path, error):
            return refused
        commits = self._commits()
        if not commits:
            return DataError(
                f"{self.path} is not a Delta table, because it has no {_LOG} with versions: check the path, and that "
                "this machine can access it"
            )
        if version is not None and version not in commits:
            return DataError(
                f"version {version} of the Delta table {self.path} does not exist, or its log was removed: use one of "
                f"the versions {min(commits)} to {max(commits)}"
            )
        reason = next(iter(redact(str(error)).splitlines()), type(error).__name__)
        if "nsupported" in reason or "catalog-managed" in reason:
            return DataError(f"the Delta table {self.path} uses a feature that shoal cannot read ({reason}): {_DROP}")
        return DataAccessError(f"the Delta table {self.path} cannot be read: {reason}")

    def _commits(self) -> dict[int, datetime]:
        """Return the versions that the log can still restore, and the time of each."""
        filesystem, inner = resolve(self.path)
        found = filesystem.get_file_info(fs.FileSelector(f"{inner.rstrip('/')}/{_LOG}", allow_not_found=True))
        names = {info.base_name: info.mtime for info in found}
        times = {int(name[:20]): time for name, time in names.items() if re.fullmatch(r"\d{20}\.json", name)}
        saved = {int(name[:20]) for name in names if re.match(r"\d{20}\.checkpoint", name)}
        first = 0 if 0 in times else min(saved, default=None)
        return {} if first is None else {version: times[version] for version in sorted(times) if version >= first}

    def _version_at(self, moment: datetime, configuration: Mapping[str, str]) -> int:
        """Return the newest version that was written at or before a moment: by the times in the commits, if the table
        has them, else by those of the files, none of which counts as earlier than that of the version before."""
        commits = self._commits()
        if not commits:
            raise DataError(
                f"the Delta table {self.path} has no commits in its {_LOG}, which as_of needs, but only a checkpoint: "
                "omit as_of, or give version"
            )
        versions = list(commits)
        in_files = dict(zip(versions, accumulate(commits.values(), max), strict=True))
        has_times = configuration.get("delta.enableInCommitTimestamps") == "true"
        since = (
            int(configuration.get("delta.inCommitTimestampEnablementVersion", 0)) if has_times else max(versions) + 1
        )

        def written_at(version: int) -> datetime:
            return in_files[version] if version < since else self._time_in_commit(version)

        after = bisect_right(versions, moment, key=written_at)
        if not after:
            raise DataError(
                f"the Delta table {self.path} has no version as of {moment.isoformat()}: the oldest that still exists "
                f"is version {versions[0]} of {written_at(versions[0]).isoformat()}"
            )
        return versions[after - 1]

    def _time_in_commit(self, version: int) -> datetime:
        filesystem, inner = resolve(self.path)
        with filesystem.open_input_stream(f"{inner.rstrip('/')}/{_LOG}/{version:020}.json") as stream:
            first = json.loads(stream.read().split(b"\n", 1)[0])
        return datetime.fromtimestamp(first["commitInfo"]["inCommitTimestamp"] / 1000, UTC)

    def _deleted(self, table: DeltaTable, root: str) -> dict[str, np.ndarray]:
        """Return the positions of the deleted rows of each file that has any."""
        from deltalake.exceptions import DeltaError

        if "deletionVectors" not in (table.protocol().reader_features or ()):
            return {}
        try:
            rows = pa.table(table.deletion_vectors())
        except DeltaError as error:
            raise DataError(
                f"the deletion vectors of the Delta table {self.path} cannot be read ({error}): write the rows anew "
                "without them, in Spark with REORG TABLE ... APPLY (PURGE)"
            ) from None
        return {
            self._path(path, root): np.flatnonzero(~np.asarray(kept.values)).astype(np.uint32)
            for path, kept in zip(rows["filepath"].to_pylist(), rows["selection_vector"], strict=True)
        }

    def _path(self, logged: str, root: str) -> str:
        """Return the path of a file in the log, which is relative to the table, except in a shallow clone."""
        text = unquote(logged.removeprefix(root))
        match = _SCHEME.match(text)
        if match is None:
            return join(self.path, text)
        scheme = match[0][:-2].lower()
        if scheme == "file":
            return "/" + text[match.end() :].lstrip("/")
        moved = _HADOOP.get(scheme, scheme) + text[len(scheme) :] + "".join(split_query(self.path)[1:])
        return in_storage(split_storage(self.path)[0], moved)

    def _remaining(self) -> str:
        """Return which versions still have all their files: VACUUM removes the files of older versions first."""
        commits = sorted(self._commits())
        low = bisect_left(commits, True, key=lambda version: DeltaFiles(self.path, version)._is_complete())
        if low == len(commits):
            return "no version has all its files, so restore the files"
        return f"use one of the versions {commits[low]} to {commits[-1]}, which still have all their files"

    def _is_complete(self) -> bool:
        listed = [resolve(file.path) for file in self.list_files(None).files]
        return all(filesystem.get_file_info(inner).type == fs.FileType.File for filesystem, inner in listed)


def _column_in_files(field: pa.Field, mode: str) -> pa.Field:
    """Return a column with what identifies it in the files: its id, its other name, or, without a mapping, its name."""
    if mode == "none":
        return field.remove_metadata()
    ids = {FIELD_ID: field.metadata[b"delta.columnMapping.id"]} if mode == "id" else {}
    return field.with_metadata({**field.metadata, **ids})


def _bounds(added: dict[str, Any], fields: Iterable[pa.Field]) -> dict[str, tuple[Any, Any]]:
    """Return the smallest and the largest value of columns in a file, as far as the log has them exactly enough."""
    found = {}
    for field in fields:
        name = (field.metadata or {}).get(DELTA_NAME, field.name.encode()).decode()
        low, high = ((added.get(end) or {}).get(name) for end in ("min", "max"))
        # Texts are cut, and decimals and floats have passed through JSON.
        if all(isinstance(end, int | date) and not isinstance(end, bool) for end in (low, high)):
            if isinstance(high, datetime):
                high = min(high, datetime.max.replace(tzinfo=high.tzinfo) - _ROUNDED) + _ROUNDED
            found[field.name] = (low, high)
    return found


@contextmanager
def _storage_options(storage: str | None, query: str) -> Iterator[dict[str, str]]:
    """Provide deltalake's options for a storage and the options in a URI, such as
    ``s3://bucket/table?region=eu-west-1``."""
    options = storage_options("deltalake", storage, query)
    # deltalake refuses HTTP unless it is told to allow it; pyarrow does not.
    if options.get("AWS_ENDPOINT_URL", os.environ.get("AWS_ENDPOINT_URL", "")).startswith("http://"):
        options["AWS_ALLOW_HTTP"] = "true"
    # deltalake would send the session token of this process's own keys with the keys of the storage.
    own = os.environ.pop("AWS_SESSION_TOKEN", None) if "AWS_ACCESS_KEY_ID" in options else None
    try:
        yield options
    finally:
        if own is not None:
            os.environ["AWS_SESSION_TOKEN"] = own
