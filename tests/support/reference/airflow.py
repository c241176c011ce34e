"""The reference of the Airflow operators, from the ``:param`` lines of their docstrings."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from typing import Any

from tests.support.reference.texts import arguments, cell, default, paragraph, table

HEAD = """# Airflow

The guide is [airflow.md](../airflow.md). Every operator and sensor also takes the arguments of Airflow's
`BaseOperator`, such as `retries` and `execution_timeout`. Arguments marked as templated are rendered by Jinja.
"""
_SHARED_BY = 3
"""An argument with the same default and text in at least so many operators stands once."""

Rows = dict[str, tuple[str, str]]
"""Default and meaning of each argument."""


def page() -> str:
    """Return the text of the page."""
    described = _described()
    rows = {title: _rows(each) for title, each in described.items()}
    decorators = {title: rows.pop(title) for title in (*rows,) if title.startswith("@")}
    counts = Counter((name, *row) for found in rows.values() for name, row in found.items())
    shared = {name: (value, text) for (name, value, text), count in counts.items() if count >= _SHARED_BY}
    parts = [HEAD, "## Arguments that several operators have\n", _table(shared)]
    for title, found in rows.items():
        own = {name: row for name, row in found.items() if shared.get(name) != row}
        also = ", ".join(f"`{name}`" for name in found if name not in own)
        link = f"Also {also}: [above](#arguments-that-several-operators-have).\n" if also else ""
        summary = paragraph(inspect.getdoc(described[title][0]) or "")
        parts.append("\n".join([f"## {title}", "", summary, "", _table(own), link]))
    for title, found in decorators.items():
        summary = paragraph(inspect.getdoc(described[title][0]) or "")
        link = "Also the arguments of [DistributedTrainOperator](#distributedtrainoperator).\n"
        parts.append("\n".join([f"## {title}", "", summary, "", _table(found), link]))
    return "\n".join([*parts, _section()]).replace("\n\n\n", "\n\n")


def _described() -> dict[str, list[Any]]:
    """Return the classes or the function that describe the arguments, by title; the first description counts."""
    from shoal.airflow import operators
    from shoal.airflow.pool_for_run import pool_for_run
    from shoal.airflow.sensors import NodesSensor
    from shoal.airflow.task_decorators import DistributedDecoratedOperator, RayLaunchDecoratedOperator

    decorators = {"@task.distributed": DistributedDecoratedOperator, "@task.ray_launch": RayLaunchDecoratedOperator}
    found = [
        getattr(operators, name)
        for name in sorted(vars(operators))
        if name.endswith("Operator") and name != "BaseOperator"
    ]
    own = [each for each in [*found, NodesSensor] if each.__module__.startswith("shoal.")]
    return {
        "pool_for_run": [pool_for_run],
        **{each.__name__: _classes(each) for each in own},
        **{name: [operator] for name, operator in decorators.items()},
    }


def _classes(operator: type) -> list[type]:
    return [each for each in operator.__mro__ if each.__module__.startswith("shoal.")]


def _rows(described: Sequence[Any]) -> Rows:
    found: Rows = {}
    for each in described:
        signature = inspect.signature(each.__init__ if isinstance(each, type) else each)
        for name, text in arguments(inspect.getdoc(each) or "").items():
            if name in signature.parameters and name not in found:
                found[name] = default(signature.parameters[name].default), cell(text)
    return found


def _table(rows: Rows) -> str:
    return "\n".join(table(("argument", "default", "meaning"), ((f"`{name}`", *row) for name, row in rows.items())))


def _section() -> str:
    """Return the section about the options in Airflow's configuration."""
    from shoal.airflow.deployment import SECTION, config_section

    section = config_section()[SECTION]
    rows = (
        (f"`{name}`", f"`{option['example']}`", cell(option["description"]))
        for name, option in section["options"].items()
    )
    head = [f"## Section `[{SECTION}]` of airflow.cfg", "", section["description"], ""]
    return "\n".join([*head, *table(("option", "example", "meaning"), rows)])
