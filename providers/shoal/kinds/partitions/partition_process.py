"""Call the user's function for the partitions of buckets, in a process that a worker forks for this purpose.

If the function ends the process, by a segmentation fault, ``os._exit`` or lack of memory, the worker goes on with
another process.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import pickle
import random
import secrets
import selectors
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle
import numpy as np

from shoal.data.output_tables import described
from shoal.errors import CapacityError, TrainingError
from shoal.kinds.partitions import partition_messages as messages
from shoal.kinds.partitions.bucket_rows import BatchInfo, BucketReader
from shoal.kinds.partitions.keys import Key, encoded, key_text, seed_of, shown_key
from shoal.kinds.partitions.partition_messages import Message
from shoal.lazy_imports import pa
from shoal.os_processes import how_ended
from shoal.secrets.hidden_output import flush_output
from shoal.secrets.known_secrets import KnownSecrets, SecretStream
from shoal.secrets.redaction import redact
from shoal.training.host import memory
from shoal.training.host.own_process import ending_forks, print_to
from shoal.training.host.process_channel import ProcessChannel
from shoal.training.reporting import GangContext, gang_context, set_gang_context

COPIES = 2
"""Copies of a partition's rows that are in memory at the same time: as Arrow's columns and as a DataFrame. What the
function itself needs is not known."""

MARK = secrets.token_bytes(16)
"""Bytes before and after the output of each partition. The messages come by another pipe than the output, so they do
not show where it begins."""

_libc = ctypes.CDLL(None)


def serve(work: messages.Work, worker: ProcessChannel, output: int) -> NoReturn:
    """Process buckets until the worker closes the channel, and end this process.

    Args:
        work: What is the same for all partitions.
        worker: Channel from which the buckets are received, and to which the messages are sent.
        output: Descriptor to which the function prints.
    """

    def send(message: Message) -> None:
        worker.send(pickle.dumps(message))

    try:
        print_to(output)
        reader = _reader(work)
        with contextlib.suppress(EOFError, OSError):
            while True:
                bucket: messages.Bucket = pickle.loads(worker.receive())
                try:
                    for message in _processed(work, reader, bucket):
                        if isinstance(message, messages.Begun | messages.Outcome):
                            os.write(output, MARK)
                        send(message)
                    send(messages.BucketEnded())
                except OSError:
                    raise
                except Exception as error:
                    send(messages.BucketEnded("".join(traceback.format_exception_only(error)).strip()))
                memory.trim()
    finally:
        _flush()
        os._exit(0)


def _reader(work: messages.Work) -> BucketReader:
    schema = work.source.schema()
    return BucketReader(work.rows_folder, {name: schema.field(name).type for name in (*work.columns, *work.by)})


def _processed(work: messages.Work, reader: BucketReader, bucket: messages.Bucket) -> Iterator[Message]:
    """Call the function for each partition of a bucket, the largest first, and yield what happens."""
    partitions = _Partitions(work, reader, bucket)
    yield messages.Read(len(partitions.rows))
    for text, key in partitions.order:
        if text in bucket.skip:
            continue
        yield messages.Begun(key, text, partitions.rows[text])
        context = messages.PartitionContext(key, seed_of(work.seed, text), bucket.attempts.get(text, 1), work.threads)
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

    def __init__(self, work: messages.Work, reader: BucketReader, bucket: messages.Bucket) -> None:
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


def _called(
    work: messages.Work, partitions: _Partitions, context: messages.PartitionContext, text: str
) -> messages.Outcome:
    """Call the function for a partition."""
    ended = partial(messages.Outcome, context.key, attempts=context.attempt, rows=partitions.rows[text])
    began = time.perf_counter()
    try:
        table = described(partitions.table(text, context.key), work.source)
        rows = table if isinstance(work.function, messages.PartitionFunction) else table.to_pandas()
        random.seed(context.seed)
        np.random.seed(context.seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(context.seed)
        messages.set_context(context)
        began = time.perf_counter()
        with ending_forks():
            value = work.function(rows, context.key)
            seconds = time.perf_counter() - began
            content = _content(value)
        return ended(status="succeeded", seconds=seconds, metrics=context.metrics, value=content)
    except CapacityError as error:
        return ended(status="failed", seconds=0.0, error=str(error))
    except BaseException as error:  # also SystemExit and KeyboardInterrupt, which would end this process
        # Without the frame of this function, which is none of the user's.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        summary = "".join(traceback.format_exception_only(error)).strip()
        seconds = time.perf_counter() - began
        return ended(status="failed", seconds=seconds, metrics=context.metrics, error=summary)
    finally:
        messages.set_context(None)
        _flush()


def _content(value: Any) -> messages.ModelBytes:
    if isinstance(value, messages.ModelBytes):
        return value
    try:
        return messages.ModelBytes("pickle", cloudpickle.dumps(value))
    except Exception as error:
        raise TypeError(
            f"the return value of type {type(value).__name__} cannot be pickled: {error}. Return plain data or a model"
        ) from error


def _flush() -> None:
    flush_output()
    _libc.fflush(None)  # libraries such as LightGBM print through C


_PR_SET_PDEATHSIG = 1

LOG_BYTES = 8192
"""Bytes of the end of a partition's output that are kept."""

_MOST_CHUNKS = 16
"""Chunks of output that are read at once: more than the pipe holds, which has all marks, and not without an end if a
program that the function has started prints without an end."""

_LOOK_EVERY_S = 0.25
_SHORT_MEMORY = 0.08
"""Part of the machine's memory of which less is short: more than the part at which the node would end the worker."""


def forked(run: Callable[[], object]) -> int:
    """Fork a process that calls a function and ends with this worker, and return its process id."""
    worker = os.getpid()
    # Otherwise each garbage collection of the process would copy the memory that it shares with this worker.
    gc.freeze()
    with warnings.catch_warnings():
        # The other thread of a worker sends heartbeats, and takes no lock that the fork needs.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if not pid:
        _become(run, worker)
    return pid


def _become(run: Callable[[], object], worker: int) -> NoReturn:
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == worker:  # else the worker has ended before the call
            with contextlib.suppress(OSError):  # a container may refuse this
                Path("/proc/self/oom_score_adj").write_text("1000")
            # The process is no member of a gang: `get_shard` has to return all rows, and metrics have no rank.
            set_gang_context(GangContext())
            run()
    finally:
        os._exit(1)


def in_fork(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a forked process, whose memory and threads end with it, and return its value.

    Raises:
        TrainingError: The process has ended before the function returned.
        Exception: The exception that the function raised.
    """
    ours, theirs = socket.socketpair()

    def run() -> None:
        try:
            answer = True, function(*args)
        except Exception as error:
            answer = False, error
        ProcessChannel(theirs).send(cloudpickle.dumps(answer))

    pid = forked(run)
    theirs.close()
    with ProcessChannel(ours, pid) as channel:
        try:
            is_value, found = cloudpickle.loads(channel.receive())
        except EOFError:
            is_value, found = False, None
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if is_value:
        return found
    raise found or TrainingError(f"a process of the worker, which divides rows into buckets, {how_ended(code)}")


class ProcessLostError(Exception):
    """The process that called the function has ended, or was ended because it took too long.

    Args:
        cause: Reason, as a phrase.
        again: Whether the partition may be tried again.
    """

    def __init__(self, cause: str, *, again: bool = True) -> None:
        super().__init__(cause)
        self.again = again


class ForkedProcess:
    """A process that calls the function, forked from this worker.

    Args:
        work: What is the same for all partitions.
    """

    def __init__(self, work: messages.Work) -> None:
        ours, theirs = socket.socketpair()
        self._output, output = os.pipe()
        self._oom_kills = memory.OomKills()

        def run() -> None:
            ours.close()
            os.close(self._output)
            serve(work, ProcessChannel(theirs), output)

        self._pid = forked(run)
        self._channel = ProcessChannel(ours, self._pid)
        theirs.close()
        os.close(output)
        os.set_blocking(self._output, False)
        self._parts = [b""]
        self._log: bytes | None = None
        self._idle_bytes: int | None = None
        self.peak_bytes = 0

    def messages(
        self, bucket: messages.Bucket, timeout: float | None, meanwhile: Callable[[], object] = lambda: None
    ) -> Iterator[Message]:
        """Have a bucket processed, and yield the messages of the process. Call `meanwhile` while no message comes.

        Raises:
            ProcessLostError: The process has ended, or a call of the function took longer than `timeout`.
        """
        with contextlib.suppress(OSError):  # the process has ended, which `_receive` finds
            self._channel.send(pickle.dumps(bucket))
        deadline: float | None = None
        while True:
            message = self._receive(deadline, timeout, meanwhile)
            if isinstance(message, messages.BucketEnded) and not message.error:
                return
            if isinstance(message, messages.Begun):
                self._next_part()
                self._log = None
                deadline = None if timeout is None else time.monotonic() + timeout
            elif isinstance(message, messages.Outcome):
                self._log = self._next_part()
                deadline = None
            yield message

    def log(self, hidden: KnownSecrets) -> str:
        """Return the end of the output of the function's last call without secrets. If there is a line to begin with,
        no secret is cut, and otherwise no known one."""
        self._read_output()
        output = self._parts[0] if self._log is None else self._log
        text = output[-2 * LOG_BYTES :].decode(errors="backslashreplace")
        cut = max(0, len(text) - LOG_BYTES)
        cut = cut and (text.find("\n", cut, cut + LOG_BYTES // 2) + 1 or cut)
        stream = SecretStream(hidden)
        stream.feed(text[:cut])
        return redact(stream.feed(text[cut:]) + stream.end())

    def _next_part(self) -> bytes:
        """Remove the output before the next mark, and return it. The process writes a mark before it sends a message,
        so the mark is there."""
        self._read_output()
        return self._parts.pop(0)

    def growth(self) -> int:
        """Return by how many bytes the memory of the process has grown since its first bucket."""
        now = _resident_bytes(self._pid)
        if self._idle_bytes is None:
            self._idle_bytes = now
        return now - self._idle_bytes

    def end(self) -> None:
        """Kill the process, and wait until it has ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._wait()
        self._channel.close()
        os.close(self._output)

    _code: int | None = None

    def _wait(self) -> int:
        if self._code is None:
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        return self._code

    def _receive(self, deadline: float | None, timeout: float | None, meanwhile: Callable[[], object]) -> Message:
        with selectors.DefaultSelector() as selector:
            for descriptor in (*self._channel.descriptors(), self._output):
                selector.register(descriptor, selectors.EVENT_READ)
            look_at = time.monotonic() + _LOOK_EVERY_S
            while True:
                ready = {key.fd for key, _ in selector.select(_LOOK_EVERY_S)}
                if self._output in ready and not self._read_output():
                    selector.unregister(self._output)
                if not ready.isdisjoint(self._channel.descriptors()):
                    try:
                        content = self._channel.receive_at_once()
                    except (EOFError, OSError):
                        code = self._wait()
                        killed = self._oom_kills.told() if code == -signal.SIGKILL else ""
                        raise ProcessLostError(how_ended(code) + (f" ({killed})" if killed else "")) from None
                    if content is not None:
                        message: Message = pickle.loads(content)
                        return message
                if time.monotonic() >= look_at:
                    look_at = time.monotonic() + _LOOK_EVERY_S
                    self._look(deadline, timeout)
                    meanwhile()

    def _look(self, deadline: float | None, timeout: float | None) -> None:
        """End the process if it takes too long, or uses more than its share of the memory while memory is short."""
        resident = _resident_bytes(self._pid)
        self.peak_bytes = max(self.peak_bytes, resident)
        if deadline is not None and time.monotonic() > deadline:
            raise ProcessLostError(f"took longer than {timeout:g} s", again=False)
        total = memory.total_bytes()
        if resident > total // gang_context().local_world_size and memory.available_bytes() < _SHORT_MEMORY * total:
            raise ProcessLostError(
                f"was ended, because it used {resident / 2**20:,.0f} MiB and its machine has almost no memory left,"
            )

    def _read_output(self) -> bool:
        """Read what the process has printed, divided at the marks; return whether it may print more."""
        for _ in range(_MOST_CHUNKS):
            try:
                chunk = os.read(self._output, 65536)
            except BlockingIOError:
                return True
            if not chunk:
                return False
            divided = (self._parts.pop() + chunk).split(MARK)
            # A mark may be divided between two chunks.
            self._parts += [part[-2 * LOG_BYTES - len(MARK) :] for part in divided]
        return True


def _resident_bytes(pid: int) -> int:
    """Return the resident memory of a process that it does not share with its parent; 0 if it has ended."""
    try:
        resident, shared = Path(f"/proc/{pid}/statm").read_text().split()[1:3]
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
