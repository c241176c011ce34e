"""The tables, and the states their rows go through. Times are seconds since the epoch (UTC)."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, Dialect, Enum, ForeignKey, Index, String, Text
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from shoal.state.codec import storable


class PoolState(StrEnum):
    """What is wanted of a pool as a whole."""

    UP = "up"
    """It should run: its nodes are held at its demand."""
    STOPPING = "stopping"
    """`down()` was asked: every node is being ended."""
    DOWN = "down"
    """No node is left. Only `up()` leaves this state."""


class NodeState(StrEnum):
    """A node's way from intent to being forgotten. Its row exists before it does and goes when its end was seen."""

    PLANNED = "planned"
    """Intent only: a supervisor may or may not have been spawned, none has claimed the row yet."""
    STARTING = "starting"
    """A supervisor has claimed the row and brings the node up."""
    READY = "ready"
    """Joined to the pool and able to take work."""
    DRAINING = "draining"
    """Chosen to go: takes no new work, and is ended once idle or past its grace period."""
    FAILED = "failed"
    """Never came up, or died; what is left of it has still to be ended."""
    ENDING = "ending"
    """Its processes are being ended; the row goes when none was seen."""


class OperationKind(StrEnum):
    """What a journaled operation changes."""

    UP = "up"
    SCALE = "scale"
    LEASE = "lease"


class OperationState(StrEnum):
    """How far a journaled operation is."""

    OPEN = "open"
    """Accepted; the reconciler works towards it until its deadline."""
    SUCCEEDED = "succeeded"
    """Its size was reached, or at least its minimum by its deadline."""
    ROLLED_BACK = "rolled_back"
    """It failed; its demand was withdrawn and the one before it restored."""
    SUPERSEDED = "superseded"
    """A newer operation, or `down()`, took its place before it was through."""


class JobState(StrEnum):
    """How far one attempt of a job is."""

    PENDING = "pending"
    """Accepted here; its driver has not reported yet."""
    RUNNING = "running"
    """Its driver runs."""
    SUCCEEDED = "succeeded"
    """It has a result."""
    FAILED = "failed"
    """It ended without a result; `error` says why."""
    CANCELLED = "cancelled"
    """Somebody ended it, or nobody asked about it for longer than `orphan_after`."""


JOB_ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

JOB_ACTIVE = frozenset(JobState) - JOB_ENDED


class PromotionState(StrEnum):
    """How far a promotion is."""

    INTENDED = "intended"
    """The alias is about to be set: after a crash, whether it was is read off the alias."""
    CONFIRMED = "confirmed"
    """The alias was set."""
    WITHDRAWN = "withdrawn"
    """The next to take the lock did not find the alias set."""


def _state(enum: type[StrEnum]) -> Enum:
    """Stored as the member's value in a plain string column, so that a new member needs no migration."""
    return Enum(enum, native_enum=False, length=20, values_callable=lambda e: [member.value for member in e])


class _Text(TypeDecorator[str]):
    """A text column, escaped where a database would refuse a character (`codec.storable`), in comparisons too."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


class _LongText(_Text):
    impl = Text


_HOLDER = _Text(255).with_variant(_LongText(), "postgresql")
"""Airflow DAG ids and run ids may have 250 characters each. SQLite enforces no limit: its columns stay as they are."""


class Base(DeclarativeBase):
    """What the tables share."""

    type_annotation_map = {dict[str, Any]: JSON, dict[str, str]: JSON, str: _Text(255)}  # noqa: RUF012


class Pool(Base):
    """A named set of nodes: its spec, and what is wanted of it as a whole."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    state: Mapped[PoolState] = mapped_column(_state(PoolState))
    host: Mapped[str]  # name of the host that it is bound to; empty for a pool that any host can act on
    host_id: Mapped[str | None]  # identity of that host, which outlives a change of its name; None in rows of 0.1
    min_nodes: Mapped[int]
    max_nodes: Mapped[int]
    epoch: Mapped[int]  # counts its lives, one an `up()`: nodes of an older one have no right to exist
    next_node: Mapped[int]  # number of the next node's name; never used twice in one life
    owner: Mapped[dict[str, Any] | None]  # the process that an embedded pool dies with; None for every other
    start_failures: Mapped[int] = mapped_column(
        default=0
    )  # nodes in a row that failed to start, or died young, with no operation open
    last_failure: Mapped[str | None] = mapped_column(_Text)  # what the last of them said
    cooldown_until: Mapped[float | None]  # no replacement is started before
    created_at: Mapped[float]
    touched_at: Mapped[float]  # last time somebody wanted something of it; `idle_timeout` counts from here
    clock: Mapped[dict[str, Any] | None]  # when its rows last followed the clock (`shoal.pool.journal.clock`)


class Demand(Base):
    """A pool's base demand: how many nodes `scale_cluster` (or `up`) last asked for.

    A pool that is up without one was brought up by a lease, and goes down with the last.
    """

    __tablename__ = "demand"

    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), primary_key=True)
    size: Mapped[int]
    operation_id: Mapped[str | None]  # who set it: only that operation's rollback may withdraw it
    set_at: Mapped[float]


class Lease(Base):
    """A run's claim on a number of nodes, with a time to live."""

    __tablename__ = "leases"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    size: Mapped[int]
    epoch: Mapped[int]
    ttl: Mapped[float]  # what a renewal adds, whoever renews it
    expires_at: Mapped[float]
    renewed_clock: Mapped[dict[str, Any] | None]  # stamp of `expires_at`, see `shoal.state.stamps`; None in rows of 0.1
    created_at: Mapped[float]


class Operation(Base):
    """One journaled change of size."""

    __tablename__ = "operations"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    kind: Mapped[OperationKind] = mapped_column(_state(OperationKind))
    state: Mapped[OperationState] = mapped_column(_state(OperationState), index=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    size: Mapped[int]
    block_until_min_cluster_size: Mapped[int | None] = mapped_column("min_size")
    replaced_size: Mapped[int | None]  # the base demand it took the place of: what its rollback restores
    replaced_operation_id: Mapped[str | None]
    lease_id: Mapped[str | None]  # of a lease operation: what its rollback takes back
    deadline: Mapped[float]
    failures: Mapped[int]  # nodes that failed to start under it
    node_errors: Mapped[dict[str, str]]  # node name -> what went wrong
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]


class Node(Base):
    """One node: intent, owner, and what its supervisor last said of it."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    name: Mapped[str]
    is_head: Mapped[bool]
    state: Mapped[NodeState] = mapped_column(_state(NodeState))
    epoch: Mapped[int]  # the pool's epoch that it was planned in
    head_id: Mapped[str | None]  # the head it joins; a worker does not outlive its head
    operation_id: Mapped[str | None]  # the operation open when it was planned, told of its failure
    cpus: Mapped[int]
    gpus: Mapped[int]
    supervisor: Mapped[dict[str, Any] | None]  # process identity (boot id, pid, start ticks), written by its own claim
    endpoint: Mapped[dict[str, str] | None]  # where to reach it, once ready
    busy: Mapped[bool]  # as last reported by its supervisor
    # All times of a node follow the jumps of the wall clock, so their differences are time that really passed.
    spawned_at: Mapped[float | None]  # when a supervisor was last spawned for it
    start_deadline: Mapped[float]
    drain_deadline: Mapped[float | None]
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]


class Job(Base):
    """One attempt of a training run."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(index=True)  # no foreign key: a job's record outlives its pool
    holder: Mapped[str] = mapped_column(_HOLDER)
    spec: Mapped[dict[str, Any]]
    state: Mapped[JobState] = mapped_column(_state(JobState), index=True)
    endpoint: Mapped[dict[str, str]]  # the head it was submitted to
    driver: Mapped[dict[str, Any] | None]  # process identity of its driver
    submitter: Mapped[dict[str, Any] | None]  # process identity of the process that sends it to the head
    heartbeat_at: Mapped[float | None]  # last sign of life of its driver; None where the driver is of 0.1
    orphan_after: Mapped[float | None]  # seconds without anybody asking, after which it ends itself
    last_polled_at: Mapped[float] = mapped_column("asked_at")  # last time a process asked about it
    last_polled_clock: Mapped[dict[str, Any] | None] = mapped_column(
        "asked_clock"
    )  # stamp of `last_polled_at`, see `shoal.state.stamps`; None in rows of 0.1
    collected_at: Mapped[float | None]  # when its result was handed out
    result: Mapped[dict[str, Any] | None]
    results_digest: Mapped[str | None] = mapped_column(String(64))  # SHA-256 of `results.pkl`
    error: Mapped[str | None] = mapped_column(_Text)
    mlflow_run_id: Mapped[str | None]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]


class Lock(Base):
    """A named lock with a time to live, for what must not happen twice at once (promoting a model)."""

    __tablename__ = "locks"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str] = mapped_column(_HOLDER)
    expires_at: Mapped[float]


class Promotion(Base):
    """One setting of a model's alias by shoal, written under the lock: the intent before it, its success after it."""

    __tablename__ = "promotions"
    __table_args__ = (Index("ix_promotions_alias", "registry_uri", "model", "alias"),)

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)  # later ones have greater ids
    registry_uri: Mapped[str] = mapped_column(Text)  # without credentials
    model: Mapped[str] = mapped_column(Text)
    alias: Mapped[str] = mapped_column(Text)
    version: Mapped[str]  # that the alias is given to
    previous: Mapped[str | None]  # that had it before; None: none had
    metric: Mapped[str]
    value: Mapped[float | None]  # of `version` on the holdout; None where it is not finite
    holdout_digest: Mapped[str]  # of the rows that the metric was measured on
    job_id: Mapped[str]
    attempt: Mapped[int]
    state: Mapped[PromotionState] = mapped_column(_state(PromotionState))
    created_at: Mapped[float]
    confirmed_at: Mapped[float | None]
