"""Compute pools behind Airflow connections."""

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
    from airflow.sdk import BaseHook
except ImportError:  # Airflow 3.0
    from airflow.hooks.base import BaseHook  # type: ignore[attr-defined,no-redef]

if TYPE_CHECKING:
    from airflow.sdk import Connection
    from airflow.sdk.definitions.context import Context


ENGINE = "airflow"


def holder_of(context: Context) -> str:
    """``airflow:<dag_id>/<run_id>``: a DAG run, in whose name all of its tasks lease and submit.

    :param context: Airflow's context of one of its tasks.
    """
    dag_run = context["dag_run"]
    return f"{ENGINE}:{dag_run.dag_id}/{dag_run.run_id}"


class ComputePoolHook(BaseHook):
    """A compute pool, by connection, name or URI; by neither, the one that the one rule names.

    A connection's host is the pool's name, its schema the backend (``local``), its extra the options of a pool URI:
    ``compute-pool://retrain/local?max_nodes=4``.

    :param compute_pool_conn_id: Connection of type ``compute_pool``.
    :param pool_name: Name of a pool, or its URI (``local://retrain?max_nodes=4``).
    """

    conn_name_attr = "compute_pool_conn_id"
    default_conn_name = "compute_pool_default"
    conn_type = CONNECTION_TYPE
    hook_name = HOOK_NAME

    def __init__(self, compute_pool_conn_id: str | None = None, pool_name: str | None = None) -> None:
        super().__init__()
        if compute_pool_conn_id and pool_name:
            raise InvalidArgumentError(
                f"compute_pool_conn_id={compute_pool_conn_id!r} and pool_name={pool_name!r}: give one of them"
            )
        self.compute_pool_conn_id = compute_pool_conn_id
        self.pool_name = pool_name

    @cached_property
    def spec(self) -> PoolSpec | None:
        """What the connection or URI says of the pool; None where it was only named: then it is never brought up."""
        if self.compute_pool_conn_id:
            return spec_of(self.get_connection(self.compute_pool_conn_id))
        return PoolSpec.parse(self.pool_name) if self.pool_name and is_uri(self.pool_name) else None

    def pool(self, holder: str | None = None) -> ComputePool:
        """The pool, in the hand of a holder.

        :param holder: Who asks; see :func:`holder_of`.
        """
        return ComputePool(self.spec or self.pool_name, holder=holder)

    def get_conn(self) -> ComputePool:
        """The pool."""
        return self.pool()

    def test_connection(self) -> tuple[bool, str]:
        """Whether the connection says what a pool can be, and how that pool is."""
        try:
            status = self.pool().describe()
        except ShoalError as error:
            if isinstance(error, PoolNotFoundError) and self.spec is not None:
                return True, f"{self.spec.uri} is not there yet: the first run makes it"
            return False, str(error)
        return True, f"{status.uri} is {status.state}, {len(status.active)} of {status.max_nodes} nodes active"

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """The connection form; since Airflow 3.2 the provider info says the same."""
        return UI_FIELDS

    @classmethod
    def get_connection_form_widgets(cls) -> dict[str, Any]:
        """The form's own fields; since Airflow 3.2 the provider info says the same."""
        from flask_appbuilder.fieldwidgets import BS3TextFieldWidget  # type: ignore[import-not-found]
        from wtforms import StringField  # type: ignore[import-untyped]

        return {
            name: StringField(name, description=description, widget=BS3TextFieldWidget())
            for name, description in pool_options().items()
        }


def spec_of(connection: Connection) -> PoolSpec:
    """The pool that a connection means.

    :param connection: Of type ``compute_pool``.
    """
    if not connection.host:
        raise InvalidArgumentError(f'connection "{connection.conn_id}" names no pool: put its name where the host goes')
    try:
        json.loads((connection.extra or "").strip() or "{}")  # Airflow takes an extra that is no JSON for an empty one
        extra = connection.extra_dejson
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" is no JSON object: write options, as in {{"max_nodes": 4}}'
        )
    given = {name: value for name, value in extra.items() if value not in (None, "")}  # left empty in the form
    if twice := [name for name in ("backend", "name") if name in given]:
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" gives {twice[0]}: host is the name, schema the backend'
        )
    return PoolSpec.parse({"backend": connection.schema or "local", "name": connection.host, **given})
