"""Validate options and specs that users write. The base class `Settings` reports a wrong or unknown option as
`InvalidArgumentError`."""

from __future__ import annotations

import contextlib
import difflib
import math
import re
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, Any, Self, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import InvalidArgumentError, shown
from shoal.secrets.redaction import HIDDEN, RedactedRepr, is_secret_name, redact, redact_address, redact_all


class Settings(RedactedRepr, BaseModel):
    """Base class of shoal's options and specs. The values of an object are checked when the object is created, and
    cannot be changed afterwards.

    Raises:
        InvalidArgumentError: An option is unknown or missing, or a value is not allowed. The message names the option,
            its value and the allowed values. For an unknown option, it suggests the option with the most similar name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # `__init__` is hidden from type checkers. Otherwise they would take `**options` for the signature of every
    # subclass, and would not check the names and types of the fields.
    if not TYPE_CHECKING:

        def __init__(self, **options: Any) -> None:
            with _explained(type(self)):
                super().__init__(**options)

        # Without this attribute, pydantic would also call `__init__` for each nested model. Then `__init__` would raise
        # an error for one nested model at a time, without the path to the wrong field.
        __init__.__pydantic_base_init__ = True

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> Self:
        """Build the options from a mapping of names to values.

        Raises:
            InvalidArgumentError: An option is unknown or missing, or a value is not allowed.
        """
        with _explained(cls):
            return cls.model_validate(dict(fields))

    @classmethod
    def check(cls, fields: Mapping[str, Any], is_known: Callable[[Any], bool]) -> None:
        """Check the names of the options, and all values that contain no placeholder.

        A rule about several options is checked only if none of their values contains a placeholder.

        Args:
            fields: Names of the options and their values.
            is_known: Returns False for a value that contains a placeholder, such as a template, at any depth.

        Raises:
            InvalidArgumentError: An option is unknown or missing, or a known value is not allowed.
        """
        with _explained(cls, lambda problem: _is_certain(problem, fields, is_known)):
            cls.model_validate(dict(fields))


def optional(description: str) -> Any:
    """Return the field of a value that may be missing; it is None then."""
    return Field(default=None, description=description)


def later_option(description: str, default: Any = None, **rules: Any) -> Any:
    """Return the field of an option that the first specs did not have. The option is not stored while it has its
    default value: a spec that an earlier version has stored then keeps its fingerprint, and processes of that version,
    which refuse unknown options, can read it.
    """
    return Field(default=default, description=description, exclude_if=lambda value: value == default, **rules)


def positive_or_all(meaning: str) -> AfterValidator:
    """Return the validator of a number that is positive or -1. The error message contains the meaning of -1."""

    def check(value: int) -> int:
        if value != -1 and value < 1:
            raise ValueError(f"must be a positive number, or -1 {meaning}")
        return value

    return AfterValidator(check)


_MEMORY_UNITS = {
    **{"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
}


def memory_bytes(amount: str) -> int:
    """Return an amount of memory as Kubernetes writes it, such as 16Gi, in bytes.

    Raises:
        ValueError: The text is no such amount, or the amount is 0.
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kMGT]|[KMGT]i)?", amount)
    size = math.floor(float(found[1]) * _MEMORY_UNITS[found[2] or ""]) if found else 0
    if not size:
        raise ValueError(f'"{amount}" is not an amount of memory: write it as 16Gi or 16G')
    return size


def _checked_memory(amount: str) -> str:
    memory_bytes(amount)
    return amount


Memory = Annotated[str, AfterValidator(_checked_memory)]
"""Type of an option with an amount of memory; see :func:`memory_bytes`."""


_DURATION = re.compile(r"(\d{1,6})\s*([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 7 * 24}


def duration(text: str) -> timedelta:
    """Parse a whole number of hours, days or weeks: `36h`, `90d`, `4w`.

    Raises:
        InvalidArgumentError: The text is not a duration of this form.
    """
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidArgumentError(
            f"{shown(text)} is not a duration: write hours, days or weeks, such as 36h, 90d or 4w"
        )
    return timedelta(hours=int(found[1]) * _HOURS[found[2]])


def _checked_duration(text: str) -> str:
    duration(text)
    return text


Duration = Annotated[str, AfterValidator(_checked_duration)]
"""Type of an option with a duration; see :func:`duration`."""


def positive_seconds(name: str, bound: timedelta) -> float:
    """Check that a time limit is a positive duration, and return the limit in seconds."""
    if not isinstance(bound, timedelta) or bound <= timedelta(0):
        raise InvalidArgumentError(f"{name}={shown(bound)} must be a positive timedelta, such as timedelta(days=40)")
    return bound.total_seconds()


def unknown_value(field: str, given: str, allowed: str) -> str:
    """Return the error message for a text that is not among the allowed values of an option. The message suggests the
    allowed value that is most similar to the text.
    """
    near = difflib.get_close_matches(given, re.findall("'([^']*)'", allowed), n=1)
    return f'unknown {field} "{given}": it can be {allowed}' + (f"; did you mean {near[0]}?" if near else "")


@contextlib.contextmanager
def _explained(
    model: type[BaseModel], is_certain: Callable[[Mapping[str, Any]], bool] = lambda problem: True
) -> Iterator[None]:
    """If pydantic raises an error in the ``with`` block, raise `InvalidArgumentError` instead. The message names each
    wrong option.
    """
    try:
        yield
    except ValidationError as error:
        problems = [_sentence(model, problem) for problem in error.errors(include_url=False) if is_certain(problem)]
        if problems:
            raise InvalidArgumentError("; ".join(problems)) from None
    # A text with a lone surrogate cannot be encoded in UTF-8. For such a text, pydantic raises UnicodeEncodeError
    # instead of ValidationError.
    except UnicodeEncodeError as error:
        raise InvalidArgumentError(
            f"an option contains a character that cannot be encoded in UTF-8; remove it: {error}"
        ) from None


def _is_certain(problem: Mapping[str, Any], fields: Any, is_known: Callable[[Any], bool]) -> bool:
    """Return whether a problem that pydantic has found will remain when placeholders (templates) get their values."""
    found = fields
    for step in problem["loc"][:-1]:
        try:
            found = found[step]
        # `loc` contains the name of a model, because the field is a union of models, and pydantic reports the errors of
        # each model in the union. The values of the user decide which of these models applies. While a value is a
        # placeholder, the error may be of a model that does not apply.
        except (KeyError, IndexError, TypeError):
            return is_known(found)
    # Missing and unknown options are always errors, because only values contain placeholders, and names do not.
    return problem["type"] in ("missing", "extra_forbidden") or is_known(problem["input"])


def _sentence(model: type[BaseModel], problem: Mapping[str, Any]) -> str:
    where, kind, given = problem["loc"], problem["type"], problem["input"]
    message = redact(problem["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, "))
    if not where:
        return message
    field = redact(".".join(map(str, where)))
    if kind == "missing":
        return f"{field} is missing"
    if kind == "extra_forbidden":
        return f'unknown option "{field}"{_hint(str(where[-1]), _names(model, where[:-1]))}'
    if kind == "literal_error" and isinstance(given, str):
        return unknown_value(field, redact_all(given), problem["ctx"]["expected"])
    if kind == "model_type":
        message = f"must be a dict with the fields of a {problem['ctx']['class_name']}"
    if isinstance(given, str) and kind == "tuple_type":
        message = 'must be a list such as ["a", "b"], not a text'
    if isinstance(given, str) and is_secret_name(str(where[-1])):
        return f"{field}={HIDDEN}: {message}"
    hidden = redact_address(given) if isinstance(given, str) else redact_all(given)
    return f"{field}={redact(shown(hidden))}: {message}"


def _hint(name: str, legal: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, legal, n=1)
    if near:
        return f": did you mean {near[0]}?"
    if not legal:
        return ""
    library = "; parameters of the library belong in params" if {"params", "n_estimators"} <= {*legal} else ""
    return f"; allowed options: {', '.join(legal)}{library}"


def _names(model: type[BaseModel], path: Sequence[int | str]) -> list[str]:
    """Return the option names of the pydantic model to which `path` leads, or an empty list if it leads to no model."""
    found: type[BaseModel] | None = model
    for step in path:
        if found is None:
            break
        fields = {field.alias or name: field for name, field in found.model_fields.items()}
        # After the name of a field, `found` is the model of the field's value. If the value is a dict or a list,
        # `found` is the model of its elements. So a key of a dict or an index of a list does not change `found`.
        if step in fields:
            found = _model_in(fields[str(step)].annotation)
    return [field.alias or name for name, field in found.model_fields.items()] if found else []


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model that a type annotation contains, or None if the annotation contains no model.

    The annotation may be a model, a union with a model (`Model | None`), or a container of models (`list[Model]`).
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, tuple, list, dict):
        return next(filter(None, map(_model_in, get_args(annotation))), None)
    return None
