"""The interface of pool backends. A backend is the code that starts, watches and ends nodes. All other code, such as
leases and rollback, is the same for all backends.

There are two kinds of backends:

- shoal runs the nodes (`local`). A supervisor process owns each node, and writes the node's state to the node's row.
  `look` only has to report which nodes are gone.
- An external API starts the nodes (`ray`, `kuberay`; later Spark, Snowflake). No process of shoal runs beside a node,
  so `look` also reports which of the requested nodes have started. `start` and `end` send the total number of nodes,
  because these APIs take a size and not a single node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from shoal.errors import InvalidArgumentError
from shoal.os_processes import ProcessId
from shoal.pool.endpoint import Endpoint
from shoal.pool.spec import PoolSpec
from shoal.pool.timeouts import CLUSTER_START_TIMEOUT
from shoal.state.schema import Node, NodeState, Pool

if TYPE_CHECKING:
    from shoal.pool.backends.ray_http import ScriptRunner


@dataclass(frozen=True)
class PoolRef:
    """The data about a pool that its backend needs to start and end nodes.

    Attributes:
        spec: The pool's settings.
        size: Number of nodes that the pool should have now; 0 while the pool goes down.
        stamp: Time at which this size was decided, in seconds since the epoch. A process that was paused after the
            decision compares the stamps, so that it does not overwrite a newer decision.
        id: Identity of the pool: another pool, or one that was deleted and created again, has another id.
        epoch: Number of times that the pool was started.
        decision: Number of the decision about this size. A later decision has a larger number, on every host.
        held: Pods of the nodes that stay (values of ``pod_uid`` in their endpoints).
        found: What the backend has found when the pool came up, to restore it (``found`` in the endpoints of nodes).
    """

    spec: PoolSpec
    size: int
    stamp: float
    id: str = ""
    epoch: int = 0
    decision: int = 0
    held: frozenset[str] = frozenset()
    found: str = ""

    @property
    def life(self) -> str:
        """Return the identity of this start of the pool: the next start has another one."""
        return f"{self.id}/{self.epoch}"

    @classmethod
    def of(cls, pool: Pool, size: int, stamp: float, held: frozenset[str] = frozenset()) -> PoolRef:
        """Build the reference to a pool from its row."""
        return cls(
            PoolSpec.model_validate(pool.spec),
            size,
            stamp,
            id=pool_id(pool),
            epoch=pool.epoch,
            decision=(pool.decision or {}).get("number", 0),
            held=held,
            found=(pool.decision or {}).get("found") or "",
        )


def pool_id(pool: Pool) -> str:
    """Return the identity of a pool (see `PoolRef.id`)."""
    return f"{pool.name}/{pool.created_at:.3f}"


@dataclass(frozen=True)
class NodeRef:
    """Reference to a node, with the fields of the node's row that backends use. Two references to the same node are
    equal as long as the node's supervisor process is the same."""

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
        """Build a `NodeRef` (the reference to a node that backends use) from the node's row."""
        supervisor = ProcessId.from_json(node.supervisor) if node.supervisor else None
        return cls(
            node.id, node.name, node.pool, node.epoch, supervisor, node.is_head, NodeState(node.state), node.endpoint
        )


@dataclass(frozen=True)
class Arrival:
    """A node that an external API (such as a Ray cluster's autoscaler) has started and that `Backend.look` has found.

    Attributes:
        endpoint: Data of the Ray node: ``ray_node_id``, and for the head also ``api``, ``gcs`` and, if the cluster
            reports it, ``memory_bytes``. Each row of a pool gets a different Ray node. On Kubernetes also ``pod``,
            ``pod_uid``, ``found`` (see `PoolRef.found`), and ``claimed_by``, the `PoolRef.id` of the pool that uses
            the cluster. No other pool gets the node.
        cpus: CPUs that the node really has.
        gpus: GPUs that the node really has.
    """

    endpoint: Mapping[str, str]
    cpus: int
    gpus: int


@dataclass(frozen=True)
class Waiting:
    """A node that was requested from an external API and is not ready yet.

    Attributes:
        reason: Reason why the node is not ready, with the next step if there is one. The text stays the same as long as
            the reason does, because each change is written to the store.
        endpoint: What exists of the node already, such as ``pod`` and ``pod_uid``; None if nothing exists.
    """

    reason: str
    endpoint: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Seen:
    """Result of `Backend.look`: the nodes that are lost, and the requested nodes that have joined the Ray cluster. The
    rows of all other nodes are still correct.

    Attributes:
        lost: The reason why each lost node is lost, by the node's id.
        arrived: The data of each requested node that has joined the Ray cluster, by the id in the node's row.
        waiting: The requested nodes that have not joined yet, as far as a reason is known, by the id in the node's row.
        silence: Reason why the nodes could not be checked at all; None if they were checked.
    """

    lost: Mapping[str, str] = field(default_factory=dict)
    arrived: Mapping[str, Arrival] = field(default_factory=dict)
    waiting: Mapping[str, Waiting] = field(default_factory=dict)
    silence: str | None = None


class Backend(Protocol):
    """Interface of a backend: the methods that start, watch and end the nodes of a pool.

    Every method is idempotent. It may be called again with the same arguments, by several processes at once, and after
    a process was killed during a call. No method writes to the store, because the callers do that.
    """

    bound_to_host: bool
    """Whether only the host that started a pool can start and end its nodes. Only other pools can be abandoned."""

    shares_files: bool
    """Whether the nodes have the files of the machine that started the pool."""

    can_retire: bool
    """Whether users announce the end of a node with `retire`. Otherwise the cluster decides which nodes end, and tells
    its drivers."""

    is_checked: bool
    """Whether the nodes are checked before the first training, because others have installed them."""

    has_exact_nodes: bool
    """Whether a node is exactly as large as the pool's spec says."""

    answers_at_once: bool
    """Whether `look` needs no request over the network."""

    start_timeout: float
    """Seconds after which a node that is not yet ready counts as failed."""

    start_timeout_per_node: float
    """Seconds that are added to `start_timeout` for each node that starts earlier, because a backend may start only a
    few nodes at the same time."""

    def admit(self, spec: PoolSpec, size: int) -> None:
        """Raise an error if the pool can never have this number of nodes. This method is called before a request is
        written to the database, and may send network requests.

        Raises:
            InvalidArgumentError: The pool cannot have this many nodes. The message names the largest possible size.
            PoolUnreachableError: The cluster does not answer, or rejects the request.
            MissingExtraError: A package that the nodes need is not installed in this environment.
        """

    def prepare(self, spec: PoolSpec) -> None:
        """Create the files that nodes need, such as a token, before the first node of a pool starts.

        This method has to be quick, because it is called inside a transaction.
        """
        return

    def discard(self, name: str, *, everything: bool) -> None:
        """Remove the files that `prepare` has created. With `everything`, also remove the logs. The pool's nodes must
        have ended before this call."""

    def look(self, spec: PoolSpec, nodes: Sequence[NodeRef]) -> Seen:
        """Check which nodes are lost, and which nodes that were requested from an external API (such as an autoscaler)
        have started. This method must not change anything and must not raise an error.

        The reconciler and `describe_pool` call this method often, so it may send only a few requests.
        """

    def start(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> None:
        """Start the nodes that belong to the given rows, and return without waiting until the nodes are ready.

        This method is called again for a node if no supervisor has claimed the node's row in time. A node counts as
        started only when its supervisor or `look` reports this. An error that a retry may solve must not be raised,
        because the next call is the retry.
        """

    def renew(self, pool: PoolRef) -> None:
        """Tell an external API that a pool that is up is still needed, if the API ends pools whose shoal is gone for
        good. Each round of a pool calls this method. It must not raise an error."""
        return

    def end(self, pool: PoolRef, nodes: Sequence[NodeRef]) -> dict[str, str | None]:
        """End nodes, and what the pool has beyond its size, and check that they are gone.

        The method is called for each smaller size until it is confirmed, also without nodes: nodes that have no row any
        more may still exist.

        Returns:
            For each node id: None if the node has no process or file left, else a description of those that are left.
            After None, the caller deletes the node's row. A node that was never started counts as ended. For the id of
            the pool: why the size is not confirmed yet; it is missing if the size is confirmed.
        """

    def existing(self) -> list[str]:
        """Return the ids of all nodes of this `$SHOAL_HOME` that have processes or files on this host, even if a node
        has no row in the database."""

    def clear(self, node_id: str) -> str | None:
        """End a node that has no row in the database. Return None, or a description of the node's processes and files
        that are left."""

    def endpoint(self, spec: PoolSpec, head: Mapping[str, str]) -> Endpoint:
        """Build the head's addresses, at which the pool accepts jobs, from the data in the head's row. The head has to
        be ready."""

    def log(self, node: NodeRef) -> str:
        """Return the location of a node's log, or an empty string if shoal has no log of the node."""

    def script_runner(self, spec: PoolSpec) -> ScriptRunner:
        """Return the runner of scripts on a pool's cluster, by which its nodes are checked (`is_checked`).

        Raises:
            PoolUnreachableError: The cluster does not answer.
            InvalidArgumentError: The nodes of such pools are not checked.
        """
        raise InvalidArgumentError(
            f'pool "{spec.name}" is a {spec.backend}:// pool, and this check is only for ray:// and kuberay:// pools: '
            "run `shoal doctor` on the pool's nodes"
        )


class ClusterBackend(Backend):
    """Part that is the same in all backends whose nodes an external API starts: no host and no folder belongs to the
    nodes of such a pool."""

    bound_to_host = shares_files = can_retire = has_exact_nodes = answers_at_once = False
    is_checked = True
    start_timeout = CLUSTER_START_TIMEOUT
    start_timeout_per_node = 0.0

    def existing(self) -> list[str]:
        """Return an empty list, because nodes have no processes or files on this host."""
        return []

    def clear(self, node_id: str) -> str | None:
        """Do nothing, because nodes have no processes or files on this host."""
        return None


DISK_NEEDED = 500 * 1024**2
"""Smallest number of free bytes on a node's disk, for its logs and the store. With fewer free bytes, Ray fails at
once."""
DISK_WANTED = 5 * 1024**3
"""Number of free bytes that a small training needs for its local copy of the data, its checkpoints, and the objects
that Ray moves from memory to disk."""

Status = Literal["ok", "note", "broken"]


@dataclass(frozen=True)
class Finding:
    """One result of a check of this machine (`shoal doctor`) or of a Ray cluster's nodes.

    Attributes:
        name: Subject of the check, after the node if there are several, such as ``head: Python``.
        status: ``ok``; ``note`` for a problem with which jobs may still work; ``broken`` if pools or jobs cannot work.
        found: Text about what was found, such as a version.
        advice: Text about how to solve the problem; None if there is no problem.
    """

    name: str
    status: Status
    found: str
    advice: str | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.found}" + (f" -> {self.advice}" if self.advice else "")
