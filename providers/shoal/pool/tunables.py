"""All tunable constants of pools, each with the reason for its value. Durations are in seconds."""

from __future__ import annotations

ROLLBACK_AFTER = 720.0
"""Default deadline of a scale operation. Same as in Snowflake's `scale_cluster`, and long enough for cloud nodes."""

LEASE_TTL = 900.0
"""Default time to live of a lease. It spans several polls of a slow orchestrator, and a dead run does not hold its
nodes for longer than this."""

START_TIMEOUT = 120.0
"""Time after which a local node that is not up is given up. Alone it takes 3 to 9 s on the test machine; it may also
wait for nodes that start before it."""

SPAWN_GRACE = 20.0
"""Time that a spawned supervisor has to claim its row before another is spawned. On an idle host it takes about 1 s."""

MAX_START_FAILURES = 3
"""Failed node starts after which an operation is rolled back before its deadline. Two may be chance; three point to a
cause that persists."""

REPLACE_COOLDOWN = 30.0
"""Pause before the next start after two nodes in a row failed with no operation open. It doubles with each further
failure, so that a broken host does not start nodes in a loop. The first failed node is replaced at once, because a
single failure is normal."""

REPLACE_COOLDOWN_MOST = 900.0
"""Longest pause between starts after failures. After the cause is fixed, the next try comes within this time."""

KEEP_OPERATIONS = 100
"""Number of ended operations that are kept for each pool. Every read of the pool loads all of them, so more would make
each read slower."""

KEEP_LOGS = 7 * 24 * 3600.0
"""Time for which the logs of ended nodes are kept. One week, so that logs of Friday can be read on Monday."""

RETENTION_PERIOD = 3600.0
"""Interval at which the reconciler removes old logs and operations."""

DRAIN_GRACE = 30.0
"""Time that a busy node has to finish its work before it is ended."""

DOWN_PATIENCE = 60.0
"""Time that `down()` waits for its nodes to end. Each node takes about 1 s on the test machine."""

SUPERVISOR_PERIOD = 1.0
"""Interval at which a supervisor checks that its node's row still allows the node, and checks its raylet."""

HEAD_PATIENCE = 15.0
"""Time for which a worker node keeps running after its head did not answer a request for 5 s. Together 20 s: the same
time after which the head declares a silent node dead."""

REVIVE_PERIOD = 5.0
"""Interval at which a supervisor starts the host's reconciler if it does not run, so that a dead one is replaced within
seconds."""

STORE_PATIENCE = 3600.0
"""Time for which a supervisor keeps its node while the store cannot be reached. Longer than a database fail-over."""

STORE_PERIOD = 2.0
"""Interval at which a blocking call tries again while the store cannot be reached."""

TERMINATE_PATIENCE = 5.0
"""Time that a node has to leave the cluster by itself before it is killed. Measured: 0.3 to 2 s."""

KILL_PATIENCE = 10.0
"""Time that a process has to end after SIGKILL. A process that takes longer hangs in the kernel, and is reported."""

RECONCILE_PERIOD = 1.0
"""Interval at which the reconciler checks every pool. `describe_pool` and the sensors promise to follow changes within
seconds."""

WAIT_PERIOD = 0.25
"""First interval at which a blocking call checks its operation."""

WAIT_PERIOD_MOST = 2.0
"""Longest interval at which a blocking call checks its operation, reached after 20 s. With 1 s, 200 waiting processes
doubled the run time of `shoal jobs list`."""

TURN_PATIENCE = 1.0
"""Time after which a waiting process takes over reconciling from another one that was killed, is paused or is slow.
It limits all processes that wait for one pool on one host to one write per second while there is no progress."""

CLUSTER_PATIENCE = 5.0
"""Timeout of one request to the head of an existing Ray cluster. The head normally answers in milliseconds, and
`describe_pool` waits for the answer."""

CLUSTER_JOB_PATIENCE = 45.0
"""Timeout of a one-line job on an existing Ray cluster. It takes 3 s on the test machine; the head may have to start
its agents first, and other jobs may be queued before it."""

CLUSTER_START_TIMEOUT = 900.0
"""Time that a node requested from Ray's autoscaler has to arrive: enough to start a cloud machine and pull its image.
A lease lives as long by default."""
