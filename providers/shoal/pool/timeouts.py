"""Timeouts and periods of pools in seconds, each with the reason for its value. Other limits are defined in the modules
that use them."""

from __future__ import annotations

ROLLBACK_AFTER = 720.0
"""Default time from the request of a scale operation to its deadline. Snowflake's `scale_cluster` has the same default.
The time is long enough for the start of cloud machines."""

LEASE_TTL = 900.0
"""Default time after which a lease expires if it is not renewed. An orchestrator that polls slowly can still renew the
lease several times within this time. A run that has died keeps its nodes for at most this time."""

IDLE_TIMEOUT = 900.0
"""Time without a call after which the embedded pool of a process goes down. A notebook whose user reads the results for
some minutes then still has its pool, and a forgotten notebook does not keep the pool's memory for a day."""

JOB_LEASE_TTL = 60.0
"""Time after which the lease of a job expires if the submitting process dies before the job is submitted. The
submitting process renews the lease every 20 s. A write to a busy SQLite store may take 30 s, so a shorter time would
not be safe."""

START_TIMEOUT = 120.0
"""Time that a local node may take to start. After this time its start counts as failed. On the test machine, a single
node starts in 3 to 9 s. Before its start, a node may have to wait, because only a few nodes may start at the same
time."""

SPAWN_GRACE = 20.0
"""Time within which a spawned supervisor process has to write its identity to its node's row. After this time another
supervisor is spawned. On an idle host a supervisor needs about 1 s."""

REPLACE_COOLDOWN = 30.0
"""Pause before the next start of a node, after two nodes in a row have failed while no operation was open. The pause
doubles with each further failure, so that a broken host does not start nodes in a loop. The first failed node is
replaced without a pause, because a single failure is normal."""

REPLACE_COOLDOWN_MOST = 900.0
"""Longest pause between starts after failures. When the cause of the failures is fixed, the next start is tried within
this time."""

RETIRE_WITHIN = 120.0
"""Default time until the announced end of a node. AWS announces the end of a spot machine 120 s in advance."""

DRAIN_GRACE = 30.0
"""Time in which a busy node may finish its work when the pool shrinks. After this time the node is ended."""

DOWN_PATIENCE = 60.0
"""Time that `down()` waits for the pool's nodes to end, before it raises an error. On the test machine, each node takes
about 1 s."""

SUPERVISOR_PERIOD = 1.0
"""Interval at which a supervisor reads its node's row, if the row may have changed, to see whether the node has to end,
and checks whether the node's raylet (Ray's main process on a node) still runs."""

HEAD_PATIENCE = 235.0
"""Time for which a worker node keeps running after a request to its head has timed out after 5 s. So the worker gives
up after 240 s. The head also waits 240 s before it declares a silent node dead. Both are on one machine, so a silent
process is paused; the end of a process is noticed within seconds."""

REVIVE_PERIOD = 5.0
"""Interval at which a supervisor checks whether the host's reconciler runs. If the reconciler has died, the supervisor
starts a new one."""

STORE_PATIENCE = 3600.0
"""Time for which a supervisor keeps its node running while the store cannot be reached. A failover of the database
takes less time, so it does not end nodes."""

RAY_CLUSTER_LEASE = 3600.0
"""Time after which a RayCluster that shoal has created on Kubernetes is deleted, if no process reconciles its pool. The
time is that of supervisors without a store, for the same reason."""

RAY_CLUSTER_RENEWAL = 60.0
"""Interval at which a process that reconciles such a pool renews its Lease. The time is short beside the lease, and
long beside the rounds."""

STORE_PERIOD = 2.0
"""Interval at which a blocking call, such as `scale_cluster`, tries again while the store cannot be reached."""

TERMINATE_PATIENCE = 5.0
"""Time within which a node should leave the cluster and end by itself. After this time the node is killed. Nodes were
measured to need 0.3 to 2 s."""

KILL_PATIENCE = 10.0
"""Time within which a process has to end after SIGKILL. A process that takes longer hangs in the kernel and cannot be
ended, so an error message names it."""

GPU_PATIENCE = 2.0
"""Time for which a starting node waits for GPUs that another node uses, before the start fails. A node that ends
releases its GPUs within 0.3 to 2 s."""

RECONCILE_PERIOD = 1.0
"""Interval at which the reconciler checks every pool. The interval has to be short, because `describe_pool` and the
sensors promise to show changes within seconds."""

SIZE_PERIOD = 60.0
"""Interval at which the reconciler records that it has checked the nodes of a pool. Each record is a write
transaction."""

SIZE_UNKNOWN_AFTER = 180.0
"""Time without such a record after which the page draws no size of the pool: the pool's host is off, its cluster does
not answer, or the reconciler does not run."""

WAIT_PERIOD = 0.1
"""Shortest interval at which a blocking call checks whether its operation or job has ended. The interval is a tenth of
the time waited, so that a process notices the end after at most a tenth of that time."""

WAIT_PERIOD_MOST = 2.0
"""Longest interval at which a blocking call checks whether its operation or job has ended. The interval reaches this
value after 20 s. With 1 s instead, 200 waiting processes made `shoal jobs list` two to three times as slow."""

TURN_PATIENCE = 1.0
"""If several processes of a host wait for the same pool, only one of them reconciles it (see
`shoal.pool.waiting`). If this process has not reconciled the pool for this time, because it was killed or
paused or is slow, another process takes over."""

CLUSTER_PATIENCE = 5.0
"""Timeout of one request to the head of an existing Ray cluster. The head normally answers in milliseconds. The timeout
is short because `describe_pool` waits for the answer."""

CLUSTER_JOB_PATIENCE = 45.0
"""Timeout of a one-line job on an existing Ray cluster. Such a job takes 3 s on the test machine. It takes longer if
the head has to start its agents first, or if other jobs are queued before it."""

CLUSTER_UNKNOWN_PATIENCE = 5.0
"""Seconds for which a head has to answer that it does not know a job, until the job counts as lost. A busy head of Ray
2.60 has answered once that it did not know a job that ran."""

CLUSTER_START_TIMEOUT = 900.0
"""Time within which a node that was requested from Ray's autoscaler has to join the cluster: enough to start a cloud
machine and pull its image. By default, a lease expires after the same time."""

DRIVER_LOST_AFTER = 60.0
"""If the last heartbeat of a job's driver is older than this number of seconds when the job's end is recorded, the job
has used its nodes only until that heartbeat. A driver writes a heartbeat every 5 s, but the store may not answer for
some time."""

START_TIMEOUT_PER_NODE = 10.0
"""Seconds that are added to a node's time limit for its start, for each node that starts earlier. A host starts only a
few nodes at the same time, and each start takes 3 to 9 s."""

DRIVER_START_TIMEOUT = 60.0
"""Seconds to wait until the fork server has started a driver. The fork server needs 1 s for its imports, and more on a
busy host."""

DRIVER_STOP_PATIENCE = 3.0
"""Seconds after SIGTERM within which a driver has to end. After this time the driver is killed. Ray's Job API uses the
same time."""

HEAD_REQUEST_TIMEOUT = 30.0
"""Seconds within which a client has to send its request. Without this limit, idle connections would occupy threads."""

HEAD_TOKEN_TIMEOUT = 10.0
"""Seconds after which a connection to a head is closed if it has not sent the token. A client sends the token directly
after connecting, but on a busy machine the client may have to wait for CPU time."""

RAY_RPC_TIMEOUT = 5.0
"""Time limit of one request of a supervisor to the GCS of its Ray cluster. The answer normally takes milliseconds."""
