"""Sensors on compute pools."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowFailException

from shoal.airflow.hooks import ComputePoolHook, holder_of
from shoal.errors import ScaleError

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class NodesSensor(BaseSensorOperator):
    """Wait until a pool has so many nodes ready, keeping the DAG run's lease alive meanwhile.

    It fails at once, saying why, when nobody asks for so many: the scaling or lease that did was rolled back.

    :param expected_nodes: Nodes, the head among them. (templated)
    :param pool_name: Name of a pool, or its URI. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    :param poke_interval: Seconds between two looks: short ones, nodes come within seconds.
    """

    template_fields: Sequence[str] = ("pool_name", "compute_pool_conn_id", "expected_nodes")
    ui_color = "#d9ecf2"

    def __init__(
        self,
        *,
        expected_nodes: int,
        pool_name: str | None = None,
        compute_pool_conn_id: str | None = None,
        poke_interval: float = 2.0,
        **kwargs: Any,
    ) -> None:
        super().__init__(poke_interval=poke_interval, **kwargs)
        self.expected_nodes = expected_nodes
        self.pool_name = pool_name
        self.compute_pool_conn_id = compute_pool_conn_id

    def poke(self, context: Context) -> bool:
        """Look once."""
        pool = ComputePoolHook(self.compute_pool_conn_id, self.pool_name).pool(holder_of(context))
        pool.renew()
        expected = int(self.expected_nodes)
        self.log.info("pool %s: %d of %d nodes ready", pool.name, len(pool.get_nodes()), expected)
        try:
            return pool.has_nodes(expected)
        except ScaleError as error:
            raise AirflowFailException(str(error)) from error
