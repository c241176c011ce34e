"""Airflow sensors on compute pools: `NodesSensor` waits until nodes are ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow._base import CheckedOperator
from shoal.airflow._holder import holder_of
from shoal.airflow.checks import Arguments, check_nodes, check_pool, node_count
from shoal.airflow.hooks import ComputePoolHook
from shoal.airflow.retries import no_retry_of_permanent_errors
from shoal.errors import ScaleError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class NodesSensor(CheckedOperator, BaseSensorOperator):
    """Sensor that waits until a given number of a pool's nodes are ready, and renews the DAG run's lease during the
    wait.

    The sensor fails without waiting if fewer nodes are requested than it waits for, for example because the request was
    rolled back. The error message contains the reason.

    :param expected_nodes: Number of nodes, including the head node. (templated)
    :param pool_name: Name or URI of the pool. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param lease: Id of the task that leases the nodes. A DAG with several leases needs it to know which lease the
        sensor waits for. ``pool_for_run`` sets it for the tasks of its block.
    :param poke_interval: Seconds between two checks. The default is short because nodes start within seconds.
    """

    template_fields: Sequence[str] = ("pool_name", "compute_pool_conn_id", "expected_nodes")
    ui_color = "#d9ecf2"

    def __init__(
        self,
        *,
        expected_nodes: int,
        pool_name: str | None = None,
        compute_pool_conn_id: str | None = None,
        lease: str | None = None,
        poke_interval: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.expected_nodes = expected_nodes
        self.pool_name = pool_name
        self.compute_pool_conn_id = compute_pool_conn_id
        self.lease = lease
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check those arguments that are known: the pool and the number of nodes."""
        check_nodes(arguments, "expected_nodes", check_pool(arguments))

    @no_retry_of_permanent_errors()
    def poke(self, context: Context) -> bool:
        """Renew the DAG run's lease, and return whether the nodes are ready."""
        pool = ComputePoolHook(self.compute_pool_conn_id, self.pool_name).pool(holder_of(context, self.lease))
        pool.renew()
        expected = node_count(self.expected_nodes, "expected_nodes")
        status = pool.describe()
        self.log.info("pool %s: %d of %d nodes ready", pool.name, len(status.active), expected)
        if note := status.queue_note(pool.holder):
            self.log.info("the lease of this DAG run is %s", note)
        try:
            return pool.has_nodes(expected)
        except ScaleError as error:
            raise AirflowFailException(str(error)) from error
