"""All tunable constants of pools, each with the reason for its value. Durations are in seconds."""

from __future__ import annotations

import os

ROLLBACK_AFTER = 720.0
"""Default time from the request of a scale operation to its deadline. Snowflake's `scale_cluster` has the same default.
The time is long enough for the start of cloud machines."""

LEASE_TTL = 900.0
"""Default time after which a lease expires if it is not renewed. An orchestrator that polls slowly can still renew the
lease several times within this time. A run that has died keeps its nodes for at most this time."""

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

MAX_START_FAILURES = 3
"""Number of failed node starts after which an operation is rolled back, even before its deadline. Two failures may be a
coincidence. After three failures the cause is probably permanent, so further starts would fail, too."""

REPLACE_COOLDOWN = 30.0
"""Pause before the next start of a node, after two nodes in a row have failed while no operation was open. The pause
doubles with each further failure, so that a broken host does not start nodes in a loop. The first failed node is
replaced without a pause, because a single failure is normal."""

REPLACE_COOLDOWN_MOST = 900.0
"""Longest pause between starts after failures. When the cause of the failures is fixed, the next start is tried within
this time."""

KEEP_OPERATIONS = 100
"""Number of ended operations that are kept for each pool. Every read of the pool loads all these operations, so a
larger number would make each read slower."""

KEEP_LOGS = 7 * 24 * 3600.0
"""Time for which the logs of ended nodes are kept: one week, so that logs of Friday can still be read on Monday."""

KEEP_USAGE = 400 * 24 * 3600.0
"""Time for which the record of used nodes is kept: long enough to compare a month with the same month of last year."""

USAGE_DAYS = 30.0
"""Number of past days whose use of nodes `shoal pool describe` shows: about a month, the period of most budgets."""

RETENTION_PERIOD = 3600.0
"""Interval at which the reconciler removes old logs and operations."""

RETIRE_WITHIN = 120.0
"""Default time until the announced end of a node. AWS announces the end of a spot machine 120 s in advance."""

DRAIN_GRACE = 30.0
"""Time in which a busy node may finish its work when the pool shrinks. After this time the node is ended."""

DOWN_PATIENCE = 60.0
"""Time that `down()` waits for the pool's nodes to end, before it raises an error. On the test machine, each node takes
about 1 s."""

SUPERVISOR_PERIOD = 1.0
"""Interval at which a supervisor reads its node's row to see whether the node has to end, and checks whether the node's
raylet (Ray's main process on a node) still runs."""

HEAD_PATIENCE = 15.0
"""Time for which a worker node keeps running after a request to its head has timed out after 5 s. Together these are 20
s. The head also waits 20 s before it declares a silent node dead, so head and worker give up at about the same time."""

REVIVE_PERIOD = 5.0
"""Interval at which a supervisor checks whether the host's reconciler runs. If the reconciler has died, the supervisor
starts a new one."""

STORE_PATIENCE = 3600.0
"""Time for which a supervisor keeps its node running while the store cannot be reached. A failover of the database
takes less time, so it does not end nodes."""

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

WAIT_PERIOD = 0.25
"""Shortest interval at which a blocking call checks whether its operation has ended. The interval grows with the time
waited."""

WAIT_PERIOD_MOST = 2.0
"""Longest interval at which a blocking call checks whether its operation has ended. The interval reaches this value
after 20 s. With 1 s instead, 200 waiting processes doubled the run time of `shoal jobs list`."""

TURN_PATIENCE = 1.0
"""If several processes of a host wait for the same pool, only one of them reconciles it (see
`shoal.pool.reconcile.election`). If this process has not reconciled the pool for this time, because it was killed or
paused or is slow, another process takes over."""

CLUSTER_PATIENCE = 5.0
"""Timeout of one request to the head of an existing Ray cluster. The head normally answers in milliseconds. The timeout
is short because `describe_pool` waits for the answer."""

CLUSTER_JOB_PATIENCE = 45.0
"""Timeout of a one-line job on an existing Ray cluster. Such a job takes 3 s on the test machine. It takes longer if
the head has to start its agents first, or if other jobs are queued before it."""

CLUSTER_START_TIMEOUT = 900.0
"""Time within which a node that was requested from Ray's autoscaler has to join the cluster: enough to start a cloud
machine and pull its image. By default, a lease expires after the same time."""

STARTS_AT_ONCE = (os.cpu_count() or 1) + 1
"""Number of nodes that may start at the same time on this host: one more than the host has cores. A starting node keeps
one core busy with the imports of its agents. When the node has to wait, another node can use the core."""
