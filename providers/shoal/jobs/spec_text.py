"""Read the fields of a job spec from a JSON or YAML text, and refuse fields with too many levels or too long integers.

DAG files import this module, so it does not import the specs themselves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from shoal.errors import InvalidArgumentError, MissingExtraError

_YAML = (".yaml", ".yml")

SUFFIXES = (".json", *_YAML)
"""Suffixes of the names of files that contain a job spec."""

_DEEPEST = 100
"""Most levels of nested lists and objects in a spec, far below the 1,000 calls at which Python stops."""

_LONGEST_INTEGER_BITS = 14_000
"""Most bits of an integer, about 4,200 digits. Python converts at most 4,300 digits to or from text."""


def check_json(fields: Any) -> None:
    """Refuse a spec that is nested too deeply or has an integer with too many digits, because later code would fail.

    Raises:
        InvalidArgumentError: The spec is nested too deeply, or has an integer that is too long.
    """
    left = [(fields, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise InvalidArgumentError(f"the spec is nested more than {_DEEPEST} levels deep: use fewer levels")
        if isinstance(value, int) and value.bit_length() > _LONGEST_INTEGER_BITS:
            raise InvalidArgumentError(
                "the spec has an integer of more than 4000 digits: use a smaller number, or write the number as a text"
            )
        items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        left += [(item, depth + 1) for item in items]


def fields_of(text: str, what: str, file_name: str = "") -> dict[str, Any]:
    """Return the fields of a job spec that a JSON or YAML text contains.

    Raises:
        InvalidArgumentError: The text is not valid, or does not contain an object.
        MissingExtraError: The text is YAML, and the package that reads YAML is not installed.
    """
    language = "YAML" if file_name.endswith(_YAML) else "JSON"
    try:
        document = _of_yaml(text) if language == "YAML" else json.loads(text)
    except RecursionError:
        raise InvalidArgumentError(
            f"{what} is nested too deeply: use fewer lists and objects inside each other"
        ) from None
    # `json.loads` also raises a ValueError for an integer of more than 4300 digits.
    except ValueError as error:
        raise InvalidArgumentError(f"{what} is not valid {language}: {error}") from None
    check_json(document)
    if not isinstance(document, dict):
        raise InvalidArgumentError(
            f'{what} is not a {language} object: write an object such as {{"dataset": {{"paths": [...]}}, …}}'
        )
    return document


def _of_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise MissingExtraError("PyYAML", None) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
