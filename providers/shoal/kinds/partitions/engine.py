"""Call a function for each partition of a dataset, with a gang (workers that start together)."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.data.checks import check_same_schema
from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import content_of
from shoal.data.filters import check_present
from shoal.errors import DataError, TrainingError
from shoal.jobs.files import storage
from shoal.kinds.partitions import result_files, worker
from shoal.kinds.partitions.bucket_rows import BatchInfo, chunks_of, dealt, largest_first, number_of_buckets, read_index
from shoal.kinds.partitions.keys import key_type, keys_in, shown_key
from shoal.kinds.partitions.partition_messages import PartitionProgram
from shoal.kinds.partitions.spec import PartitionsJobSpec
from shoal.lazy_imports import pa
from shoal.secrets.hidden_output import SECRETS
from shoal.training import cluster, locations
from shoal.training.gang.child_processes import import_ahead
from shoal.training.gang.gang import Gang
from shoal.training.locations import Claim, filesystem, is_local, make_folder
from shoal.training.reporting import OnProgress, Progress, ProgressDisplay, say
from shoal.training.run_config import Restarts, fewer_workers
from shoal.training.timeouts import FIRST_PROGRESS_LINE_S

_PLAN = "plan.json"


class WorkFolder:
    """Folder of the rows and results of one attempt.

    Args:
        attempt_folder: Artifact folder of the attempt, which has the attempt's marker file.
        claim: Job and attempt.
    """

    def __init__(self, attempt_folder: str, claim: Claim) -> None:
        self._attempt_folder = attempt_folder
        self._claim = claim
        self.path = result_files.work_folder_in(attempt_folder)
        self.rows = f"{self.path}/rows"
        self.results = f"{self.path}/results"
        self.manifest = f"{self.path}/{result_files.MANIFEST}"
        self.is_local = is_local(filesystem(attempt_folder)[0])

    def prepare(self, key: str, earlier: Iterable[str]) -> None:
        """Create the folder, or continue with that of an earlier attempt with the same plan, except its failures.

        Args:
            key: Digest of the dataset, the function and the options, by which an equal plan is recognised.
            earlier: Artifact folders of earlier attempts, the newest first, which did not succeed.
        """
        if self._key(self.path) != key:
            result_files.remove_tree(self.path)
            for folder in earlier:
                found = locations.read_claim(folder)
                is_ours = found is not None and (found.job_id, found.owner) == (self._claim.job_id, self._claim.owner)
                if is_ours and self._key(result_files.work_folder_in(folder)) == key:
                    self._take_over(result_files.work_folder_in(folder))
                    result_files.forget_failed(self.results)
                    break
        if self.is_local:
            for folder in (self.rows, self.results):
                make_folder(self._attempt_folder, folder)
        storage.write(f"{self.path}/{_PLAN}", json.dumps({"key": key}).encode())

    def new_claims(self) -> str | None:
        """Create a folder in which the workers of one gang claim buckets; None at a URI, where a file cannot be created
        exclusively."""
        if not self.is_local:
            return None
        folder = f"{self.path}/claims/{uuid.uuid4().hex}"
        make_folder(self._attempt_folder, folder)
        return folder

    def discard_rows(self) -> None:
        """Remove what is not needed when the attempt has ended: rows, claims, and half-written files of killed
        workers."""
        for folder in (self.rows, f"{self.path}/claims"):
            with contextlib.suppress(OSError):
                result_files.remove_tree(folder)
        with contextlib.suppress(OSError):
            result_files.discard_leftovers(self.results)

    def _take_over(self, earlier: str) -> None:
        """Move the files of an earlier attempt. If the store names its results, they stay readable there, and this
        attempt gets copies of the result files, which are links on a local disk."""
        fs, old = filesystem(earlier)
        _, new = filesystem(self.path)
        is_published = fs.exists(f"{old}/{result_files.MANIFEST}")
        if self.is_local and not is_published:
            Path(old).rename(new)
            return
        if self.is_local:
            make_folder(self._attempt_folder, self.results)
        for path in map(str, fs.find(f"{old}/results" if is_published else old)):
            target = new + path.removeprefix(old)
            with contextlib.suppress(OSError):  # not every file system has links
                if self.is_local:
                    os.link(path, target)
                    continue
            (fs.cp_file if is_published else fs.mv)(path, target)

    def _key(self, path: str) -> str | None:
        try:
            return str(json.loads(storage.read(f"{path}/{_PLAN}"))["key"])
        except (OSError, ValueError, KeyError, TypeError):
            return None


_MOST_ERRORS = 20
"""Number of failed partitions that the log names."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine returns when all partitions have ended.

    Args:
        folder: Folder or URI of the results.
        manifest: Path or URI of the manifest.
        digest: SHA-256 of the manifest.
        counts: Number of partitions by status.
        rows: Number of rows of the dataset.
        num_workers: Number of workers; 0 if an earlier attempt had processed all partitions.
        restarts: Number of restarts after a lost worker.
        seconds: Seconds from the call to the result.
        peak_memory_per_worker: Highest resident memory of each worker and its process, in bytes, by rank.
    """

    folder: str
    manifest: str
    digest: str
    counts: dict[str, int]
    rows: int
    num_workers: int
    restarts: int
    seconds: float
    peak_memory_per_worker: tuple[int, ...] = ()


def import_ahead_for_workers(spec: PartitionsJobSpec) -> None:
    """Import pandas and Arrow in the template of the workers, while this process does other things."""
    framework = [spec.estimator.framework] if spec.estimator else []
    modules = ["pandas", "pyarrow.parquet", worker.__name__, *framework]
    import_ahead(spec.demand().resolved, modules, complete=spec.estimator is None)


def run(
    spec: PartitionsJobSpec,
    program: PartitionProgram,
    *,
    claim: Claim,
    folder: str,
    earlier: Iterable[str] = (),
    env: Mapping[str, str] | None = None,
    may_publish: Callable[[], bool] = lambda: True,
    on_progress: OnProgress | None = None,
) -> Answer:
    """Call a function for each partition of a dataset, and write a manifest when all partitions have ended.

    Args:
        spec: Dataset, columns and workers.
        program: The function.
        claim: Job and attempt.
        folder: Artifact folder of the attempt, which has the attempt's marker file.
        earlier: Artifact folders of earlier attempts of the job that did not succeed, the newest first. The partitions
            that have ended there are not repeated.
        env: Environment variables of the workers.
        may_publish: Function that returns whether this attempt may still publish.
        on_progress: Function that is called with the progress.

    Raises:
        InvalidArgumentError: This process is not connected to Ray.
        DataError: The dataset has no rows, or lacks a column.
        CapacityError: The active nodes are too small for the workers, or had no free room in time.
        TrainingError: All partitions have failed, or the results are not reachable.
        WorkerLostError: Workers or nodes were lost more often than `max_restarts` allows.
    """
    restarts = Restarts(spec.run_config)
    cluster.require_connection()
    connector = DataConnector.from_spec(spec.dataset)
    columns = _checked_columns(spec, connector)
    work = WorkFolder(folder, claim)
    work.prepare(plan_key(spec, program), earlier)
    job = _Partitions(spec, program.content, connector, columns, work, dict(env or {}), on_progress)
    try:
        peaks = restarts.run(
            lambda: job.attempt(restarts), checkpoint=lambda: "the partitions that have ended", shrink=job.shrink
        )
        return job.published(restarts, peaks, may_publish)
    finally:
        work.discard_rows()


def _checked_columns(spec: PartitionsJobSpec, connector: DataConnector) -> tuple[str, ...]:
    """Return the columns that the function gets."""
    if not connector.num_rows():
        raise DataError("the dataset has no rows: check its paths and its filters")
    names = connector.schema().names
    key_type(connector.source, spec.by)
    columns = spec.columns or (spec.estimator.columns if spec.estimator else None)
    for name in columns or ():
        check_present(connector.source.reference().path, name, names)
    check_same_schema(connector.source, columns)
    return columns or tuple(names)


def plan_key(spec: PartitionsJobSpec, program: PartitionProgram) -> str:
    """Return a digest of all that determines the outcomes of the partitions, equal in each process that runs the job.

    The number of workers is left out: an attempt with another number continues the work.
    """
    files, config = content_of(spec.dataset), spec.run_config
    content = [
        uuid.uuid4() if files is None else files,
        spec.dataset.filters,
        spec.dataset.splits,
        program.digest,
        spec.by,
        spec.columns,
        spec.scaling_config.num_cpu_per_worker,
        spec.partition_timeout,
        config.seed,
        sorted(config.env.items()),
        config.packages,
        [path.rpartition("/")[2] for path in config.code],  # the name of a stored archive is the digest of its content
    ]
    return hashlib.sha256(repr(content).encode()).hexdigest()


@dataclass(eq=False, repr=False)
class _Partitions:
    """One job with partitions.

    Args:
        spec: Dataset, columns and workers.
        program: Pickled function.
        connector: The dataset.
        columns: Columns that the function gets.
        work: Folder of rows and results.
        env: Environment variables of the workers.
        on_progress: Function that is called with the progress.
    """

    spec: PartitionsJobSpec
    program: bytes
    connector: DataConnector
    columns: tuple[str, ...]
    work: WorkFolder
    env: dict[str, str]
    on_progress: OnProgress | None

    def __post_init__(self) -> None:
        self._source = self.connector.source
        self._rows = self.connector.num_rows()
        self._chunks = chunks_of(self._source.row_groups())
        self._buckets = number_of_buckets(self._rows)
        self._key_type = key_type(self._source, self.spec.by)
        self._size = self.spec.demand().resolved()
        self._named_errors = 0

    def shrink(self) -> str | None:
        """Reduce the number of workers to those for which the active nodes have room, if these are fewer."""
        fewer = fewer_workers(self._size, 1, lambda: self.spec.demand().resolved(clamp=True))
        self._size = fewer or self._size
        return None if fewer is None else f"{fewer.num_workers} workers"

    def attempt(self, restarts: Restarts) -> list[int]:
        """Process all partitions that have not ended, and return the peak memory of each worker."""
        done = result_files.complete_files(self.work.results, self._key_type)
        batches = self._batches()
        if batches is not None and not set(batches) - set(done):
            return []
        gang = Gang.start(self._size, timeout=restarts.wait_s, env=self.env)
        try:
            peaks: list[int] = []
            if batches is None:
                peaks = self._divide(gang, restarts)
                batches = self._batches()
            if batches is None:
                raise TrainingError(
                    f"the rows that the workers have written are missing in {self.work.rows}: set artifact_location "
                    "to a directory or URI that all nodes can reach"
                )
            found = self._process(gang, restarts, batches, done)
            peaks = [max(pair) for pair in zip(peaks or found, found, strict=True)]
        except BaseException:
            gang.end()
            raise
        gang.finish(timeout=restarts.timeout)
        return peaks

    def _batches(self) -> dict[int, list[BatchInfo]] | None:
        """Return the places of the rows of each bucket; None if not all rows are divided."""
        found: dict[int, list[BatchInfo]] = {}
        for chunk in self._chunks:
            if (index := read_index(self.work.rows, chunk)) is None:
                return None
            for bucket, place in index:
                found.setdefault(bucket, []).append(place)
        return found

    def _divide(self, gang: Gang, restarts: Restarts) -> list[int]:
        """Divide the rows that are not divided yet into buckets."""
        missing = {chunk.number: chunk for chunk in self._chunks if read_index(self.work.rows, chunk) is None}
        shares = dealt({number: chunk.rows for number, chunk in missing.items()}, self._size.num_workers)
        tasks = [
            (
                self._source,
                tuple(missing[number] for number in sorted(share)),
                self.columns,
                self.spec.by,
                self._buckets,
                self.work.rows,
            )
            for share in shares
        ]
        return gang.run(worker.divide, tasks, timeout=restarts.timeout)

    def _process(
        self, gang: Gang, restarts: Restarts, batches: Mapping[int, Sequence[BatchInfo]], done: Mapping[int, pa.Table]
    ) -> list[int]:
        """Have the buckets processed that are not done, and report the progress."""
        left = {bucket: places for bucket, places in batches.items() if bucket not in done}
        kept = result_files.kept_outcomes(self.work.results, self._key_type)
        kept = {bucket: table for bucket, table in kept.items() if bucket in left}
        counts = _counted([*done.values(), *kept.values()])
        claims = self.work.new_claims()
        assignment = worker.Assignment(
            self._source,
            self.columns,
            self.spec.by,
            self.work.rows,
            self.spec.run_config.seed,
            self._size.threads,
            self.program,
            self._key_type,
            self.work.results,
            claims,
            self.spec.partition_timeout,
            tuple(json.loads(self.env.get(SECRETS, "[]"))),
        )
        rows = {bucket: sum(place.rows for place in places) for bucket, places in left.items()}
        everything = tuple(largest_first(rows))
        shares = dealt(rows, self._size.num_workers) if claims is None else (everything,) * self._size.num_workers
        files = {bucket: tuple(table.column("file").unique().to_pylist()) for bucket, table in kept.items()}
        orders = {bucket: worker.Order(bucket, left[bucket], files.get(bucket, ())) for bucket in everything}
        tasks = [(assignment, [orders[bucket] for bucket in share]) for share in shares]
        with ProgressDisplay(first_line_s=FIRST_PROGRESS_LINE_S, on_progress=self.on_progress) as display:

            def note(_rank: int, found: dict[str, Any]) -> None:
                self._name_errors(found.pop("errors", ()))
                counts.update(found)
                metrics = {status: float(counts[status]) for status in ("succeeded", "failed")}
                display.show(Progress(counts["rows"], self._rows, "rows", metrics))

            return gang.run(worker.process, tasks, timeout=restarts.timeout, on_note=note, report_uneven=False)

    def _name_errors(self, errors: Iterable[str]) -> None:
        for error in errors:
            self._named_errors += 1
            if self._named_errors <= _MOST_ERRORS:
                say(f"partition {error}")
            elif self._named_errors == _MOST_ERRORS + 1:
                say("more partitions have failed: the result names all of them")

    def published(self, restarts: Restarts, peaks: Sequence[int], may_publish: Callable[[], bool]) -> Answer:
        """Write the manifest, and return the answer.

        Raises:
            TrainingError: All partitions have failed, a result file is missing, or a newer attempt has begun.
        """
        tables = result_files.complete_files(self.work.results, self._key_type)
        counts = _counted(tables.values())
        if counts["rows"] != self._rows:
            raise TrainingError(
                f"the result files in {self.work.results} have {counts['rows']:,} of {self._rows:,} rows: set "
                "artifact_location to a directory or URI that all nodes can reach"
            )
        if not may_publish():
            raise TrainingError("the results are not published, because the attempt has ended or a newer one has begun")
        if not counts["succeeded"]:
            first = _first_error(tables.values())
            raise TrainingError(f"the function has failed for all {counts['failed']:,} partitions: {first}")
        content = result_files.manifest_of(tables[bucket] for bucket in sorted(tables))
        storage.write(self.work.manifest, content)
        return Answer(
            self.work.path,
            self.work.manifest,
            hashlib.sha256(content).hexdigest(),
            {status: counts[status] for status in ("succeeded", "failed")},
            self._rows,
            len(peaks),
            restarts.count,
            restarts.seconds,
            tuple(peaks),
        )


def _counted(tables: Iterable[pa.Table]) -> Counter[str]:
    """Return the number of partitions by status, and of rows, in tables of `complete_files`."""
    counts: Counter[str] = Counter()
    for table in tables:
        counts.update(table.column("status").to_pylist())
        counts["rows"] += sum(table.column("rows").to_pylist())
    return counts


def _first_error(tables: Iterable[pa.Table]) -> str:
    for table in tables:
        for key, error in zip(keys_in(table.column("key")), table.column("error").to_pylist(), strict=True):
            if error:
                return f"{shown_key(key)}: {error}"
    return ""
