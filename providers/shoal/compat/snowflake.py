"""Names of Snowflake's Container Runtime, with Snowflake's default values.

Sources: https://docs.snowflake.com/en/developer-guide/snowpark-ml/reference/latest/index-container and
snowflake-ml-python 1.3x (`DataConnector`, `snowflake.ml.jobs.remote`).
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Generic, ParamSpec, Self, TypeVar

from shoal import get_nodes as get_nodes
from shoal import scale_cluster as scale_cluster
from shoal.compat import snowflake_tune as tune
from shoal.compat.snowflake_partitions import DPF as DPF
from shoal.compat.snowflake_partitions import TORCH_DEFAULTS
from shoal.compat.snowflake_partitions import DPFRun as DPFRun
from shoal.compat.snowflake_partitions import ExecutionOptions as ExecutionOptions
from shoal.compat.snowflake_partitions import ManyModelInference as ManyModelInference
from shoal.compat.snowflake_partitions import ManyModelTraining as ManyModelTraining
from shoal.compat.snowflake_partitions import ModelSerde as ModelSerde
from shoal.compat.snowflake_partitions import PartitionContext as PartitionContext
from shoal.compat.snowflake_partitions import PartitionStatus as PartitionStatus
from shoal.compat.snowflake_partitions import PickleSerde as PickleSerde
from shoal.compat.snowflake_partitions import RunStatus as RunStatus
from shoal.compat.snowflake_partitions import TorchSerde as TorchSerde
from shoal.compat.snowflake_tune import BayesOpt as BayesOpt
from shoal.compat.snowflake_tune import Choice as Choice
from shoal.compat.snowflake_tune import GridSearch as GridSearch
from shoal.compat.snowflake_tune import LogUniform as LogUniform
from shoal.compat.snowflake_tune import RandInt as RandInt
from shoal.compat.snowflake_tune import RandomSearch as RandomSearch
from shoal.compat.snowflake_tune import Tuner as Tuner
from shoal.compat.snowflake_tune import TunerConfig as TunerConfig
from shoal.compat.snowflake_tune import TunerResults as TunerResults
from shoal.compat.snowflake_tune import Uniform as Uniform
from shoal.compat.snowflake_tune import get_tuner_context as get_tuner_context
from shoal.data import RayDataIngester as RayDataIngester
from shoal.data import connector as own
from shoal.data.dataset_spec import TorchDefaults
from shoal.data.ingest import ArrowIngester, IngesterClass
from shoal.distributors import SubmittedCall, pytorch, ray_launch
from shoal.distributors.decorators import LaunchedFunction
from shoal.distributors.lightgbm import LightGBMEstimator as LightGBMEstimator
from shoal.distributors.lightgbm import LightGBMScalingConfig as LightGBMScalingConfig
from shoal.distributors.pytorch import Context as Context
from shoal.distributors.pytorch import PyTorchScalingConfig as PyTorchScalingConfig
from shoal.distributors.pytorch import WorkerResourceConfig as WorkerResourceConfig
from shoal.distributors.pytorch import get_context as get_context
from shoal.distributors.xgboost import XGBEstimator as XGBEstimator
from shoal.distributors.xgboost import XGBScalingConfig as XGBScalingConfig
from shoal.errors import InvalidArgumentError, JobCancelledError, JobFailedError
from shoal.pool.spec import pool_name_of
from shoal.state.schema import JobState
from shoal.training.pytorch.program import Script
from shoal.training.run_config import RunConfig

P = ParamSpec("P")
T = TypeVar("T")

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
        state = self.call.status().state
        return "DONE" if state is JobState.SUCCEEDED else state.name

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


search_algorithm = tune.search
"""The names of ``entities.search_algorithm``."""


class DataConnector(own.DataConnector):
    """`shoal.data.DataConnector`, whose tensors have the shapes that Snowflake gives them.

    A column of numbers is a tensor ``[batch_size, 1]``, a number of a single row a tensor ``[1]``, and the last batch
    is left out if it has fewer rows. ``expand_dims=False`` of the constructors gives ``[batch_size]``, as it does in
    Snowflake.
    """

    TORCH_DEFAULTS: ClassVar[TorchDefaults] = TORCH_DEFAULTS

    @classmethod
    def from_dataframe(
        cls,
        df: Any,
        ingestor_class: IngesterClass | None = None,
        *,
        expand_dims: bool = True,
        equal: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Write a DataFrame as Parquet to a staging location, as `shoal.data.DataConnector.from_dataframe` does.

        Args:
            df: Snowpark DataFrame, or any other table.
            ingestor_class: Class that reads the rows in the workers.
            expand_dims: Whether a column of numbers is a tensor ``[batch_size, 1]`` instead of ``[batch_size]``.
            equal: Accepted, and always true: ``get_shard().to_torch_dataset()`` gives all ranks as many rows.
            kwargs: Further arguments of `shoal.data.DataConnector.from_dataframe`.
        """
        connector = super().from_dataframe(df, ingestor_class=ingestor_class or ArrowIngester, **kwargs)
        return connector._expanding(expand_dims)

    @classmethod
    def from_sources(  # type: ignore[override]  # Snowflake's first argument is the session
        cls,
        session: Any,
        sources: Sequence[Any],
        ingestor_class: IngesterClass | None = None,
        *,
        expand_dims: bool = True,
        equal: bool = False,
    ) -> Self:
        """Combine paths, or read the one query of a Snowpark session.

        Args:
            session: Snowpark session; not used for paths.
            sources: Paths, or one object with the attribute `sql`, such as Snowflake's `DataFrameInfo`.
            ingestor_class: Class that reads the rows in the workers.
            expand_dims: Whether a column of numbers is a tensor ``[batch_size, 1]`` instead of ``[batch_size]``.
            equal: As in `from_dataframe`.

        Raises:
            InvalidArgumentError: If `sources` contains a query and anything else.
        """
        queries = [source.sql for source in sources if hasattr(source, "sql")]
        if not queries:
            connector = super().from_sources(sources, ingestor_class or ArrowIngester)
            return connector._expanding(expand_dims)
        if len(sources) > 1:
            raise InvalidArgumentError(
                f"sources contains a query and {len(sources) - 1} more: a connector reads one query, or several paths; "
                "combine the tables in the query (UNION ALL)"
            )
        return cls.from_dataframe(session.sql(queries[0]), ingestor_class, expand_dims=expand_dims)

    @classmethod
    def from_ray_dataset(
        cls,
        ds: Any,
        ingestor_class: IngesterClass | None = None,
        *,
        expand_dims: bool = True,
        equal: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Write the rows of a Ray dataset as Parquet, as `shoal.data.DataConnector.from_ray_dataset` does.

        Args:
            ds: The ``ray.data.Dataset``.
            ingestor_class: Class that reads the rows in the workers.
            expand_dims: Whether a column of numbers is a tensor ``[batch_size, 1]`` instead of ``[batch_size]``.
            equal: As in `from_dataframe`.
            kwargs: Further arguments of `shoal.data.DataConnector.from_ray_dataset`.
        """
        connector = super().from_ray_dataset(ds, ingestor_class=ingestor_class or RayDataIngester, **kwargs)
        return connector._expanding(expand_dims)

    @property
    def data_sources(self) -> list[str]:
        """Return the paths of the files."""
        return list(self.source.paths)

    def _expanding(self, expand_dims: bool) -> Self:
        self.torch_defaults = self.torch_defaults.model_copy(update={"expand_dims": expand_dims})
        return self


class ShardedDataConnector(DataConnector, own.ShardedDataConnector):
    """`shoal.data.ShardedDataConnector`, whose tensors have the shapes that Snowflake gives them; see `DataConnector`.

    All ranks get the same number of rows, with ``equal=True`` and without: where Snowflake drops rows, a few rows are
    repeated.
    """


class PyTorchDistributor(pytorch.PyTorchDistributor):
    """`shoal.distributors.pytorch.PyTorchDistributor`, which uses the whole pool if `scaling_config` is omitted, as in
    Snowflake: one worker for each GPU of all active nodes, or one for each node without a GPU.
    """

    _default_scaling = PyTorchScalingConfig(
        num_nodes=-1, num_workers_per_node=-1, resource_requirements_per_worker=WorkerResourceConfig(num_gpus=-1)
    )
