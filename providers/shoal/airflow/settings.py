"""Set environment variables in all processes of Airflow from the section ``[shoal]`` of Airflow's configuration.

An option sets its environment variable unless the variable is set already. shoal itself, with its command line and the
processes of pools, reads only the variables and not Airflow's configuration.
"""

from __future__ import annotations

import logging
import os
from typing import Any

log = logging.getLogger(__name__)

SECTION = "shoal"

VARIABLES = {"home": "SHOAL_HOME", "state_url": "SHOAL_STATE_URL", "pool": "SHOAL_POOL", "ui_url": "SHOAL_UI_URL"}
"""Environment variable of each option that shoal also reads outside of Airflow."""

_OPTIONS = {
    "home": (
        "Folder with the state of pools, with jobs and their logs. Default: ~/.shoal. All workers of a host must use "
        "the same folder.",
        "/var/lib/shoal",
    ),
    "state_url": (
        "SQLAlchemy URL of the PostgreSQL database with the state of pools and jobs. Default: a SQLite file in `home`. "
        "Required with workers on several hosts. As for other secrets, `state_url_cmd` and `state_url_secret` name a "
        "command or a secret with the value. In an Airflow with several teams, section `[TEAM=shoal]` names the store "
        "of a team.",
        "postgresql+psycopg://shoal@db.example/shoal",
    ),
    "pool": (
        "Name of the pool that a task uses if neither its arguments nor its spec name one, and there is no connection "
        "`compute_pool_default`. Default: the only pool that is up.",
        "retrain",
    ),
    "ui_url": (
        "Address of the page for pools, jobs and models, to which tasks link. Default: the page in Airflow, if the "
        "extra `ui` is installed where the task runs.",
        "https://shoal.example",
    ),
    "deployment": (
        "Id of this Airflow in the names of its leases and jobs, which differs from the ids of other Airflows that use "
        "the same store. Letters, digits, `.`, `_` and `-`. Default: the Variable `shoal_deployment`, which the "
        "scheduler makes.",
        "production",
    ),
}


def config_section() -> dict[str, Any]:
    """Return the description of the section ``[shoal]`` in the format that Airflow expects of a provider."""
    return {
        SECTION: {
            "description": "Settings of shoal. An option with an environment variable sets it for all processes of "
            "Airflow, unless the variable is set already.",
            "options": {
                name: {
                    "description": f"{text} Environment variable: {VARIABLES[name]}." if name in VARIABLES else text,
                    "version_added": "0.1.0",
                    "type": "string",
                    "example": example,
                    "default": None,
                    "sensitive": name == "state_url",
                }
                for name, (text, example) in _OPTIONS.items()
            },
        }
    }


def has_teams() -> bool:
    """Return whether Airflow has several teams (``[core] multi_team``)."""
    from airflow.sdk.configuration import conf

    return bool(conf.getboolean("core", "multi_team", fallback=False))


def store_of(team: str | None) -> str | None:
    """Return the URL of a team's store, from the option ``state_url`` in section ``[TEAM=shoal]``. None: the store of
    this process.

    :param team: Name of the team; None if there is none.
    """
    from airflow.sdk.configuration import conf

    if team is None:
        return None
    return (conf.get(SECTION, "state_url", team_name=team, fallback=None) or "").strip() or None


def apply_settings() -> None:
    """Set the environment variables of this process from the options that have a value. A variable that is set already
    keeps its value."""
    from airflow.sdk.configuration import conf

    for option, variable in VARIABLES.items():
        value = (conf.get(SECTION, option, fallback=None) or "").strip()
        if value and os.environ.setdefault(variable, value) != value:
            log.warning(
                "the option %s in section [%s] of Airflow's configuration is ignored, because the environment variable "
                "%s has another value: remove one of them",
                option,
                SECTION,
                variable,
            )
