"""Write docs/reference.md: all arguments of the Airflow operators, and all fields of a job's spec.

The texts are those of the code: the `:param` lines of docstrings, and the descriptions of pydantic fields. Run
``python -m tests.support.reference`` after a change of them.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal.option_validation import Settings

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"

SET_BY_SHOAL = {
    *("fingerprint", "user_code", "program", "arguments", "code_digest", "returns", "torch_distributor", "room_for"),
}
"""Fields of specs that users do not set."""

HEAD = """# Reference

All arguments of the [Airflow operators](#airflow), and all fields of a [job's spec](#specs-of-jobs). This page is
written by `python -m tests.support.reference` from the docstrings and descriptions in the code.

## Airflow

The guide is [airflow.md](airflow.md). Every operator and sensor also takes the arguments of Airflow's `BaseOperator`,
such as `retries` and `execution_timeout`. Arguments marked as templated are rendered by Jinja.
"""

SPECS = """## Specs of jobs

The guide is [specs.md](specs.md). `shoal train`, `DistributedTrainOperator`, Prefect's `distributed_train` and
`shoal.jobs.submit` take the same specs. A field without a default is required.
"""


def page() -> str:
    """Return the text of the page."""
    from shoal.airflow.operators import (
        BatchPredictOperator,
        CheckModelsOperator,
        CleanupPoolOperator,
        DistributedTrainOperator,
        LeasePoolOperator,
        ManyModelsOperator,
        PromoteModelOperator,
        ScaleClusterOperator,
        SweepPoolsOperator,
        TuneOperator,
    )
    from shoal.airflow.pool_for_run import pool_for_run
    from shoal.airflow.sensors import NodesSensor
    from shoal.airflow.task_decorators import DistributedDecoratedOperator, RayLaunchDecoratedOperator
    from shoal.jobs import FunctionJobSpec, JobSpec, PartitionsJobSpec, PredictJobSpec, TuneJobSpec

    operators = (
        DistributedTrainOperator,
        ManyModelsOperator,
        BatchPredictOperator,
        TuneOperator,
        LeasePoolOperator,
        ScaleClusterOperator,
        NodesSensor,
        CleanupPoolOperator,
        SweepPoolsOperator,
        PromoteModelOperator,
        CheckModelsOperator,
    )
    decorators = {"@task.distributed": DistributedDecoratedOperator, "@task.ray_launch": RayLaunchDecoratedOperator}
    parts = [HEAD, _arguments("pool_for_run", [pool_for_run])]
    parts += [_arguments(operator.__name__, _own_classes(operator)) for operator in operators]
    parts += [
        _arguments(name, [operator, *_own_classes(DistributedTrainOperator)]) for name, operator in decorators.items()
    ]
    parts.append(_section())
    parts.append(SPECS)
    parts += _specs(JobSpec, FunctionJobSpec, PredictJobSpec, PartitionsJobSpec, TuneJobSpec)
    return "\n".join(parts)


def _section() -> str:
    """Return the section about the options in Airflow's configuration."""
    from shoal.airflow.deployment import SECTION, config_section

    section = config_section()[SECTION]
    options = section["options"].items()
    rows = [f"| `{name}` | `{option['example']}` | {_cell(option['description'])} |" for name, option in options]
    head = [f"### Section `[{SECTION}]` of airflow.cfg", "", section["description"], ""]
    return "\n".join([*head, "| option | example | meaning |", "| --- | --- | --- |", *rows, ""])


def _own_classes(operator: type) -> list[type]:
    return [each for each in operator.__mro__ if each.__module__.startswith("shoal.")]


def _arguments(title: str, described: Sequence[Any]) -> str:
    """Return the section about an operator or function.

    Args:
        title: Heading.
        described: The class and its base classes, or the function. The first description of an argument counts.
    """
    summary = _paragraph(inspect.getdoc(described[0]) or "")
    found: dict[str, tuple[str, str]] = {}
    for each in described:
        signature = inspect.signature(each.__init__ if isinstance(each, type) else each)
        for name, text in _params(inspect.getdoc(each) or ""):
            if name in signature.parameters and name not in found:
                found[name] = _default(signature.parameters[name].default), text
    rows = [f"| `{name}` | {default} | {_cell(text)} |" for name, (default, text) in found.items()]
    table = ["| argument | default | meaning |", "| --- | --- | --- |", *rows, ""] if rows else []
    return "\n".join([f"### {title}", "", summary, "", *table])


def _params(doc: str) -> Iterator[tuple[str, str]]:
    for name, text in re.findall(r"^:param (\w+): (.*?)(?=^:|\Z)", doc, re.DOTALL | re.MULTILINE):
        yield name, " ".join(text.split())


def _specs(*specs: type[Settings]) -> list[str]:
    """Return the sections about specs and, after them, about the options that their fields contain."""
    sections, todo, done = [], [*specs], set[type]()
    while todo:
        spec = todo.pop(0)
        if spec in done:
            continue
        done.add(spec)
        rows = []
        for name, field in spec.model_fields.items():
            if name not in SET_BY_SHOAL:
                todo += _settings_in(field.annotation)
                rows.append(
                    f"| `{field.alias or name}` | {_type(field.annotation)} | {_field_default(field)} | "
                    f"{_cell(field.description or '')} |"
                )
        head = [f"### {spec.__name__}", "", _paragraph(inspect.getdoc(spec) or ""), ""]
        sections.append(
            "\n".join([*head, "| field | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""])
        )
    return sections


def _settings_in(annotation: Any) -> list[type[Settings]]:
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return [annotation]
    return [found for part in get_args(annotation) for found in _settings_in(part)]


_NAMES = {int: "integer", float: "number", str: "text", bool: "true or false", type(None): "null", dict: "object"}


def _type(annotation: Any) -> str:
    """Return a type as users of JSON write it."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(parts[0])
    if origin in (Union, types.UnionType):
        return " or ".join(dict.fromkeys(_type(part) for part in parts))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in parts)
    if origin in (tuple, list):
        return f"list of {_type(parts[0])}"
    if isinstance(annotation, type) and issubclass(annotation, Settings):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return _NAMES.get(origin or annotation, "any value")


def _field_default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    default = field.default if field.default is not PydanticUndefined else field.default_factory()
    # The defaults of options within options are in the section about them.
    return "see there" if isinstance(default, Settings) else _default(default)


def _default(value: Any) -> str:
    return "" if value is inspect.Parameter.empty else f"`{list(value) if isinstance(value, tuple) else value!r}`"


def _paragraph(doc: str) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join(doc.partition("\n\n")[0].split()).replace("``", "`")


def _cell(text: str) -> str:
    return text.replace("``", "`").replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
