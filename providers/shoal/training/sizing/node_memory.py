"""Memory of the nodes of a pool that workers can use: below the limit of a pod, as Ray reports it, or of this host."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shoal.option_validation import memory_bytes
from shoal.pool.spec import PoolSpec
from shoal.training.host import memory

RAY_BYTES = 700 * 2**20
"""Reserve on each node of a Ray cluster for Ray's processes, and on the head for the driver of a job: an estimate that
is rather too high, because only the head has a driver."""
DRIVER_BYTES = 170 * 2**20
"""Memory of a job's driver and of the template of its workers on a ``local://`` pool. Measured when the workers had
their peak, each shared page counted once: 90 MiB without MLflow, 169 MiB with an MLflow run."""
REGISTERING_BYTES = 150 * 2**20
"""Further memory of a driver that registers its model, which imports scikit-learn and opens the champion before the
workers start. Measured: 99 MiB, and up to 50 MiB of modules that the pool keeps for the next job."""
_DEFAULT_POD = "4Gi"


@dataclass(frozen=True, slots=True)
class NodeMemory:
    """Memory of a node that the workers of a job can use.

    Args:
        usable_bytes: Memory without Ray's processes and the object store.
        is_shared: Whether all nodes of the pool share this memory, because they run on one machine.
        source: Where the number comes from, for messages.
    """

    usable_bytes: int
    is_shared: bool
    source: str

    def room(self, workers: int, nodes: int) -> int:
        """Return the memory that each of some workers on some nodes can have."""
        return self.usable_bytes // (workers if self.is_shared else math.ceil(workers / nodes))


def node_memory(pool: PoolSpec, reported_bytes: int = 0, *, registers: bool = False) -> NodeMemory | None:
    """Return the memory of each node of a pool; None if it is not known.

    Args:
        pool: The pool.
        reported_bytes: Memory that Ray reports of the smallest node that was ready; 0 if none was.
        registers: Whether the job registers its model, in its driver on the head.
    """
    if pool.backend == "local":
        usable = max(0, memory.available_bytes() - DRIVER_BYTES - registers * REGISTERING_BYTES)
        return NodeMemory(usable, True, "free memory of this machine, which all nodes share")
    if reported_bytes:
        return NodeMemory(reported_bytes, False, "memory that Ray offers on each node")
    if pool.image is None:
        return None
    limit = memory_bytes(pool.memory_per_node or _DEFAULT_POD)
    usable = max(0, limit - RAY_BYTES - pool.object_store_mb * 10**6)
    return NodeMemory(usable, False, f"memory_per_node={pool.memory_per_node or _DEFAULT_POD} without Ray's own")
