"""Base class of operators that wait: whether the task is deferred meanwhile, and how often its trigger looks."""

from __future__ import annotations

import time
from typing import Any

from airflow.sdk.configuration import conf

from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.checks import Arguments, check_waits

POLL_INTERVAL_S = 5.0
"""Default of `poll_interval`. A deferred task continues after up to this time, and after the time that Airflow needs to
start a worker process, which is longer."""

_OPERATION_GRACE_S = 60.0
"""Seconds after the deadline of a request for nodes until a deferred task continues in any case. The reconciler of the
pool's host normally ends the request at its deadline."""


def is_deferrable(given: bool | None) -> bool:
    """Return whether a task is deferred: as given, else as Airflow's setting ``[operators] default_deferrable`` says.

    :param given: The operator's argument `deferrable`.
    """
    return bool(conf.getboolean("operators", "default_deferrable", fallback=False)) if given is None else given


def deadline_of_operation(rollback_after_s: float) -> float:
    """Return the time at which a task that waits for a request for nodes continues in any case.

    :param rollback_after_s: Seconds until the deadline of the request.
    :returns: Seconds since the epoch.
    """
    return time.time() + rollback_after_s + _OPERATION_GRACE_S


class WaitingOperator(PoolOperator):
    """Base class of operators that wait.

    :param deferrable: Whether the task waits in Airflow's triggerer, where it takes no slot of a worker. By default,
        Airflow's setting ``[operators] default_deferrable`` decides.
    :param poll_interval: Seconds between two looks at the store while the task is deferred.
    :param wait_for_completion: Whether the task waits at all. False: it ends when its request or job is submitted.
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
        """Check those arguments that are known: the pool, and how the task waits."""
        super().check_arguments(arguments)
        check_waits(arguments)
