"""The reference of the specs of jobs and of the options of pools, from the descriptions of their fields."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shoal.option_validation import Settings
from tests.support.reference.texts import cell, default, paragraph, table

SET_BY_SHOAL = {
    *("fingerprint", "user_code", "program", "arguments", "code_digest", "returns", "torch_distributor", "room_for"),
}
"""Fields of specs that users do not set."""

HEAD = """# Specs of jobs

The guide is [jobs.md](../jobs.md). `shoal train`, `DistributedTrainOperator`, Prefect's `distributed_train` and
`shoal.jobs.submit` take the same specs. A field without a default is required.
"""

POOLS = """# Pools

The guide is [pools.md](../pools.md). The options stand in a pool's URI, such as `local://retrain?max_nodes=4`, in
`PoolSpec`, in an Airflow connection and in a Prefect block.
"""


def page() -> str:
    """Return the page of the specs, and of the options that their fields contain."""
    return "\n".join([HEAD, *("\n".join([f"## {spec.__name__}", "", *fields(spec)]) for spec in on_page())])


@functools.cache
def on_page() -> list[type[Settings]]:
    """Return the specs and options of the page."""
    from shoal.jobs import FunctionJobSpec, JobSpec, PartitionsJobSpec, PredictJobSpec, TuneJobSpec

    found: list[type[Settings]] = [JobSpec, FunctionJobSpec, PredictJobSpec, PartitionsJobSpec, TuneJobSpec]
    for spec in found:  # grows while it is read
        inside = (each for field in spec.model_fields.values() for each in _settings_in(field.annotation))
        found += [each for each in dict.fromkeys(inside) if each not in found]
    return found


def pools_page() -> str:
    """Return the page of the options of pools, and of scaling and leases."""
    from shoal.pool.options import OPTIONS
    from shoal.pool.options.base import PoolOptions
    from shoal.pool.spec import LeaseOptions, ScaleOptions

    of_all = PoolOptions.model_fields
    lines = [POOLS, "## All pools", "", *fields(PoolOptions, {"backend": None})]
    for name, options in OPTIONS.items():
        lines += [f"## {name}://", "", *fields(options, of_all)]
    lines += ["## ScaleOptions", "", *fields(ScaleOptions)]
    lines += ["## LeaseOptions", "", *fields(LeaseOptions, ScaleOptions.model_fields)]
    return "\n".join(lines)


def fields(model: type[BaseModel], others: Mapping[str, Any] | None = None) -> list[str]:
    """Return the lines about a model: what it is, and a table of its fields without those that others have."""
    rows = [
        (f"`{field.alias or name}`", _type(field.annotation), _field_default(field), cell(field.description or ""))
        for name, field in model.model_fields.items()
        if name not in SET_BY_SHOAL and name not in (others or {})
    ]
    return [paragraph(inspect.getdoc(model) or ""), "", *table(("field", "type", "default", "meaning"), rows)]


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
        name = annotation.__name__
        return f"[{name}](specs.md#{name.lower()})" if annotation in on_page() else f"`{name}`"
    return _NAMES.get(origin or annotation, "any value")


def _field_default(field: FieldInfo) -> str:
    if field.is_required():
        return ""
    value = field.default if field.default is not PydanticUndefined else field.default_factory()
    # The defaults of options within options are in the section about them.
    return "see there" if isinstance(value, Settings) else default(value)
