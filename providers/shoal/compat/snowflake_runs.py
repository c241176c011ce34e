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


class DPFRun:
    """Run of a `DPF`, with the methods of Snowflake's class. `DPF.run` and `restore_from` return one.

    Args:
        run_id: Id of the run.
        folder: Folder of the run in the stage.
        call: Handle of the job.
        is_restored: Whether the run was restored, so that it can be neither awaited nor cancelled.
    """

    def __init__(self, run_id: str, folder: str, call: SubmittedCall[Any], *, is_restored: bool = False) -> None:
        self.run_id = run_id
        self.call = call
        self._folder = folder
        self._is_restored = is_restored

    @classmethod
    def restore_from(cls, run_id: str, stage_name: str) -> Self:
        """Return a run that was started before, in this or another process.

        Raises:
            InvalidArgumentError: The stage has no such run, or its job was removed.
        """
        from shoal.distributors import attach

        folder = f"{stage_root(stage_name)}/{run_id}"
        try:
            document = json.loads(storage.read(f"{folder}/{RUN_FILE}"))
            call = attach(document["job_id"])
        except (OSError, ValueError, KeyError, JobNotFoundError) as error:
            raise InvalidArgumentError(f"the stage {stage_name} has no run {run_id} ({error})") from error
        return cls(run_id, folder, call, is_restored=True)

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

    def wait(self, show_progress: bool = True) -> RunStatus:
        """Wait until the run has ended, and return its status.

        Args:
            show_progress: Whether to show a progress bar, in a terminal.

        Raises:
            InvalidArgumentError: The run was restored.
        """
        self._refuse_if_restored("wait")
        from shoal.training.progress import ProgressDisplay

        with suppress(JobFailedError, JobCancelledError), ProgressDisplay(first_line_s=0.0) as display:
            self.call.job.wait(None, None, display.show if show_progress else None)
        return self.status

    def cancel(self) -> None:
        """Cancel the run. The outcomes of the partitions that have ended remain.

        Raises:
            InvalidArgumentError: The run was restored.
        """
        self._refuse_if_restored("cancel")
        self.call.cancel()

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
        for each in self._results():
            partition_id = str(each.key)
            artifacts = StageArtifactsManager(f"{self._folder}/{partition_id}")
            found[partition_id] = PartitionDetails(partition_id, each, artifacts)
        return found

    def _results(self) -> PartitionResults:
        from shoal.jobs import partitions_so_far

        if self.call.status().state is JobState.SUCCEEDED:
            results: PartitionResults = self.call.result()
            return results
        return partitions_so_far(self.call.job_id)

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
