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
"""Pause before a node is replaced that failed with no operation open, so that a broken host does not spin."""

DRAIN_GRACE = 30.0
"""How long a busy node that has to go may finish its work."""

DOWN_PATIENCE = 60.0
"""How long `down()` waits for its nodes' end: each takes about a second here."""

SUPERVISOR_PERIOD = 1.0
"""How often a supervisor proves its right to exist and looks after its raylet."""

STORE_PATIENCE = 3600.0
"""How long a supervisor keeps its node while the store cannot be reached: longer than a database fail-over."""

TERMINATE_PATIENCE = 5.0
"""How long a node may take to leave the cluster by itself before it is killed: seen 0.3 to 2 s here."""

KILL_PATIENCE = 10.0
"""How long SIGKILL may take to show; longer means a process that hangs in the kernel, which is reported."""

RECONCILE_PERIOD = 1.0
"""How often the reconciler looks at every pool: within seconds is what `describe_pool` and the sensors promise."""

WAIT_PERIOD = 0.25
"""How often a blocking call looks at its operation."""
