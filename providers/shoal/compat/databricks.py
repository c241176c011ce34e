"""Names of Databricks' AI Runtime (`databricks.air`), of `serverless_gpu` and of PySpark's `TorchDistributor`, with
Databricks' default values.

Sources: https://docs.databricks.com/aws/en/machine-learning/ai-runtime/distributed-training and
https://api-docs.databricks.com/python/serverless_gpu/overview.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, ParamSpec, Self, TypeVar

from shoal.distributors import decorators
from shoal.distributors import runtime as runtime
from shoal.distributors.call import same_arguments
from shoal.distributors.pytorch import TorchDistributor as TorchDistributor
from shoal.errors import InvalidArgumentError
from shoal.lazy_imports import ray
from shoal.training.pytorch.request import DATABRICKS_NODE_TYPE
from shoal.training.run_config import RunConfig

P = ParamSpec("P")
T = TypeVar("T")

_LOCAL_TIMEOUT_S = 10_800.0


class _WithOverrides(decorators.Decorated[P, T]):
    """What Databricks' decorated functions have beside `distributed`."""

    DECORATOR: ClassVar[str]

    def __init__(self, function: Callable[P, T], arguments: dict[str, Any]) -> None:
        super().__init__(function, _site(self.DECORATOR, **arguments))
        self.func = function
        self._arguments = arguments

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse the call, as Databricks does: it is not clear where it should run.

        Raises:
            InvalidArgumentError: Always.
        """
        name = self.func.__name__
        raise InvalidArgumentError(
            f"{name} is decorated: call {name}.distributed(...) to run it in the workers, or {name}.func(...) to run "
            "it in this process"
        )

    def with_overrides(self, **arguments: Any) -> Self:
        """Return a copy of this function with other arguments of the decorator.

        Raises:
            InvalidArgumentError: An argument is not one of the decorator's, or its value is not legal.
        """
        if unknown := sorted(set(arguments) - set(self._arguments)):
            raise InvalidArgumentError(
                f"with_overrides has no argument {', '.join(unknown)}: choose from {', '.join(self._arguments)}"
            )
        return type(self)(self.func, self._arguments | arguments)


class DistributedFunction(_WithOverrides[P, T], decorators.DistributedFunction[P, T]):
    """Function that was decorated with `distributed`: ``f.distributed(...)`` calls it in every worker, ``f.func`` is
    the function itself."""

    DECORATOR = "distributed"


class LaunchedFunction(_WithOverrides[P, T], decorators.LaunchedFunction[P, T]):
    """Function that was decorated with `ray_launch`: ``f.distributed(...)`` calls it once, connected to Ray, and
    ``f.func`` is the function itself."""

    DECORATOR = "ray_launch"


def distributed(
    num_accelerators: int | None = None,
    accelerator_type: str | None = None,
    remote: bool = False,
    timeout: float | None = _LOCAL_TIMEOUT_S,
    *,
    gpus: int | None = None,
    gpu_type: str | None = None,
) -> Callable[[Callable[P, T]], DistributedFunction[P, T]]:
    """Decorate a function `f`: ``f.distributed(...)`` calls `f` in one worker for each GPU.

    Args:
        num_accelerators: Number of GPUs of all workers together. None: those of one node of `accelerator_type`, else
            all GPUs of this machine.
        accelerator_type: Type of a node or of the GPUs, such as ``GPU_8xH100`` or ``H100``, in upper or lower case.
        remote: Whether to run on the pool instead of on this machine.
        timeout: Maximum time of a call on this machine in seconds; not used with `remote`.
        gpus: Name of `num_accelerators` in `serverless_gpu`.
        gpu_type: Name of `accelerator_type` in `serverless_gpu`.

    Raises:
        InvalidArgumentError: Two names of the same argument have different values; or the number of GPUs is missing,
            with `remote` or with a type of GPUs that is not a type of node.
    """
    arguments = dict(locals())
    _site("distributed", **arguments)
    return lambda function: DistributedFunction(function, arguments)


@same_arguments(distributed)
def ray_launch(**arguments: Any) -> Callable[[Callable[P, T]], LaunchedFunction[P, T]]:
    """Decorate a function `f`: ``f.distributed(...)`` calls `f` once, in a process that is connected to Ray. The
    arguments are those of `distributed`, and say how many GPUs the Ray tasks and actors of `f` need together."""
    _site("ray_launch", **arguments)
    return lambda function: LaunchedFunction(function, arguments)


def ray_init(**arguments: Any) -> Any:
    """Connect this process to Ray: in a function of `ray_launch` to the pool's cluster, else to a new one on this
    machine. The arguments are those of `ray.init`."""
    return ray.init(**{"ignore_reinit_error": True, **arguments})


def _site(
    decorator: str,
    num_accelerators: int | None,
    accelerator_type: str | None,
    remote: bool,
    timeout: float | None,
    gpus: int | None,
    gpu_type: str | None,
) -> decorators.Site:
    count = _one_of("num_accelerators", num_accelerators, "gpus", gpus)
    kind = _one_of("accelerator_type", accelerator_type, "gpu_type", gpu_type)
    kind = None if kind is None else str(getattr(kind, "value", kind))
    if count is None and (kind is not None or remote):
        node = DATABRICKS_NODE_TYPE.fullmatch(kind or "")
        if node is None:
            raise InvalidArgumentError(
                "the number of GPUs is missing: pass num_accelerators, or a type of node such as "
                'accelerator_type="GPU_8xH100"'
            )
        count = int(node["gpus"])
    return decorators.site(
        decorator,
        gpus=count or 0,
        num_workers=None,
        gpu_type=kind,
        remote=remote,
        num_cpus=1,
        run_config=RunConfig(timeout=None if remote else timeout),
    )


def _one_of(name: str, value: Any, older: str, given: Any) -> Any:
    if value is not None and given is not None and value != given:
        raise InvalidArgumentError(f"{name}={value!r} and {older}={given!r} are two names of one argument: give one")
    return given if value is None else value
