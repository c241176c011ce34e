"""The rows of a pool at one instant, from which shoal decides what to do."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.state.schema import Demand, Lease, Node, Operation, Pool


@dataclass(frozen=True)
class Snapshot:
    """The database rows of a pool at one instant.

    An expired lease still counts until `journal.advance` deletes the lease's row.
    """

    pool: Pool
    demand: Demand | None
    leases: tuple[Lease, ...]
    operations: tuple[Operation, ...]
    nodes: tuple[Node, ...]
    works: bool = False
    """Whether a job is running on the pool or waiting for it."""
    lasting: frozenset[str] = frozenset()
    """Ids of the leases that belong to a job (see `shoal.pool.holder.job_holder`) and do not expire, because the job
    has not ended, or its driver still cleans up."""
