"""Define `RunConfig`, the options of a run that all estimators and distributors accept, and restart a run that has lost
a worker or a node, up to `RunConfig.max_restarts` times."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from os import PathLike, fspath
from typing import TYPE_CHECKING, Any, Self, TypeVar

from pydantic import Field, field_validator, model_validator

from shoal.errors import CapacityError, WorkerLostError
from shoal.option_validation import Settings, optional
from shoal.own_pauses import waited_since
from shoal.secrets.redaction import has_credentials, is_secret_variable, redact_value
from shoal.training.locations import resolved
from shoal.training.reporting import say
from shoal.training.timeouts import REPLACE_NODE_S, RESOURCES_WAIT_S, RESTART_PERIOD_S
from shoal.training.tracking import Tracking

if TYPE_CHECKING:
    from shoal.training.gang.placement import GangShape

_REQUIREMENT = re.compile(r"[A-Za-z0-9]")


class RunConfig(Settings):
    """Options of a run: its pool, its limits and the folder for its results.

    All estimators and distributors accept the same options.

    Example:
        >>> from shoal import RunConfig
        >>> RunConfig(pool_name="retrain", seed=7, timeout=3600)
    """

    pool_name: str | None = optional(
        "Name or URI (`local://retrain?max_nodes=4`) of the pool that runs the training. A call of an "
        "estimator, a distributor or a decorated function creates the pool of a URI if necessary, brings it up, and "
        "leases as many nodes as its workers need. None: inside a job the pool of that job, otherwise the "
        "pool named by $SHOAL_POOL, otherwise the only pool that is up."
    )
    job_id: str | None = Field(
        default=None,
        min_length=1,
        description="Id of the job. A second call with the same id attaches to the job instead of starting another "
        "one. None: each call creates a new id.",
    )
    max_restarts: int = Field(
        default=0,
        ge=0,
        description="Number of times that a training may continue from its last checkpoint after a worker was lost. "
        "With the default 0, the first lost worker ends the training with an error.",
    )
    min_workers: int | None = Field(
        default=None,
        ge=1,
        description="Minimum number of workers with which the training may continue after a worker was lost. None: "
        "the training continues only with as many workers as before, which gives the same model.",
    )
    checkpoint_every: int | None = Field(
        default=None,
        ge=1,
        description="Number of boosting rounds between two checkpoints. None: 50 rounds, or a quarter of all rounds "
        "if that is more.",
    )
    artifact_location: str | None = optional(
        "Directory or URI for models and results. A relative path starts at the caller's working "
        "directory. None: the default location of the pool."
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**31,
        description="Seed for the division of the rows among the workers, and for the boosting library unless "
        "`params` contains a seed.",
    )
    clamp: bool = Field(
        default=False,
        description="Whether to reduce a request for more workers or CPUs than the active nodes have, and to warn. "
        "With the default False, such a request is refused with an error.",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="Maximum time of the training in seconds, from the call to the result. None: no limit. Before the"
        " training starts, a job may additionally wait for free resources on its pool for the same time.",
    )
    budget_node_hours: float | None = Field(
        default=None,
        gt=0,
        allow_inf_nan=False,
        description="Node-hours after which the job is ended with an error. The node-hours of all attempts since "
        "the last successful attempt are added up. None: no limit.",
    )
    orphan_after: float | None = Field(
        default=900.0,
        gt=0,
        description="Time in seconds after which the job ends itself if no process has asked for its state. None: the"
        " job never ends for this reason.",
    )

    priority: int = Field(
        default=0,
        ge=-1000,
        le=1000,
        description="Priority among the jobs that wait for free resources on the pool. Jobs with a higher number "
        "start first.",
    )

    tracking: Tracking | None = Field(
        default_factory=Tracking,
        exclude=True,
        description="Options for the MLflow run of the job. None: the job records nothing in MLflow. A training in a "
        "Ray cluster that the calling process is connected to is not a job, so shoal records no run for it. In the "
        "JSON of a job's spec, the field `tracking` contains these options, and `run_config` does not.",
    )

    env: dict[str, str] = Field(
        default_factory=dict,
        description="Environment variables of the workers, such as TOKENIZERS_PARALLELISM. The values are stored "
        "with the job: name secrets in `secret_env` instead.",
    )
    secret_env: tuple[str, ...] = Field(
        default=(),
        description="Names of environment variables of the process that submits the job, such as HF_TOKEN. The driver "
        "and the workers get the values of these variables. The values are not stored.",
    )
    packages: tuple[str, ...] = Field(
        default=(),
        description="Python packages that the workers need in addition to those of the nodes, such as einops==0.8. uv "
        "installs them on the pool, once for all jobs with the same packages.",
    )
    code: tuple[str, ...] = Field(
        default=(),
        description="Folders of Python packages, and .py files, that the workers can import, such as ./mypkg, and "
        "other files, such as ./settings.yaml, which lie beside the modules on the nodes. A relative path starts at "
        "the working directory of the process that submits the job.",
    )

    @field_validator("env")
    @classmethod
    def _legal_variables(cls, env: dict[str, str]) -> dict[str, str]:
        for name, value in env.items():
            check_variable(name)
            if is_secret_variable(name):
                raise ValueError(
                    f'"{name}" looks like the name of a secret, but values in env are stored with the job: '
                    f'set the variable in this process, and give secret_env=["{name}"] instead'
                )
            if "\0" in value:
                raise ValueError(f"the value of {name} contains a NUL character: remove this character")
        return env

    @field_validator("code", mode="before")
    @classmethod
    def _paths(cls, code: Any) -> Any:
        if isinstance(code, PathLike):
            return fspath(code)
        if not isinstance(code, list | tuple):
            return code
        return tuple(fspath(path) if isinstance(path, PathLike) else path for path in code)

    @field_validator("secret_env")
    @classmethod
    def _legal_names(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            check_variable(name)
        return names

    @model_validator(mode="after")
    def _named_once(self) -> Self:
        if twice := sorted(self.env.keys() & set(self.secret_env)):
            raise ValueError(
                f"env and secret_env contain the same variables: {', '.join(twice)}. Remove them from one of the two"
            )
        return self

    @field_validator("packages")
    @classmethod
    def _requirements(cls, packages: tuple[str, ...]) -> tuple[str, ...]:
        for package in packages:
            if not _REQUIREMENT.match(package):
                raise ValueError(
                    f'"{package}" is not a package: write the name of a package, or a requirement such as '
                    '"einops==0.8". Set options such as --index-url in the configuration of uv on the nodes'
                )
            if has_credentials(package):
                raise ValueError(
                    f'"{redact_value(package)}" contains credentials, which every user of the node could read on the '
                    "command line of uv: name the package without a URL, set UV_INDEX in this process to the URL of "
                    'the package index, and pass secret_env=["UV_INDEX"]'
                )
        return packages

    @field_validator("artifact_location")
    @classmethod
    def _absolute(cls, location: str | None) -> str | None:
        return resolved(location) if location else location


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_RESERVED = re.compile(
    r"(RAY|SHOAL|TORCHELASTIC)_.*|PWD|PYTHONPATH|PYTHONHOME|PATH|LD_LIBRARY_PATH"
    r"|((LOCAL|GROUP|ROLE)_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|OMP_NUM_THREADS"
    r"|CUDA_VISIBLE_DEVICES|MLFLOW_RUN_ID"
)
"""Environment variables that a job may not set: shoal, Ray or the node sets them, or they have no effect in a process
that is already running."""


def check_variable(name: str) -> None:
    """Check that a job may set an environment variable.

    Raises:
        ValueError: The name is not legal, or the variable is reserved.
    """
    if not _VARIABLE.fullmatch(name):
        raise ValueError(f'"{name}" is not the name of an environment variable: use only letters, digits and "_"')
    if _RESERVED.fullmatch(name):
        raise ValueError(
            f"{name} cannot be set for a job: shoal, Ray or the node sets this variable, or the variable has no "
            f"effect in a process that is already running. Remove {name}. To make modules importable in the workers, "
            "use the options code and packages"
        )


_T = TypeVar("_T")


class NodeLeavesError(Exception):
    """Raised at a checkpoint if a node of the training will shut down soon: the training then moves to other nodes."""


class Restarts:
    """Runner that restarts a training with new workers after a worker was lost, within `max_restarts` and `timeout`.

    The training begins when this object is created.

    Attributes:
        count: Number of restarts so far.
    """

    def __init__(self, run_config: RunConfig) -> None:
        self.count = 0
        self._most = run_config.max_restarts
        self._began = time.monotonic()
        self._deadline = None if run_config.timeout is None else self._began + run_config.timeout

    @property
    def seconds(self) -> float:
        """Seconds since the training began."""
        return time.monotonic() - self._began

    @property
    def timeout(self) -> float | None:
        """Seconds from now until the time limit of the training; None if there is no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def wait_s(self) -> float:
        """Seconds to wait for CPUs and GPUs that other work uses."""
        return RESOURCES_WAIT_S if self.timeout is None else min(RESOURCES_WAIT_S, self.timeout)

    def run(
        self,
        attempt: Callable[[], _T],
        *,
        checkpoint: Callable[[], str],
        shrink: Callable[[], str | None] = lambda: None,
    ) -> _T:
        """Call `attempt`, and call it again each time a worker was lost, until no restarts are left.

        `attempt` is also called again if it raises `NodeLeavesError`, which does not count as a restart.

        Raises:
            WorkerLostError: A worker was lost, and no restarts are left.
            CapacityError: The nodes are too small for the workers, or not enough resources became free in time.
        """
        lost_at: float | None = None
        while True:
            try:
                return attempt()
            except WorkerLostError as error:
                if self.count >= self._most:
                    raise
                self.count += 1
                lost_at = time.monotonic()
                say(f"{error}: continuing from {checkpoint()} (restart {self.count} of {self._most})")
            except NodeLeavesError as error:
                lost_at = time.monotonic()
                say(f"{error}: continuing from {checkpoint()} on other nodes")
            except CapacityError:
                # After a worker was lost, the pool may still be replacing the lost node, which takes time. The training
                # therefore waits and tries again instead of failing at once.
                waited = None if lost_at is None else waited_since(lost_at)
                if waited is None or waited > RESOURCES_WAIT_S or self.timeout == 0.0:
                    raise
                if waited > REPLACE_NODE_S and (fewer := shrink()):
                    say(f"the lost node was not replaced within {REPLACE_NODE_S:.0f} s: continuing with {fewer}")
                time.sleep(RESTART_PERIOD_S)


def fewer_workers(size: GangShape, least: int | None, resolve: Callable[[], GangShape]) -> GangShape | None:
    """Return the size with fewer workers for which the active nodes have room, if they have room for `least`; None if
    the training has to keep its workers."""
    if least is None:
        return None
    with warnings.catch_warnings(action="ignore"):
        found = resolve()
    return found if least <= found.num_workers < size.num_workers else None
