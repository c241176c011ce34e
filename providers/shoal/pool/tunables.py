"""Every constant of pools that one might want to change, with the reason for its value. Seconds, if not said."""

from __future__ import annotations

ROLLBACK_AFTER = 720.0
"""Default deadline of a scale operation: what Snowflake's `scale_cluster` takes, long enough for cloud nodes."""

LEASE_TTL = 900.0
"""Default time to live of a lease: several polls of a slow orchestrator, and short enough for what a dead run holds."""

START_TIMEOUT = 120.0
"""A local node that is not up by then never will be: alone it takes 3 to 9 s here, and waits for others before it."""

SPAWN_GRACE = 20.0
"""How long a spawned supervisor may take to claim its row before another is spawned: it takes ~1 s idle."""

MAX_START_FAILURES = 3
"""Failed starts after which an operation gives up before its deadline: two may be bad luck, three are a reason."""

REPLACE_COOLDOWN = 30.0
"""Pause before the next try after two nodes in a row failed with no operation open; doubled with each further one, so
that a broken host does not spin. The first is replaced at once: a node may die for once."""

REPLACE_COOLDOWN_MOST = 900.0
"""The longest such pause: somebody who mends the cause does not wait for longer."""

KEEP_OPERATIONS = 100
"""Ended operations of a pool that are kept for `describe` and for looking back; more only make every look slower."""

KEEP_LOGS = 7 * 24 * 3600.0
"""How long the logs of ended nodes are kept: a week, so that Monday can look at Friday's."""

RETENTION_PERIOD = 3600.0
"""How often the reconciler removes what is older."""

DRAIN_GRACE = 30.0
"""How long a busy node that has to go may finish its work."""

DOWN_PATIENCE = 60.0
"""How long `down()` waits for its nodes' end: each takes about a second here."""

SUPERVISOR_PERIOD = 1.0
"""How often a supervisor proves its right to exist and looks after its raylet."""

HEAD_PATIENCE = 15.0
"""How long a worker node lives on after its head did not answer it in 5 s: together what the head waits for a node
that fell silent before it gives up its work."""

REVIVE_PERIOD = 5.0
"""How often a supervisor sees to it that the host's reconciler runs: a dead one is back within seconds."""

STORE_PATIENCE = 3600.0
"""How long a supervisor keeps its node while the store cannot be reached: longer than a database fail-over."""

STORE_PERIOD = 2.0
"""How often a blocking call tries again while the store cannot be reached."""

TERMINATE_PATIENCE = 5.0
"""How long a node may take to leave the cluster by itself before it is killed: seen 0.3 to 2 s here."""

KILL_PATIENCE = 10.0
"""How long SIGKILL may take to show; longer means a process that hangs in the kernel, which is reported."""

RECONCILE_PERIOD = 1.0
"""How often the reconciler looks at every pool: within seconds is what `describe_pool` and the sensors promise."""

WAIT_PERIOD = 0.25
"""How often a blocking call looks at its operation at first."""

WAIT_PERIOD_MOST = 2.0
"""How often it looks after 20 s: 200 waiters that looked every second doubled the time of `shoal jobs list`."""

TURN_PATIENCE = 1.0
"""After how long a waiter takes over the reconciling from another that was killed, is paused, or takes long to act: so
all who wait for a pool on one host write once a second at most while nobody makes progress."""

CLUSTER_PATIENCE = 5.0
"""For one request to a foreign cluster's head: it answers in milliseconds, and `describe_pool` waits for it."""

CLUSTER_JOB_PATIENCE = 45.0
"""For a job of one line on a foreign cluster: 3 s here, with a head that starts its agents and a queue before it."""

CLUSTER_START_TIMEOUT = 900.0
"""How long a node asked of Ray's autoscaler may take: a cloud machine with its image, as long as the claim stands."""
