"""The base of the config objects that users make: checked on construction, frozen, and wrong values refused by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shoal.errors import InvalidArgumentError, shown
from shoal.redaction import RedactedRepr


def describe(exc: ValidationError) -> str:
    """What pydantic found, on one line, each field by name."""
    return "; ".join(
        f"{'.'.join(map(str, error['loc'])) or 'value'}={shown(error['input'])}: {error['msg']}"
        for error in exc.errors()
    )


class Config(RedactedRepr, BaseModel):
    """A frozen set of options; an unknown one or a wrong value raises `InvalidArgumentError`."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    # Hidden from type checkers, which would take it for the signature and lose the fields.
    if not TYPE_CHECKING:

        def __init__(self, **options: Any) -> None:
            try:
                super().__init__(**options)
            except ValidationError as exc:
                raise InvalidArgumentError(f"{type(self).__name__}: {describe(exc)}") from None
