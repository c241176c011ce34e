"""Define the time-outs and periods of trainings, each with the reason for its value.

Other limits, such as sizes, are defined in the modules that use them.
"""

from __future__ import annotations

RESOURCES_WAIT_S = 600.0
"""Seconds to wait for CPUs and GPUs that other work uses. This time is long enough for another training to end, and
short enough that a waiting Airflow or Prefect task does not occupy its slot for hours."""

FIRST_WAIT_MESSAGE_S = 3.0
"""Seconds to wait for CPUs and GPUs before the first message about the wait is printed. A free pool reserves the
resources in 0.05 s, and a pool whose last gang was just killed needs up to 2 s, so these normal cases print no
message."""

WAIT_MESSAGE_PERIOD_S = 30.0
"""Seconds between two messages about the wait. The messages show the user that the process waits and does not hang."""

WORKER_START_S = 120.0
"""Seconds to wait until all workers have started. Workers on a running node start in 1 to 5 s. The limit is much
longer, because workers start more slowly on a machine where many processes import modules at once."""

WORKER_REPLACE_S = 30.0
"""Seconds to wait until a worker has started in the place of a lost one. Shorter than `WORKER_START_S`, because the
other workers get no answers meanwhile, and because Ray notices only after about 15 s that a node is gone."""

WORKER_HEARTBEAT_S = 1.0
"""Seconds between two heartbeats of a worker."""

WORKER_SILENCE_S = 240.0
"""Seconds without a heartbeat after which the driver reports a worker as lost. The driver notices an ended process at
once and a vanished host after 4 s (`gang/connection.py`). So a silent worker still exists, but is stopped or blocked:
by SIGSTOP, a snapshot of its machine, or a C extension that is loaded from a cold disk. Most of these go on after some
minutes at most, and a restart would cost the training more than the wait."""

FURTHER_ERRORS_S = 0.5
"""Seconds to wait for further errors after the first failure, to find the real cause. If a worker raises an exception
or is killed, the kernel closes its connections at once. The other workers then failed within 0.1 s."""

UNREACHABLE_WORKER_S = 4.5
"""Same limit as `FURTHER_ERRORS_S`, while all known errors only report an unreachable worker. If a host vanishes, the
driver notices this only after the 4 s of the TCP keepalive."""

UNEVEN_RETURN_S = 60.0
"""Seconds after the return of the first rank until the log says which ranks have not returned. Ranks that train on the
same number of batches return within seconds of each other, and saving a model on one rank rarely takes a minute."""

WORKER_FINISH_S = 30.0
"""Seconds to wait, after a successful training, until the threads of the workers have ended and their exit handlers
have run. Experiment trackers send their last data in an exit handler, which takes seconds. A thread that never ends
must not keep the job, which has its result, from ending."""

WORKER_KILL_S = 1.0
"""Seconds to wait until killed workers have ended, before the driver closes the workers' sockets. In our measurements
killed processes ended within 0.1 s, so the limit is reached only if a node is dead or a host has vanished."""

WORKER_END_S = 4.0
"""Seconds to wait for the end of the workers after the driver has closed their sockets; for the reason see
`WORKER_KILL_S`."""

REMOVE_FOLDERS_S = 10.0
"""Seconds to wait until the workers' temporary working folders on other hosts are removed. Ray has to start a process
on each of these hosts to remove the folder."""

REPLACE_NODE_S = 60.0
"""Seconds to wait for the replacement of a lost node before the training continues with fewer workers, if
`RunConfig.min_workers` allows fewer. A local node is replaced within 40 s, including the time to detect its loss."""

RESTART_PERIOD_S = 2.0
"""Seconds between two attempts to start the workers while the training waits for the replacement of a lost node."""

COLLECTIVE_S = 600
"""Seconds that a worker of XGBoost or LightGBM waits for the other workers in a collective operation (such as an
allreduce) before it fails. XGBoost's default is half an hour. The driver detects a dead worker within seconds, because
the worker's socket closes. This limit is needed only for a worker that is alive but makes no progress, for example
because a read from storage hangs. Shard sizes differ by at most 1 %, so a healthy worker is never ten minutes slower
than the others."""

TRACKER_START_S = 60.0
"""Seconds to wait for the answer of XGBoost's tracker process. The import of xgboost takes 1.4 s, or 3 s from a cold
disk, and longer while many processes start. The limit is much longer, so that only a process that hangs exceeds it."""

TORCH_JOIN_S = 300.0
"""Maximum time in seconds that a rank's request to PyTorch's key-value server (the store) waits for a key. The ranks
find each other with this server. The value is PyTorch's default."""

SET_EXPERIMENT_WAIT_S = 30.0
"""Maximum time in seconds that the other ranks wait for rank 0 to call ``mlflow.set_experiment``. If all ranks run the
same code, they call ``set_experiment`` within a second of each other. After the maximum time, a rank uses the first run
of the job."""

FIRST_PROGRESS_LINE_S = 10.0
"""Seconds until the first line about the progress is printed, so that a training or prediction of a few seconds prints
none."""

PROGRESS_LINE_PERIOD_S = 10.0
"""Seconds between two progress lines in a log. A shorter interval would make the log long, and a longer interval would
make a slow training look like a training that hangs."""

PROGRESS_REPORT_PERIOD_S = 2.0
"""Minimum number of seconds between two reports of a boosting worker about its progress. Reporting every round would be
slow, because a round may take less than a millisecond."""

USAGE_PERIOD_S = 10.0
"""Seconds between two measurements of the memory and the CPU time that workers and nodes use. MLflow's system metrics
have the same default interval."""
