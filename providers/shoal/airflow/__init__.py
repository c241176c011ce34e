"""shoal for Airflow: ``shoal.airflow.operators``, ``.sensors``, ``.hooks`` and the context manager of ``.context``."""

from __future__ import annotations

from typing import Any

CONNECTION_TYPE = "compute_pool"
HOOK_NAME = "Compute pool"
UI_FIELDS: dict[str, Any] = {
    "hidden_fields": ["login", "password", "port", "extra"],
    "relabeling": {"host": "Pool name", "schema": "Backend"},
    "placeholders": {"host": "retrain", "schema": "local"},
}
"""What of Airflow's connection form stays, under which label."""


def get_provider_info() -> dict[str, Any]:
    """What Airflow's entry point `apache_airflow_provider` is told."""
    return {
        "package-name": "shoal",
        "name": "shoal",
        "description": "Distributed training on compute pools that are scaled, leased and cleaned up by the DAG.",
        "integrations": [
            {"integration-name": "shoal", "external-doc-url": "https://pypi.org/project/shoal/", "tags": ["service"]}
        ],
        "operators": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.operators"]}],
        "sensors": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.sensors"]}],
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
    """What a connection may say of a pool beside its name and backend, each with its description."""
    from shoal.pool.spec import PoolSpec

    return {
        name: field.description or ""
        for name, field in PoolSpec.model_fields.items()
        if name not in ("name", "backend")  # fields that every connection has: host and schema
    }
