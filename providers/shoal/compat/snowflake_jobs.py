"""Jobs of functions and scripts, with the names of `snowflake.ml.jobs`."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from shoal.distributors import ray_launch
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError
from shoal.pool.names import pool_name_of
from shoal.state.schema import JobState
from shoal.training.pytorch.script import Script
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors import SubmittedCall
    from shoal.distributors.decorators import LaunchedFunction

P = ParamSpec("P")
T = TypeVar("T")

_STATUS = {
    JobState.PENDING: "PENDING",
    JobState.RUNNING: "RUNNING",
    JobState.SUCCEEDED: "DONE",
    JobState.FAILED: "FAILED",
    JobState.CANCELLED: "CANCELLED",
}
_NOT_HERE = ("external_access_integrations", "query_warehouse", "database", "schema", "session", "stage_name")


class MLJob(Generic[T]):
    """Job of a function that was decorated with `remote`, with the methods of Snowflake's `MLJob`.

    Args:
        call: Handle of the call; the attribute `call` has all that shoal knows about the job.
    """

    def __init__(self, call: SubmittedCall[T]) -> None:
        self.call = call

    @property
    def id(self) -> str:
        """Return the id of the job."""
        return self.call.job_id

    @property
    def name(self) -> str:
        """Return the id of the job; a job has no other name."""
        return self.call.job_id

    @property
    def status(self) -> str:
        """Return the present status in Snowflake's words: PENDING, RUNNING, DONE, FAILED or CANCELLED."""
        return _STATUS[self.call.status().state]

    def wait(self, timeout: float = -1) -> str:
        """Wait until the job has ended, and return its status.

        Args:
            timeout: Seconds to wait; a negative number waits without a limit.

        Raises:
            JobTimeoutError: The job has not ended in time. The error is also a `TimeoutError`.
        """
        with contextlib.suppress(JobFailedError, JobCancelledError):
            self.call.job.wait(_seconds(timeout))
        return self.status

    def result(self, timeout: float = -1) -> T:
        """Wait until the job has ended, and return the value of the function.

        Args:
            timeout: Seconds to wait; a negative number waits without a limit.

        Raises:
            JobFailedError: The job failed; the message ends with the cause.
            JobCancelledError: The job was cancelled.
            JobTimeoutError: The job has not ended in time. The error is also a `TimeoutError`.
        """
        return self.call.result(_seconds(timeout))

    def get_logs(self, limit: int = -1, *, as_list: bool = False) -> str | list[str]:
        """Return the last lines of the job's log, as one text or as a list of lines.

        Args:
            limit: Number of lines; a negative number returns all lines.
            as_list: Whether to return a list.
        """
        lines = list(self.call.logs())
        lines = lines[max(0, len(lines) - limit) :] if limit >= 0 else lines
        return lines if as_list else "\n".join(lines)

    def show_logs(self, limit: int = -1) -> None:
        """Print the last lines of the job's log; see `get_logs`."""
        print(self.get_logs(limit))

    def cancel(self) -> None:
        """Cancel the job and end its workers. A job that has ended stays as it is."""
        self.call.cancel()


def remote(
    compute_pool: str,
    *,
    target_instances: int = 1,
    pip_requirements: Sequence[str] = (),
    env_vars: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> Callable[[Callable[P, T]], Callable[P, MLJob[T]]]:
    """Decorate a function so that a call submits it as a job and returns the job, as `snowflake.ml.jobs.remote` does.

    The function runs once, on the head of the pool, and can use the whole Ray cluster, as with `@ray_launch`.

    Args:
        compute_pool: Name or URI of the pool. A name is made of any text: ``MY_POOL`` is the pool ``my-pool``.
        target_instances: Number of nodes. The pool grows to this size for the call, and gets its previous size
            afterwards.
        pip_requirements: Packages that the function needs on the nodes.
        env_vars: Environment variables of the function.
        kwargs: Arguments that have no meaning here (`stage_name`, `external_access_integrations`, `session`,
            `database`, `schema`, `query_warehouse`) are accepted and not used.

    Returns:
        A decorator. The decorated function returns an `MLJob`.

    Raises:
        InvalidArgumentError: An argument is not known, or a number is not legal.
    """
    launched = _launched("@remote", compute_pool, target_instances, pip_requirements, env_vars, kwargs)

    def decorate(function: Callable[P, T]) -> Callable[P, MLJob[T]]:
        submit = launched(function).submit

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> MLJob[T]:
            return MLJob(submit(*args, **kwargs))

        return call

    return decorate


def submit_file(
    file_path: str | os.PathLike[str],
    compute_pool: str,
    *,
    args: Sequence[str] | None = None,
    target_instances: int = 1,
    pip_requirements: Sequence[str] = (),
    env_vars: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> MLJob[None]:
    """Submit a script as a job, as `snowflake.ml.jobs.submit_file` does.

    The script runs once, on the head of the pool, and can use the whole Ray cluster. The files of its folder travel
    with it, as those of every script do.

    Args:
        file_path: Path of the script.
        compute_pool: Name or URI of the pool. A name is made of any text: ``MY_POOL`` is the pool ``my-pool``.
        args: Command line arguments of the script.
        target_instances: Number of nodes, as for `remote`.
        pip_requirements: Packages that the script needs on the nodes.
        env_vars: Environment variables of the script.
        kwargs: Arguments that have no meaning here, as for `remote`.

    Raises:
        InvalidArgumentError: The script cannot be read, an argument is not known, or a number is not legal.
    """
    launched = _launched("submit_file", compute_pool, target_instances, pip_requirements, env_vars, kwargs)
    return MLJob(launched(Script.read(file_path, args or ())).submit())


def submit_directory(
    dir_path: str | os.PathLike[str],
    compute_pool: str,
    *,
    entrypoint: str,
    args: Sequence[str] | None = None,
    target_instances: int = 1,
    pip_requirements: Sequence[str] = (),
    env_vars: Mapping[str, str] | None = None,
    **kwargs: Any,
) -> MLJob[None]:
    """Submit a script with its folder as a job, as `snowflake.ml.jobs.submit_directory` does.

    The script runs as with `submit_file`. Relative paths start in the folder.

    Args:
        dir_path: Path of the folder.
        compute_pool: Name or URI of the pool. A name is made of any text: ``MY_POOL`` is the pool ``my-pool``.
        entrypoint: Name of the script in the folder.
        args: Command line arguments of the script.
        target_instances: Number of nodes, as for `remote`.
        pip_requirements: Packages that the script needs on the nodes.
        env_vars: Environment variables of the script.
        kwargs: Arguments that have no meaning here, as for `remote`.

    Raises:
        InvalidArgumentError: The script cannot be read, is not directly in the folder, an argument is not known, or a
            number is not legal.
    """
    if not isinstance(entrypoint, str) or Path(entrypoint).name != entrypoint:
        raise InvalidArgumentError(
            f"entrypoint must be the name of a script in {os.fspath(dir_path)}, not {entrypoint!r}: pass the folder of "
            "the script as dir_path"
        )
    launched = _launched("submit_directory", compute_pool, target_instances, pip_requirements, env_vars, kwargs)
    script = Script.read(Path(dir_path, entrypoint), args or ())
    return MLJob(launched(script.with_files("")).submit())


def _launched(
    name: str,
    compute_pool: str,
    target_instances: int,
    pip_requirements: Sequence[str],
    env_vars: Mapping[str, str] | None,
    others: Mapping[str, Any],
) -> Callable[[Callable[P, T]], LaunchedFunction[P, T]]:
    if unknown := sorted(set(others) - set(_NOT_HERE)):
        raise InvalidArgumentError(f"{name} has no argument {', '.join(unknown)} here: remove it")
    pool = compute_pool if "://" in compute_pool else pool_name_of(compute_pool)
    config = RunConfig(pool_name=pool, packages=tuple(pip_requirements), env=dict(env_vars or {}))
    return ray_launch(num_workers=target_instances, remote=True, run_config=config)


def _seconds(timeout: float) -> float | None:
    return None if timeout < 0 else timeout
