"""Time-outs and periods of jobs in seconds, each with the reason for its value. Other limits are defined in the modules
that use them."""

from __future__ import annotations

HEAD_CHECK_S = 3.0
"""Period of asking the head whether the driver still runs, because a killed driver cannot record its end."""

TURN_CHECK_S = 0.5
"""Period of checking whether a waiting job may start, if it is the first in the queue."""

TURN_CHECK_PER_PLACE_S = 0.2
"""Seconds to add to `TURN_CHECK_S` for each place in the queue. So the number of checks grows slowly: 40 waiting
processes together make 13 checks per second, and 200 make 20."""

POLL_PERIOD_S = 30.0
"""Period of updating `last_polled_at`. It is far below the default `orphan_after` of 15 minutes, so that no job ends by
mistake, and hundreds of waiting processes cause little load."""

UNPOLLED_AFTER_S = 60.0
"""Seconds since the last poll after which no process waits for a job any more: two polls were left out. Prefect marks a
run as crashed at least 60 s after the process was killed, so the janitor, which starts then, ends the jobs."""

LIVE_SUBMITTER_SILENT_AFTER_S = 300.0
"""The same if the submitter of the job still runs on this host. It may be unable to reach the store, or have few CPUs.
The limit is needed because the submitter may also be a process that took the job out of the queue for another one."""

ORPHAN_GRACE_S = 60.0
"""Seconds after a job's `orphan_after` until another process ends the job. Normally the driver, which checks every 2 s,
has ended it by then."""

TURN_PATIENCE_S = 4.0
"""Seconds for which the pool must have had room for a waiting job of another process before this process starts that
job. A process that waits for the job starts it within 2 s, but no process waits for a detached job."""

STOP_PATIENCE_S = 15.0
"""Seconds for which `cancel` waits for the driver's end. The head kills a driver 3 s after SIGTERM, so 15 s are
normally enough."""

CLEAN_UP_PATIENCE_S = 5.0
"""Seconds for which `wait` lets a driver clean up after it has stored the result; measured: 0.1 s."""

CLEAN_UP_PERIOD_S = 0.05
"""Period of the checks by `wait` whether the driver has cleaned up, which takes about 0.1 s."""

HEAD_PATIENCE_S = 45.0
"""Seconds without an answer from a pool's head after which the pool's jobs count as lost. The limit is longer than the
8 to 20 s that the replacement of a head took on 2 busy cores."""

FAR_HEAD_PATIENCE_S = 300.0
"""The same for a head on another machine to which there is no network connection: jobs go on while a link is down, and
its repair may take minutes."""

SUBMISSION_GRACE_S = 20.0
"""Seconds for which the head may have no record of a pending job before another process that waits for the job sends
it. Longer than the 15 s for which the submitter retries, because only the submitter has the credentials."""

FAR_SUBMISSION_GRACE_S = 300.0
"""The same for a submitter on another host, which this host cannot check. Far above the 15 s for which the submitter
retries, and above the difference between two hosts' clocks."""

HEAD_TIMEOUT_S = 30.0
"""Time limit for one request to a head. A submission waits for Ray's agent, which took up to 10 s on 2 busy cores."""

QUEUE_PERIOD_S = 1.0
"""Period of checking the queues by the process that starts waiting jobs. It need not be shorter, because a driver that
has ended starts the next job itself."""

ROW_CHECK_S = 2.0
"""Period of reading the job's row by its driver. A SIGTERM from the head usually ends a cancelled job sooner."""

HEARTBEAT_S = 5.0
"""Shortest time between two heartbeats, because every running job writes to the store at each."""

SIGTERM_GRACE_S = 10.0
"""Seconds that a driver has after SIGTERM to end the workers and record the end, before it is killed."""

DRIVER_END_S = 10.0
"""Seconds that the threads and exit handlers of a driver have after the job's end. A thread that never ends must not
keep the job's lease. The driver of a cancelled job ends earlier, as the head kills it 3 s after SIGTERM."""

LEAVING_PERIOD_S = 5.0
"""Period of checking which nodes will shut down soon. AWS announces the end of a spot machine 120 s before."""

METRICS_PERIOD_S = 1.0
"""Shortest time between two calls to MLflow, which take 10 ms or more: the time of many training steps."""

TRIAL_RUNS_END_S = 30.0
"""Seconds for which a search waits at its end until MLflow has the runs of its trials. Each takes four requests."""

CREDENTIALS_PATIENCE_S = 600.0
"""Seconds for which a driver waits for its credentials. A process that waits for the job sends the credentials within
seconds. For a deferred task, Airflow first has to start a worker process, which may take minutes if Airflow is busy."""

CREDENTIALS_PERIOD_S = 0.5
"""Period of reading the row by a driver that waits for credentials, whose sending takes seconds."""

LOCK_PERIOD_S = 0.2
"""Period of trying to take a lock in the store. A lock is usually held for about a second."""

PROMOTION_LOCK_TTL_S = 120.0
"""Seconds until the lock of a promotion expires. Its holder makes two requests to MLflow, each with a time limit of
120 s. If it loses the lock meanwhile, it compares the models in another round and corrects the alias."""

DELETION_LOCK_TTL_S = 120.0
"""Seconds until the lock for an alias expires while old versions are deleted, in at most four requests to MLflow."""

MLFLOW_RETRIES = 5
"""Number of times that a driver's MLflow client repeats a request after the training. The pauses of 0, 4, 8, 16 and 32
seconds together are a minute, enough for a restart of the server. With MLflow's default of 7, each request to a server
that is gone takes 4 minutes. MLflow's limit of 120 s for an answer stays, because a large model takes long to store."""

REGISTRY_PATIENCE_S = 10.0
"""Time limit for the first answer of a tracking server. MLflow's own client would retry for several minutes."""

FORK_SERVER_IDLE_S = 300.0
"""Seconds without a driver after which the server frees the memory of the modules (about 150 MiB)."""

JOB_SILENT_AFTER = 30.0
"""Seconds without a change in a job's row after which the job counts as silent (possibly lost). A driver changes the
row every 5 s, and a submission takes up to 15 s."""

WAITING_JOB_SILENT_AFTER = 45.0
"""Seconds that a job may wait in its queue before it counts as silent. A process that waits for it starts it sooner."""

SILENT_JOBS_PERIOD = 10.0
"""Seconds between two checks for jobs whose rows in the database no longer change."""

LOST_JOBS_PERIOD = 60.0
"""Shortest time between two starts of the command that asks heads about lost jobs. A head that does not answer needs
some time to recover."""
