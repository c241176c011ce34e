"""Plan how many nodes of a pool a training needs, from its spec."""

from __future__ import annotations

import os
from collections.abc import Mapping
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import ColumnElement, func, select

from shoal.data.connections import connection_variable
from shoal.data.connector import DataConnector
from shoal.data.row_copies import copy_first_rows
from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs import credentials
from shoal.jobs.spec import AnyJobSpec, is_spec
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.kinds.training.spec import JobSpec
from shoal.lazy_imports import pa
from shoal.option_validation import memory_bytes
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Job, JobState, Node
from shoal.training.boosting.training_plan import NOTHING_LEARNED, Learned, plan_training
from shoal.training.pytorch.function_plan import plan_function
from shoal.training.sizing.node_memory import NodeMemory, node_memory
from shoal.training.sizing.plan import TrainingPlan


def plan(
    spec: AnyJobSpec | Mapping[str, Any] | str,
    pool: str | PoolSpec | None = None,
    *,
    memory_per_node: str | None = None,
    rows: int | None = None,
) -> TrainingPlan:
    """Predict whether a boosting training fits into the memory of a pool, for 1, 2, 4 … nodes and its largest size,
    and find the smallest size on which it fits.

    Only the footers of the files are read, unless a filter needs the values of rows, and the first rows of some files
    if there are texts.

    Args:
        spec: Spec of the training, as for `submit`; or the path of Parquet files, whose last numeric column counts as
            the label and all others as features of a training with XGBoost.
        pool: URI or name of the pool; by default that of the spec.
        memory_per_node: Memory of each node that workers can use, such as ``16Gi``; by default that of the pool.
        rows: Number of rows of the training set, if it is a query or CSV or JSON files: only the first rows are then
            read. It is the number before filters and splits.

    Raises:
        InvalidArgumentError: The spec is not that of a boosting training on CPUs, or the memory of the pool's nodes is
            not known.
        DataError: The files cannot be used for the training.

    Example:
        >>> plan("s3://bucket/train/", "local://retrain?max_nodes=8").chosen
    """
    from shoal.jobs import parse_spec
    from shoal.pool.api import ComputePool

    job, train = spec_of_path(spec) if isinstance(spec, str) else (spec if is_spec(spec) else parse_spec(spec), None)
    source = pool if pool is not None else job.run_config.pool_name
    settings = source if isinstance(source, PoolSpec) else ComputePool(source).settings()
    node = memory_of(settings, memory_per_node, registers=job.register_as is not None)
    if isinstance(job, FunctionJobSpec) and rows is None:
        refuse_gpus(job, settings)
        known = memory_bytes(job.memory_per_worker) if job.memory_per_worker else _memory_of_last_run(job)
        return plan_function(job, node, known, cpus=settings.cpus_per_node, most_nodes=settings.max_nodes)
    training = plannable(job, settings)
    if rows is None:
        return plan_on(training, settings, node, model=job.registered_model, train=train)
    with TemporaryDirectory(prefix="shoal-plan-") as folder:
        return plan_on(with_rows(training, rows, folder), settings, node, model=job.registered_model)


def with_rows(spec: JobSpec, rows: int, folder: str) -> JobSpec:
    """Return a training on copies of the first rows of its training set, as many as it will have.

    Raises:
        InvalidArgumentError: The training set is read in place, so that its rows can be counted.
    """
    dataset = spec.dataset.located()
    if rows < 1 or dataset.staging or not dataset.is_stream:
        raise InvalidArgumentError(
            f"rows={rows}: give a positive number, and only for a training set of sql, csv or json; the rows of others "
            "are counted"
        )
    url = credentials.connections(dataset.connections(), os.environ).get(connection_variable(dataset.connection or ""))
    copies = copy_first_rows(dataset, url, rows, folder, spec.used_columns())
    source = spec.dataset.source_key()
    return spec.with_datasets(
        lambda each: each.model_copy(update={"staging": copies}) if each.source_key() == source else each
    )


def plan_on(
    spec: JobSpec, pool: PoolSpec, node: NodeMemory, *, model: str | None, train: DataConnector | None = None
) -> TrainingPlan:
    """Plan a training on a pool with these settings; see :func:`plan`.

    Args:
        spec: The training.
        pool: The settings.
        node: Memory of each node.
        model: Registered model whose earlier trainings correct the prediction; None if there is none.
        train: The training set, if it was opened before.
    """
    learned = learned_memory(model, spec.framework) if model else NOTHING_LEARNED
    return plan_training(spec, node, train, cpus=pool.cpus_per_node, most_nodes=pool.max_nodes, learned=learned)


_LEARNED_JOBS = 5


def learned_memory(model: str, framework: str) -> Learned:
    """Return the medians of the idle memory, and of measured / predicted memory above it, of the newest five trainings
    on CPUs with a library that registered a model."""
    query = (
        select(Job.result)
        .where(Job.state == JobState.SUCCEEDED, Job.result["model_name"].as_string() == model)
        .where(func.coalesce(Job.spec["framework"].as_string(), "xgboost") == framework)
        .where(func.coalesce(Job.gang["gpus"].as_float(), 0.0) == 0.0)
        .order_by(Job.created_at.desc())
        .limit(_LEARNED_JOBS)
    )
    results = [result or {} for result in Store().scalars(query)]
    names = "idle_memory_per_worker", "peak_memory_per_worker", "predicted_memory_per_worker"
    figures = [[max(result.get(name) or [0]) for name in names] for result in results]
    known = [(idle, (peak - idle) / (need - idle)) for idle, peak, need in figures if peak and need > idle]
    return Learned(*map(median, zip(*known, strict=True))) if known else NOTHING_LEARNED


def _memory_of_last_run(spec: FunctionJobSpec) -> int:
    """Return the highest memory of a worker and its processes in the last run of a function; 0 if there is none."""
    query = select(Job.result).where(*has_trained(spec)).order_by(Job.created_at.desc()).limit(1)
    found = Store().scalar(query) or {}
    usages = [each.get("memory_usage_megabytes", 0) * 10**6 for each in found.get("peak_usage_per_worker") or ()]
    return int(max([*(found.get("peak_memory_per_worker") or ()), *usages], default=0))


def has_trained(spec: AnyJobSpec) -> tuple[ColumnElement[bool], ...]:
    """Return the conditions of the jobs that were successful runs of a spec."""
    of_spec = Job.label == spec.label, Job.spec["framework"].as_string() == spec.framework
    return *of_spec, Job.state == JobState.SUCCEEDED, Job.result["skipped"].as_string().is_(None)


def memory_of(pool: PoolSpec, given: str | None = None, *, registers: bool = False) -> NodeMemory:
    """Return the memory of each node of a pool that workers can use; see `node_memory`.

    Raises:
        InvalidArgumentError: The memory is not known.
    """
    if given is not None:
        try:
            return NodeMemory(memory_bytes(given), False, f"memory_per_node={given}")
        except ValueError as error:
            raise InvalidArgumentError(f"memory_per_node: {error}") from None
    endpoints = Store().scalars(select(Node.endpoint).where(Node.pool == pool.name))
    reported = [int((endpoint or {}).get("memory_bytes", 0)) for endpoint in endpoints]
    if (found := node_memory(pool, min(filter(None, reported), default=0), registers=registers)) is None:
        raise InvalidArgumentError(
            f'the memory of the nodes of pool "{pool.name}" is not known before its first node is ready: give '
            "memory_per_node, such as 16Gi"
        )
    return found


def plannable(spec: AnyJobSpec, pool: PoolSpec) -> JobSpec:
    """Return a spec for which a number of nodes of a pool can be planned.

    Raises:
        InvalidArgumentError: The job is no boosting training on CPUs.
    """
    if not isinstance(spec, JobSpec):
        raise InvalidArgumentError(
            f"only trainings with XGBoost or LightGBM can be planned, not {spec.framework}: the memory of functions, "
            "searches and predictions is not known in advance, so give the number of nodes"
        )
    refuse_gpus(spec, pool)
    return spec


def refuse_gpus(spec: AnyJobSpec, pool: PoolSpec) -> None:
    """Raise InvalidArgumentError for a job with GPUs."""
    gpus = spec.demand().gang.gpus
    if gpus > 0 or (gpus < 0 and pool.gpus_per_node):
        raise InvalidArgumentError("the memory of GPUs cannot be planned: give the number of nodes")


def spec_of_path(path: str) -> tuple[AnyJobSpec, DataConnector]:
    """Return the spec of a training with XGBoost on the numeric columns of Parquet files, of which the last one is the
    label; and the dataset, whose footers are read.

    Raises:
        DataError: The files cannot be read, or have fewer than two numeric columns.
    """
    connector = DataConnector.from_parquet(path)
    types = pa.types
    numbers = [
        field.name
        for field in connector.schema()
        if types.is_integer(field.type) or types.is_floating(field.type) or types.is_boolean(field.type)
    ]
    if len(numbers) < 2:
        raise DataError(f"{path} has fewer than two numeric columns: write a spec that names the columns")
    return JobSpec(dataset=connector.to_spec(), input_cols=tuple(numbers[:-1]), label_col=numbers[-1]), connector
