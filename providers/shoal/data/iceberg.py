"""List the files of an Iceberg table with pyiceberg: data files, deleted rows, partition values and columns."""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from shoal.data import connections
from shoal.data.connections import in_storage, refusal, split_storage
from shoal.data.filters import Filters, columns_of, parse_moment
from shoal.data.listing import DataFile, Listing, TableLister, naming_versions
from shoal.data.parquet.files import in_threads, join, need, resolve, split_query
from shoal.data.parquet.footers import FIELD_ID, NAMES_IN_FILES, wrap_read_errors
from shoal.data.parquet.schema import is_time
from shoal.errors import DataAccessError, DataError
from shoal.lazy_imports import fs, np, pa, pq
from shoal.secrets.redaction import redact

_METADATA_FILE = re.compile(r"v?(\d+)(-.*)?(\.gz)?\.metadata\.json(\.gz)?")
_PINNED = re.compile(r"(\d+)(?:-schema-(\d+))?")
"""A version as `Listing.version` has it: a snapshot, and the schema if it is not that of the snapshot."""
_SHOWN_SNAPSHOTS = 10

CATALOG_URI = "iceberg://"
"""Prefix of the address of a table of a catalog, such as ``iceberg://prod/flights.hourly``."""


def address_of(catalog: str, table: str) -> str:
    """Return the address of a table of a catalog."""
    return table if table.startswith(CATALOG_URI) else f"{CATALOG_URI}{catalog}/{table}"


class IcebergFiles(TableLister):
    """Lister of an Iceberg table.

    The path is that of the table's directory or of one of its metadata files, or ``iceberg://CATALOG/NAMESPACE.TABLE``
    for a catalog of pyiceberg's configuration. A version is the id of a snapshot, or the name of a tag or branch.
    """

    @property
    def options(self) -> dict[str, Any]:
        """The options of a `DatasetSpec` that describe the table."""
        address = split_storage(self.path)[1]
        catalog = address.removeprefix(CATALOG_URI).partition("/")[0] if address.startswith(CATALOG_URI) else None
        return {"format": "iceberg", "catalog": catalog, "version": self.version, "as_of": self.as_of}

    def find_version(self) -> tuple[int | str, str]:
        """Return the id of the snapshot that is read now, with the schema if it is not that of the snapshot. Ids of
        snapshots are random, so the table needs no id."""
        with _pyiceberg_errors(self.path):
            snapshot, schema = self._select(self._load())
        if snapshot is None:
            raise DataError(f"the Iceberg table {self.path} has no rows: check the program that writes the table")
        return _version_of(snapshot, schema), ""

    def list_files(self, filters: Filters | None) -> Listing:
        """List the files of the snapshot, with the bounds of the filters' columns in the manifests.

        Raises:
            DataError: There is no such table or snapshot, or the table uses a feature that shoal does not support.
        """
        with _pyiceberg_errors(self.path):
            table = self._load()
            snapshot, schema = self._select(table)
            columns = self._columns(table, schema)
            if snapshot is None:
                return Listing((), columns)
            self._refuse_equality_deletes(snapshot.manifests(table.io), table.io)
            tasks = list(table.scan(snapshot_id=snapshot.snapshot_id).plan_files())
            specs = table.specs()
        storage, address = split_storage(self.path)
        query = _query_of(table.io.properties) if storage is None else "".join(split_query(address)[1:])
        version = str(_version_of(snapshot, schema))
        with naming_versions(self.path, version, lambda: _existing(table)):
            deleted = self._deleted_rows(tasks, query, storage)
        by_id = {field.field_id: (field, column) for field, column in zip(schema.fields, columns, strict=True)}
        named = set(columns_of(filters or ()))
        bounded = {number: pair for number, pair in by_id.items() if pair[1].name in named and _is_exact(pair[1].type)}
        files = []
        for file in (task.file for task in tasks):
            self._require_parquet(file)
            files.append(
                DataFile(
                    _path(file.file_path, query, storage),
                    file.file_size_in_bytes,
                    partitions=_partition_values(file, specs[file.spec_id], by_id),
                    deleted=deleted.get(file.file_path),
                    bounds=_bounds(file, bounded),
                )
            )
        defaults = {field.name: field.initial_default for field in schema.fields if field.initial_default is not None}
        files.sort(key=lambda file: file.path)
        return Listing(tuple(files), columns, version, defaults, lambda: _existing(table))

    def _load(self) -> Any:
        from pyiceberg.catalog import load_catalog
        from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
        from pyiceberg.table import StaticTable

        storage, address = split_storage(self.path)
        head, _, query = split_query(address)
        options = connections.storage_options("pyiceberg", storage, query)
        if not head.startswith(CATALOG_URI):
            return StaticTable.from_metadata(head if head.endswith(".json") else self._newest_metadata(), options)
        catalog, _, name = head.removeprefix(CATALOG_URI).partition("/")
        try:
            return load_catalog(catalog, **(connections.catalog_properties(catalog) | options)).load_table(name)
        except (NoSuchTableError, NoSuchNamespaceError):
            raise DataError(f"the catalog {catalog} has no table {name}: write namespace.table") from None

    def _newest_metadata(self) -> str:
        """Return the path of the metadata file with the highest number in the table's folder."""
        folder = join(self.path, "metadata")
        filesystem, inner = resolve(folder)
        names: dict[int, list[str]] = {}
        for info in filesystem.get_file_info(fs.FileSelector(inner, allow_not_found=True)):
            if match := _METADATA_FILE.fullmatch(info.base_name):
                names.setdefault(int(match[1]), []).append(info.base_name)
        if not names:
            raise refusal(self.path, "", filesystem, inner) or DataError(
                f"{self.path} is not an Iceberg table, because it has no file metadata/*.metadata.json: check the "
                "path, or give the name of the table's catalog as catalog"
            )
        newest = names[max(names)]
        if len(newest) > 1:
            # Of two commits at once, a catalog accepts only one, and the metadata file of the other may stay.
            raise DataError(
                f"the Iceberg table {self.path} has several newest metadata files ({', '.join(sorted(newest))}), and "
                "only its catalog knows the current one: give the name of the catalog as catalog, or the path of a file"
            )
        return join(split_query(split_storage(folder)[1])[0], newest[0])

    def _select(self, table: Any) -> tuple[Any, Any]:
        """Return the snapshot (None if the table is empty) and the schema with which it is read."""
        schemas, current = table.schemas(), table.schema()
        if self.as_of is not None:
            milliseconds = math.floor(parse_moment(self.as_of).timestamp() * 1000)
            snapshot = table.snapshot_as_of_timestamp(milliseconds)
            if snapshot is None:
                raise self._no_snapshot(table, f"as of {self.as_of}")
        elif self.version is None:
            return table.current_snapshot(), current
        elif ref := table.refs().get(str(self.version)):
            snapshot = table.snapshot_by_id(ref.snapshot_id)
            if ref.snapshot_ref_type == "branch":
                return snapshot, current
        else:
            match = _PINNED.fullmatch(str(self.version))
            snapshot = table.snapshot_by_id(int(match[1])) if match else None
            if snapshot is None or match is None:
                raise self._no_snapshot(table, str(self.version))
            if match[2] is not None:
                return snapshot, schemas.get(int(match[2]), current)
        return snapshot, schemas.get(snapshot.schema_id, current)

    def _no_snapshot(self, table: Any, wanted: str) -> DataError:
        return DataError(
            f"the Iceberg table {self.path} has no snapshot {wanted}, which may have expired: {_existing(table)}"
        )

    def _columns(self, table: Any, schema: Any) -> pa.Schema:
        """Return the table's columns, with their field ids and their names in files without field ids."""
        from pyiceberg.schema import index_by_id

        mapping = table.name_mapping()
        names = None if mapping is None else _names_by_id(mapping)
        for field in schema.fields:
            if any(nested.initial_default is not None for nested in index_by_id(field.field_type).values()):
                raise DataError(
                    f'column "{field.name}" of the Iceberg table {self.path} has a field with a default value for '
                    "older rows, which shoal cannot read inside of a column: write the rows to a new table"
                )
        return pa.schema([_arrow_field(field, names) for field in schema.fields])

    def _refuse_equality_deletes(self, manifests: Iterable[Any], io: Any) -> None:
        from pyiceberg.manifest import DataFileContent, ManifestContent

        for manifest in manifests:
            if manifest.content == ManifestContent.DELETES:
                for entry in manifest.fetch_manifest_entry(io):
                    if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
                        raise DataError(
                            f"the Iceberg table {self.path} has equality deletes, which name deleted rows by their "
                            "values, and which shoal cannot apply: compact the table first, with rewrite_data_files in "
                            "Spark or with the engine that writes the table"
                        )

    def _deleted_rows(self, tasks: Sequence[Any], query: str, storage: str | None) -> dict[str, np.ndarray]:
        """Read the delete files. Return the positions of the deleted rows of each data file, by the location that the
        table's metadata has for the file."""
        files = {_path(file.file_path, query, storage): file for task in tasks for file in task.delete_files}
        found: dict[str, list[np.ndarray]] = {}
        for part in in_threads("deletes", lambda path: self._positions(files[path], path), files):
            for location, positions in part.items():
                found.setdefault(location, []).append(positions)
        return {location: np.unique(np.concatenate(parts)) for location, parts in found.items()}

    def _positions(self, file: Any, path: str) -> dict[str, np.ndarray]:
        """Read one delete file."""
        filesystem, inner = resolve(path)
        if file.file_format.value == "PUFFIN":
            from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
            from pyiceberg.table.puffin import PuffinFile

            with wrap_read_errors(path), filesystem.open_input_file(inner) as stream:
                content = stream.read()
            with _pyiceberg_errors(path):
                vectors = deletion_vectors_from_puffin_file(PuffinFile(content))
            return {one.referenced_data_file: one.to_vector().to_numpy().astype(np.uint64) for one in vectors}
        self._require_parquet(file)
        columns = ["file_path", "pos"]
        # Each row has the whole path of a data file, which would take far more memory than a dictionary.
        options = {"filesystem": filesystem, "partitioning": None, "read_dictionary": columns[:1]}
        with wrap_read_errors(path):
            table = pq.read_table(inner, columns=columns, **options).unify_dictionaries()
        locations = table.column("file_path").combine_chunks()
        codes = locations.indices.to_numpy()
        positions = table.column("pos").to_numpy().astype(np.uint64)[np.argsort(codes, kind="stable")]
        ends = np.cumsum(np.bincount(codes, minlength=1))
        return dict(zip(locations.dictionary.to_pylist(), np.split(positions, ends[:-1]), strict=False))

    def _require_parquet(self, file: Any) -> None:
        if file.file_format.value != "PARQUET":
            raise DataError(
                f"the Iceberg table {self.path} has files in {file.file_format.value}, and shoal reads only Parquet: "
                "set the table's property write.format.default to parquet, and rewrite the files with "
                "rewrite_data_files"
            )


@contextlib.contextmanager
def _pyiceberg_errors(place: str) -> Iterator[None]:
    """Check that pyiceberg is installed, and convert an exception that it raises to a DataError that names the
    table."""
    need("pyiceberg", "pyarrow", "numpy", extra="iceberg")
    from pyiceberg import __version__
    from pyiceberg.exceptions import RESTError

    try:
        yield
    except (DataError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise DataError(
            f"{place} cannot be read, because a file was removed, as an expiry of snapshots does ({error}): check the "
            "path, and read a newer snapshot"
        ) from None
    except (OSError, RESTError, pa.ArrowException) as error:
        raise refusal(place, error) or DataAccessError(f"{place} cannot be read: {redact(str(error))}") from None
    # The exceptions of pyiceberg and of the libraries of its catalogs have no common base class.
    except Exception as error:
        raise DataError(f"{place} cannot be read with pyiceberg {__version__}: {redact(str(error))}") from error


def _version_of(snapshot: Any, schema: Any) -> int | str:
    number: int = snapshot.snapshot_id
    return number if schema.schema_id == snapshot.schema_id else f"{number}-schema-{schema.schema_id}"


def _existing(table: Any) -> str:
    """Return which snapshots a table still has."""
    snapshots = sorted(table.snapshots(), key=lambda snapshot: snapshot.timestamp_ms)[-_SHOWN_SNAPSHOTS:]
    shown = [
        f"{snapshot.snapshot_id} of {datetime.fromtimestamp(snapshot.timestamp_ms // 1000, UTC):%Y-%m-%dT%H:%M:%SZ}"
        for snapshot in snapshots
    ]
    names = ", ".join(sorted(table.refs()))
    return (
        f"use one of the newest snapshots ({', '.join(shown)}), or a branch or tag ({names})"
        if shown
        else "it is empty"
    )


def _path(location: str, query: str, storage: str | None = None) -> str:
    """Return the path or URI of a file as shoal writes it. A location of Hadoop is not encoded as a URI is."""
    scheme, _, rest = location.partition(":")
    if scheme == "file":
        return f"/{rest.lstrip('/')}"
    return in_storage(storage, f"s3:{rest}{query}") if scheme in ("s3", "s3a", "s3n") else location


def _query_of(properties: Mapping[str, str]) -> str:
    """Return the options of the URIs of files for the server and region with which pyiceberg reads the table."""
    scheme, _, host = properties.get("s3.endpoint", "").partition("://")
    options = {"region": properties.get("s3.region"), "endpoint_override": host, "scheme": scheme}
    given = urlencode({name: value for name, value in options.items() if value}, safe=":/")
    return f"?{given}" if given else ""


def _partition_values(file: Any, spec: Any, columns: Mapping[int, tuple[Any, pa.Field]]) -> dict[str, Any]:
    """Return the values of those columns that are partition columns as they are, as objects of the column's type."""
    values = {}
    for position, part in enumerate(spec.fields):
        if str(part.transform) == "identity" and part.source_id in columns:
            column, value = columns[part.source_id][1], file.partition[position]
            values[column.name] = None if value is None else pa.scalar(value, column.type).as_py()
    return values


def _is_exact(type_: pa.DataType) -> bool:
    """Return whether a file's bounds of a column are its smallest and largest value: those of texts are cut."""
    return bool(pa.types.is_integer(type_)) or is_time(type_)


def _bounds(file: Any, columns: Mapping[int, tuple[Any, pa.Field]]) -> dict[str, tuple[Any, Any]]:
    from pyiceberg.conversions import from_bytes

    found = {}
    for number, (field, column) in columns.items():
        low, high = ((bounds or {}).get(number) for bounds in (file.lower_bounds, file.upper_bounds))
        if low is not None and high is not None:
            ends = [pa.scalar(from_bytes(field.field_type, end), column.type).as_py() for end in (low, high)]
            found[column.name] = (ends[0], ends[1])
    return found


def _arrow_field(field: Any, names: Mapping[int, Sequence[str]] | None) -> pa.Field:
    """Convert a field of pyiceberg's schema. Its metadata has its id and its names in files without ids."""
    known = None if names is None else names.get(field.field_id, ())
    metadata = {FIELD_ID: str(field.field_id), NAMES_IN_FILES: json.dumps(known)}
    return pa.field(field.name, _arrow_type(field.field_type, names), not field.required, metadata)


def _arrow_type(type_: Any, names: Mapping[int, Sequence[str]] | None) -> pa.DataType:
    from pyiceberg.io.pyarrow import schema_to_pyarrow

    if type_.is_struct:
        return pa.struct([_arrow_field(field, names) for field in type_.fields])
    if str(type_).startswith("list<"):
        return pa.list_(_arrow_field(type_.element_field, names))
    if str(type_).startswith("map<"):
        return pa.map_(_arrow_field(type_.key_field, names), _arrow_field(type_.value_field, names))
    arrow = schema_to_pyarrow(type_)
    # Parquet files have the small types, which are compared and read as they are.
    small = {pa.large_string(): pa.string(), pa.large_binary(): pa.binary(), pa.uuid(): pa.binary(16)}
    return small.get(arrow, arrow)


def _names_by_id(mapping: Iterable[Any]) -> dict[int, Sequence[str]]:
    found: dict[int, Sequence[str]] = {}
    for field in mapping:
        if field.field_id is not None:
            found[field.field_id] = field.names
        found |= _names_by_id(field.fields)
    return found
