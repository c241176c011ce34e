"""What a kind of pool has to be able to do. Everything else (demand, rollback, leases, journal) is the same for all.

Two kinds fit behind it. Where nodes are *ours to run* (`local`), a process of ours owns each, claims its row and writes
there how far the node is; `look` only has to tell which of them are gone. Where nodes are started *by an API* (`ray`,
later KubeRay, Spark, Snowflake), nothing of ours runs beside them: `look` also tells which rows have a node by now, and
`start` and `end` carry over how many are wanted in all, because such APIs take a size and no single node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec
from shoal.state.process import ProcessId
from shoal.state.schema import Node, NodeState


@dataclass(frozen=True)
class PoolRef:
    """A pool as a backend needs to know it.

    Attributes:
        spec: What it is.
        size: How many nodes it is to have now; 0 while it goes down.
        stamp: When that was decided (seconds since the epoch): whoever was paused since then finds a newer one.
    """

    spec: PoolSpec
    size: int
    stamp: float


@dataclass(frozen=True)
class NodeRef:
    """What a backend needs to know of a node's row. Two are equal while the node has the same owner."""

    id: str
    name: str
    pool: str
    epoch: int
    supervisor: ProcessId | None
    is_head: bool = field(default=False, compare=False)
    state: NodeState = field(default=NodeState.PLANNED, compare=False)
    endpoint: Mapping[str, str] | None = field(default=None, compare=False)

    @classmethod
    def of(cls, node: Node) -> NodeRef:
        """The reference of a row."""
        supervisor = ProcessId.from_json(node.supervisor) if node.supervisor else None
        return cls(
            node.id, node.name, node.pool, node.epoch, supervisor, node.is_head, NodeState(node.state), node.endpoint
        )


@dataclass(frozen=True)
class Arrival:
    """A node that came up without a process of ours to say so.

    Attributes:
        endpoint: ``ray_node_id``, and of the head ``api`` and ``gcs``. No two rows of a pool get the same.
        cpus: CPUs that it really has.
        gpus: GPUs that it really has.
    """

    endpoint: Mapping[str, str]
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Seen:
    """What `Backend.look` saw; a node that is in neither is as its row says.

    Attributes:
        lost: Node id -> why it is no more.
        arrived: Node id -> what it turned out to be, for rows whose node is there by now.
        silence: Why nothing could be seen at all, where that is so: no news, neither good nor bad.
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    arrived: Mapping[str, Arrival] = field(default_factory=dict)
    silence: str | None = None


class Backend(Protocol):
    """Starts and ends nodes.

    Every method may be called again with the same arguments, by several processes at once, and by one that was killed
    half-way and is now somebody else. None writes to the store: rows change by what they return.
    """

    bound_to_host: bool
    """Whether only the host that brought a pool up can act on it."""

    start_timeout: float
    """Seconds after which a node that is not up never will be."""

    start_timeout_per_node: float
    """Seconds more for each node before it, where starts take turns."""

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Refuse a size that can never be reached, before anything is journaled. May ask over the network.

        Raises:
            InvalidArgumentError: It cannot have so many nodes; the message says how many it can.
            PoolUnreachableError: Whatever runs the pool does not answer, or refuses us.
        """

    def prepare(self, spec: PoolSpec) -> None:
        """Make what nodes need before the first of a new life starts (a token). Quick: called in a transaction."""

    def discard(self, name: str, *, everything: bool) -> None:
        """Remove what `prepare` made, once no node is left; `everything`: logs too, the pool is forgotten."""

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """See what has become of nodes. Changes nothing and raises nothing: who describes a pool looks too.

        Called within seconds again and again: it takes no longer than a request or two.
        """

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Have nodes started whose rows stand; returns at once. Called again for those that nobody has claimed since.

        Nothing is confirmed by its return: a node is there when its owner or `look` says so. A failure that another try
        may cure is not raised, the next call is that try.
        """

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """End nodes and see them gone: node id -> None when nothing of it is left, else what is.

        None is a promise: the row goes, and nobody looks again. A node that never was has ended too.
        """

    def existing(self) -> list[str]:
        """Ids of all nodes of this home that there is any trace of, rows or not."""

    def clear(self, node_id: str) -> str | None:
        """End a node of `existing` that has no row, and see it gone: as `end`."""

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Where a head that is ready takes jobs, from the endpoint in its row."""

    def log(self, node: NodeRef) -> str:
        """Where to read what a node had to say."""
