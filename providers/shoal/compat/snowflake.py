"""Names of Snowflake's Container Runtime, with Snowflake's default values.

Sources: https://docs.snowflake.com/en/developer-guide/snowpark-ml/reference/latest/index-container and
snowflake-ml-python 1.3x (`DataConnector`, `snowflake.ml.jobs.remote`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

from shoal import get_nodes as get_nodes
from shoal import scale_cluster as scale_cluster
from shoal.compat import snowflake_tune as tune
from shoal.compat.snowflake_jobs import DPFRun as DPFRun
from shoal.compat.snowflake_jobs import MLJob as MLJob
from shoal.compat.snowflake_jobs import PartitionStatus as PartitionStatus
from shoal.compat.snowflake_jobs import RunStatus as RunStatus
from shoal.compat.snowflake_jobs import remote as remote
from shoal.compat.snowflake_jobs import submit_directory as submit_directory
from shoal.compat.snowflake_jobs import submit_file as submit_file
from shoal.compat.snowflake_partitions import DPF as DPF
from shoal.compat.snowflake_partitions import ExecutionOptions as ExecutionOptions
from shoal.compat.snowflake_partitions import ManyModelInference as ManyModelInference
from shoal.compat.snowflake_partitions import ManyModelTraining as ManyModelTraining
from shoal.compat.snowflake_stages import TORCH_DEFAULTS
from shoal.compat.snowflake_stages import ModelSerde as ModelSerde
from shoal.compat.snowflake_stages import PartitionContext as PartitionContext
from shoal.compat.snowflake_stages import PickleSerde as PickleSerde
from shoal.compat.snowflake_stages import TorchSerde as TorchSerde
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
from shoal.distributors import pytorch
from shoal.distributors.lightgbm import LightGBMEstimator as LightGBMEstimator
from shoal.distributors.lightgbm import LightGBMScalingConfig as LightGBMScalingConfig
from shoal.distributors.pytorch import Context as Context
from shoal.distributors.pytorch import PyTorchScalingConfig as PyTorchScalingConfig
from shoal.distributors.pytorch import WorkerResourceConfig as WorkerResourceConfig
from shoal.distributors.pytorch import get_context as get_context
from shoal.distributors.xgboost import XGBEstimator as XGBEstimator
from shoal.distributors.xgboost import XGBScalingConfig as XGBScalingConfig
from shoal.errors import InvalidArgumentError

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
