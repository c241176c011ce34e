"""Snowflake's names for functions and models per partition: `DPF`, `ManyModelTraining`, `ManyModelInference`, their
runs, and stages.

A stage is a folder here: a path, a URI, or a name, which stands for a folder in ``$SHOAL_HOME/stages``. Artifacts are
in ``<stage>/<run_id>/<partition_id>/``, as in Snowflake.

Sources: https://docs.snowflake.com/en/developer-guide/snowflake-ml/process-data-across-partitions and
https://docs.snowflake.com/en/developer-guide/snowflake-ml/train-models-across-partitions
"""

from __future__ import annotations

import json
import os
import pickle
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self
from urllib.parse import quote

from shoal.data.connector import DataConnector
from shoal.data.dataset_spec import TorchDefaults
from shoal.data.parquet.source import ParquetSource
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError, JobNotFoundError
from shoal.jobs import partitions_so_far
from shoal.jobs.files import storage
from shoal.kinds.partitions.partition_results import PartitionResult, PartitionResults
from shoal.kinds.partitions.result_files import remove_tree
from shoal.lazy_imports import cloudpickle, pd
from shoal.state.home import home
from shoal.state.schema import JobState
from shoal.training.cluster import is_connected
from shoal.training.locations import filesystem, local_path, names_in, resolved
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    from shoal.distributors import SubmittedCall


RUN_FILE = ".shoal-run.json"
"""Name of the file in the folder of a run that names its job."""

TORCH_DEFAULTS = TorchDefaults(expand_dims=True, drop_last_batch=True)
"""Shapes that Snowflake gives to tensors."""


def connector_to(path: str) -> DataConnector:
    """Return a connector to Parquet files, whose tensors have Snowflake's shapes."""
    return DataConnector(ParquetSource(path), torch_defaults=TORCH_DEFAULTS)


def stage_root(stage_name: str) -> str:
    """Return the folder or URI of a stage: a path or URI itself, or the folder of a name such as ``@db.schema.stage``.

    Raises:
        InvalidArgumentError: The name is empty.
    """
    name = stage_name.removeprefix("@").rstrip("/")
    if not name:
        raise InvalidArgumentError("stage_name is empty: give a path, a URI or a name")
    if stage_name.startswith("@") or ("/" not in name and "://" not in name):
        first, *rest = name.split("/")
        return "/".join([str(home() / "stages" / quote(first, safe="")), *rest])
    return local_path(resolved(name, "stage_name")).rstrip("/")


class StageArtifactsManager:
    """The artifacts of a partition: files in a folder of the stage.

    Args:
        folder: Folder or URI.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def list(self) -> list[str]:
        """Return the names of the files."""
        return names_in(self.folder)

    def get(self, filename: str, read_function: Callable[[str], Any] | None = None) -> Any:
        """Read an artifact: with ``pickle``, or with a function of the path of a local copy."""
        with tempfile.TemporaryDirectory(prefix="shoal-artifact-") as folder:
            return (read_function or PickleSerde().read)(self.download(filename, folder))

    def download(self, filename: str, local_dir: str) -> str:
        """Copy an artifact to a local directory, and return the path of the copy."""
        path = os.path.join(local_dir, checked_name(filename))
        Path(path).write_bytes(storage.read(f"{self.folder}/{filename}"))
        return path

    def put(self, obj: Any, filename: str, write_function: Callable[[Any, str], Any] | None = None) -> None:
        """Write an artifact: with ``pickle``, or with a function of the object and the path of a local file."""
        target = f"{self.folder}/{checked_name(filename)}"
        with tempfile.TemporaryDirectory(prefix="shoal-artifact-") as folder:
            path = os.path.join(folder, filename)
            (write_function or PickleSerde().write)(obj, path)
            storage.write(target, Path(path).read_bytes())


def checked_name(filename: str) -> str:
    """Return the name of an artifact.

    Raises:
        InvalidArgumentError: The name is a path.
    """
    if not filename or "/" in filename or filename in (".", "..", RUN_FILE):
        raise InvalidArgumentError(f"{filename!r} is no name of an artifact: give a plain file name, without folders")
    return filename


class PartitionContext:
    """Context of a partition, which Snowflake passes to the function as second argument.

    Args:
        partition_id: Value of the column as text, or the path of the file below the stage's folder.
        run_folder: Folder of the run in the stage.
    """

    def __init__(self, partition_id: str, run_folder: str) -> None:
        self.partition_id = partition_id
        self._artifacts = StageArtifactsManager(f"{run_folder}/{partition_id}")

    def upload_to_stage(self, obj: Any, filename: str, write_function: Callable[[Any, str], Any] | None = None) -> None:
        """Write an artifact of this partition; see `StageArtifactsManager.put`."""
        self._artifacts.put(obj, filename, write_function)

    def download_from_stage(
        self, filename: str, stage_path: str | None = None, read_function: Callable[[str], Any] | None = None
    ) -> Any:
        """Read an artifact of this partition, or of the folder `stage_path`, such as ``@stage/run_id/partition_id``."""
        found = self._artifacts if stage_path is None else StageArtifactsManager(stage_root(stage_path))
        return found.get(filename, read_function)

    def with_session(self, func: Callable[[Any], Any]) -> Any:
        """Refuse the call, because there is no Snowflake session here.

        Raises:
            InvalidArgumentError: Always.
        """
        raise InvalidArgumentError(
            "with_session needs a session of Snowflake: return the rows with upload_to_stage, or write them with a "
            "connection that the function opens"
        )


class PartitionConnector:
    """Connector to the rows of a partition, which Snowflake passes to the function as first argument.

    Args:
        rows: Rows of the partition.
        folder: Empty local folder that is removed when the function has returned.
    """

    def __init__(self, rows: pd.DataFrame, folder: str) -> None:
        self._rows = rows
        self._folder = folder

    def to_pandas(self, limit: int | None = None) -> pd.DataFrame:
        """Return the rows, or the first `limit` rows."""
        return self._rows if limit is None else self._rows.head(limit)

    def to_torch_dataset(self, **options: Any) -> Any:
        """Return a torch dataset of the rows; the options are those of `DataConnector.to_torch_dataset`."""
        return self._connector.to_torch_dataset(**options)

    @cached_property
    def _connector(self) -> Any:
        path = os.path.join(self._folder, "rows.parquet")
        self._rows.to_parquet(path)
        return connector_to(path)


class ModelSerde(ABC):
    """How a model is stored in a file. Subclasses define `filename`, `write` and `read`."""

    @property
    @abstractmethod
    def filename(self) -> str:
        """Return the name of the file."""

    @abstractmethod
    def write(self, model: Any, file_path: str) -> None:
        """Write a model into a file."""

    @abstractmethod
    def read(self, file_path: str) -> Any:
        """Read a model from a file."""


class PickleSerde(ModelSerde):
    """Models as pickle, in the file ``model.pkl``."""

    filename: ClassVar[str] = "model.pkl"

    def write(self, model: Any, file_path: str) -> None:
        """Pickle a model into a file."""
        Path(file_path).write_bytes(cloudpickle.dumps(model))

    def read(self, file_path: str) -> Any:
        """Unpickle a model from a file."""
        with open(file_path, "rb") as file:
            return pickle.load(file)


class TorchSerde(ModelSerde):
    """PyTorch models, in the file ``model.pth``."""

    filename: ClassVar[str] = "model.pth"

    def write(self, model: Any, file_path: str) -> None:
        """Write a model with ``torch.save``."""
        import torch

        torch.save(model, file_path)

    def read(self, file_path: str) -> Any:
        """Read a model with ``torch.load``."""
        import torch

        return torch.load(file_path, weights_only=False)


_FILE = "file"


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
        work: Handle of the run's job; or its outcomes, if it has ended in the Ray cluster of a function of `remote`.
        is_restored: Whether the run was restored, so that it can be neither awaited nor cancelled.
    """

    def __init__(
        self, run_id: str, folder: str, work: SubmittedCall[Any] | PartitionResults, *, is_restored: bool = False
    ) -> None:
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

        folder = f"{stage_root(stage_name)}/{run_id}"
        try:
            document = json.loads(storage.read(f"{folder}/{RUN_FILE}"))
            work = PartitionResults(**document) if "manifest" in document else attach(document["job_id"])
        except (OSError, ValueError, KeyError, JobNotFoundError) as error:
            raise InvalidArgumentError(f"the stage {stage_name} has no run {run_id} ({error})") from error
        return cls(run_id, folder, work, is_restored=True)

    @property
    def status(self) -> RunStatus:
        """Return the present status."""
        if isinstance(self.work, PartitionResults):
            failed = self.work.counts["failed"]
            return RunStatus.PARTIAL_FAILURE if failed else RunStatus.SUCCESS
        found = self.work.status()
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
        from shoal.training.reporting import ProgressDisplay

        self._refuse_if_restored("wait")
        if not isinstance(self.work, PartitionResults):
            with suppress(JobFailedError, JobCancelledError), ProgressDisplay(first_line_s=0.0) as display:
                self.work.job.wait(None, None, display.show if show_progress else None)
        return self.status

    def cancel(self) -> None:
        """Cancel the run. The outcomes of the partitions that have ended remain.

        Raises:
            InvalidArgumentError: The run was restored.
        """
        self._refuse_if_restored("cancel")
        if not isinstance(self.work, PartitionResults):
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
        results: PartitionResults
        if isinstance(self.work, PartitionResults):
            results = self.work
        elif self.work.status().state is JobState.SUCCEEDED:
            results = self.work.result()
        else:
            results = partitions_so_far(self.work.job_id)
        return {
            key: PartitionDetails(key, each, StageArtifactsManager(f"{self._folder}/{key}"))
            for key, each in ((str(each.key), each) for each in results)
        }

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
        return StageArtifactsManager(f"{self._folder}/{partition_id}").get(self.serde.filename, self.serde.read)


@dataclass(frozen=True)
class ExecutionOptions:
    """Options of a run, with Snowflake's names and default values.

    Args:
        use_head_node: Accepted and not used: the driver of a job needs no CPU of the head.
        loading_wh: Accepted and not used.
        num_cpus_per_worker: CPUs of each worker; 1 by default.
        num_gpus_per_worker: Only 0 and None, because partitions are processed on CPUs.
        max_retries: Only 1: a partition whose process is lost is tried once more.
        fail_fast: Only False: the other partitions go on.

    Raises:
        InvalidArgumentError: An option has a value that is not possible here.
    """

    use_head_node: bool = True
    loading_wh: str | None = None
    num_cpus_per_worker: int | None = None
    num_gpus_per_worker: int | None = None
    max_retries: int = 1
    fail_fast: bool = False

    def __post_init__(self) -> None:
        if self.num_gpus_per_worker:
            raise InvalidArgumentError("num_gpus_per_worker is not possible here: partitions are processed on CPUs")
        if self.max_retries != 1:
            raise InvalidArgumentError(
                f"max_retries={self.max_retries} is not possible here: a partition whose process is lost is tried once "
                "more, and one whose function raises an error is not tried again"
            )
        if self.fail_fast:
            raise InvalidArgumentError("fail_fast=True is not possible here: cancel the run with run.cancel()")


class DPF:
    """Distributed partition function: calls a function for each partition of a table, with Snowflake's arguments.

    Args:
        func: Function of a data connector and a `PartitionContext`.
        stage_name: Stage for artifacts: a path, a URI, or a name.
        run_config: Pool to run on, and limits of the run. Snowflake has no such argument.
    """

    _run_class: ClassVar[type[DPFRun]] = DPFRun

    def __init__(
        self, func: Callable[[Any, PartitionContext], Any], stage_name: str, *, run_config: RunConfig | None = None
    ) -> None:
        self._func = func
        self._stage = stage_root(stage_name)
        self._run_config = run_config or RunConfig()

    def run(
        self,
        partition_by: str,
        snowpark_dataframe: Any,
        run_id: str,
        on_existing_artifacts: Literal["error", "overwrite"] = "error",
        execution_options: ExecutionOptions | None = None,
    ) -> Any:
        """Start a run for the partitions of a table, and return it without waiting. In a function of `remote`, the run
        has ended when this method returns.

        Args:
            partition_by: Column whose values divide the rows.
            snowpark_dataframe: Rows: a DataFrame of Snowpark or pandas, or a `DataConnector`.
            run_id: Id of the run, which is the name of its folder in the stage.
            on_existing_artifacts: ``error`` refuses a run whose folder exists, ``overwrite`` replaces the folder.
            execution_options: CPUs of the workers.

        Returns:
            The run.

        Raises:
            InvalidArgumentError: An argument is not legal, or the run exists.
            DataError: The rows cannot be used.
        """
        folder = self._new_folder(run_id, on_existing_artifacts)
        function = partial(_process_rows, self._func, folder)
        return self._started(function, snowpark_dataframe, partition_by, run_id, folder, execution_options)

    def run_from_stage(
        self,
        stage_location: str,
        run_id: str,
        file_pattern: str = "*.parquet",
        partition_ids: list[str] | None = None,
        on_existing_artifacts: Literal["error", "overwrite"] = "error",
        execution_options: ExecutionOptions | None = None,
    ) -> Any:
        """Start a run for the files of a stage, each of which is a partition, and return it without waiting.

        Args:
            stage_location: Path, URI or stage with the files, such as ``@stage/data/``.
            run_id: Id of the run, which is the name of its folder in the output stage.
            file_pattern: Pattern of the names of the files.
            partition_ids: Paths of the files below `stage_location`; the pattern is then not used.
            on_existing_artifacts: ``error`` refuses a run whose folder exists, ``overwrite`` replaces the folder.
            execution_options: CPUs of the workers.

        Returns:
            The run.

        Raises:
            InvalidArgumentError: There is no such file, an argument is not legal, or the run exists.
        """
        source = stage_root(stage_location)
        files = sorted(partition_ids or ())
        if partition_ids is None:
            fs, root = filesystem(source)
            found = fs.glob(f"{root}/{file_pattern}" if "**" in file_pattern else f"{root}/**/{file_pattern}")
            files = sorted({str(path).removeprefix(f"{root}/") for path in found})
        if not files:
            raise InvalidArgumentError(f"{stage_location} has no file that matches {file_pattern}")
        folder = self._new_folder(run_id, on_existing_artifacts)
        function = partial(_process_file, self._func, folder, source)
        return self._started(function, pd.DataFrame({_FILE: files}), _FILE, run_id, folder, execution_options)

    def _new_folder(self, run_id: str, on_existing_artifacts: str) -> str:
        if on_existing_artifacts not in ("error", "overwrite"):
            raise InvalidArgumentError(
                f'on_existing_artifacts={on_existing_artifacts!r} is not legal: use "error" or "overwrite"'
            )
        folder = f"{self._stage}/{checked_name(run_id)}"
        fs, root = filesystem(folder)
        if fs.exists(root):
            if on_existing_artifacts == "error":
                raise InvalidArgumentError(
                    f'the run "{run_id}" exists in {self._stage}: choose another run_id, or set '
                    'on_existing_artifacts="overwrite"'
                )
            if not fs.exists(f"{root}/{RUN_FILE}"):
                raise InvalidArgumentError(f"{folder} is not the folder of a run: choose another run_id")
            remove_tree(folder)
        return folder

    def _started(
        self,
        function: Callable[..., Any],
        rows: Any,
        by: str,
        run_id: str,
        folder: str,
        options: ExecutionOptions | None,
    ) -> Any:
        from shoal import many

        cpus = (options or ExecutionOptions()).num_cpus_per_worker or 1
        # The marker is written first, so that a folder that a run has begun can always be replaced.
        storage.write(f"{folder}/{RUN_FILE}", b"{}")
        scaling = many.PartitionsScalingConfig(num_cpu_per_worker=cpus)
        given: dict[str, Any] = {"scaling_config": scaling, "run_config": self._run_config}
        work: SubmittedCall[PartitionResults] | PartitionResults
        if is_connected():  # in a function of `remote`
            work = many.run(function, rows, by, **given)
            document = {"manifest": work.manifest, "digest": work.digest}
        else:
            work = many.submit_run(function, rows, by, **given)
            document = {"job_id": work.job_id}
        storage.write(f"{folder}/{RUN_FILE}", json.dumps(document).encode())
        return self._run_class(run_id, folder, work)


class ManyModelTraining(DPF):
    """Training of a model for each partition of a table, with Snowflake's arguments. The models are in the stage.

    Args:
        train_func: Function of a data connector and a `PartitionContext` that returns a model.
        stage_name: Stage for the models: a path, a URI, or a name.
        serde: How a model is stored; `PickleSerde` by default.
        run_config: Pool to run on, and limits of the run. Snowflake has no such argument.
    """

    def __init__(
        self,
        train_func: Callable[[Any, PartitionContext], Any],
        stage_name: str,
        serde: ModelSerde | None = None,
        *,
        run_config: RunConfig | None = None,
    ) -> None:
        self._serde = serde or PickleSerde()
        super().__init__(partial(_train, train_func, self._serde), stage_name, run_config=run_config)

    def _started(self, *arguments: Any) -> ManyModelRun:
        run: ManyModelRun = super()._started(*arguments)
        run.serde = self._serde
        return run

    _run_class: ClassVar[type[DPFRun]] = ManyModelRun

    @classmethod
    def restore_from(cls, run_id: str, stage_name: str, serde: ModelSerde | None = None) -> ManyModelRun:
        """Return a run that was started before, in this or another process.

        Args:
            run_id: Id of the run.
            stage_name: Stage of the models.
            serde: How the models are stored; `PickleSerde` by default.
        """
        run = ManyModelRun.restore_from(run_id, stage_name)
        run.serde = serde or PickleSerde()
        return run


class ManyModelInference(DPF):
    """Call of a function for each partition of a table, with the partition's model of a `ManyModelTraining`.

    Args:
        inference_func: Function of a data connector, the model and a `PartitionContext`.
        stage_name: Stage of the models, and of the artifacts of this run: a path, a URI, or a name.
        training_run_id: Id of the run of the `ManyModelTraining`.
        serde: How the models are stored; `PickleSerde` by default.
        run_config: Pool to run on, and limits of the run. Snowflake has no such argument.
    """

    def __init__(
        self,
        inference_func: Callable[[Any, Any, PartitionContext], Any],
        stage_name: str,
        training_run_id: str,
        serde: ModelSerde | None = None,
        *,
        run_config: RunConfig | None = None,
    ) -> None:
        models = f"{stage_root(stage_name)}/{checked_name(training_run_id)}"
        function = partial(_infer, inference_func, serde or PickleSerde(), models)
        super().__init__(function, stage_name, run_config=run_config)


def _infer(
    inference_func: Callable[..., Any], serde: ModelSerde, models: str, connector: Any, context: PartitionContext
) -> None:
    artifacts = StageArtifactsManager(f"{models}/{context.partition_id}")
    inference_func(connector, artifacts.get(serde.filename, serde.read), context)


def _train(train_func: Callable[..., Any], serde: ModelSerde, connector: Any, context: PartitionContext) -> None:
    model = train_func(connector, context)
    if model is not None:
        context.upload_to_stage(model, serde.filename, write_function=serde.write)


def _process_rows(func: Callable[..., Any], run_folder: str, rows: pd.DataFrame, key: Any) -> None:
    """Call the user's function for the rows of a partition, in a worker."""
    with tempfile.TemporaryDirectory(prefix="shoal-partition-", ignore_cleanup_errors=True) as folder:
        func(PartitionConnector(rows, folder), PartitionContext(str(key), run_folder))


def _process_file(func: Callable[..., Any], run_folder: str, source: str, rows: pd.DataFrame, key: str) -> None:
    """Call the user's function for the rows of a file, in a worker."""
    func(connector_to(f"{source}/{key}"), PartitionContext(key, run_folder))
