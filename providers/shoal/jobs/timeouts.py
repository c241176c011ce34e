"""Time-outs and periods of jobs, each with the reason for its value. Other limits are defined in the modules that use
them."""

from __future__ import annotations

SHORTEST_PAUSE_S = 0.1
"""Shortest pause in seconds between two reads of a job's row. From 1 s of waiting on, the pause is a tenth of the time
waited, up to `LONGEST_PAUSE_S`. So a waiting process notices the end of its job after at most a tenth of the time
waited."""

LONGEST_PAUSE_S = 2.0
"""Longest pause in seconds between two reads of a job's row. The pause is not shorter because 200 processes that read
every second made `shoal jobs list` take three times as long."""

HEAD_CHECK_S = 3.0
"""Seconds between two requests to the head that ask whether the driver still runs. The requests are necessary because a
killed driver cannot record its end."""

TURN_CHECK_S = 0.5
"""Seconds between two checks whether a waiting job may start. `TURN_CHECK_PER_PLACE_S` is added to this value for each
place in the queue."""

TURN_CHECK_PER_PLACE_S = 0.2
"""Seconds to add to `TURN_CHECK_S` for each place in the queue. The processes of the jobs that start next therefore
check most often, and the number of checks grows slowly: 40 waiting processes together make 13 checks per second, and
200 waiting processes make 20."""

POLL_PERIOD_S = 30.0
"""Seconds between two updates of `last_polled_at`. The period is far below the default `orphan_after` of 15 minutes, so
that no job ends by mistake. With this period, even hundreds of waiting processes cause little load."""

ORPHAN_GRACE_S = 60.0
"""Seconds that a process other than the driver waits, after a job's `orphan_after` has passed, before that process ends
the job. Normally a thread of the driver, which checks every 2 s, has ended the job by then."""

TURN_PATIENCE_S = 4.0
"""Seconds for which the pool must have had room for a waiting job of another process before this process starts that
job. If a process waits for the job, that process starts the job within 2 s. If no process waits for the job, because it
is detached, other processes have to start the job."""

STOP_PATIENCE_S = 15.0
"""Seconds for which `cancel` waits for the driver's end. The head kills a driver 3 s after SIGTERM, so 15 s are
normally enough."""

CLEAN_UP_PATIENCE_S = 5.0
"""Seconds for which `wait` lets a driver clean up after it has stored the result. The clean-up took 0.1 s when
measured."""

CLEAN_UP_PERIOD_S = 0.05
"""Seconds between two checks by `wait` whether the driver has cleaned up. The period is short, because a clean-up takes
about 0.1 s."""

HEAD_PATIENCE_S = 45.0
"""Seconds without an answer from a pool's head after which the pool's jobs count as lost. The limit is longer than the
8 to 20 s that the replacement of a head took on 2 busy cores."""

FAR_HEAD_PATIENCE_S = 300.0
"""Same limit as `HEAD_PATIENCE_S`, for a head on another machine to which there is no network connection. The limit is
longer because jobs go on while a network link is down, and the repair of the link may take minutes."""

SUBMISSION_GRACE_S = 20.0
"""Seconds for which the pool's head may have no record of a pending job. After that time, another process that waits
for the job sends the job to the head. The time is longer than the 15 s for which the submitter retries, because only
the submitter has the credentials from the spec's URIs."""

FAR_SUBMISSION_GRACE_S = 300.0
"""Same limit as `SUBMISSION_GRACE_S`, for a submitter on another host. This host cannot check whether that process is
alive. The limit is far above the 15 s for which the submitter retries, and above the difference between two hosts'
clocks."""

HEAD_TIMEOUT_S = 30.0
"""Time limit in seconds for one request. A submission to a Ray cluster waits for a process of Ray on the head, the
agent, which took up to 10 s on a busy 2-core machine."""

QUEUE_PERIOD_S = 1.0
"""Seconds between two checks of the queues by the process that starts waiting jobs. The period need not be shorter,
because a driver that has recorded the end of its job starts the next job itself."""

ROW_CHECK_S = 2.0
"""Seconds between two reads of the job's row. The period need not be shorter, because a SIGTERM from the head usually
ends a cancelled job sooner."""

HEARTBEAT_S = 5.0
"""Shortest time in seconds between two heartbeats. The time is not shorter, because every running job writes to the
store at each heartbeat."""

SIGTERM_GRACE_S = 10.0
"""Seconds that the main thread has after SIGTERM to end the workers and record the end, before its other thread ends
the process."""

DRIVER_END_S = 10.0
"""Seconds that the threads and exit handlers of a driver have after the job's end, before the driver is ended. A driver
runs little code of users, and a thread that never ends must not keep the job's lease. The driver of a cancelled job
ends earlier, because the head kills it 3 s after SIGTERM."""

LEAVING_PERIOD_S = 5.0
"""Seconds between two checks by a driver which nodes will shut down soon. AWS announces the shutdown of a spot machine
120 s before it."""

METRICS_PERIOD_S = 1.0
"""Shortest time in seconds between two calls to MLflow. Metrics are buffered between the calls, because a call takes at
least 10 ms, and many training steps could run in that time."""

CREDENTIALS_PATIENCE_S = 600.0
"""Seconds for which a driver waits for its credentials. A process that waits for the job sends the credentials within
seconds. For a deferred task, Airflow first has to start a worker process, which may take minutes if Airflow is busy."""

CREDENTIALS_PERIOD_S = 0.5
"""Seconds between two reads of the attempt's row by a driver that waits for credentials. The period need not be
shorter, because sending the credentials takes seconds."""

LOCK_PERIOD_S = 0.2
"""Seconds between two tries to take a lock in the store. The time is short enough because a lock is usually held for
about a second."""

PROMOTION_LOCK_TTL_S = 120.0
"""Seconds until the lock of a promotion for an alias expires. A process that holds the lock makes two requests to
MLflow, each with a default time limit of 120 s. If the requests take longer than 120 s, the process loses the lock, and
then compares the models in another round and corrects the alias."""

DELETION_LOCK_TTL_S = 120.0
"""Seconds until the lock for an alias expires while old versions are deleted. The lock is held for at most four
requests to MLflow."""

MLFLOW_RETRIES = 5
"""Number of times that a driver's MLflow client repeats a request after the training. The pauses of 0, 4, 8, 16 and 32
seconds together are a minute, which is enough for a restart of the server. With MLflow's default of 7 repetitions, a
request to a server that is gone takes 4 minutes, and a job makes several requests. MLflow's limit of 120 s for an
answer is not changed, because a server answers only after it has stored a model, which may be large."""

REGISTRY_PATIENCE_S = 10.0
"""Time limit in seconds for the first answer of a tracking server. Without this limit, MLflow's own client would retry
for several minutes."""

FORK_SERVER_IDLE_S = 300.0
"""Seconds without a driver after which the server frees the memory of the modules (about 150 MiB)."""

JOB_SILENT_AFTER = 30.0
"""Seconds without a change in a job's row after which the job counts as silent (possibly lost). A driver (the process
that runs the job) changes the row every 5 s, and a submission takes up to 15 s, so healthy jobs stay below this
limit."""

WAITING_JOB_SILENT_AFTER = 45.0
"""Seconds that a job may wait in the queue of its pool before it counts as silent (possibly lost). If a process on this
host waits for the job's result, that process starts the job sooner."""

SILENT_JOBS_PERIOD = 10.0
"""Seconds between two checks for jobs whose rows in the database no longer change."""

LOST_JOBS_PERIOD = 60.0
"""Shortest time in seconds between two starts of the command that asks heads about jobs that may be lost. A head that
does not answer needs some time to recover, so more frequent requests would be useless."""
