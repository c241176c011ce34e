"""Provide Airflow operators, sensors and hooks, ``@task.distributed`` and the context manager ``pool_for_run``."""

from __future__ import annotations

from typing import Any

CONNECTION_TYPE = "compute_pool"
HOOK_NAME = "Compute pool"
_UI_FIELDS: dict[str, Any] = {
    # In a connection URI such as compute-pool://retrain/local, the schema is the backend. Airflow's form hides the
    # schema and has a separate field for the backend, because that field can list the possible values.
    "hidden-fields": ["login", "port", "schema", "extra"],
    "relabeling": {"host": "Pool name", "password": "Token of the Ray cluster"},
    "placeholders": {"host": "retrain", "password": "only for the backend ray"},
}
"""Settings of Airflow's form for a connection: which fields are hidden, how fields are labelled, and which example text
is shown in an empty field."""


def get_provider_info() -> dict[str, Any]:
    """Return the description of this provider, which Airflow reads through the entry point `apache_airflow_provider`.

    The description lists the modules with operators, sensors and hooks, the connection type, and the options of the
    section ``[shoal]`` in Airflow's configuration.
    """
    from shoal.airflow.deployment import config_section
    from shoal.installation import address, name

    return {
        "package-name": name(),
        "name": "shoal",
        "description": "Distributed training on compute pools that are scaled, leased and cleaned up by the DAG.",
        "integrations": [
            {"integration-name": "shoal", "external-doc-url": address("Documentation") or "", "tags": ["service"]}
        ],
        "operators": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.operators"]}],
        "sensors": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.sensors"]}],
        "triggers": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.triggers"]}],
        "task-decorators": [
            {"name": name, "class-name": f"shoal.airflow.task_decorators.{name}_task"}
            for name in ("distributed", "ray_launch")
        ],
        "hooks": [{"integration-name": "shoal", "python-modules": ["shoal.airflow.hooks"]}],
        "extra-links": [
            f"shoal.airflow.operators.job_operator.{name}"
            for name in ("JobPageLink", "MlflowRunLink", "ModelVersionLink", "RayDashboardLink")
        ],
        "config": config_section(),
        "connection-types": [
            {
                "connection-type": CONNECTION_TYPE,
                "hook-class-name": "shoal.airflow.hooks.ComputePoolHook",
                "hook-name": HOOK_NAME,
                "ui-field-behaviour": _UI_FIELDS,
                "conn-fields": _pool_fields(),
            }
        ],
    }


def _pool_fields() -> dict[str, Any]:
    """Return the fields of Airflow's connection form: one for each pool option that a connection's extra may
    contain."""
    from shoal.pool.options import OPTIONS
    from shoal.pool.spec import PoolSpec

    fields = {
        name: {
            "label": name.replace("_", " ").capitalize(),
            "description": field.description or "",
            # All types are strings, because an option such as idle_timeout is either a number or "none".
            "schema": {"type": ["string", "null"]},
        }
        for name, field in PoolSpec.model_fields.items()
        if name != "name"  # The pool's name is in the connection's host field.
    }
    fields["backend"]["schema"] = {"type": ["string", "null"], "enum": [*OPTIONS, None]}
    return fields
