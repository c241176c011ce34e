"""Provide the hook that finds a compute pool by an Airflow connection, a name or a URI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from airflow.sdk import BaseHook
from airflow.sdk.exceptions import AirflowNotFoundException

from shoal.airflow import CONNECTION_TYPE, HOOK_NAME
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
        """Return the team whose quota limits the leases: the value ``team`` in the connection's extra (``{"team":
        "fraud"}``). None if the extra names no team."""
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

    def pool(self, holder: str | None = None, *, owner: str | None = None) -> ComputePool:
        """Return a client of the pool, with methods such as ``up()``, ``lease()`` and ``scale()``.

        :param holder: Name of the holder that will own the leases and jobs requested through this client; see
            :func:`shoal.airflow._run_holder.holder_of`. By default, a name made from user, host and process id.
        :param owner: Team whose quota limits the leases if the connection names no team. Operators pass the owner of
            their task.
        """
        from shoal.pool.api import ComputePool  # Imported here, because DAG files load this module and need no store.

        return ComputePool(self.spec or self.pool_name, holder=holder, team=self.team or owner)

    def get_conn(self) -> ComputePool:
        """Return a client of the pool. Every hook of Airflow has this method."""
        return self.pool()

    def test_connection(self) -> tuple[bool, str]:
        """Return whether the connection is valid, and a message with the pool's state."""
        try:
            status = self.pool().describe()
        except ShoalError as error:
            if isinstance(error, PoolNotFoundError) and self.spec is not None:
                return True, f"{self.spec.uri} does not exist yet: the first run that leases nodes creates it"
            return False, str(error)
        return True, f"{status.uri} is {status.state}, {len(status.active)} of {status.max_nodes} nodes active"


_DRIVERS = {"postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}
"""Name of SQLAlchemy's dialect and driver for each Airflow connection type. A type that is missing here has the same
name in SQLAlchemy."""


def database_url(conn_id: str) -> str | None:
    """Return the SQLAlchemy URL of an Airflow connection to a database; None if there is no such connection.

    :param conn_id: Id of the connection. If the database's URL needs more than host, port, schema, login and password,
        write the whole URL into the connection's extra field: ``{"sqlalchemy_url": "..."}``.
    """
    from sqlalchemy import URL

    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return None
    if url := connection.extra_dejson.get("sqlalchemy_url"):
        return str(url)
    kind = connection.conn_type or ""
    if kind == "sqlite":
        return URL.create("sqlite", database=connection.host or connection.schema).render_as_string()
    return URL.create(
        _DRIVERS.get(kind, kind),
        username=connection.login,
        password=connection.password,
        host=connection.host,
        port=connection.port,
        database=connection.schema,
    ).render_as_string(hide_password=False)


def spec_of(connection: Connection, *, keep: bool = True) -> PoolSpec:
    """Convert an Airflow connection to the definition of a pool.

    :param connection: Connection of type ``compute_pool``. The connection's host is the pool's name, its extra contains
        the options, and its password is the token of a Ray cluster. The connection's schema, or the option ``backend``,
        is the backend.
    :param keep: Whether the token is written to a file in ``$SHOAL_HOME``. False: the connection is only checked.
    """
    if not connection.host:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names no pool: write the name of the pool into the host field'
        )
    try:
        # If the extra is not valid JSON, Airflow's `extra_dejson` returns an empty dict without an error. So the extra
        # is first parsed with `json.loads`, which raises an error.
        json.loads((connection.extra or "").strip() or "{}")
        extra = connection.extra_dejson
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" is not a JSON object: write options such as '
            '{"max_nodes": 4}'
        )
    # Airflow's form also stores the fields that the user left empty. Empty fields are dropped here, so that their
    # defaults apply.
    given = {name: value for name, value in extra.items() if value not in (None, "") and name != "team"}
    if "name" in given:
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" must not contain "name": write the name of the pool into '
            "the host field"
        )
    backend = given.pop("backend", None)
    if backend and connection.schema and backend != connection.schema:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names two backends, {connection.schema} in its schema and {backend} in '
            f"its extra: choose {connection.schema} in Airflow's form, or create the connection again without a schema"
        )
    fields = {"backend": backend or connection.schema or "local", "name": connection.host, **given}
    spec = PoolSpec.parse(fields)
    if not connection.password:
        return spec
    _check_token(spec, connection.conn_id)
    if not keep:
        return spec
    from shoal.pool.backends.ray.token_file import keep_token

    return PoolSpec.parse({**spec.model_dump(), "token_file": keep_token(spec.name, connection.password)})


def _check_token(spec: PoolSpec, conn_id: str) -> None:
    """Check that the password of a connection may be used as the token of the connection's pool."""
    if spec.backend != "ray":
        raise InvalidArgumentError(
            f'connection "{conn_id}" has a password, but a password is allowed only for ray:// pools, where it is the '
            f"token of the Ray cluster: remove the password, because a {spec.backend}:// pool creates its own tokens"
        )
    if spec.token_file is not None:
        raise InvalidArgumentError(
            f'connection "{conn_id}" has a password and the option token_file: use only one of them as the token'
        )
