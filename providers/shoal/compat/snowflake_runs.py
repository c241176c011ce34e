"""Runs of functions and of trainings per partition, with the methods and members of Snowflake's classes."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Self

from shoal.compat.snowflake_stages import RUN_FILE, ModelSerde, PickleSerde, StageArtifactsManager, stage_root
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError, JobNotFoundError
from shoal.jobs.files import storage
from shoal.state.schema import JobState

if TYPE_CHECKING:
    from shoal.distributors import SubmittedCall
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
