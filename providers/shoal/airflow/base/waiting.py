"""Base class of operators that wait, either in a worker or deferred in Airflow's triggerer."""

from __future__ import annotations

import socket
import time
from typing import Any

from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import AirflowException

from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.checks import Arguments, check_waits

POLL_INTERVAL_S = 5.0
"""Default of `poll_interval`. The trigger notices the end of a wait after at most `poll_interval` seconds. Airflow then
needs more than 5 s to start the process in which the deferred task continues."""

_OPERATION_GRACE_S = 60.0
"""Seconds after the deadline of a request for nodes, after which a deferred task continues even if the request is still
open. Normally the reconciler on the pool's host ends a request at its deadline."""


def is_deferrable(given: bool | None) -> bool:
    """Return an operator's argument `deferrable` or, if it is None, Airflow's setting ``[operators]
    default_deferrable``.

    :param given: The operator's argument `deferrable`.
    """
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False)) if given is None else given


def deadline_of_operation(rollback_after_s: float) -> float:
    """Return the time until which a deferred task waits for a request for nodes: the deadline of the request, plus a
    grace period.

    :param rollback_after_s: Seconds until the deadline of the request.
    :returns: Seconds since the epoch.
    """
    return time.time() + rollback_after_s + _OPERATION_GRACE_S


class WorkerLostError(AirflowException):
    """Raised in a task whose worker was killed. The job goes on, and Airflow's next try of the task attaches to the
    job."""


def end_if_worker_is_lost() -> None:
    """Raise WorkerLostError if the worker's process that supervises this task was killed.

    The task's own process survives the loss of its worker, but can no longer send a result to Airflow. If this process
    went on and collected the job's result, the next try of the task would train again.
    """
    from airflow.sdk.execution_time import task_runner

    # In `dag.test()`, there is no supervising process, and so no connection to one.
    connection = getattr(getattr(task_runner, "SUPERVISOR_COMMS", None), "socket", None)
    if connection is None:
        return
    try:
        is_lost = connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        is_lost = False
    except OSError:
        is_lost = True
    if is_lost:
        raise WorkerLostError(
            "the task's worker was killed: the job goes on, and Airflow's next try of the task attaches to the job"
        )


class WaitingOperator(PoolOperator):
    """Base class of operators that wait.

    :param deferrable: Whether the task waits in Airflow's triggerer, where it takes no slot of a worker. By default,
        Airflow's setting ``[operators] default_deferrable`` decides.
    :param poll_interval: Seconds between two checks of the store while the task is deferred.
    :param wait_for_completion: Whether the task waits. False: the task ends when its request or job is submitted.
    """

    def __init__(
        self,
        *,
        deferrable: bool | None = None,
        poll_interval: float = POLL_INTERVAL_S,
        wait_for_completion: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.deferrable = is_deferrable(deferrable)
        self.poll_interval = poll_interval
        self.wait_for_completion = wait_for_completion

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, and how the task waits."""
        super().check_arguments(arguments)
        check_waits(arguments)
