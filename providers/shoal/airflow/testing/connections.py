"""Check the connections that the tasks of a DAG name: they exist, and those of pools have valid settings."""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def wrong_connection(conn_id: str, *, of_pool: bool) -> str | None:
    """Return a text about what is wrong with a connection: it does not exist or, if `of_pool` is True, it does not
    define a pool. None if nothing is wrong."""
    from shoal.airflow.connections import spec_of
    from shoal.errors import InvalidArgumentError

    connection = _connection(conn_id)
    if connection is None:
        return (
            f'uses the connection "{conn_id}", which Airflow does not find here: define it as '
            f"AIRFLOW_CONN_{conn_id.upper()}, or name it with --connection (connections=) if it exists "
            "where the DAG runs"
        )
    if of_pool:
        try:
            spec_of(connection, keep=False)
        except InvalidArgumentError as error:
            return f"has a wrong connection: {error}"
    return None


def _connection(conn_id: str) -> Any:
    """Return an Airflow connection, or None if neither Airflow's secrets backends nor its database have it."""
    from airflow.secrets.metastore import MetastoreBackend

    from shoal.airflow.hooks import ComputePoolHook

    with suppress(Exception):  # The connection does not exist, or the secrets backend cannot be reached.
        return ComputePoolHook.get_connection(conn_id)
    with suppress(Exception):  # In a test environment, Airflow may have no database.
        return MetastoreBackend().get_connection(conn_id)
    return None
