"""Tasks that wrap functions of shoal's core. For each task, a task with the prefix `a` is for async flows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from shoal.jobs import AnyJobSpec, PredictJobSpec, clean_up, spec_of
from shoal.pool.status import NodeInfo
from shoal.pool.tunables import ROLLBACK_AFTER
from shoal.prefect._holder import current_holder
from shoal.prefect._progress import NodeLog
from shoal.prefect._threads import in_thread
from shoal.prefect._training import Training, artifact
from shoal.prefect.blocks import PoolSource, pool_of
from shoal.training.pytorch.train_func import TrainFunc

_CLEANED = "its Prefect run cleaned up"


@task(cache_policy=NO_CACHE)
def scale_cluster(
    expected_cluster_size: int,
    *,
    pool_name: PoolSource = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Set a pool's base demand and wait for the nodes; see `shoal.scale_cluster`.

    To get nodes only for a block of code, use `pool_lease`, which releases them at the end of the block.

    Args:
        expected_cluster_size: Number of nodes, including the head node.
        pool_name: Name, URI or block of the pool.
        is_async: Return when the request is recorded, before the nodes are ready.
        options: ``rollback_after_seconds``, ``block_until_min_cluster_size``.

    Returns:
        True when the nodes are ready, or with `is_async` when the request is accepted.

    Raises:
        ScaleError: The pool did not reach the size; the scaling was rolled back.
        InvalidArgumentError: The size or an option is invalid; the pool was not changed.

    Example:
        >>> @flow
        ... def grow():
        ...     scale_cluster(3, pool_name="retrain")
    """
    return pool_of(pool_name, holder=current_holder()).scale(
        expected_cluster_size, is_async=is_async, options=options, on_progress=NodeLog()
    )


@task(cache_policy=NO_CACHE)
async def ascale_cluster(
    expected_cluster_size: int,
    *,
    pool_name: PoolSource = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Set a pool's base demand and wait for the nodes: `scale_cluster` for async flows."""
    holder, log = current_holder(), NodeLog()
    return await in_thread(
        lambda: pool_of(pool_name, holder=holder).scale(
            expected_cluster_size, is_async=is_async, options=options, on_progress=log
        ),
        log.interrupt,
    )


@task(cache_policy=NO_CACHE)
def get_nodes(pool_name: PoolSource = None) -> list[NodeInfo]:
    """Return the active nodes of a pool; see `shoal.get_nodes`.

    Args:
        pool_name: Name, URI or block of the pool.

    Returns:
        Name, number of CPUs and number of GPUs of each node, with the head node first.

    Raises:
        PoolNotFoundError: The pool does not exist.

    Example:
        >>> nodes = get_nodes("retrain")
    """
    return pool_of(pool_name).get_nodes()


@task(cache_policy=NO_CACHE)
async def aget_nodes(pool_name: PoolSource = None) -> list[NodeInfo]:
    """Return the active nodes of a pool: `get_nodes` for async flows."""
    return await in_thread(lambda: pool_of(pool_name).get_nodes())


@task(cache_policy=NO_CACHE)
def wait_for_nodes(
    expected_cluster_size: int, *, pool_name: PoolSource = None, timeout: float = ROLLBACK_AFTER
) -> list[NodeInfo]:
    """Wait until a number of nodes is active, without scaling the pool.

    Args:
        expected_cluster_size: Number of nodes, including the head node.
        pool_name: Name, URI or block of the pool.
        timeout: Maximum time to wait, in seconds.

    Returns:
        The active nodes, with the head node first.

    Raises:
        ScaleError: The pool's demand is below this number (the request was rolled back or released, or never made), or
            the timeout has passed.

    Example:
        >>> scale_cluster(3, pool_name="retrain", is_async=True)
        >>> wait_for_nodes(3, pool_name="retrain")
    """
    pool = pool_of(pool_name, holder=current_holder())
    return pool.wait_for_nodes(expected_cluster_size, timeout=timeout, on_progress=NodeLog())


@task(cache_policy=NO_CACHE)
async def await_for_nodes(
    expected_cluster_size: int, *, pool_name: PoolSource = None, timeout: float = ROLLBACK_AFTER
) -> list[NodeInfo]:
    """Wait until a number of nodes is active: `wait_for_nodes` for async flows."""
    holder, log = current_holder(), NodeLog()
    return await in_thread(
        lambda: pool_of(pool_name, holder=holder).wait_for_nodes(
            expected_cluster_size, timeout=timeout, on_progress=log
        ),
        log.interrupt,
    )


@task(cache_policy=NO_CACHE)
def distributed_train(
    spec: AnyJobSpec | dict[str, Any] | None = None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Train on a pool, and copy the job's log to the run's log.

    The job does not end with this task. A retry of the task attaches to the job if it still runs, and starts a new
    attempt if it failed. Cancelling the run cancels the job.

    Args:
        spec: A `JobSpec`, a `FunctionJobSpec`, or the fields of one of them as a dict. With `train_func`, a dict of the
            remaining fields, such as ``hyper_params``, ``dataset_map``, ``scaling_config``, ``register``.
        framework: Library that trains the model, if `spec` does not contain it.
        train_func: Function that runs in every worker. Pass the function itself (which is pickled by value), its name
            as ``pkg.module:name``, or the path of a script. `shoal.jobs.load_results` returns the ranks' return values.
        args: Positional arguments of the function, or command line arguments of the script.
        kwargs: Keyword arguments of the function.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values.

    Raises:
        JobFailedError: The job failed. The message ends with the cause.
        PoolDownError: The pool is not up. Use `pool_lease` to bring it up.
        InvalidArgumentError: The spec is invalid; no job was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     result = distributed_train(spec, pool_name="retrain")
    """
    training = Training(spec_of(spec, framework=framework, train_func=train_func, args=args, kwargs=kwargs), pool_name)
    result = training.run()
    try:
        create_table_artifact(**artifact(result))
    except Exception as error:  # A missing table in the UI must not fail a task after hours of training.
        training.logger.warning("the Prefect artifact could not be created: %s", error)
    return result.model_dump(mode="json")


@task(cache_policy=NO_CACHE)
async def adistributed_train(
    spec: AnyJobSpec | dict[str, Any] | None = None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Train on a pool, and copy the job's log to the run's log: `distributed_train` for async flows."""
    job = await in_thread(lambda: spec_of(spec, framework=framework, train_func=train_func, args=args, kwargs=kwargs))
    training = Training(job, pool_name)
    result = await in_thread(training.run, training.cancel)
    try:
        await acreate_table_artifact(**artifact(result))
    except Exception as error:
        training.logger.warning("the Prefect artifact could not be created: %s", error)
    return result.model_dump(mode="json")


@task(cache_policy=NO_CACHE)
def batch_predict(
    model: str,
    dataset: Any,
    output_path: str,
    *,
    spec: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Predict the rows of a dataset on a pool, and write the predictions as Parquet; see `shoal.distributors.predict`.

    A retry of the task attaches to the job if it still runs. If `output_path` has the same predictions already, nothing
    is done.

    Args:
        model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
        dataset: A `DataConnector`, or its spec as a dict.
        output_path: Directory or URI for the predictions.
        spec: Further fields of a `PredictJobSpec`, such as ``keep_cols``, ``overwrite``, ``scaling_config``.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values: ``rows``, ``output_path``, ``model_uri`` with its version.

    Raises:
        JobFailedError: The job failed. The message ends with the cause.
        InvalidArgumentError: A field is invalid; no job was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     batch_predict("models:/delays@champion", DataConnector.from_parquet(today), "/data/predictions/today")
    """
    return Training(_prediction(model, dataset, output_path, spec), pool_name).run().model_dump(mode="json")


@task(cache_policy=NO_CACHE)
async def abatch_predict(
    model: str,
    dataset: Any,
    output_path: str,
    *,
    spec: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Predict the rows of a dataset on a pool: `batch_predict` for async flows."""
    training = Training(_prediction(model, dataset, output_path, spec), pool_name)
    return (await in_thread(training.run, training.cancel)).model_dump(mode="json")


def _prediction(model: str, dataset: Any, output_path: str, spec: Mapping[str, Any] | None) -> PredictJobSpec:
    return PredictJobSpec.parse({**(spec or {}), "model": model, "dataset": dataset, "output_path": output_path})


@task(cache_policy=NO_CACHE)
def cleanup_pool(pool_name: PoolSource = None) -> dict[str, Any]:
    """Cancel this flow run's jobs on a pool, release its lease, and remove leftovers without an owner.

    This is needed only without `pool_lease`. It is safe to run twice.

    Args:
        pool_name: Name, URI or block of the pool.

    Returns:
        A dict with the jobs that were `cancelled`, whether a lease was `released`, the leftovers that were `swept`, and
        the leftovers that were `left` because only another host can remove them.

    Example:
        >>> cleanup_pool("retrain")
    """
    return clean_up(pool_of(pool_name).name, str(current_holder()), reason=_CLEANED).to_dict()


@task(cache_policy=NO_CACHE)
async def acleanup_pool(pool_name: PoolSource = None) -> dict[str, Any]:
    """Clean up after this flow run on a pool: `cleanup_pool` for async flows."""
    holder = str(current_holder())
    return await in_thread(lambda: clean_up(pool_of(pool_name).name, holder, reason=_CLEANED).to_dict())
