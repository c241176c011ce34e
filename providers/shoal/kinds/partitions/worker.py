"""Run one worker of a job with partitions: divide rows into buckets, and have the partitions of buckets processed.

The driver calls `divide` and then `process`, each on all ranks at once. The user's function runs in a process that the
worker forks (`partition_process`), so that a crash of the function does not end the worker.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import cloudpickle

from shoal.data.parquet.source import ParquetSource
from shoal.errors import TrainingError
from shoal.kinds.partitions import partition_messages as messages
from shoal.kinds.partitions.bucket_rows import BatchInfo, Chunk, write_chunk
from shoal.kinds.partitions.keys import shown_key
from shoal.kinds.partitions.partition_process import ForkedProcess, ProcessLostError, in_fork
from shoal.kinds.partitions.result_files import ResultWriter
from shoal.lazy_imports import pa
from shoal.secrets.known_secrets import KnownSecrets
from shoal.secrets.redaction import redact
from shoal.training.host import memory
from shoal.training.reporting import gang_context

MOST_ATTEMPTS = 2
"""Number of processes that a partition may end. The first end may have another cause, such as the memory that another
program has used."""

_GROWTH_BYTES = 200 * 2**20
"""Growth of the process of the function after which it is replaced by a new one, when a bucket has ended: functions and
libraries often keep some memory of each partition."""

_NOTE_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Assignment(messages.Work):
    """Arguments of `process` that are the same for all workers, with the pickled function.

    Args:
        key_type: Type of the keys.
        results_folder: Folder of the result files.
        claims_folder: Local folder in which workers claim buckets; None: each worker has buckets of its own.
        timeout: Maximum seconds of the function for one partition; None: no limit.
        secrets: Texts that are hidden in errors and logs.
    """

    key_type: pa.DataType
    results_folder: str
    claims_folder: str | None
    timeout: float | None
    secrets: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Order to process a bucket.

    Args:
        bucket: Number of the bucket.
        batches: Places of its rows.
        kept: Names of the files in which an earlier worker has kept outcomes of the bucket.
    """

    bucket: int
    batches: Sequence[BatchInfo]
    kept: tuple[str, ...]


def divide(
    source: ParquetSource, chunks: Sequence[Chunk], columns: Sequence[str], by: Sequence[str], buckets: int, folder: str
) -> int:
    """Divide the rows of chunks into buckets on disk, and return the peak memory of the process in bytes."""

    def write() -> int:
        memory.reset_peak()
        for chunk in chunks:
            write_chunk(source, chunk, columns, by, buckets, folder)
        return memory.peak_rss_bytes()

    # Arrow's threads, which read the rows, must not run in this process when it is forked for the function.
    peak: int = in_fork(write)
    return peak


def process(assignment: Assignment, orders: Sequence[Order]) -> int:
    """Process buckets in their order, and return the peak memory of this worker and its process in bytes.

    Args:
        assignment: Function, dataset and folders.
        orders: The buckets. With a folder of claims, all workers get the same ones, and each processes those that it
            claims.
    """
    memory.reset_peak()
    own = memory.peak_rss_bytes()
    work = replace(assignment, function=cloudpickle.loads(assignment.function))
    # Read the footer that the conversion to pandas needs, once for all forks.
    work.source.metadata(work.source.reference().path)
    if isinstance(work.function, messages.PartitionFunction):
        work.function.prepare(work.key_type, work.by)
    reporter = _Reporter()
    with contextlib.closing(_Processes(work)) as processes:
        for order in orders:
            if work.claims_folder is None or _claim(work.claims_folder, order.bucket):
                writer = ResultWriter(work.results_folder, order.bucket, work.key_type, order.kept)
                for outcome in processes.outcomes(order.batches, writer):
                    writer.add(outcome)
                    reporter.ended(outcome)
                writer.close()
                reporter.send()
    return max(own, memory.peak_rss_bytes()) + processes.peak_bytes


def _claim(folder: str, bucket: int) -> bool:
    """Return whether this worker is the first that claims a bucket."""
    try:
        os.close(os.open(f"{folder}/{bucket}", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


class _Reporter:
    """Sender of notes about ended partitions, at most every half a second and after each bucket."""

    def __init__(self) -> None:
        self._note: dict[str, Any] = {}
        self._sent = time.monotonic()

    def ended(self, outcome: messages.Outcome) -> None:
        """Count a partition."""
        note = self._note
        for name, value in (("rows", outcome.rows), (outcome.status, 1)):
            note[name] = note.get(name, 0) + value
        if outcome.error:
            note.setdefault("errors", []).append(f"{shown_key(outcome.key)}: {outcome.error[:500]}")
        if time.monotonic() - self._sent >= _NOTE_EVERY_S:
            self.send()

    def send(self) -> None:
        """Send what was counted."""
        if self._note:
            self._note["errors"] = self._note.get("errors", [])[:10]
            gang_context().note(self._note)
        self._note, self._sent = {}, time.monotonic()


class _Processes:
    """The processes that call the function, one after the other.

    Args:
        work: What is the same for all partitions, with the loaded function.
    """

    def __init__(self, work: Assignment) -> None:
        self._work = work
        self._hidden = KnownSecrets(work.secrets)
        self._process: ForkedProcess | None = None
        self.peak_bytes = 0

    def outcomes(self, batches: Sequence[BatchInfo], writer: ResultWriter) -> Iterator[messages.Outcome]:
        """Have the partitions of a bucket processed that have not ended yet, and yield the outcome of each, once.

        The writer keeps earlier outcomes while the function runs for a long time.
        """
        budget = max(1, memory.available_bytes() // gang_context().local_world_size)
        bucket = messages.Bucket(batches, writer.ended, {}, budget)
        unread = 0
        while True:
            current: messages.Begun | None = None
            ended: set[str] = set()
            try:
                self._process = self._process or ForkedProcess(self._work)
                for message in self._process.messages(bucket, self._work.timeout, writer.keep):
                    if isinstance(message, messages.Read):
                        writer.expect(message.partitions)
                        unread = 0
                    elif isinstance(message, messages.Begun):
                        current = message
                    elif isinstance(message, messages.Outcome):
                        assert current is not None
                        yield self._complete(message)
                        ended.add(current.text)
                        current = None
                    elif message.error:
                        raise TrainingError(f"the rows of a bucket could not be read: {message.error}")
                if self._process.growth() > _GROWTH_BYTES:
                    self.close()
                return
            except ProcessLostError as lost:
                self.close()
                if current is None:
                    unread += 1
                    if unread >= MOST_ATTEMPTS:
                        raise TrainingError(f"the process that reads the rows of a bucket {lost} twice") from None
                    bucket = replace(bucket, skip=bucket.skip | ended)
                    continue
                attempt = bucket.attempts.get(current.text, 1)
                attempts = {**bucket.attempts, current.text: attempt + 1}
                if attempt >= MOST_ATTEMPTS or not lost.again:
                    why = f"the process of the function {lost} in {attempt} attempts"
                    why = why if lost.again else f"the function {lost}"
                    yield self._complete(messages.Outcome(current.key, "failed", attempt, current.rows, 0.0, error=why))
                    ended.add(current.text)
                bucket = replace(bucket, skip=bucket.skip | ended, attempts=attempts)

    def _complete(self, outcome: messages.Outcome) -> messages.Outcome:
        """Add the log, and hide the secrets in the error."""
        log = self._last_log if self._process is None else self._process.log(self._hidden)
        return replace(outcome, error=redact(self._hidden.hide(outcome.error)), log=log)

    def close(self) -> None:
        if self._process is not None:
            self.peak_bytes = max(self.peak_bytes, self._process.peak_bytes)
            self._last_log = self._process.log(self._hidden)
            self._process.end()
            self._process = None

    _last_log = ""
