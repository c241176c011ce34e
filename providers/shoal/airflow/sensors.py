"""Airflow sensors on compute pools: `NodesSensor` waits until nodes are ready."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.definitions.context import Context
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from shoal.airflow.operators import base
from shoal.airflow.results import no_retry_of_permanent_errors
from shoal.errors import ScaleError


class NodesSensor(base.PoolOperator, BaseSensorOperator):
    """Sensor that waits until a given number of a pool's nodes are ready, and renews the DAG run's lease during the
    wait.

    The sensor fails at once if fewer than `expected_nodes` nodes are requested, for example because the request was
    rolled back. The error message contains the reason.

    :param expected_nodes: Number of nodes, including the head node. (templated)
    :param poke_interval: Seconds between two checks. The default is short because nodes start within seconds.
    :param deferrable: Whether the sensor waits in Airflow's triggerer, without a worker. By default, Airflow's setting
        ``[operators] default_deferrable`` decides.
    :param poll_interval: Seconds between two checks while the sensor is deferred. By default `poke_interval`.
    """

    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, "expected_nodes")

    def __init__(
        self,
        *,
        expected_nodes: int,
        poke_interval: float = 2.0,
        deferrable: bool | None = None,
        poll_interval: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.expected_nodes = expected_nodes
        self.deferrable = base.is_deferrable(deferrable)
        self.poll_interval = poll_interval
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: base.Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, the number of nodes and how the sensor waits."""
        base.check_nodes(arguments, "expected_nodes", base.check_pool(arguments))
        base.check_waits(arguments)

    def execute(self, context: Context) -> Any:
        """Wait until the nodes are ready. A deferrable sensor waits in the triggerer; others wait in this process."""
        if not self.deferrable:
            return super().execute(context)
        limit = self.timeout if self.execution_timeout is None else self.execution_timeout.total_seconds()
        try:
            self._defer_until_ready(context, time.time() + min(self.timeout, limit))
        # With `soft_fail` or `never_fail`, an error must mark the sensor as skipped. Airflow itself does this only in
        # two cases: the sensor is not deferrable, or the error occurs after a deferral.
        except AirflowFailException as error:
            if self.soft_fail or self.never_fail:
                raise AirflowSkipException(str(error)) from error
            raise
        return None

    def execute_complete(self, context: Context, event: Mapping[str, Any], deadline: float) -> None:
        """Continue the task after its deferral: return if the nodes are ready, raise an error if they cannot become
        ready, or defer the sensor again."""
        if event["timed_out"] and not self.poke(context):
            raise AirflowSensorTimeout(
                f"the pool had fewer than {self.expected_nodes} ready nodes after the sensor's timeout of "
                f"{self.timeout:g} s: increase the timeout, or see `shoal pool describe` for the reason"
            )
        self._defer_until_ready(context, deadline)

    def _defer_until_ready(self, context: Context, deadline: float) -> None:
        """Defer the task, unless the nodes are ready already.

        :param deadline: Time at which the sensor's timeout ends, in seconds since the epoch.
        """
        if self.poke(context):
            return
        pool, nodes = self.pool_in(context), base.node_count(self.expected_nodes, "expected_nodes")
        interval = self.poll_interval or self.poke_interval
        self._defer_to_pool(pool, deadline, {"deadline": deadline}, nodes=nodes, poll_interval=interval)

    @no_retry_of_permanent_errors()
    def poke(self, context: Context) -> bool:
        """Renew the DAG run's lease, and return whether the nodes are ready."""
        pool = self.pool_in(context)
        has_lease = pool.renew()
        expected = base.node_count(self.expected_nodes, "expected_nodes")
        status = pool.describe()
        self.log.info("pool %s: %d of %d nodes ready", pool.name, len(status.active), expected)
        if note := status.queue_note(pool.holder):
            self.log.info("the lease of this DAG run is %s", note)
        try:
            return pool.has_nodes(expected)
        except ScaleError as error:
            advice = f". {self.setup_advice(context)}" if self.lease is not None and not has_lease else ""
            raise AirflowFailException(f"{error}{advice}") from error
