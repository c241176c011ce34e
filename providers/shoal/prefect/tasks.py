"""The tasks, each with an `a…` twin for async flows. A task over a core call is a few lines: logic stays below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prefect import task
from prefect.artifacts import acreate_table_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE

from shoal.jobs import FunctionJobSpec, JobSpec, clean_up, spec_of
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
    """Set a pool's base demand, and wait for it; see `shoal.scale_cluster`.

    For the duration of a block of code use `pool_lease`, which restores the pool.

    Args:
        expected_cluster_size: Nodes, the head among them.
        pool_name: Name, URI or block of the pool.
        is_async: Return as soon as the request is journaled.
        options: ``rollback_after_seconds``, ``block_until_min_cluster_size``.

    Returns:
        True when the nodes are ready, with `is_async` when the request is accepted.

    Raises:
        ScaleError: The size was not reached; rolled back.
        InvalidArgumentError: A wrong size or option; nothing happened.

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
    """`scale_cluster` for async flows."""
    holder, log = current_holder(), NodeLog()
    return await in_thread(
        lambda: pool_of(pool_name, holder=holder).scale(
            expected_cluster_size, is_async=is_async, options=options, on_progress=log
        ),
        log.interrupt,
    )


@task(cache_policy=NO_CACHE)
def get_nodes(pool_name: PoolSource = None) -> list[NodeInfo]:
    """The active nodes of a pool, the head first; see `shoal.get_nodes`.

    Args:
        pool_name: Name, URI or block of the pool.

    Returns:
        Name, CPUs and GPUs of each.

    Raises:
        PoolNotFoundError: There is no such pool.

    Example:
        >>> nodes = get_nodes("retrain")
    """
    return pool_of(pool_name).get_nodes()


@task(cache_policy=NO_CACHE)
async def aget_nodes(pool_name: PoolSource = None) -> list[NodeInfo]:
    """`get_nodes` for async flows."""
    return await in_thread(lambda: pool_of(pool_name).get_nodes())


@task(cache_policy=NO_CACHE)
def wait_for_nodes(
    expected_cluster_size: int, *, pool_name: PoolSource = None, timeout: float = ROLLBACK_AFTER
) -> list[NodeInfo]:
    """Wait until so many nodes are active; scales nothing itself.

    Args:
        expected_cluster_size: Nodes, the head among them.
        pool_name: Name, URI or block of the pool.
        timeout: Seconds to wait.

    Returns:
        The active nodes, the head first.

    Raises:
        ScaleError: Nobody wants that many nodes any more (rolled back, released, or never asked for), or the time
            is over.

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
    """`wait_for_nodes` for async flows."""
    holder, log = current_holder(), NodeLog()
    return await in_thread(
        lambda: pool_of(pool_name, holder=holder).wait_for_nodes(
            expected_cluster_size, timeout=timeout, on_progress=log
        ),
        log.interrupt,
    )


@task(cache_policy=NO_CACHE)
def distributed_train(
    spec: JobSpec | FunctionJobSpec | dict[str, Any] | None = None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Train on a pool; the job's log streams into the run's log.

    The job is durable: a retry of this task attaches to the job if it still runs, and makes a new attempt if it
    failed. Cancelling the run cancels the job.

    Args:
        spec: What to train: a `JobSpec`, a `FunctionJobSpec`, or the fields of one; beside `train_func` the other
            fields, such as ``hyper_params``, ``dataset_map``, ``scaling_config``, ``register``.
        framework: What trains, where `spec` does not say.
        train_func: A function that runs in every worker: itself, by value; its name ``pkg.module:name``; or a script's
            path. `shoal.jobs.load_results` has what its ranks returned.
        args: Its arguments; of a script, its command line.
        kwargs: Its arguments by name.
        pool_name: Name, URI or block of the pool; by default the one that the spec names.

    Returns:
        The `JobResult` as plain data.

    Raises:
        JobFailedError: The training failed; the message ends with the cause.
        PoolDownError: The pool is not up: `pool_lease` brings it up.
        InvalidArgumentError: The spec is wrong; nothing was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     result = distributed_train(spec, pool_name="retrain")
    """
    training = Training(spec_of(spec, framework=framework, train_func=train_func, args=args, kwargs=kwargs), pool_name)
    result = training.run()
    try:
        create_table_artifact(**artifact(result))
    except Exception as error:  # hours of training are not thrown away because a table could not be shown
        training.logger.warning("the artifact could not be made: %s", error)
    return result.model_dump(mode="json")


@task(cache_policy=NO_CACHE)
async def adistributed_train(
    spec: JobSpec | FunctionJobSpec | dict[str, Any] | None = None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """`distributed_train` for async flows."""
    said = await in_thread(lambda: spec_of(spec, framework=framework, train_func=train_func, args=args, kwargs=kwargs))
    training = Training(said, pool_name)
    result = await in_thread(training.run, training.cancel)
    try:
        await acreate_table_artifact(**artifact(result))
    except Exception as error:
        training.logger.warning("the artifact could not be made: %s", error)
    return result.model_dump(mode="json")


@task(cache_policy=NO_CACHE)
def cleanup_pool(pool_name: PoolSource = None) -> dict[str, Any]:
    """End what this flow run still has on a pool: its jobs, its lease, and whatever nobody owns.

    Needed only where no `pool_lease` is used; safe to run twice.

    Args:
        pool_name: Name, URI or block of the pool.

    Returns:
        What was done: `cancelled`, `released`, `swept`, and `left` to another host.

    Example:
        >>> cleanup_pool("retrain")
    """
    return clean_up(pool_of(pool_name).name, str(current_holder()), reason=_CLEANED).to_dict()


@task(cache_policy=NO_CACHE)
async def acleanup_pool(pool_name: PoolSource = None) -> dict[str, Any]:
    """`cleanup_pool` for async flows."""
    holder = str(current_holder())
    return await in_thread(lambda: clean_up(pool_of(pool_name).name, holder, reason=_CLEANED).to_dict())
