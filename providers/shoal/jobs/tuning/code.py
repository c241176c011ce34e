"""The pickled code of a search: functions, and objects of Optuna."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shoal.jobs import shipped_code
from shoal.training.pickling import pickled


@dataclass(frozen=True)
class SearchCode:
    """Code of a search that its spec cannot contain as data.

    Args:
        function: Pickled function ``(params, context)``, which only the workers unpickle; None: a boosting training.
        space: Function that suggests the parameters of a trial; None: the spec has ranges.
        sampler: Sampler of Optuna; None: the spec names one.
        pruner: Pruner of Optuna; None: the spec names one.
    """

    function: bytes | None = None
    space: Callable[[Any], Any] | None = None
    sampler: Any = None
    pruner: Any = None

    def __bool__(self) -> bool:
        return any(each is not None for each in (self.function, self.space, self.sampler, self.pruner))

    def dumps(self) -> bytes:
        """Pickle the code.

        Raises:
            InvalidArgumentError: The code contains an object that cannot be pickled.
        """
        return pickled(self, "the space, sampler or pruner of a search")


def load(path: str | None) -> SearchCode:
    """Return the code in a file of a job; without a file, no code."""
    if path is None:
        return SearchCode()
    import cloudpickle

    code: SearchCode = cloudpickle.loads(shipped_code.read(path))
    return code
