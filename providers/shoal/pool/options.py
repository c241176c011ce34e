"""What a scaling can be asked for, checked before anything starts."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from shoal.errors import InvalidArgumentError, shown
from shoal.pool.tunables import ROLLBACK_AFTER


class ScaleOptions(BaseModel):
    """The `options` of `scale_cluster`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    rollback_after_seconds: Annotated[float, Field(gt=0, allow_inf_nan=False)] = ROLLBACK_AFTER
    block_until_min_cluster_size: Annotated[int, Field(ge=1)] | None = None

    @classmethod
    def parse(cls, options: Mapping[str, Any] | None, size: int) -> ScaleOptions:
        """Check options before anything starts.

        Raises:
            InvalidArgumentError: An unknown option, or a value out of range, by name.
        """
        try:
            parsed = cls.model_validate(dict(options or {}))
        except ValidationError as error:
            raise InvalidArgumentError("; ".join(cls._say(problem) for problem in error.errors())) from None
        least = parsed.block_until_min_cluster_size
        if least is not None and least > size:
            raise InvalidArgumentError(
                f"block_until_min_cluster_size={least} is above expected_cluster_size={size}: it can be {size} at most"
            )
        return parsed

    @classmethod
    def _say(cls, problem: Any) -> str:
        if not problem["loc"]:  # a key that is no text, or no Unicode
            return f"name of an option: {problem['msg']}"
        name = str(problem["loc"][0])
        if problem["type"] != "extra_forbidden":
            return f"option {name}={shown(problem['input'])}: {problem['msg']}"
        near = difflib.get_close_matches(name, cls.model_fields, n=1)
        return f'unknown option "{name}"' + (
            f": did you mean {near[0]}?" if near else f"; there are: {', '.join(cls.model_fields)}"
        )


def checked_size(value: Any, name: str = "expected_cluster_size") -> int:
    """A number of nodes.

    Raises:
        InvalidArgumentError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InvalidArgumentError(f"{name}={shown(value)}: it has to be a whole number of nodes, 1 or more")
    return value
