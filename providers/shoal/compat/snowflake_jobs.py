"""Jobs, and runs of functions and trainings per partition, with the methods and members of Snowflake's classes."""

from __future__ import annotations

import contextlib
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, Self, TypeVar

from shoal.compat.snowflake_stages import RUN_FILE, ModelSerde, PickleSerde, StageArtifactsManager, stage_root
from shoal.distributors import ray_launch
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError, JobNotFoundError
from shoal.jobs.files import storage
from shoal.pool.spec import pool_name_of
from shoal.state.schema import JobState
from shoal.training.pytorch.script import Script
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors import SubmittedCall
    from shoal.distributors.decorators import LaunchedFunction
    from shoal.jobs.partitions.results import PartitionResult, PartitionResults


class RunStatus(StrEnum):
    """Status of a run, with Snowflake's members."""

    IN_PROGRESS = "IN_PROGRESS"
    SUCCESS = "SUCCESS"
    PARTIAL_FAILURE = "PARTIAL_FAILURE"
    FAILURE = "FAILURE"
    CANCELLED = "CANCELLED"


class PartitionStatus(StrEnum):
    """Status of a partition, with Snowflake's members. shoal knows only partitions that have ended: DONE, FAILED, and
    INTERNAL_ERROR if the process of the function was lost."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    DONE = "DONE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"
    INTERNAL_ERROR = "INTERNAL_ERROR"


@dataclass(frozen=True)
class PartitionDetails:
    """Outcome of a partition, with Snowflake's attributes.

    Args:
        partition_id: Id of the partition.
        result: What shoal knows of the partition.
        stage_artifacts_manager: Artifacts that the function has uploaded.
    """

    partition_id: str
    result: PartitionResult
    stage_artifacts_manager: StageArtifactsManager

    @property
    def status(self) -> PartitionStatus:
        """Return DONE, FAILED, or INTERNAL_ERROR if the process of the function was lost."""
        if self.result.status == "succeeded":
            return PartitionStatus.DONE
        is_lost = self.result.error.startswith("the process of the function")
        return PartitionStatus.INTERNAL_ERROR if is_lost else PartitionStatus.FAILED

    @property
    def logs(self) -> str:
        """Return the end of what the function has printed, and the reason of its failure."""
        return "\n".join(filter(None, (self.result.log.rstrip("\n"), self.result.error)))


@dataclass(frozen=True)
class JobRun:
    """A run that is a job.

    Args:
        call: Handle of the job.
    """

    call: SubmittedCall[Any]

    def document(self) -> dict[str, str]:
        """Return what `DPFRun.restore_from` needs, as plain data."""
        return {"job_id": self.call.job_id}

    @property
    def status(self) -> RunStatus:
        """Return the present status."""
        found = self.call.status()
        if found.state in (JobState.PENDING, JobState.RUNNING):
            return RunStatus.IN_PROGRESS
        if found.state is JobState.CANCELLED:
            return RunStatus.CANCELLED
        if found.result is None or found.result.partitions is None:
            return RunStatus.FAILURE
        return RunStatus.PARTIAL_FAILURE if found.result.partitions.get("failed") else RunStatus.SUCCESS

    def wait(self, show_progress: bool) -> None:
        """Wait until the job has ended."""
        from shoal.training.progress import ProgressDisplay

        with suppress(JobFailedError, JobCancelledError), ProgressDisplay(first_line_s=0.0) as display:
            self.call.job.wait(None, None, display.show if show_progress else None)

    def cancel(self) -> None:
        """Cancel the job."""
        self.call.cancel()

    def results(self) -> PartitionResults:
        """Return the outcomes of the partitions that have ended."""
        from shoal.jobs import partitions_so_far

        if self.call.status().state is JobState.SUCCEEDED:
            results: PartitionResults = self.call.result()
            return results
        return partitions_so_far(self.call.job_id)


@dataclass(frozen=True)
class ClusterRun:
    """A run that has ended in the Ray cluster of a function of `remote`.

    Args:
        found: Outcomes of all partitions.
    """

    found: PartitionResults

    def document(self) -> dict[str, str]:
        """Return what `DPFRun.restore_from` needs, as plain data."""
        return {"manifest": self.found.manifest, "digest": self.found.digest}

    @property
    def status(self) -> RunStatus:
        """Return PARTIAL_FAILURE if a partition failed, else SUCCESS."""
        failed = any(each.status != "succeeded" for each in self.found)
        return RunStatus.PARTIAL_FAILURE if failed else RunStatus.SUCCESS

    def wait(self, show_progress: bool) -> None:
        """Return at once."""

    def cancel(self) -> None:
        """Do nothing."""

    def results(self) -> PartitionResults:
        """Return the outcomes of all partitions."""
        return self.found


RunWork = JobRun | ClusterRun


class DPFRun:
    """Run of a `DPF`, with the methods of Snowflake's class. `DPF.run` and `restore_from` return one.

    Args:
        run_id: Id of the run.
        folder: Folder of the run in the stage.
        work: The job of the run, or its outcomes.
        is_restored: Whether the run was restored, so that it can be neither awaited nor cancelled.
    """

    def __init__(self, run_id: str, folder: str, work: RunWork, *, is_restored: bool = False) -> None:
        self.run_id = run_id
        self.work = work
        self._folder = folder
        self._is_restored = is_restored

    @classmethod
    def restore_from(cls, run_id: str, stage_name: str) -> Self:
        """Return a run that was started before, in this or another process.

        Raises:
            InvalidArgumentError: The stage has no such run, or its job was removed.
        """
        from shoal.distributors import attach
        from shoal.jobs.partitions.results import PartitionResults

        folder = f"{stage_root(stage_name)}/{run_id}"
        work: RunWork
        try:
            document = json.loads(storage.read(f"{folder}/{RUN_FILE}"))
            if "manifest" in document:
                work = ClusterRun(PartitionResults(**document))
            else:
                work = JobRun(attach(document["job_id"]))
        except (OSError, ValueError, KeyError, JobNotFoundError) as error:
            raise InvalidArgumentError(f"the stage {stage_name} has no run {run_id} ({error})") from error
        return cls(run_id, folder, work, is_restored=True)

    @property
    def status(self) -> RunStatus:
        """Return the present status."""
        return self.work.status

    def wait(self, show_progress: bool = True) -> RunStatus:
        """Wait until the run has ended, and return its status.

        Args:
            show_progress: Whether to show a progress bar, in a terminal.

        Raises:
            InvalidArgumentError: The run was restored.
        """
        self._refuse_if_restored("wait")
        self.work.wait(show_progress)
        return self.status

    def cancel(self) -> None:
        """Cancel the run. The outcomes of the partitions that have ended remain.

        Raises:
            InvalidArgumentError: The run was restored.
        """
        self._refuse_if_restored("cancel")
        self.work.cancel()

    def get_progress(self) -> dict[str, list[PartitionDetails]]:
        """Return the outcomes of the partitions that have ended, by status."""
        found: dict[str, list[PartitionDetails]] = {}
        for details in self.partition_details.values():
            found.setdefault(details.status.value, []).append(details)
        return found

    @property
    def partition_details(self) -> dict[str, PartitionDetails]:
        """Return the outcomes of the partitions that have ended, by id."""
        found = {}
        for each in self.work.results():
            partition_id = str(each.key)
            artifacts = StageArtifactsManager(f"{self._folder}/{partition_id}")
            found[partition_id] = PartitionDetails(partition_id, each, artifacts)
        return found

    def _refuse_if_restored(self, what: str) -> None:
        if self._is_restored:
            raise InvalidArgumentError(
                f"{what}() is not possible for a restored run: read its status and its partitions"
            )


class ManyModelRun(DPFRun):
    """Run of a `ManyModelTraining`."""

    serde: ModelSerde = PickleSerde()

    def get_model(self, partition_id: str) -> Any:
        """Return the model of a partition.

        Raises:
            FileNotFoundError: The partition has no model.
        """
        artifacts = StageArtifactsManager(f"{self._folder}/{partition_id}")
        return artifacts.get(self.serde.filename, self.serde.read)


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
