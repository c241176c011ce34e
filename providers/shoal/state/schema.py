"""Define the database tables of the store, and the states of the tables' rows.

All times are in seconds since the epoch (UTC). A column with the stamp of a time contains a reading of the monotonic
clock, from which the age of that time can be computed even after the wall clock has jumped (`shoal.state.stamps`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, Dialect, Enum, ForeignKey, Index, Integer, LargeBinary, String, Text
from sqlalchemy.engine import Connection
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import ForeignKeyConstraint
from sqlalchemy.types import TypeDecorator

from shoal.errors import InvalidArgumentError
from shoal.state import databases
from shoal.state.databases import storable


class PoolState(StrEnum):
    """State of a pool of nodes: up, stopping or down."""

    UP = "up"
    """The pool runs. The reconciler starts and ends nodes so that their number matches the demand."""
    STOPPING = "stopping"
    """The pool goes down, and every node is being ended."""
    DOWN = "down"
    """No node is left. The pool stays down until `up()` or a lease with `bring_up` starts it."""


class NodeState(StrEnum):
    """State of a node. The node's row is written before the node starts, and deleted after the node has ended."""

    PLANNED = "planned"
    """The row exists. A supervisor process may have been spawned, but has not yet written its identity to the row."""
    STARTING = "starting"
    """A supervisor process has written its identity to the row, and is starting the node."""
    READY = "ready"
    """The node has joined the pool and can take work."""
    DRAINING = "draining"
    """The node gets no new work. It is ended when it is idle, or when its grace period has passed."""
    FAILED = "failed"
    """The node did not start, or died. Its remaining processes and files still have to be removed."""
    ENDING = "ending"
    """The node's processes are being ended. The row is deleted when all processes have ended."""


class OperationKind(StrEnum):
    """Kind of change that an operation makes: start the pool, set its number of nodes, or request a lease on nodes."""

    UP = "up"
    SCALE = "scale"
    LEASE = "lease"


class OperationState(StrEnum):
    """State of an operation (a request to change the pool's size)."""

    OPEN = "open"
    """The operation was accepted, and the reconciler works on it until its deadline."""
    SUCCEEDED = "succeeded"
    """The pool reached the operation's size, or had at least `block_until_min_cluster_size` ready nodes at the
    deadline."""
    ROLLED_BACK = "rolled_back"
    """The operation failed, and the previous demand was restored."""
    SUPERSEDED = "superseded"
    """The operation was ended before it was complete, because a newer operation or `down()` replaced it, or because its
    lease was released or has expired."""


class JobState(StrEnum):
    """State of one attempt of a job."""

    PENDING = "pending"
    """The attempt is in the store, but its driver (the process that runs the attempt) has not reported yet."""
    RUNNING = "running"
    """The driver has started and has not yet reported a result."""
    SUCCEEDED = "succeeded"
    """The attempt has a result."""
    FAILED = "failed"
    """The attempt ended without a result. The column `error` contains the reason."""
    CANCELLED = "cancelled"
    """The attempt was cancelled, or no process asked about it for longer than `orphan_after`."""


JOB_ENDED = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

JOB_ACTIVE = frozenset(JobState) - JOB_ENDED


class PromotionState(StrEnum):
    """State of a promotion, which sets an alias of a registered model to a version."""

    INTENDED = "intended"
    """The alias in the model registry is about to be set. If the process crashes in this state, the next process checks
    in the registry whether the alias was set."""
    CONFIRMED = "confirmed"
    """The alias in the model registry was set."""
    WITHDRAWN = "withdrawn"
    """The promotion does not count: the process that made it crashed before it set the alias, or the promotion was
    withdrawn later (`shoal.models.withdraw_promotion`)."""


class ActionKind(StrEnum):
    """Kind of an action in the record of actions (table `history`)."""

    CREATED = "created"
    """A pool was started for the first time."""
    STARTED = "started"
    """`up` was called for a pool, to start the pool or to wait for its minimum number of nodes."""
    SCALED = "scaled"
    """The base demand of a pool was set with `scale_cluster`."""
    LEASED = "leased"
    """A lease was requested."""
    RELEASED = "released"
    """A lease was released."""
    ALTERED = "altered"
    """The limits of a pool or the quota of a team were changed, or the end of a node was announced."""
    STOPPED = "stopped"
    """`down` was called for a pool."""
    DELETED = "deleted"
    """A pool was deleted."""
    CANCELLED = "cancelled"
    """A job was cancelled."""
    DISMISSED = "dismissed"
    """The failure of a job was dismissed from the list of what needs attention."""
    SWEPT = "swept"
    """A host was swept: nodes that no pool needs were ended, and the end of lost jobs was recorded."""
    PROMOTED = "promoted"
    """A version of a model became champion, or its promotion was withdrawn."""


def _state(enum: type[StrEnum]) -> Enum:
    """Return the column type for an enum: a string column that stores the values of the enum's members.

    The database does not know the list of members, so a new member changes no table. Processes of an older version
    cannot read it, so it needs a new `SCHEMA_VERSION` nevertheless: then they may not open the store.
    """
    return Enum(enum, native_enum=False, length=20, values_callable=lambda e: [member.value for member in e])


class _Text(TypeDecorator[str]):
    """Text column that escapes characters that databases reject, such as NUL (see `databases.storable`).

    Texts that a query compares with the column are escaped in the same way, so the query finds the row.
    """

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        return None if value is None else storable(value)


class _LongText(_Text):
    impl = Text
    cache_ok = True


class _Number(TypeDecorator[int]):
    """Column of integers of 32 bits. PostgreSQL refuses larger numbers, and SQLite those with more than 64 bits."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: int | None, dialect: Dialect) -> int | None:
        if value is not None and not -(2**31) <= value < 2**31:
            raise InvalidArgumentError(f"the number {value} is too large: the largest allowed number is {2**31 - 1}")
        return value


def _of_attempt(table: str, attempt: str = "attempt", ondelete: str | None = "CASCADE") -> ForeignKeyConstraint:
    """Return the key that binds the rows of a table to attempts of jobs. The database checks it at the end of a
    transaction, so rows may be written and deleted in any order."""
    checks: dict[str, Any] = {"ondelete": ondelete, "deferrable": True, "initially": "DEFERRED"}
    return ForeignKeyConstraint(["job_id", attempt], ["jobs.id", "jobs.attempt"], f"fk_{table}_jobs", **checks)


class Base(DeclarativeBase):
    """Base class of all tables."""

    type_annotation_map = {dict[str, Any]: JSON, dict[str, str]: JSON, str: _Text(255), int: _Number}  # noqa: RUF012


class Pool(Base):
    """A pool of nodes: its name, settings and state."""

    __tablename__ = "pools"

    name: Mapped[str] = mapped_column(primary_key=True)
    spec: Mapped[dict[str, Any]]
    state: Mapped[PoolState] = mapped_column(_state(PoolState))
    host: Mapped[str]
    """Name of the host to which the pool is bound. Empty if any host can start and end the pool's nodes."""
    host_id: Mapped[str | None]
    """Id of the host to which the pool is bound. A renamed host keeps its id. None if the pool is bound to no host."""
    min_nodes: Mapped[int]
    max_nodes: Mapped[int]
    epoch: Mapped[int]
    """Number of times that the pool was started. Nodes that were planned in an older epoch are ended."""
    next_node: Mapped[int]
    """Number for the name of the next node. Within one epoch, no two nodes get the same number."""
    owner: Mapped[dict[str, Any] | None]
    """Identity of the process to which an embedded pool belongs. The pool is removed when this process has ended and no
    job has a lease on the pool any more. None for other pools."""
    start_failures: Mapped[int] = mapped_column(default=0)
    """Number of nodes in a row that failed to start, or died soon after, while no operation was open."""
    last_failure: Mapped[str | None] = mapped_column(_Text)
    """Error of the last node that `start_failures` counts."""
    cooldown_until: Mapped[float | None]
    """Time before which failed nodes are not replaced, because several nodes in a row have failed. None: no pause."""
    created_at: Mapped[float]
    touched_at: Mapped[float]
    """Time of the last use of the pool. If `idle_timeout` seconds have passed since then, the pool goes down."""
    quotas: Mapped[dict[str, Any] | None]
    """Limits by team: `max_nodes` and `node_hours` (within `USAGE_DAYS`), each None if there is no limit."""
    clock: Mapped[dict[str, Any] | None]
    """Stamp of the last clock correction (`shoal.pool.journal.rows`). The next correction compares its own stamp with
    this stamp to compute by how much the wall clock has jumped."""
    decision: Mapped[dict[str, Any] | None]
    """Last decision about the pool's size: `number`, which increases with each change of the size, and `size`. A
    backend whose API can compare numbers refuses older decisions. `unconfirmed` is the reason why the backend has not
    confirmed a smaller size yet, and None if it has. `found` is `PoolRef.found`. None before the first decision."""
    seen_at: Mapped[float | None]
    """Time at which the reconciler last checked the pool's nodes and found them as in the rows (`SIZE_PERIOD`). None:
    it has not checked them yet."""


class Size(Base):
    """The number of a pool's nodes from one time on, until the time of the pool's next row.

    The row is written in the transaction that changes one of the numbers.
    """

    __tablename__ = "sizes"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    at: Mapped[float]
    ready: Mapped[int | None]
    """Number of ready nodes. None: no process checked the nodes, such as while the pool's host was off."""
    target: Mapped[int | None]
    """Number of nodes that the pool should have. None like `ready`."""


class Demand(Base):
    """A pool's base demand: the number of nodes that the last call of `scale_cluster` or `up` requested.

    A pool that is up without a base demand was started by a lease, and goes down after its last lease and job.
    """

    __tablename__ = "demand"

    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), primary_key=True)
    size: Mapped[int]
    operation_id: Mapped[str | None]
    """Id of the operation that set the demand. Only the rollback of this operation may restore the previous demand."""
    set_at: Mapped[float]


class Lease(Base):
    """Request for a number of nodes, valid until its holder (such as a workflow) releases it or stops renewing it."""

    __tablename__ = "leases"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    holder: Mapped[str] = mapped_column(_LongText)
    ancestors: Mapped[dict[str, Any] | None]
    """Holders whose end is also the end of the lease (`shoal.pool.holder.Ancestors`). None: only the lease's holder."""
    size: Mapped[int]
    epoch: Mapped[int]
    ttl: Mapped[float]
    """Seconds by which each renewal extends the lease."""
    expires_at: Mapped[float]
    renewed_clock: Mapped[dict[str, Any] | None]
    """Stamp of `expires_at` (see `shoal.state.stamps`)."""
    exclusive: Mapped[bool] = mapped_column(default=False)
    """Whether the lease's nodes are added to those of other leases. Shared leases use the same nodes."""
    waiting: Mapped[bool] = mapped_column(default=False)
    """Whether the lease waits in the pool's queue. A waiting lease takes no nodes until it is granted."""
    queue_number: Mapped[int] = mapped_column(default=0)
    """Number that increases with each request for a lease of the pool. Leases with lower numbers are granted first."""
    max_lifetime: Mapped[float | None]
    """Seconds after the grant at which the lease is ended, even if its holder still renews it. None: no limit."""
    budget_node_hours: Mapped[float | None]
    """Node-hours after which the lease is ended. None: no limit."""
    team: Mapped[str | None]
    """Team to whose quota the lease counts. None: no team."""
    created_at: Mapped[float]


class Operation(Base):
    """One operation: a request to change the pool's size, and the result of the request."""

    __tablename__ = "operations"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    kind: Mapped[OperationKind] = mapped_column(_state(OperationKind))
    state: Mapped[OperationState] = mapped_column(_state(OperationState), index=True)
    holder: Mapped[str] = mapped_column(_LongText)
    size: Mapped[int]
    block_until_min_cluster_size: Mapped[int | None]
    replaced_size: Mapped[int | None]
    """Size of the base demand or lease before this operation, which a rollback restores. None if the base demand or
    lease did not exist before."""
    replaced_operation_id: Mapped[str | None]
    lease_id: Mapped[str | None]
    """Id of the lease that the operation created or renewed. None if the operation's kind is not `lease`."""
    deadline: Mapped[float]
    failures: Mapped[int]
    """Number of nodes that failed to start for this operation."""
    node_errors: Mapped[dict[str, str]]
    """Error of each failed node, by node name."""
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]
    ended_at: Mapped[float | None]


class Node(Base):
    """One node of a pool, with its supervisor process and the state that this process last reported."""

    __tablename__ = "nodes"

    id: Mapped[str] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(ForeignKey("pools.name", ondelete="CASCADE"), index=True)
    name: Mapped[str]
    is_head: Mapped[bool]
    state: Mapped[NodeState] = mapped_column(_state(NodeState))
    epoch: Mapped[int]
    """The pool's epoch in which the node was planned."""
    head_id: Mapped[str | None]
    """Id of the head that a worker node joins. The worker is ended when this head ends. None for a head."""
    operation_id: Mapped[str | None]
    """Id of the operation for which the node is started. If the start fails, the operation's `failures` increases."""
    cpus: Mapped[int]
    gpus: Mapped[int]
    supervisor: Mapped[dict[str, Any] | None]
    """Identity of the node's supervisor process, which the supervisor writes before it starts the node. None before."""
    endpoint: Mapped[dict[str, str] | None]
    """Addresses of the node, and its pod if it has one. A node that was never ready has no `ray_node_id` here."""
    busy: Mapped[bool]
    """Whether work was running on the node, as last reported by the supervisor."""
    # When the wall clock jumps, the size of the jump is added to all stored times of a node
    # (`shoal.pool.journal.rows`). So the difference of two of these times is always the real duration.
    spawned_at: Mapped[float | None]
    """Time at which a supervisor was last spawned."""
    start_deadline: Mapped[float]
    drain_deadline: Mapped[float | None]
    leaving_at: Mapped[float | None]
    """Time at which the node is expected to end, as announced with `retire_node`. None: no end was announced."""
    error: Mapped[str | None] = mapped_column(_Text)
    created_at: Mapped[float]

    @property
    def was_ready(self) -> bool:
        """Return whether the node is ready or has been ready."""
        return "ray_node_id" in (self.endpoint or {})


class Job(Base):
    """One attempt of a job, such as a training. A job that is started again after a failure has several attempts."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    pool: Mapped[str] = mapped_column(index=True)
    """Name of the pool. The column is not a foreign key, because a job's row is kept when its pool is deleted."""
    holder: Mapped[str] = mapped_column(_LongText)
    ancestors: Mapped[dict[str, Any] | None]
    """Holders whose end is also the end of the job (`shoal.pool.holder.Ancestors`). None: only the job's holder."""
    label: Mapped[str | None] = mapped_column(_LongText)
    """What the job is about, such as the name of its model. None: an older shoal has submitted the job."""
    team: Mapped[str | None]
    """Team to which the job belongs. None: no team."""
    spec: Mapped[dict[str, Any]]
    state: Mapped[JobState] = mapped_column(_state(JobState), index=True)
    endpoint: Mapped[dict[str, str]]
    """Addresses of the head to which the job was submitted."""
    driver: Mapped[dict[str, Any] | None]
    """Identity of the job's driver (the process that runs the attempt). None until the driver has reported."""
    submitter: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Identity of the process that sends the job to the head. The key `python` contains the path of the Python
    interpreter of the process that submitted the job. The key `submissions` contains the number of times that the
    attempt was submitted, if it was submitted more than once."""
    task_key: Mapped[str | None] = mapped_column(_LongText)
    """Name of the workflow engine's task that submitted the job, unique among the tasks of the holder; for a task of
    Prefect, the name of the flow run. None if no task submitted the job."""
    task_name: Mapped[str | None] = mapped_column(_LongText)
    """Name of the flow and of its task that submitted the job, as users know them. None if no task of a flow has
    submitted the job; `task_key` has the name of Airflow's task."""
    task_try: Mapped[int | None]
    """Number of the newest try of the task `task_key` that has submitted the job or attached to it."""
    task_digest: Mapped[str | None] = mapped_column(String(64))
    """Digest of the function and the arguments of the task that submitted the job (`shoal.jobs.journal.owners`)."""
    task_run: Mapped[str | None] = mapped_column(_LongText)
    """Try of the flow run, and task run, that has submitted the job or attached to it last. None if the job does not
    belong to a task of Prefect, or if its promotion was withdrawn: then no later try takes the job over."""
    log_shown: Mapped[int | None] = mapped_column(BigInteger)
    """Position in the job's log up to which the deferred try `task_try` has shown the log. Another process that
    continues this try begins at this position."""
    priority: Mapped[int] = mapped_column(default=0)
    """Priority in the pool's queue. Jobs with a higher number start first."""
    gang: Mapped[dict[str, Any]] = mapped_column(default=dict)
    """Number and resources of the workers that the job needs (`shoal.jobs.scheduling.Gang`)."""
    uses_gpu: Mapped[bool | None]
    """Whether the training uses GPUs, as the job's first attempt has decided. None before this decision, and for jobs
    whose spec contains the decision."""
    versions: Mapped[dict[str, Any] | None]
    """Version of each table that the job reads and for which the spec has none, the newest time of each dataset that is
    divided by time, and the time at which the age of rows is measured, as the job's first attempt has found them
    (`shoal.jobs.driver.table_versions`). None before that, and for jobs without such datasets."""
    queued_at: Mapped[float | None]
    """Time at which the attempt joined the queue. The job's credentials were stored before this time, so from then on
    any process may send the job to the head."""
    queued_clock: Mapped[dict[str, Any] | None]
    """Stamp of `queued_at` (see `shoal.state.stamps`)."""
    admitted_at: Mapped[float | None]
    """Time at which the attempt left the queue, because the pool has room for its workers. None while the attempt
    waits."""
    needs_credentials: Mapped[bool] = mapped_column(default=False)
    """Whether the driver gets credentials through this row (`shoal.jobs.credentials`), and waits for them while the
    attempt is pending. False if the driver gets credentials from a file, or needs none."""
    driver_key: Mapped[str | None] = mapped_column(_LongText)
    """Public key of the driver that waits for credentials. None before the driver has requested credentials, and after
    the driver has received them."""
    sealed_credentials: Mapped[str | None] = mapped_column(_LongText)
    """The encrypted credentials. Only the driver with the key `driver_key` can decrypt them. Removed when the attempt
    runs or has ended."""
    heartbeat_at: Mapped[float | None]
    """Time of the driver's last sign of life, which it writes every few seconds. None before the driver has started."""
    orphan_after: Mapped[float | None]
    """Seconds after which the job ends itself if no process asks about it. None: never."""
    last_polled_at: Mapped[float]
    """Time at which a process last asked about the job."""
    last_polled_clock: Mapped[dict[str, Any] | None]
    """Stamp of `last_polled_at` (see `shoal.state.stamps`)."""
    collected_at: Mapped[float | None]
    """Time at which the result was first returned to a caller. None before."""
    result: Mapped[dict[str, Any] | None]
    results_digest: Mapped[str | None] = mapped_column(String(64))
    """SHA-256 of the file `results.pkl`, which contains the return values of a function job. For a boosting job that
    records an MLflow run: digest of the files of its saved training, also if the attempt has failed later."""
    error: Mapped[str | None] = mapped_column(_Text)
    error_is_permanent: Mapped[bool | None]
    """Whether a further attempt would fail in the same way, or a user has cancelled the attempt. None if the attempt
    has not failed and was not cancelled."""
    dismissed_at: Mapped[float | None]
    """Time at which a user has dismissed the failure of the attempt from the page. None: nobody has."""
    mlflow_run_id: Mapped[str | None]
    progress: Mapped[dict[str, Any] | None]
    """Last reported progress of the training. None before the first report."""
    metrics_in_mlflow: Mapped[int] = mapped_column(default=0)
    """Number of points of the attempt's series of metrics that its MLflow run has. The next attempt of a job whose
    driver was killed sends the others."""
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    ended_at: Mapped[float | None]

    @property
    def framework(self) -> str:
        """Name of the job's kind (`shoal.jobs.kind`)."""
        return str(self.spec.get("framework", "xgboost"))

    @property
    def run_config(self) -> dict[str, Any]:
        """The run config in the spec, as plain data."""
        return self.spec.get("run_config") or {}


class JobMetrics(Base):
    """A part of an attempt's series of metrics: some hundred points, which the driver adds with its heartbeats.

    The series is not a part of the job's row, because lists of jobs read all rows.
    """

    __tablename__ = "job_metrics"
    __table_args__ = (_of_attempt("job_metrics"),)

    job_id: Mapped[str] = mapped_column(primary_key=True)
    attempt: Mapped[int] = mapped_column(primary_key=True)
    seq: Mapped[int] = mapped_column(primary_key=True)
    """Place of this part in the series."""
    generation: Mapped[int]
    """Number of times that the training was continued from a checkpoint before these points. The points replace those
    of earlier generations from their first step on."""
    points: Mapped[str] = mapped_column(_LongText)
    """Steps, times and values as JSON, which `shoal.jobs.journal.metric_points` writes before the transaction."""


class StudyLog(Base):
    """An entry in the journal of a search for parameters, of which Optuna builds the study when it reads the entries.

    Entries are only added, by the driver of the job's newest attempt.
    """

    __tablename__ = "study_logs"
    __table_args__ = (_of_attempt("study_logs", "first"),)

    job_id: Mapped[str] = mapped_column(primary_key=True)
    study: Mapped[int] = mapped_column(primary_key=True)
    """Number of the attempt that has begun the study. An attempt after a failure continues the study."""
    number: Mapped[int] = mapped_column(primary_key=True)
    """Place of the entry in the journal, from 0. The numbers of a study have no gaps."""
    entry: Mapped[str] = mapped_column(_LongText)
    """Optuna's entry as JSON (`shoal.state.databases`)."""
    first: Mapped[int] = mapped_column(default=1, server_default="1")
    """Number of the job's first attempt, which is kept as long as the job. The attempt that has begun the study may be
    deleted before."""


class Usage(Base):
    """A period in which a lease or a job has used a constant number of nodes.

    The row is written when the period begins, in the transaction that grants the lease or starts the job. So the sum
    over the rows is right even if all processes are killed during the period.
    """

    __tablename__ = "usage"
    __table_args__ = (
        Index("ix_usage_pool", "pool", "ended_at"),
        Index("ix_usage_job", "job_id", "attempt"),
        Index("ix_usage_lease", "lease_id"),
        _of_attempt("usage", "first", ondelete="SET NULL"),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    pool: Mapped[str]
    """Name of the pool. The column is not a foreign key, because the row is kept when the pool is deleted."""
    holder: Mapped[str] = mapped_column(_LongText)
    lease_id: Mapped[str | None]
    """Id of the lease; None if a job has used the nodes."""
    job_id: Mapped[str | None]
    """Id of the job; None if a lease has used the nodes, or if the job was deleted."""
    attempt: Mapped[int | None]
    first: Mapped[int | None] = mapped_column(default=1, server_default="1")
    """Number of the job's first attempt, which is kept as long as the job."""
    nodes: Mapped[int]
    begun_at: Mapped[float]
    begun_clock: Mapped[dict[str, Any] | None]
    """Stamp of `begun_at` (see `shoal.state.stamps`)."""
    ended_at: Mapped[float | None]
    """End of the period: the lease or job ended, or got another number of nodes. None while the period goes on."""
    node_seconds: Mapped[float | None]
    """Number of nodes multiplied by the seconds of the period. None while the period goes on."""
    end_reason: Mapped[str | None] = mapped_column(_LongText)
    """Reason why shoal ended the lease before its holder released it: the lifetime or the budget of the lease is
    over."""
    team: Mapped[str | None]
    """Team of the lease; None for a job."""


class Lock(Base):
    """A named lock that expires, for actions that must not run at the same time, such as promoting a model."""

    __tablename__ = "locks"

    name: Mapped[str] = mapped_column(primary_key=True)
    holder: Mapped[str] = mapped_column(_LongText)
    expires_at: Mapped[float]


class AirflowDeployment(Base):
    """A web address at which an Airflow deployment has run.

    Two addresses of one deployment mean that the Airflow has moved, or that a copy of its database has the same id.
    """

    __tablename__ = "airflow_deployments"

    id: Mapped[str] = mapped_column(primary_key=True)
    """Id of the deployment, as in the names of its holders."""
    base_url: Mapped[str] = mapped_column(_LongText, primary_key=True)
    seen_at: Mapped[float]
    """Time at which a task last reported the address; written at most once an hour."""


class Promotion(Base):
    """One promotion: setting an alias of a registered model, such as ``champion``, to a version of the model.

    A process writes the row while it holds the lock for promotions (table `locks`): with the state `intended` before it
    sets the alias, and with the state `confirmed` afterwards.
    """

    __tablename__ = "promotions"
    __table_args__ = (
        Index("ix_promotions_alias", "registry_uri", "model", "alias"),
        _of_attempt("promotions", ondelete=None),
    )

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Id of the promotion. Later promotions have greater ids."""
    registry_uri: Mapped[str] = mapped_column(Text)
    """URI of the model registry, without credentials."""
    model: Mapped[str] = mapped_column(Text)
    alias: Mapped[str] = mapped_column(Text)
    version: Mapped[str]
    """Number of the model version to which the alias is set."""
    version_identity: Mapped[dict[str, Any] | None]
    """What identifies this version besides its number (`VersionId`). None: an older shoal has
    written the row."""
    previous: Mapped[str | None]
    """Number of the model version that had the alias before, if any."""
    previous_identity: Mapped[dict[str, Any] | None]
    """What identifies the version before besides its number. None: there was none, or an older shoal has written the
    row."""
    metric: Mapped[str]
    value: Mapped[float | None]
    """Value of `metric` for the version on the holdout rows (rows that were not used for training). None if the value
    is not finite."""
    holdout_digest: Mapped[str]
    """Digest of the holdout rows, which shows whether two promotions were decided on the same rows."""
    job_id: Mapped[str]
    attempt: Mapped[int | None]
    """None: the store does not have the job, because it was deleted after the promotion was withdrawn, or was submitted
    with another store."""
    state: Mapped[PromotionState] = mapped_column(_state(PromotionState))
    created_at: Mapped[float]
    confirmed_at: Mapped[float | None]
    withdrawn_after: Mapped[int | None]
    """Id of the newest promotion of the alias at the time at which this promotion was withdrawn. None: it was not
    withdrawn, or by an older shoal."""


class StoredFile(Base):
    """A result file of a job (`shoal-store://`). The store contains the file if the job's pool shares no file system
    with the process that submitted the job."""

    __tablename__ = "files"

    path: Mapped[str] = mapped_column(Text, primary_key=True)
    """Path without the URI's scheme."""
    content: Mapped[bytes] = mapped_column(LargeBinary)
    written_at: Mapped[float]


class Action(Base):
    """One line of the record of actions. Lines are only added, and never changed (`shoal.history`)."""

    __tablename__ = "history"

    id: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    """Id of the line. Later lines have greater ids."""
    at: Mapped[float]
    actor: Mapped[str] = mapped_column(_LongText)
    """Name of the user, run or process that acted."""
    kind: Mapped[ActionKind] = mapped_column(_state(ActionKind))
    pool: Mapped[str | None] = mapped_column(index=True)
    """Name of the pool; None for an action that belongs to no pool."""
    subject: Mapped[str] = mapped_column(_LongText)
    """Name of the changed object: a pool, the holder of a lease, the id of a job, or a model. For a sweep, the host."""
    detail: Mapped[str | None] = mapped_column(_LongText)
    outcome: Mapped[str] = mapped_column(_LongText)
    operation_id: Mapped[str | None] = mapped_column(index=True)
    """Id of the operation. For each operation, one line is added at its request and one line at its end. None for
    actions that are complete at once."""


def create_tables(connection: Connection) -> None:
    """Create all tables in an empty database, and note the version of the schema as Alembic does."""
    Base.metadata.create_all(connection, checkfirst=False)
    connection.exec_driver_sql(
        "CREATE TABLE IF NOT EXISTS alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)"
    )
    connection.exec_driver_sql(f"INSERT INTO alembic_version VALUES ('{databases.SCHEMA_VERSION}')")
