"""Share the workers' parts of the sample for LightGBM's bins, so that the driver holds none of them.

The parts are in Ray's object store, or, if the worker is no Ray actor, in memory of this machine that the worker owns.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shoal.training import cluster

if TYPE_CHECKING:
    import pyarrow as pa

_files: list[int] = []
"""Descriptors of the files in memory with the parts of this process."""


@dataclass(frozen=True, slots=True)
class _InMemory:
    """Reference to a table in a file in memory, which belongs to a process of this machine.

    Args:
        pid: Id of the process.
        descriptor: The process's descriptor of the file.
    """

    pid: int
    descriptor: int

    def read(self) -> pa.Table:
        """Return the table, which uses the memory of the file."""
        import pyarrow as pa

        try:
            with pa.memory_map(f"/proc/{self.pid}/fd/{self.descriptor}") as file:
                return pa.ipc.open_stream(file).read_all()
        except FileNotFoundError as exc:
            raise LookupError(f"its process {self.pid} has ended") from exc


def share(table: pa.Table) -> Any:
    """Store a table for another worker, and return a reference, which the driver passes on."""
    if (ray := cluster.ray_if_connected()) is not None:
        return ray.put(table)
    import pyarrow as pa

    descriptor = os.memfd_create("shoal-sample")
    _files.append(descriptor)
    with open(descriptor, "wb", closefd=False) as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    return _InMemory(os.getpid(), descriptor)


def own() -> pa.Table | None:
    """Return the table that this process has shared; None if it is in Ray's object store."""
    return _InMemory(os.getpid(), _files[-1]).read() if _files else None


def forget() -> None:
    """Free the memory of the tables of this process. Those in Ray's object store are freed with their references."""
    while _files:
        os.close(_files.pop())


def fetch(reference: Any) -> pa.Table:
    """Return the table that another worker has shared.

    Raises:
        LookupError: The worker or its node was lost, and the table with it.
    """
    if isinstance(reference, _InMemory):
        return reference.read()
    import ray

    try:
        return ray.get(reference)
    except ray.exceptions.ObjectLostError as exc:
        raise LookupError(str(exc)) from exc
