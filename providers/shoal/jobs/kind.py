"""The kinds of jobs by the name that their specs have in the field `framework`, and how specs of any kind are parsed.

A further kind is a folder with its spec, and a line in `_KINDS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shoal.errors import InvalidArgumentError
from shoal.option_validation import unknown_value
from shoal.secrets.redaction import redact

if TYPE_CHECKING:
    from shoal.jobs.specs.base import AnyJobSpec

_KINDS = {
    "xgboost": "shoal.jobs.specs.training:JobSpec",
    "lightgbm": "shoal.jobs.specs.training:JobSpec",
    "pytorch": "shoal.jobs.specs.function:FunctionJobSpec",
    "predict": "shoal.jobs.specs.prediction:PredictJobSpec",
    "partitions": "shoal.jobs.specs.partitions:PartitionsJobSpec",
    "tune": "shoal.jobs.specs.tuning:TuneJobSpec",
}
"""The class of a kind's specs. Its module is imported when the first such spec is parsed."""


def parse_spec(fields: Mapping[str, Any]) -> AnyJobSpec:
    """Build the spec of a job from fields that come from a file, an operator's arguments or a job's row in the store.

    The field `framework` selects the kind of the spec.

    Raises:
        InvalidArgumentError: At least one field is wrong; the message names each of them.
    """
    return spec_class(fields).parse(fields)


def spec_class(fields: Mapping[str, Any]) -> type[AnyJobSpec]:
    """Return the class of the spec that the field `framework` selects.

    Raises:
        InvalidArgumentError: The framework is unknown.
    """
    framework = fields.get("framework", "xgboost")
    if isinstance(framework, str) and framework not in _KINDS:
        *most, last = (f"'{name}'" for name in _KINDS)
        raise InvalidArgumentError(unknown_value("framework", redact(framework), f"{', '.join(most)} or {last}"))
    # If the framework is not a text, the spec of a training raises the error when it parses the fields.
    module, _, name = _KINDS[framework if isinstance(framework, str) else "xgboost"].partition(":")
    found: type[AnyJobSpec] = getattr(import_module(module), name)
    return found
