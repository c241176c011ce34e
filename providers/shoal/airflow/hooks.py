"""Provide the hook that finds a compute pool by an Airflow connection, a name or a URI."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from shoal.airflow import CONNECTION_TYPE, HOOK_NAME
from shoal.airflow.connections import spec_of
from shoal.errors import InvalidArgumentError, PoolNotFoundError, ShoalError
from shoal.pool.spec import PoolSpec, is_uri

if TYPE_CHECKING:
    from airflow.sdk import Connection

    from shoal.pool.api import ComputePool


class ComputePoolHook(BaseHook):
    """Hook for one compute pool. The pool is selected by an Airflow connection, a name or a URI.

    Without connection and name, the hook uses the connection ``compute_pool_default`` if it exists, else the pool that
    ``$SHOAL_POOL`` names, else the only pool that is up.

    The connection's host is the name of the pool, its schema is the backend (``local``), and its extra contains the
    options of a pool URI: ``compute-pool://retrain/local?max_nodes=4``. The connection's password is the token of a Ray
    cluster.

    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``. Pass at most one of
        `compute_pool_conn_id` and `pool_name`.
    :param pool_name: Name or URI (``local://retrain?max_nodes=4``) of the pool.
    """

    conn_name_attr = "compute_pool_conn_id"
    default_conn_name = "compute_pool_default"
    conn_type = CONNECTION_TYPE
    hook_name = HOOK_NAME

    def __init__(self, compute_pool_conn_id: str | None = None, pool_name: str | None = None) -> None:
        super().__init__()
        if compute_pool_conn_id and pool_name:
            raise InvalidArgumentError(
                f"compute_pool_conn_id={compute_pool_conn_id!r} and pool_name={pool_name!r} are both given: pass only "
                "one of them"
            )
        self.compute_pool_conn_id = compute_pool_conn_id
        self.pool_name = pool_name

    @cached_property
    def spec(self) -> PoolSpec | None:
        """Return the pool's definition from the connection or URI; None if only the pool's name is known.

        Without a definition, the pool cannot be brought up. If the connection has a token, the token is written to a
        file in ``$SHOAL_HOME`` (mode 0600), because the pool's processes cannot read Airflow's connections.
        """
        if self._defining_connection is not None:
            return spec_of(self._defining_connection)
        return PoolSpec.parse(self.pool_name) if self.pool_name and is_uri(self.pool_name) else None

    @cached_property
    def team(self) -> str | None:
        """Return the team for which tasks with this connection act: the value ``team`` in the connection's extra
        (``{"team": "fraud"}``). None if the extra names no team."""
        connection = self._defining_connection
        return None if connection is None else connection.extra_dejson.get("team") or None

    @cached_property
    def _defining_connection(self) -> Connection | None:
        """Return the connection that defines the pool; None if `pool_name` selects the pool, or if no connection
        exists."""
        if self.compute_pool_conn_id:
            return self._connection(self.compute_pool_conn_id)
        if self.pool_name:
            return None
        try:
            return self.get_connection(self.default_conn_name)
        except AirflowNotFoundException:
            return None

    def _connection(self, conn_id: str) -> Connection:
        try:
            return self.get_connection(conn_id)
        except AirflowNotFoundException:
            raise AirflowNotFoundException(
                f'there is no connection "{conn_id}" of type {CONNECTION_TYPE}: create the connection, or write '
                f"pool_name={conn_id!r} if this is the name of a pool"
            ) from None

    def pool(self, holder: str | None = None, *, team: str | None = None) -> ComputePool:
        """Return a client of the pool, with methods such as ``up()``, ``lease()`` and ``scale()``.

        :param holder: Name of the holder that will own the leases and jobs requested through this client; see
            :func:`shoal.airflow._run_holder.holder_of`. By default, a name made from user, host and process id.
        :param team: Team for which the client acts. By default, the team of the connection, else ``$SHOAL_TEAM``.
        """
        # Imported only here, because DAG files also import this module, and do not need the store.
        from shoal.pool.api import ComputePool

        return ComputePool(self.spec or self.pool_name, holder=holder, team=team or self.team)

    def get_conn(self) -> ComputePool:
        """Return a client of the pool. Every hook of Airflow has this method."""
        return self.pool()

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the connection is valid, and a message with the pool's state. For a ``ray://`` pool, also ask
        the cluster with the connection's token."""
        from shoal.pool.api import ComputePool

        spec, answered = None, ""
        try:
            # A test must not write the token: a pool in use reads the file, and the token may be wrong.
            connection = self._defining_connection
            spec = self.spec if connection is None else spec_of(connection, keep=False)
            if spec is not None and spec.backend == "ray":
                answered = _cluster_answer(spec, None if connection is None else connection.password)
            status = ComputePool(spec or self.pool_name).describe()
        except ShoalError as error:
            if isinstance(error, PoolNotFoundError) and spec is not None:
                untried = " and contacts the cluster" if spec.backend == "kuberay" else ""
                return (
                    True,
                    f"{spec.uri} does not exist yet: the first run that leases nodes creates it{untried}{answered}",
                )
            return False, str(error)
        return (
            True,
            f"{status.uri} is {status.state}, {len(status.active)} of {status.max_nodes} nodes active{answered}",
        )


def _cluster_answer(spec: PoolSpec, token: str | None) -> str:
    """Ask the Ray cluster of a pool for its nodes, and return the answer as a part of a message.

    :raises PoolUnreachableError: The cluster does not answer, or refuses the token.
    """
    from shoal.pool.backends.ray.backend import Cluster

    count = len(Cluster(spec, token or None).nodes())
    return f"; the cluster at {spec.address} answers, and has {count} {'node' if count == 1 else 'nodes'}"
