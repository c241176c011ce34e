"""Call the user's function for the partitions of buckets, in a process that a worker has forked for this purpose.

If the function ends the process, by a segmentation fault, ``os._exit`` or lack of memory, the worker goes on with
another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import random
import secrets
import sys
import time
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import cloudpickle
import numpy as np

from shoal.data.output_tables import described
from shoal.errors import CapacityError
from shoal.jobs.partitions.bucket_rows import BatchInfo, BucketReader
from shoal.jobs.partitions.context import PartitionContext, set_context
from shoal.jobs.partitions.keys import Key, encoded, key_text, seed_of, shown_key
from shoal.jobs.partitions.messages import (
    Begun,
    Bucket,
    BucketEnded,
    BucketFailed,
    Ended,
    Message,
    ModelBytes,
    PartitionFunction,
    Read,
    Work,
)
from shoal.training.host import memory
from shoal.training.host.own_process import ending_forks
from shoal.training.host.process_channel import ProcessChannel

if TYPE_CHECKING:
    import pyarrow as pa

COPIES = 2
"""Copies of a partition's rows that are in memory at the same time: as Arrow's columns and as a DataFrame. What the
function itself needs is not known."""

MARK = secrets.token_bytes(16)
"""Bytes before and after the output of each partition. The messages come by another pipe than the output, so they do
not show where it begins."""

_libc = ctypes.CDLL(None)


def serve(work: Work, worker: ProcessChannel, output: int) -> NoReturn:
    """Process buckets until the worker closes the channel, and end this process.

    Args:
        work: What is the same for all partitions.
        worker: Channel from which the buckets are received, and to which the messages are sent.
        output: Descriptor to which the function prints.
    """

    def send(message: Message) -> None:
        worker.send(pickle.dumps(message))

    try:
        _print_to(output)
        reader = _reader(work)
        with contextlib.suppress(EOFError, OSError):
            while True:
                bucket: Bucket = pickle.loads(worker.receive())
                try:
                    for message in _processed(work, reader, bucket):
                        if isinstance(message, Begun | Ended):
                            os.write(output, MARK)
                        send(message)
                    send(BucketEnded())
                except OSError:
                    raise
                except Exception as error:
                    send(BucketFailed("".join(traceback.format_exception_only(error)).strip()))
                memory.trim()
    finally:
        _flush()
        os._exit(0)


def _print_to(output: int) -> None:
    """Let this process print to a descriptor, line by line."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.stdout, sys.stderr = (
        os.fdopen(descriptor, "w", buffering=1, errors="backslashreplace", closefd=False) for descriptor in (1, 2)
    )


def _reader(work: Work) -> BucketReader:
    schema = work.source.schema()
    names = dict.fromkeys((*work.columns, *work.by))
    return BucketReader(work.rows_folder, {name: schema.field(name).type for name in names})


def _processed(work: Work, reader: BucketReader, bucket: Bucket) -> Iterator[Message]:
    """Call the function for each partition of a bucket, the largest first, and yield what happens."""
    partitions = _Partitions(work, reader, bucket)
    yield Read(len(partitions.rows))
    for text, key in partitions.order:
        if text in bucket.skip:
            continue
        yield Begun(key, text, partitions.rows[text])
        context = PartitionContext(key, seed_of(work.seed, text), bucket.attempts.get(text, 1), work.threads)
        yield _called(work, partitions, context, text)


class _Partitions:
    """The partitions of a bucket. If the rows of the bucket do not fit into memory, each partition is read for itself.

    Args:
        work: What is the same for all partitions.
        reader: Reader of rows.
        bucket: Places of the rows.

    Attributes:
        rows: Number of rows of each partition, by the text of its key.
        order: Texts and keys, the largest partition first.
    """

    def __init__(self, work: Work, reader: BucketReader, bucket: Bucket) -> None:
        self._work = work
        self._reader = reader
        self._budget = bucket.budget_bytes
        size = sum(batch.size_bytes for batch in bucket.batches)
        self._row_bytes = size / max(1, sum(batch.rows for batch in bucket.batches))
        self._sorted: pa.Table | None = None
        self._positions: dict[str, list[tuple[BatchInfo, np.ndarray]]] = {}
        self._starts: dict[str, int] = {}
        self.rows: dict[str, int] = {}
        self._keys: dict[str, Key] = {}
        if size * COPIES <= self._budget:
            self._sort(reader.table(bucket.batches))
        else:
            for batch in bucket.batches:
                self._find(batch, reader.table([batch]))
        self.order = sorted(self._keys.items(), key=lambda item: (-self.rows[item[0]], item[0]))

    def _sort(self, table: pa.Table) -> None:
        """Keep all rows in memory, those of a partition next to each other and in the order of the dataset."""
        codes, keys = encoded(table, self._work.by)
        order = np.argsort(codes, kind="stable")
        self._sorted = table.select(list(self._work.columns)).take(order).combine_chunks()
        starts = np.searchsorted(codes[order], np.arange(len(keys) + 1)).tolist()
        for key, start, stop in zip(keys, starts[:-1], starts[1:], strict=True):
            text = key_text(key)
            self._keys[text], self._starts[text], self.rows[text] = key, start, stop - start

    def _find(self, batch: BatchInfo, table: pa.Table) -> None:
        """Note which rows of a batch belong to which partition."""
        codes, keys = encoded(table, self._work.by)
        for code, key in enumerate(keys):
            text, positions = key_text(key), np.flatnonzero(codes == code)
            self._keys[text] = key
            self._positions.setdefault(text, []).append((batch, positions))
            self.rows[text] = self.rows.get(text, 0) + len(positions)

    def table(self, text: str, key: Key) -> pa.Table:
        """Return the rows of a partition, in the order of the dataset.

        Raises:
            CapacityError: The rows do not fit into memory.
        """
        needed = int(self.rows[text] * self._row_bytes * COPIES)
        if needed > self._budget:
            raise CapacityError(
                f"the partition {shown_key(key)} has {self.rows[text]:,} rows of {self._row_bytes:,.0f} bytes, which "
                f"need {needed / 2**20:,.0f} MiB of memory as a DataFrame, but its worker has "
                f"{self._budget / 2**20:,.0f} MiB: read fewer columns (columns=[...]), divide the "
                "rows by another column as well, or use fewer workers "
                "per node or larger nodes"
            )
        if self._sorted is not None:
            return self._sorted.slice(self._starts[text], self.rows[text])
        places = self._positions[text]
        found = self._reader.table([batch for batch, _ in places], dict(places))
        return found.select(list(self._work.columns))


def _called(work: Work, partitions: _Partitions, context: PartitionContext, text: str) -> Ended:
    """Call the function for a partition."""
    began = time.perf_counter()
    try:
        table = described(partitions.table(text, context.key), work.source)
        rows = table if isinstance(work.function, PartitionFunction) else table.to_pandas()
        _seed(context.seed)
        set_context(context)
        began = time.perf_counter()
        with ending_forks():
            value = work.function(rows, context.key)
            seconds = time.perf_counter() - began
            content = _content(value)
        return Ended("succeeded", seconds, context.metrics, value=content)
    except CapacityError as error:
        return Ended("failed", 0.0, error=str(error))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end this process
        # Without the frame of this function, which is none of the user's.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        summary = "".join(traceback.format_exception_only(error)).strip()
        return Ended("failed", time.perf_counter() - began, context.metrics, error=summary)
    finally:
        set_context(None)
        _flush()


def _content(value: Any) -> ModelBytes:
    if isinstance(value, ModelBytes):
        return value
    try:
        return ModelBytes("pickle", cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the return value of type {type(value).__name__} cannot be pickled: {error}. Return plain data or a model"
        ) from error


def _seed(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    if torch := sys.modules.get("torch"):
        torch.manual_seed(seed)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    _libc.fflush(None)  # libraries such as LightGBM print through C
