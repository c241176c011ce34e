"""Snowflake's names for functions and models per partition: `DPF`, `ManyModelTraining`, `ManyModelInference` and what
belongs to them.

Sources: https://docs.snowflake.com/en/developer-guide/snowflake-ml/process-data-across-partitions and
https://docs.snowflake.com/en/developer-guide/snowflake-ml/train-models-across-partitions

"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from shoal.compat.snowflake_jobs import ClusterRun, DPFRun, JobRun, ManyModelRun, RunWork
from shoal.compat.snowflake_stages import (
    RUN_FILE,
    ModelSerde,
    PartitionConnector,
    PartitionContext,
    PickleSerde,
    StageArtifactsManager,
    checked_name,
    connector_to,
    stage_root,
)
from shoal.errors import InvalidArgumentError
from shoal.jobs.files import storage
from shoal.training.cluster import is_connected
from shoal.training.locations import filesystem
from shoal.training.run_config import RunConfig

if TYPE_CHECKING:
    import pandas as pd

_FILE = "file"


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
        function = partial(_process_rows, self._function(), folder)
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
        import pandas as pd

        source = stage_root(stage_location)
        files = _files(source, file_pattern) if partition_ids is None else sorted(partition_ids)
        if not files:
            raise InvalidArgumentError(f"{stage_location} has no file that matches {file_pattern}")
        folder = self._new_folder(run_id, on_existing_artifacts)
        function = partial(_process_file, self._function(), folder, source)
        return self._started(function, pd.DataFrame({_FILE: files}), _FILE, run_id, folder, execution_options)

    def _function(self) -> Callable[[Any, PartitionContext], Any]:
        return self._func

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
            _remove(folder)
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
        work: RunWork
        if is_connected():  # in a function of `remote`
            work = ClusterRun(many.run(function, rows, by, **given))
        else:
            work = JobRun(many.submit_run(function, rows, by, **given))
        storage.write(f"{folder}/{RUN_FILE}", json.dumps(work.document()).encode())
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
        super().__init__(train_func, stage_name, run_config=run_config)
        self._serde = serde or PickleSerde()

    def _function(self) -> Callable[[Any, PartitionContext], Any]:
        return partial(_train, self._func, self._serde)

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


@contextmanager
def _local_folder() -> Iterator[str]:
    folder = tempfile.mkdtemp(prefix="shoal-partition-")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _process_rows(func: Callable[..., Any], run_folder: str, rows: pd.DataFrame, key: Any) -> None:
    """Call the user's function for the rows of a partition, in a worker."""
    with _local_folder() as folder:
        func(PartitionConnector(rows, folder), PartitionContext(str(key), run_folder))


def _process_file(func: Callable[..., Any], run_folder: str, source: str, rows: pd.DataFrame, key: str) -> None:
    """Call the user's function for the rows of a file, in a worker."""
    func(connector_to(f"{source}/{key}"), PartitionContext(key, run_folder))


def _files(source: str, pattern: str) -> list[str]:
    fs, root = filesystem(source)
    found = fs.glob(f"{root}/**/{pattern}") if "**" not in pattern else fs.glob(f"{root}/{pattern}")
    return sorted({str(path).removeprefix(f"{root}/") for path in found})


def _remove(folder: str) -> None:
    from shoal.kinds.partitions.work_folder import remove_tree

    remove_tree(folder)
