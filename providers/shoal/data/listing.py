"""Define what a lister is: the object that knows of which files a dataset consists, and the schema of a table. That of
Parquet files is `shoal.data.parquet.files.ParquetPaths`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal.data.filters import Filters
from shoal.errors import DataAccessError, DataError
from shoal.lazy_imports import np, pa


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file of a dataset, as a lister has found it.

    Args:
        path: Canonical path or URI.
        size: Size in bytes.
        modified_ns: Time of the last change, in nanoseconds since the epoch; None if the filesystem does not report the
            time.
        partitions: Column -> its value in all rows of the file. In a folder, the text of the Hive partition; in a
            table, a Python object of the column's type. None stands for null.
        deleted: Positions in the file of the rows that the table has deleted, ascending, as an array of unsigned
            integers; None if there are none.
        bounds: Column of the filters -> a lower and an upper bound of its values in the file, as Python objects of the
            column's type. They serve only to leave out files.
    """

    path: str
    size: int
    modified_ns: int | None = None
    partitions: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)
    deleted: np.ndarray | None = field(default=None, repr=False, compare=False)
    bounds: Mapping[str, tuple[Any, Any]] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a dataset, as a lister has found them.

    Args:
        files: The files. Those of a table are ordered by path.
        schema: Columns of a table. Each file is read in these names and types, and a column that a file lacks is null.
            A column, or a field inside of one, is found in the file by the ids and names in the field's metadata; see
            `shoal.data.parquet.footers.index_in_file`. None for a folder of Parquet files, whose columns are those of
            the files.
        version: Text that identifies the version of the table; None for a folder.
        remaining: Function that returns which versions of the table still have all their files, for the message about a
            file that was removed.
        defaults: Column of a table -> its value, as a Python object, in the files that lack it, if it is not null.
    """

    files: tuple[DataFile, ...]
    schema: pa.Schema | None = None
    version: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    remaining: Callable[[], str] | None = None


@contextmanager
def naming_versions(place: str, version: str | None, remaining: Callable[[], str] | None) -> Iterator[None]:
    """Add to the error about a file that was removed which versions of the table remain; see `Listing`."""
    try:
        yield
    except DataAccessError as error:
        if remaining is None or not isinstance(error.__context__, FileNotFoundError):
            raise
        raise DataError(
            f"files of version {version} of the table {place} were removed, as VACUUM or an expiry of versions does "
            f"({error}): {remaining()}"
        ) from None


@dataclass(frozen=True)
class TableLister(ABC):
    """Lister of a table with versions. The environment contains the credentials, as for the table's library and
    pyarrow. A lister can be pickled, and imports the library of its table only to list.

    Args:
        path: Absolute path or URI of the table's directory; see the subclasses.
        version: Version to read; None for the newest.
        as_of: Time (ISO 8601; UTC without an offset) whose version is read; None for the newest.
    """

    path: str
    version: int | str | None = None
    as_of: str | None = None

    @property
    def place(self) -> str:
        """Where the rows are, for messages."""
        return self.path

    @property
    @abstractmethod
    def options(self) -> dict[str, Any]:
        """The options of a `DatasetSpec` that describe the table, beside `paths`."""

    @abstractmethod
    def find_version(self) -> tuple[int | str, str]:
        """Return the number or name of the version that is read now, so that it can be read again later, and the id of
        the table, which is empty if no other table has such a version."""

    @abstractmethod
    def list_files(self, filters: Filters | None) -> Listing:
        """List the files of the version.

        Args:
            filters: Files in which no row matches these filters may be left out. `ParquetSource` itself leaves out
                those whose partition values do not match.

        Raises:
            DataError: The table cannot be read, or uses a feature that shoal does not support.
        """
