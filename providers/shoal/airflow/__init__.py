"""The Airflow provider: operators, sensors, hooks, ``@task.distributed`` and the context manager ``pool_for_run``."""

from __future__ import annotations

from typing import Any

CONNECTION_TYPE = "compute_pool"
HOOK_NAME = "Compute pool"
UI_FIELDS: dict[str, Any] = {
    "hidden_fields": ["login", "password", "port", "extra"],
    "relabeling": {"host": "Pool name", "schema": "Backend"},
    "placeholders": {"host": "retrain", "schema": "local"},
}
"""Settings of Airflow's form for a connection: which fields are hidden, how fields are labelled, and which example text
is shown in an empty field."""


def get_provider_info() -> dict[str, Any]:
    """Return the description of this provider, which Airflow reads through the entry point `apache_airflow_provider`.

    The description lists the modules with operators, sensors and hooks, and the connection type.
    """
    return {
        "package-name": "shoal",
        "name": "shoal",
        "description": "Distributed training on compute pools that are scaled, leased and cleaned up by the DAG.",
        "integrations": [
            {"integration-name": "shoal", "external-doc-url": "https://pypi.org/project/shoal/", "tags": ["service"]}
        ],
        "operators": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.operators"]}],
        "sensors": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.sensors"]}],
        "triggers": [
            {
                "integration-name": "shoal",
                "python-modules": ["shoal.airflow.triggers.jobs", "shoal.airflow.triggers.pools"],
            }
        ],
        "task-decorators": [{"name": "distributed", "class-name": "shoal.airflow.decorators.distributed_task"}],
        "hooks": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.hooks"]}],
        "connection-types": [
            {
                "connection-type": CONNECTION_TYPE,
                "hook-class-name": "shoal.airflow.hooks.ComputePoolHook",
                "hook-name": HOOK_NAME,
                "ui-field-behaviour": {name.replace("_", "-"): value for name, value in UI_FIELDS.items()},
                "conn-fields": {
                    name: {"label": name, "description": description, "schema": {"type": ["string", "null"]}}
                    for name, description in pool_options().items()
                },
            }
        ],
    }


def pool_options() -> dict[str, str]:
    """Return the pool options that the extra field of a connection may contain, as a dict of name to description."""
    from shoal.pool.spec import PoolSpec

    return {
        name: field.description or ""
        for name, field in PoolSpec.model_fields.items()
        # These two options are not in the extra: the pool's name is in the connection's host field, and the backend is
        # in the schema field.
        if name not in ("name", "backend")
    }
