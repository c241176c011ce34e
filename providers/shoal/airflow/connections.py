"""Read Airflow connections: their extra field, and the settings of a pool."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.pool.spec import PoolSpec

if TYPE_CHECKING:
    from airflow.sdk import Connection


def extra_of(connection: Connection, *, example: str) -> Mapping[str, Any]:
    """Return the extra field of an Airflow connection.

    :param connection: The connection.
    :param example: A valid extra field, for the error message.
    :raises InvalidArgumentError: The field is not a JSON object.
    """
    try:
        # If the extra is not valid JSON, Airflow's `extra_dejson` returns an empty dict without an error. So the extra
        # is first parsed with `json.loads`, which raises an error.
        json.loads((connection.extra or "").strip() or "{}")
        extra = connection.extra_dejson
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, Mapping):
        raise InvalidArgumentError(
            f'the extra of connection "{connection.conn_id}" is not a JSON object: write options such as {example}'
        )
    return extra


def spec_of(connection: Connection, *, keep: bool = True) -> PoolSpec:
    """Convert an Airflow connection to the definition of a pool.

    :param connection: Connection of type ``compute_pool``. The connection's host is the pool's name, its extra contains
        the options, and its password is the token of a Ray cluster. The connection's schema, or the option ``backend``,
        is the backend. The option ``kubernetes_conn_id`` is the id of a connection of type ``kubernetes``.
    :param keep: Whether the token is written to a file in ``$SHOAL_HOME``. False: the connection is only checked.
    """
    if not connection.host:
        raise InvalidArgumentError(
            f'connection "{connection.conn_id}" names no pool: write the name of the pool into the host field'
        )
    extra = extra_of(connection, example='{"max_nodes": 4}')
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
    if conn_id := given.pop("kubernetes_conn_id", None):
        given = {**_kubernetes_options(conn_id), **given}
    fields = {"backend": backend or connection.schema or "local", "name": connection.host, **given}
    spec = PoolSpec.parse(fields)
    if not connection.password:
        return spec
    from shoal.pool.endpoint import check_token, with_token

    check_token(spec, f'connection "{connection.conn_id}"', "password")
    return with_token(spec, connection.password) if keep else spec


def _kubernetes_options(conn_id: str) -> dict[str, Any]:
    """Return the options of a `kuberay://` pool that a connection of type ``kubernetes`` contains."""
    from airflow.sdk import BaseHook

    extra = extra_of(BaseHook.get_connection(conn_id), example='{"kube_config_path": "/etc/kube/config"}')
    if extra.get("kube_config"):
        raise InvalidArgumentError(
            f'connection "{conn_id}" contains a kubeconfig as JSON: write it to a file that all hosts of shoal have, '
            'and put the path into the extra as "kube_config_path", because processes of shoal outlive the task'
        )
    names = {"kubeconfig": "kube_config_path", "context": "cluster_context", "namespace": "namespace"}
    return {option: extra[name] for option, name in names.items() if extra.get(name)}
