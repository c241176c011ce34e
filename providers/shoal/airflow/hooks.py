"""Hook for compute pools: find a pool by Airflow connection, name or URI."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from shoal.airflow import CONNECTION_TYPE, HOOK_NAME, UI_FIELDS, pool_options
from shoal.errors import InvalidArgumentError, PoolNotFoundError, ShoalError
from shoal.pool.api import ComputePool
from shoal.pool.spec import PoolSpec, is_uri

try:
    from airflow.sdk.exceptions import AirflowNotFoundException
except ImportError:  # Airflow 3.0
    from airflow.exceptions import AirflowNotFoundException  # type: ignore[attr-defined]
try:
    from airflow.sdk import BaseHook
except ImportError:  # Airflow 3.0
    from airflow.hooks.base import BaseHook  # type: ignore[attr-defined,no-redef]

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from airflow.sdk.definitions.context import Context


ENGINE = "airflow"


ONLY_LEASE = "lease_pool"
"""Id of the lease task of a DAG with one lease. The holder of this lease is the DAG run itself."""


def holder_of(context: Context, lease: str | None = None) -> str:
    """Return the holder of a DAG run's leases and jobs: ``airflow:<dag_id>/<run_id>``.

    A further lease of the run has a holder of its own, ``airflow:<dag_id>/<run_id>#<lease>``. The clean-up after one
    lease therefore leaves the nodes and jobs of the others alone.

    :param context: Airflow's context of a task of the DAG run.
    :param lease: Id of the task that leases the nodes.
    """
    dag_run = context["dag_run"]
    run = f"{ENGINE}:{dag_run.dag_id}/{dag_run.run_id}"
    return run if lease in (None, ONLY_LEASE) else f"{run}#{lease}"


def run_of(holder: str) -> str:
    """Return the part of a holder's name that names the DAG run, without the id of a lease."""
    return holder.partition("#")[0]  # Airflow's default pattern for run ids does not allow "#".


class ComputePoolHook(BaseHook):
    """Hook for a compute pool, which is given by connection, name or URI.

    Without connection and name, the hook uses the pool ``$SHOAL_POOL`` or, if this is not set, the only pool.

    The connection's host is the name of the pool, its schema is the backend (``local``), and its extra contains the
    options of a pool URI: ``compute-pool://retrain/local?max_nodes=4``.

    :param compute_pool_conn_id: Connection of type ``compute_pool``.
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

        Without a definition, the pool cannot be brought up.
        """
        if self.compute_pool_conn_id:
            return spec_of(self.get_connection(self.compute_pool_conn_id))
        return PoolSpec.parse(self.pool_name) if self.pool_name and is_uri(self.pool_name) else None

    def pool(self, holder: str | None = None) -> ComputePool:
        """Return a client of the pool that acts for a holder.

        :param holder: Holder of the leases and jobs that are requested through this client; see :func:`holder_of`.
        """
        return ComputePool(self.spec or self.pool_name, holder=holder)

    def get_conn(self) -> ComputePool:
        """Return a client of the pool; the standard method of Airflow's hooks."""
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

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Return the settings of the connection form; Airflow 3.2 and later read them from the provider info."""
        return UI_FIELDS

    @classmethod
    def get_connection_form_widgets(cls) -> dict[str, Any]:
        """Return the additional fields of the connection form; Airflow 3.2 and later read the provider info."""
        from flask_appbuilder.fieldwidgets import BS3TextFieldWidget  # type: ignore[import-not-found]
        from wtforms import StringField  # type: ignore[import-untyped]

        return {
            name: StringField(name, description=description, widget=BS3TextFieldWidget())
            for name, description in pool_options().items()
        }


_DRIVERS = {"postgres": "postgresql+psycopg", "mysql": "mysql+pymysql"}
"""Airflow's connection type -> SQLAlchemy's dialect and driver, where they differ."""


def database_url(conn_id: str) -> str | None:
    """Return the SQLAlchemy URL of an Airflow connection to a database; None if there is no such connection.

    :param conn_id: Id of the connection. Its extra may contain ``{"sqlalchemy_url": "..."}``, for databases whose URL
        has more than host, port, schema, login and password.
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


def spec_of(connection: Connection) -> PoolSpec:
    """Return the definition of the pool in a connection.

    :param connection: Connection of type ``compute_pool``.
    """
    if not connection.host:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names no pool: write the name of the pool into the host field'
        )
    try:
        # `extra_dejson` returns an empty dict if the extra is not valid JSON, so that error is detected here.
        json.loads((connection.extra or "").strip() or "{}")
        extra = connection.extra_dejson
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" is not a JSON object: write options such as '
            '{"max_nodes": 4}'
        )
    given = {name: value for name, value in extra.items() if value not in (None, "")}  # The form stores empty fields.
    if twice := [name for name in ("backend", "name") if name in given]:
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" must not contain "{twice[0]}": write the name of the pool '
            "into the host field, and the backend into the schema field"
        )
    return PoolSpec.parse({"backend": connection.schema or "local", "name": connection.host, **given})
