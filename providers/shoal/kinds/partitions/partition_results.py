"""The results of a job with partitions: status, value, metrics and log of each partition, read when they are needed."""

from __future__ import annotations

import hashlib
import hmac
import io
import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shoal.data.output_tables import to_exact_frame, without_row_numbers, write_tables
from shoal.data.parquet.files import resolve
from shoal.data.parquet.schema import fitted, united
from shoal.errors import InvalidArgumentError, JobError, TrainingError
from shoal.jobs.files import artifacts, storage
from shoal.jobs.journal import attempts
from shoal.jobs.journal.attempts import Key
from shoal.jobs.results import JobResult, failed_text
from shoal.kinds.partitions import partition_messages, result_files
from shoal.kinds.partitions.keys import Key as PartitionKey
from shoal.kinds.partitions.keys import key_text, keys_in, shown_key
from shoal.kinds.partitions.partition_messages import Kind, Status
from shoal.kinds.partitions.spec import PARTITIONS
from shoal.lazy_imports import pa, pd, pq
from shoal.state import Store
from shoal.training.locations import filesystem, local_path, resolved


class PartitionFailedError(TrainingError):
    """The value of a partition was asked for, but the function has failed for this partition."""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class PartitionResult:
    """Outcome of one partition, as the manifest has it.

    Attributes:
        key: Key of the partition: a value of the column, or a tuple of the values of several columns. None: the rows
            with a null.
        text: Text that identifies the key, such as ``int:7`` for 7 and 7.0.
        status: ``succeeded`` or ``failed``.
        rows: Number of rows.
        seconds: Seconds that the function took.
        attempts: 2 if the process of the first attempt was lost, else 1.
        metrics: Metrics that the function has reported.
        error: Reason of the failure; empty if the function has returned.
        kind: Form of the value in the file: ``pickle``, ``xgboost`` or ``lightgbm`` (own formats of these libraries),
            or ``rows`` (a DataFrame in Arrow's format).
        sha256: Digest of the value; None if there is none.
        size_bytes: Size of the value as a file.
        place: Name of the result file, index of the row group, and index of the partition in the row group.
    """

    key: PartitionKey
    text: str
    status: Status
    rows: int
    seconds: float
    attempts: int
    metrics: dict[str, float]
    error: str
    kind: Kind
    sha256: str | None
    size_bytes: int
    place: tuple[str, int, int]
    _reader: _ResultReader

    def __repr__(self) -> str:
        return f"PartitionResult({shown_key(self.key)}, {self.status}, rows={self.rows}, seconds={self.seconds:.3g})"

    @property
    def value(self) -> Any:
        """Return value of the function, or the booster of an estimator, read from the result file.

        Raises:
            PartitionFailedError: The function has failed.
            JobError: The file was removed or changed.
        """
        return partition_messages.loaded(self.kind, self.content())

    def content(self) -> bytes:
        """Return the bytes of the value: pickled, or a model in the own format of its library (UBJSON for XGBoost, text
        for LightGBM).

        Raises:
            PartitionFailedError: The function has failed.
            JobError: The file was removed or changed, or the job has not succeeded.
        """
        if self.status != "succeeded":
            raise PartitionFailedError(f"partition {shown_key(self.key)} has no value: {self.error}")
        return self._reader.value(self)

    @property
    def log(self) -> str:
        """End of what the function has printed, and its traceback if it has failed; at most 8 KiB.

        Raises:
            JobError: The file was removed.
        """
        return str(self._reader.cell(self, "log"))


class _ResultReader:
    """Reader of the values and logs in result files. It keeps the last row group that it has read.

    Args:
        folder: Folder or URI of the result files.
        reads_values: Whether values may be read: False if nothing shows that the files are those of the job.
    """

    def __init__(self, folder: str, *, reads_values: bool = True) -> None:
        self._folder = folder
        self._reads_values = reads_values
        self._last: tuple[tuple[str, int, str], list[Any]] | None = None

    def value(self, partition: PartitionResult) -> bytes:
        """Return the bytes of a partition's value.

        Raises:
            JobError: The file was removed or changed, or values may not be read.
        """
        if not self._reads_values:
            raise JobError(
                f"the values in {self._folder} are not read, because the job has not succeeded, and a file that "
                "another program has written could run any code: run the job again, which repeats no ended partition"
            )
        content = self.cell(partition, "value")
        if content is None or hashlib.sha256(content).hexdigest() != partition.sha256:
            raise JobError(
                f"{self._folder}/{partition.place[0]} was changed after the job wrote it, and is not read, because a "
                "changed file could run any code: run the job again"
            )
        return bytes(content)

    def cell(self, partition: PartitionResult, column: str) -> Any:
        """Return what a result file has about a partition in a column.

        Raises:
            JobError: The file was removed.
        """
        name, row_group, row = partition.place
        group = (name, row_group, column)
        if self._last is None or self._last[0] != group:
            filesystem, root = resolve(self._folder)
            try:
                with pq.ParquetFile(filesystem.open_input_file(f"{root}/{name}")) as file:
                    self._last = group, file.read_row_group(row_group, columns=[column]).column(0).to_pylist()
            except (OSError, pa.ArrowException, IndexError) as error:
                raise JobError(f"the result file {self._folder}/{name} cannot be read: {error}") from error
        return self._last[1][row]


class PartitionResults:
    """Outcomes of all partitions, in the order of their keys.

    ``results[key]`` is the `PartitionResult` of a key, ``len(results)`` the number of partitions, and ``for each in
    results`` yields all of them. Values are read from the result files when they are asked for.

    Attributes:
        manifest: Path or URI of the manifest.
        digest: SHA-256 of the manifest.
        key_type: Arrow type of the keys, a struct if there are several columns; None if no partition has ended.

    Args:
        manifest: Path or URI of the manifest.
        digest: SHA-256 that the manifest must have; None: it is not checked.

    Raises:
        JobError: The manifest was changed.
        FileNotFoundError: The manifest was removed, or cannot be reached from this machine.
    """

    def __init__(self, manifest: str, digest: str | None = None) -> None:
        content = storage.read(manifest)
        if digest is not None and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), digest):
            raise JobError(f"{manifest} was changed after the job wrote it, and is not read: run the job again")
        self.manifest = manifest
        self.digest = hashlib.sha256(content).hexdigest()
        self._fill(content)

    def _fill(self, content: bytes | None, *, reads_values: bool = True) -> None:
        self._partitions: dict[str, PartitionResult] = {}
        self.key_type: pa.DataType | None = None
        if content is None:
            return
        reader = _ResultReader(f"{self.manifest.rpartition('/')[0]}/results", reads_values=reads_values)
        table = pq.read_table(pa.BufferReader(content))
        self.key_type = table.schema.field("key").type
        # An earlier version has written texts of keys, too, in another form.
        rows = table.drop_columns({"key", "key_text"} & {*table.column_names}).to_pylist()
        for key, row in zip(keys_in(table.column("key")), rows, strict=True):
            text, place = key_text(key), (row.pop("file"), row.pop("row_group"), row.pop("row"))
            changed = {"metrics": json.loads(row["metrics"]), "kind": row["kind"] or "pickle"}
            self._partitions[text] = PartitionResult(key=key, text=text, place=place, _reader=reader, **row | changed)

    @classmethod
    def so_far(cls, work_folder: str) -> PartitionResults:
        """Return the outcomes of the partitions that have ended until now, of a job that runs or has failed.

        Their values cannot be read: only the store's digest of the manifest shows that a file is that of the job.

        Args:
            work_folder: Folder of the job's attempt with the result files.
        """
        found = cls.__new__(cls)
        found.manifest, found.digest = f"{work_folder}/{result_files.MANIFEST}", ""
        tables = result_files.complete_files(f"{work_folder}/results")
        found._fill(result_files.manifest_of(tables.values()) if tables else None, reads_values=False)
        return found

    def __len__(self) -> int:
        return len(self._partitions)

    def __iter__(self) -> Iterator[PartitionResult]:
        return iter(self._partitions.values())

    def __getitem__(self, key: PartitionKey) -> PartitionResult:
        try:
            return self._partitions[key_text(key)]
        except KeyError:
            known = ", ".join(shown_key(each) for each in self.keys[:5])
            raise KeyError(
                f"there is no partition {shown_key(key)} ({type(key).__name__}) among the keys of type "
                f"{self.key_type}; the first keys are {known}"
            ) from None

    def __contains__(self, key: PartitionKey) -> bool:
        return key_text(key) in self._partitions

    def get(self, key: PartitionKey) -> PartitionResult | None:
        """Return the outcome of a partition; None if there is no such key."""
        return self._partitions.get(key_text(key))

    def predicts(self, key: PartitionKey) -> bool:
        """Return whether the partition of a key exists and has succeeded."""
        found = self.get(key)
        return found is not None and found.status == "succeeded"

    def __repr__(self) -> str:
        counts = ", ".join(f"{number} {status}" for status, number in self.counts.items() if number)
        return f"PartitionResults({counts})"

    @property
    def keys(self) -> list[PartitionKey]:
        """The keys of all partitions."""
        return [each.key for each in self]

    @property
    def counts(self) -> dict[str, int]:
        """Number of partitions by status."""
        states = [each.status for each in self]
        return {status: states.count(status) for status in ("succeeded", "failed")}

    @property
    def failed(self) -> list[PartitionResult]:
        """The partitions for which the function has failed."""
        return [each for each in self if each.status == "failed"]

    def values(self) -> Iterator[tuple[PartitionKey, Any]]:
        """Yield the key and the value of each partition that has succeeded, in the order of the files. This reads each
        file once."""
        for each in itertools.chain.from_iterable(self._by_file()):
            yield each.key, each.value

    def rows(self) -> Iterator[pd.DataFrame]:
        """Yield the values of the partitions that have succeeded, which must be DataFrames, such as the predictions of
        `predict`. The partitions of one result file are in one DataFrame.

        All DataFrames of `predict` have the same columns. An integer column with nulls has a nullable type, such as
        ``Int64``.

        Raises:
            InvalidArgumentError: A value is no DataFrame.
            DataError: The predictions of the partitions have types without a common type.
        """
        if any(each.kind == "rows" for each in self):
            for table in self._tables():
                yield to_exact_frame(table)
            return
        for partitions in self._by_file():
            yield pd.concat([_frame(each) for each in partitions], ignore_index=True)

    def write_parquet(self, folder: str | os.PathLike[str]) -> str:
        """Write the values of the partitions, which must be DataFrames, as Parquet files, and return the folder.

        All files have the same columns, of the same types. The rows of `predict` have the types of the dataset.

        Args:
            folder: Directory or URI, which must be empty.

        Raises:
            InvalidArgumentError: The folder is not empty, or a value is no DataFrame.
            DataError: A column has types in several partitions that have no common type.
        """
        target = resolved(os.fspath(folder), "output_path").rstrip("/")
        fs, root = filesystem(target)
        if fs.exists(root) and fs.ls(root):
            raise InvalidArgumentError(f"{target} is not empty: choose another folder")
        for number, table in enumerate(self._tables()):
            content = io.BytesIO()
            write_tables(content, [table])
            storage.write(f"{local_path(target)}/part-{number:05d}.parquet", content.getvalue())
        return target

    def _by_file(self) -> Iterator[list[PartitionResult]]:
        """Yield the partitions of each result file that have succeeded, in the order of the file."""
        ordered = sorted((each for each in self if each.status == "succeeded"), key=lambda each: each.place)
        for _, partitions in itertools.groupby(ordered, key=lambda each: each.place[0]):
            yield list(partitions)

    def _tables(self) -> Iterator[pa.Table]:
        """Yield the rows of each result file, all with the same schema. This reads the files twice."""
        found = {_table(each).schema: None for each in itertools.chain.from_iterable(self._by_file())}
        schema, first = united(found), next(iter(found), pa.schema([]))
        if all(schema.field(field.name).type == field.type for field in first):
            schema = without_row_numbers(schema.with_metadata(first.metadata))  # with the types of pandas
        for partitions in self._by_file():
            yield pa.concat_tables(fitted(_table(each), schema) for each in partitions)

    def to_pandas(self) -> pd.DataFrame:
        """Return a table of all partitions: key, status, rows, seconds, attempts, error, and a column for each metric,
        ``metric/<name>``. It has no values and logs."""
        names = ("key", "status", "rows", "seconds", "attempts", "error")
        rows = [
            {name: getattr(each, name) for name in names}
            | {f"metric/{name}": value for name, value in each.metrics.items()}
            for each in self
        ]
        return pd.DataFrame(rows)

    def require_all(self) -> None:
        """Do nothing if all partitions have succeeded.

        Raises:
            PartitionFailedError: At least one partition has failed; the message names the first ones and their errors.
        """
        if text := failed_text(self.counts, (f"{shown_key(each.key)}: {each.error}" for each in self.failed)):
            raise PartitionFailedError(text)


def _table(partition: PartitionResult) -> pa.Table:
    if partition.kind == "rows":
        return partition_messages.rows_in(partition.content())
    return pa.Table.from_pandas(_frame(partition), preserve_index=False)


def _frame(partition: PartitionResult) -> pd.DataFrame:
    value = partition.value
    if not isinstance(value, pd.DataFrame):
        raise InvalidArgumentError(
            f"the value of partition {shown_key(partition.key)} is no DataFrame but of type {type(value).__name__}: "
            "values() yields values of any type"
        )
    return value


def load_partitions(result: JobResult, artifact_location: str | None = None) -> PartitionResults:
    """Return the results of a finished job with partitions.

    Values may be pickled, and a pickled value can run any code when it is read. Therefore the manifest is compared with
    its digest in the store, and each value with its digest in the manifest.

    Args:
        result: Result of the job.
        artifact_location: The job's `artifact_location`; needed only if the location contains credentials, because the
            result does not keep credentials.

    Raises:
        InvalidArgumentError: The job was not divided into partitions.
        FileNotFoundError: The manifest was removed, or cannot be reached from this machine.
        JobError: The manifest was changed after the job wrote it, or the job is not in this store.
    """
    if result.partitions is None or result.results_path is None:
        raise InvalidArgumentError(f"job {result.job_id} has no partitions: only jobs of shoal.many have them")
    known = attempts.digest_of_results(Store(), Key(result.job_id, result.attempt))
    return PartitionResults(storage.as_given(result.results_path, artifact_location), known or "")


def partitions_so_far(
    job_id: str, artifact_location: str | None = None, *, attempt: int | None = None
) -> PartitionResults:
    """Return the outcomes of the partitions of a job whose buckets have ended until now, also if the job runs or has
    failed.

    Args:
        job_id: Id of the job.
        artifact_location: The job's `artifact_location`; needed only if the location contains credentials.
        attempt: Number of the attempt. None: the newest attempt.

    Raises:
        JobNotFoundError: There is no such job.
        InvalidArgumentError: The job was not divided into partitions.
    """
    store = Store()
    job = attempts.latest(store, job_id) if attempt is None else attempts.load(store, Key(job_id, attempt))
    if job.framework != PARTITIONS:
        raise InvalidArgumentError(f"job {job_id} has no partitions: only jobs of shoal.many have them")
    location = artifact_location or job.run_config.get("artifact_location")
    if job.result:  # it has succeeded, or failed after all results were stored
        return load_partitions(JobResult.model_validate(job.result), location)
    return PartitionResults.so_far(result_files.work_folder_in(artifacts.folder(Key(job.id, job.attempt), location)))
