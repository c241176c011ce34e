"""Database tables of the store, and the states of their rows. Times are in seconds since the epoch (UTC)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, Dialect, Enum, ForeignKey, Index, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from shoal.state.codec import storable


class PoolState(StrEnum):
    """State of a whole pool."""

    UP = "up"
    """The pool runs, and the reconciler keeps its nodes at its demand."""
    STOPPING = "stopping"
    """The pool goes down, and every node is being ended."""
    DOWN = "down"
    """No node is left. The pool stays down until `up()` or a lease with `bring_up` starts it."""


class NodeState(StrEnum):
    """State of a node. Its row is written before the node starts, and deleted after the node has ended."""

    PLANNED = "planned"
    """The row exists. A supervisor may have been spawned, but none has claimed the row yet."""
    STARTING = "starting"
    """A supervisor has claimed the row and is starting the node."""
    READY = "ready"
    """The node has joined the pool and can take work."""
    DRAINING = "draining"
    """The node takes no new work, and is ended when it is idle or its grace period has passed."""
    FAILED = "failed"
    """The node did not start, or died. Its remaining processes and files still have to be removed."""
    ENDING = "ending"
    """The node's processes are being ended. The row is deleted when none is left."""


class OperationKind(StrEnum):
    """Kind of change that a journaled operation makes."""

    UP = "up"
    SCALE = "scale"
    LEASE = "lease"


class OperationState(StrEnum):
    """State of a journaled operation."""

    OPEN = "open"
    """The operation was accepted, and the reconciler works on it until its deadline."""
    SUCCEEDED = "succeeded"
    """The operation reached its size, or at its deadline at least its minimum."""
    ROLLED_BACK = "rolled_back"
    """The operation failed, and the previous demand was restored."""
    SUPERSEDED = "superseded"
    """A newer operation or `down()` replaced the operation before it was complete."""


class JobState(StrEnum):
    """State of one attempt of a job."""

    PENDING = "pending"
    """The attempt is in the store, but its driver has not reported yet."""
    RUNNING = "running"
    """The driver runs."""
    SUCCEEDED = "succeeded"
    """The attempt has a result."""
    FAILED = "failed"
    """The attempt ended without a result. The column `error` contains the reason."""
    CANCELLED = "cancelled"
    """The attempt was cancelled, or no process asked about it for longer than `orphan_after`."""


JOB_ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

JOB_ACTIVE = frozenset(JobState) - JOB_ENDED


class PromotionState(StrEnum):
    """State of a promotion."""

    INTENDED = "intended"
    """The alias is about to be set. After a crash, the alias itself shows whether it was set."""
    CONFIRMED = "confirmed"
    """The alias was set."""
    WITHDRAWN = "withdrawn"
    """The promotion crashed, and the next process that took the lock found that the alias was not set."""


def _state(enum: type[StrEnum]) -> Enum:
    """Return a string column type that stores the member's value, so that a new member needs no migration."""
    return Enum(enum, native_enum=False, length=20, values_callable=lambda e: [member.value for member in e])


class _Text(TypeDecorator[str]):
    """Text column that escapes characters that databases reject (`codec.storable`), in comparisons too."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


class _LongText(_Text):
    impl = Text


_HOLDER = _Text(255).with_variant(_LongText(), "postgresql")
"""Column type of holders. Airflow DAG ids and run ids may have 250 characters each, so PostgreSQL needs an unlimited
text column. SQLite does not enforce the length, so its columns were not changed."""


class Base(DeclarativeBase):
    """Base class of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, dict[str, str]: JSON, str: _Text(255)}  # noqa: RUF012


class Pool(Base):
    """A pool: its name, settings and state."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    state: Mapped[PoolState] = mapped_column(_state(PoolState))
    host: Mapped[str]
    """Name of the host to which the pool is bound; empty if any host can act on it."""
    host_id: Mapped[str | None]
    """Id of that host, which survives a change of its name; None in rows of shoal 0.1."""
    min_nodes: Mapped[int]
    max_nodes: Mapped[int]
    epoch: Mapped[int]
    """Number of times that the pool was started; nodes of an older epoch are ended."""
    next_node: Mapped[int]
    """Number in the next node's name; unique within one epoch."""
    owner: Mapped[dict[str, Any] | None]
    """Process in which the pool is embedded, if any; the pool ends with it."""
    start_failures: Mapped[int] = mapped_column(default=0)
    """Number of nodes in a row that failed to start, or died soon after, while no operation was open."""
    last_failure: Mapped[str | None] = mapped_column(_Text)
    """Error of the last of these nodes."""
    cooldown_until: Mapped[float | None]
    """Time before which no failed node is replaced."""
    created_at: Mapped[float]
    touched_at: Mapped[float]
    """Last use of the pool, from which `idle_timeout` counts."""
    clock: Mapped[dict[str, Any] | None]
    """Stamp of the last clock correction (`shoal.pool.journal.clock`)."""


class Demand(Base):
    """A pool's base demand: the number of nodes of the last `scale_cluster` or `up`.

    A pool that is up without a base demand was started by a lease, and goes down after its last lease and job.
    """

    __tablename__ = "demand"

    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), primary_key=True)
    size: Mapped[int]
    operation_id: Mapped[str | None]
    """Operation that set the demand; only its rollback may change the demand back."""
    set_at: Mapped[float]


class Lease(Base):
    """A holder's claim for a number of nodes, with a time to live."""

    __tablename__ = "leases"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    size: Mapped[int]
    epoch: Mapped[int]
    ttl: Mapped[float]
    """Seconds by which each renewal extends the lease."""
    expires_at: Mapped[float]
    renewed_clock: Mapped[dict[str, Any] | None]
    """Stamp of `expires_at` (see `shoal.state.stamps`). None in rows of shoal 0.1."""
    exclusive: Mapped[bool] = mapped_column(default=False)
    """Whether the lease's nodes are added to those of other leases. Shared leases use the same nodes."""
    waiting: Mapped[bool] = mapped_column(default=False)
    """Whether the lease waits in the pool's queue. It takes no nodes until it is granted."""
    queue_number: Mapped[int] = mapped_column(default=0)
    """Order of the pool's leases by their requests. Lower numbers are granted first. 0 in rows of shoal 0.1."""
    created_at: Mapped[float]


class Operation(Base):
    """One journaled operation: a request to change the pool's size, and its result."""

    __tablename__ = "operations"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    kind: Mapped[OperationKind] = mapped_column(_state(OperationKind))
    state: Mapped[OperationState] = mapped_column(_state(OperationState), index=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    size: Mapped[int]
    block_until_min_cluster_size: Mapped[int | None] = mapped_column("min_size")
    replaced_size: Mapped[int | None]
    """Previous size of the base demand or lease, restored by a rollback."""
    replaced_operation_id: Mapped[str | None]
    lease_id: Mapped[str | None]
    """Lease that the operation created or renewed, if its kind is lease."""
    deadline: Mapped[float]
    failures: Mapped[int]
    """Number of nodes that failed to start for this operation."""
    node_errors: Mapped[dict[str, str]]
    """Error of each failed node, by node name."""
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]


class Node(Base):
    """One node: its planned start, its supervisor, and the state that the supervisor last reported."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    name: Mapped[str]
    is_head: Mapped[bool]
    state: Mapped[NodeState] = mapped_column(_state(NodeState))
    epoch: Mapped[int]
    """The pool's epoch in which the node was planned."""
    head_id: Mapped[str | None]
    """Id of the head that a worker joins; the worker is ended with this head."""
    operation_id: Mapped[str | None]
    """Operation for which the node is started; a failed start counts for it."""
    cpus: Mapped[int]
    gpus: Mapped[int]
    supervisor: Mapped[dict[str, Any] | None]
    """Process identity, written when the supervisor claims the row."""
    endpoint: Mapped[dict[str, str] | None]
    """Addresses of the node; None until it is ready."""
    busy: Mapped[bool]
    """Whether work was running on the node, as last reported by the supervisor."""
    # Jumps of the wall clock are added to all times of a node, so their differences are real durations.
    spawned_at: Mapped[float | None]
    """Time at which a supervisor was last spawned."""
    start_deadline: Mapped[float]
    drain_deadline: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]


class Job(Base):
    """One attempt of a training run."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(index=True)
    """Name of the pool. Not a foreign key, because a job's row outlives its pool."""
    holder: Mapped[str] = mapped_column(_HOLDER)
    spec: Mapped[dict[str, Any]]
    state: Mapped[JobState] = mapped_column(_state(JobState), index=True)
    endpoint: Mapped[dict[str, str]]
    """Addresses of the head to which the job was submitted."""
    driver: Mapped[dict[str, Any] | None]
    """Process identity of the job's driver."""
    submitter: Mapped[dict[str, Any] | None]
    """Process identity of the process that sends the job to the head. The key `python` has the Python of the process
    that asked for the job; rows of older versions have none."""
    priority: Mapped[int | None]
    """Priority in the pool's queue, the higher first. None in rows of versions without a queue."""
    gang: Mapped[dict[str, Any] | None]
    """The workers that the job asks for (`shoal.jobs.queue.Gang`)."""
    queued_at: Mapped[float | None]
    """Time when the attempt joined the queue. Its credentials were handed over before, so any process may send it."""
    queued_clock: Mapped[dict[str, Any] | None]
    """Stamp of `queued_at` (see `shoal.state.stamps`)."""
    admitted_at: Mapped[float | None]
    """Time when the attempt got its room. None while it waits."""
    heartbeat_at: Mapped[float | None]
    """Last sign of life of the driver; None for drivers of shoal 0.1."""
    orphan_after: Mapped[float | None]
    """Seconds without a poll after which the job ends itself."""
    last_polled_at: Mapped[float] = mapped_column("asked_at")
    """Last time that a process asked about the job."""
    last_polled_clock: Mapped[dict[str, Any] | None] = mapped_column("asked_clock")
    """Stamp of `last_polled_at` (see `shoal.state.stamps`). None in rows of shoal 0.1."""
    collected_at: Mapped[float | None]
    """Time at which the result was returned to a caller."""
    result: Mapped[dict[str, Any] | None]
    results_digest: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of `results.pkl`."""
    error: Mapped[str | None] = mapped_column(_Text)
    mlflow_run_id: Mapped[str | None]
    progress: Mapped[dict[str, Any] | None]
    """Last record of the training's progress; None before the first one, and in rows of shoal 0.2 and before."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]

    @property
    def is_waiting(self) -> bool:
        """Whether the attempt waits in its pool's queue: it has no driver, and nothing on the head knows it."""
        return self.state is JobState.PENDING and self.queued_at is not None and self.admitted_at is None


class Lock(Base):
    """A named lock with a time to live, for actions that must not run concurrently (promoting a model)."""

    __tablename__ = "locks"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    expires_at: Mapped[float]


class Promotion(Base):
    """One promotion of a model version to an alias.

    The row is written under the promotion lock: as `intended` before the alias is set, as `confirmed` after it.
    """

    __tablename__ = "promotions"
    __table_args__ = (Index("ix_promotions_alias", "registry_uri", "model", "alias"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Id of the promotion. Later promotions have greater ids."""
    registry_uri: Mapped[str] = mapped_column(Text)
    """URI of the model registry, without credentials."""
    model: Mapped[str] = mapped_column(Text)
    alias: Mapped[str] = mapped_column(Text)
    version: Mapped[str]
    """Model version to which the alias is set."""
    previous: Mapped[str | None]
    """Model version that had the alias before, if any."""
    metric: Mapped[str]
    value: Mapped[float | None]
    """Metric of `version` on the holdout rows; None if it is not finite."""
    holdout_digest: Mapped[str]
    """Digest of the holdout rows."""
    job_id: Mapped[str]
    attempt: Mapped[int]
    state: Mapped[PromotionState] = mapped_column(_state(PromotionState))
    created_at: Mapped[float]
    confirmed_at: Mapped[float | None]
