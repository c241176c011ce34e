"""Prefect tasks that call functions of shoal: scale pools, train, predict, search for parameters, and clean up.

Each task exists twice: for example `scale_cluster` for sync flows, and `ascale_cluster` for async flows (see `twin`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from prefect.logging import get_run_logger

from shoal import jobs, models
from shoal.jobs import AnyJobSpec
from shoal.pool.status import NodeInfo
from shoal.pool.timeouts import ROLLBACK_AFTER
from shoal.prefect.blocks import PoolSource, database_url, pool_of
from shoal.prefect.current_run import current_holder, lease_holder
from shoal.prefect.job_task import TrainingTask, failure_event, job_task, name_runs, planner_of, run_job, twin
from shoal.prefect.reports import NodeLog, emit_outcome
from shoal.training.pytorch.program import TrainFunc

_CLEANED = "its Prefect run cleaned up"


@job_task
def scale_cluster(
    expected_cluster_size: int | str,
    *,
    plan_for: AnyJobSpec | dict[str, Any] | None = None,
    pool_name: PoolSource = None,
    is_async: bool = False,
    options: Mapping[str, Any] | None = None,
) -> bool:
    """Set a pool's base demand (the number of nodes that the pool keeps), and wait for the nodes; see
    `shoal.scale_cluster`.

    To get nodes only for a block of code, use `pool_lease`, which releases them at the end of the block.

    Args:
        expected_cluster_size: Number of nodes, including the head node; or "auto", with `plan_for`.
        plan_for: Spec of a boosting training, or its fields, for the size "auto": the smallest number of nodes is
            planned on which the training fits into the memory. A repeated task or flow run uses the same number.
        pool_name: Name, URI or block of the pool.
        is_async: Whether the task ends when the request is written to the database, before the nodes are ready.
        options: Dict that may contain ``rollback_after_seconds`` (seconds until the deadline; default: 720) and
            ``block_until_min_cluster_size`` (number of ready nodes that are enough for the task to end).

    Returns:
        True when the nodes are ready, or with `is_async` when the request is accepted.

    Raises:
        ScaleError: The pool did not reach the requested size, and the request was rolled back.
        InvalidArgumentError: The size or an option is invalid; the pool was not changed.

    Example:
        >>> @flow
        ... def grow():
        ...     scale_cluster(3, pool_name="retrain")
    """
    pool = pool_of(pool_name, holder=current_holder())
    planner = plan_for and planner_of(pool, plan_for)
    return pool.scale(
        expected_cluster_size, plan_for=planner, is_async=is_async, options=options, on_progress=NodeLog()
    )


ascale_cluster = twin(scale_cluster)


@job_task
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


aget_nodes = twin(get_nodes)


@job_task
def wait_for_nodes(
    expected_cluster_size: int, *, pool_name: PoolSource = None, timeout: float = ROLLBACK_AFTER
) -> list[NodeInfo]:
    """Wait until a pool has the expected number of active nodes; this task does not scale the pool.

    Args:
        expected_cluster_size: Number of nodes, including the head node.
        pool_name: Name, URI or block of the pool.
        timeout: Maximum time to wait, in seconds.

    Returns:
        The active nodes, with the head node first.

    Raises:
        ScaleError: No lease and no base demand requests this many nodes (the request was rolled back or released, or
            was never made), or the timeout has passed.

    Example:
        >>> scale_cluster(3, pool_name="retrain", is_async=True)
        >>> wait_for_nodes(3, pool_name="retrain")
    """
    pool = pool_of(pool_name, holder=lease_holder(pool_of(pool_name).name))
    return pool.wait_for_nodes(expected_cluster_size, timeout=timeout, on_progress=NodeLog())


await_for_nodes = twin(wait_for_nodes)


@TrainingTask.of
def distributed_train(
    spec: AnyJobSpec | dict[str, Any] | None = None,
    *,
    framework: str | None = None,
    train_func: TrainFunc | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    skip_if_unchanged: bool | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Run a training as a job on a pool, and copy the job's log to the log of the Prefect run.

    If the task fails while the job runs, the job goes on. If Prefect repeats the task or the flow run (a retry, a
    resumed run, the UI's *Retry*), the task attaches to a running job, takes the result of a job that has succeeded,
    and starts a new attempt of a failed job. With ``refresh_cache=True``, with a changed function, and in a new flow
    run, it trains anew. After a permanent error the task is not retried (see `retry_unless_permanent`). Cancelling the
    run cancels the job.

    If the job registers a boosting model, and the rows, holdout and settings are the same as for the newest registered
    version, then nothing is trained. The task run ends in the state ``Skipped`` (of the type Completed), and the entry
    ``skipped`` of its result has the reason. A first run and a run after a failed run always train.

    At the end, the task sends a Prefect event about the model, with the resource ``shoal.model.NAME``. The event's name
    is ``shoal.model.`` and the outcome: promoted, kept, waiting, trained, failed or skipped. With `retries`, only the
    last failure is sent. A repeated task that takes an earlier result sends no event again. If a Prefect transaction
    around the task rolls back, the promotion of the model is withdrawn, and ``shoal.model.promoted`` is sent only on
    commit.

    The task also stores a report on the model as a markdown artifact, with the key ``shoal-model-NAME``.

    Args:
        spec: A `JobSpec`, a `FunctionJobSpec`, or the fields of one of them as a dict. With `train_func`, `spec` is a
            dict of the remaining fields, such as ``hyper_params``, ``dataset_map``, ``scaling_config``, ``register``.
        framework: Library that trains the model. Needed only if `spec` does not contain the field ``framework``.
        train_func: Function that runs in every worker. Pass the function itself (which is pickled with its code), its
            name as ``pkg.module:name``, or the path of a script. Call `shoal.jobs.load_results` to get the function's
            return values.
        args: Positional arguments of the function, or command line arguments of the script.
        kwargs: Keyword arguments of the function.
        skip_if_unchanged: Whether a training without new rows is skipped, as described above. False: the task always
            trains. None: the field ``register.skip_if_unchanged`` of `spec` decides, and the training is skipped if
            `spec` does not contain this field. A training function is never skipped.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values.

    Raises:
        JobFailedError: The job failed. The message ends with the cause.
        PoolDownError: The pool is not up. Use `pool_lease` to bring the pool up.
        InvalidArgumentError: The spec is invalid; no job was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     result = distributed_train(spec, pool_name="retrain")
    """

    def build() -> AnyJobSpec:
        job = jobs.spec_of(spec, framework=framework, train_func=train_func, args=args, kwargs=kwargs)
        return jobs.skipping_if_unchanged(job, skip_if_unchanged)

    return run_job(spec, pool_name, build, train_func, args, kwargs)


adistributed_train = twin(distributed_train)


@job_task
def promote_model(
    model: str | None = None,
    version: str | int | None = None,
    *,
    training: Mapping[str, Any] | str | None = None,
    tracking_uri: str | None = None,
) -> dict[str, Any]:
    """Promote a version that waits for a decision, if it is better than the champion; see `shoal.models.promote_model`.

    A training with ``register: {"promote": False}`` registers such a version. The version is compared with the champion
    of this moment. A version that is not better is not promoted, and the task run ends as Completed. At the end, the
    task sends the event ``shoal.model.promoted`` or ``shoal.model.kept``. The comparison runs in the process of the
    task, which needs the library of the model, MLflow and the holdout.

    Args:
        model: Name of the registered model, together with `version`; instead of `training`.
        version: Version number.
        training: Result of `distributed_train`, or the id of the job.
        tracking_uri: URI of the MLflow server or database. None: that of the training, the environment variable
            MLFLOW_TRACKING_URI, or else the database in ``$SHOAL_HOME``.

    Returns:
        The `PromotionResult` as a dict of JSON values.

    Raises:
        InvalidArgumentError: The arguments do not name one version, or the version does not wait for a decision.
        ModelNotFoundError: The version does not exist, or was deleted.
        DataError: The holdout has changed since the version was registered, or cannot be read.
        RegistryError: MLflow cannot be used.

    Example:
        >>> result = distributed_train(spec, pool_name="retrain")
        >>> if pause_flow_run(wait_for_input=bool):
        ...     promote_model(training=result)
    """
    named = training.get("model_name") if isinstance(training, Mapping) else model
    with failure_event(named or str(training)):
        result = models.promote_model(
            model,
            version,
            training=training,
            tracking_uri=tracking_uri,
            holder=str(current_holder()),
            connection_url=database_url,
            on_log=get_run_logger().info,
        )
    emit_outcome(result.model_name, result)
    return result.to_dict()


apromote_model = twin(promote_model)


@partial(job_task, run_name=name_runs("batch_predict", lambda model, **_: f"predict {model}"))
def batch_predict(
    model: str, dataset: Any, output_path: str, *, spec: Mapping[str, Any] | None = None, pool_name: PoolSource = None
) -> dict[str, Any]:
    """Predict the rows of a dataset on a pool, and write the predictions as Parquet; see `shoal.distributors.predict`.

    If Prefect repeats the task or the flow run, the task uses its earlier job, as `distributed_train` does. If
    `output_path` already contains the same predictions, the job does nothing.

    Args:
        model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
        dataset: A `DataConnector`, or its spec as a dict.
        output_path: Directory or URI to which the predictions are written.
        spec: Further fields of a `PredictJobSpec`, such as ``keep_cols``, ``overwrite``, ``scaling_config``.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values. The dict contains ``rows`` (the number of rows), ``output_path``, and
        ``model_uri`` (with the version of the model).

    Raises:
        JobFailedError: The job failed. The message ends with the cause.
        InvalidArgumentError: A field is invalid; no job was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     batch_predict("models:/delays@champion", DataConnector.from_parquet(today), "/data/predictions/today")
    """
    fields = {**(spec or {}), "framework": "predict", "model": model, "dataset": dataset, "output_path": output_path}
    return run_job(fields, pool_name, partial(jobs.parse_spec, fields))


abatch_predict = twin(batch_predict)


@partial(
    job_task,
    run_name=name_runs("many_models", lambda by, **_: f"models by {by if isinstance(by, str) else ', '.join(by)}"),
)
def many_models(
    dataset: Any,
    by: str | Sequence[str],
    *,
    function: Callable[..., Any] | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    estimator: Mapping[str, Any] | None = None,
    max_failed: float | None = None,
    spec: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Train a model for each partition of a table, all in one job on a pool; see `shoal.many.train`.

    If Prefect repeats the task or the flow run, the task uses its earlier job, as `distributed_train` does, and no
    partition that has succeeded is repeated.

    Args:
        dataset: A `DataConnector`, or its spec as a dict.
        by: Column whose values divide the rows, or several columns.
        function: Function of the rows and the key of a partition that returns a model, or its name as
            ``pkg.module:name``.
        kwargs: Keyword arguments of the function.
        estimator: Boosting model instead of a function, as a dict with the fields of a `PartitionEstimator`.
        max_failed: Number of partitions that may fail, or their share, such as 0.05. If more fail, the task
            fails after all others were trained and stored. None: the number in `spec`, or 0.
        spec: Further fields of a `PartitionsJobSpec`, such as ``register``, ``columns``, ``run_config``.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values. The entry ``partitions`` has the numbers of partitions that have
        ``succeeded`` and ``failed``. `shoal.jobs.load_partitions` returns the models.

    Raises:
        JobFailedError: The job failed, for example because too many partitions have failed.
        InvalidArgumentError: A field is invalid; no job was started.

    Example:
        >>> estimator = {"input_cols": ["price"], "label_col": "sold", "n_estimators": 20}
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     many_models(DataConnector.from_parquet(sales), by="store", estimator=estimator)
    """
    named = {"dataset": dataset, "by": by, "estimator": estimator, "max_failed": max_failed}
    fields = {**(spec or {}), **{name: value for name, value in named.items() if value is not None}}
    return run_job(fields, pool_name, partial(jobs.models_spec_of, fields, function=function, kwargs=kwargs))


amany_models = twin(many_models)


@partial(job_task, run_name=name_runs("tune", lambda train, **_: f"tune {train['label_col']}"))
def tune(
    space: Mapping[str, Any],
    train: Mapping[str, Any] | None = None,
    *,
    trials: int = 40,
    spec: Mapping[str, Any] | None = None,
    pool_name: PoolSource = None,
) -> dict[str, Any]:
    """Search for the parameters of a model on a pool, and train the best ones on all rows; see `shoal.tune.search`.

    If Prefect repeats the task or the flow run, the task uses its earlier job, as `distributed_train` does. A job that
    has failed is continued: no trial that has ended is repeated.

    Args:
        space: Values among which the search chooses, by the name of the parameter.
        train: The training whose parameters are searched: fields as in the spec of a training. None: `spec` names a
            function in ``train_func``.
        trials: Number of trials.
        spec: Further fields of a `TuneJobSpec`, such as ``holdout``, ``metric``, ``register``.
        pool_name: Name, URI or block of the pool; by default the pool in `spec`.

    Returns:
        The `JobResult` as a dict of JSON values. Its ``search`` contains ``best_params`` and ``best_value``.

    Raises:
        JobFailedError: The job failed. The message ends with the cause.
        InvalidArgumentError: A field is invalid; no job was started.

    Example:
        >>> with pool_lease(3, pool_name="local://retrain?max_nodes=4"):
        ...     tune({"max_depth": {"type": "int", "low": 2, "high": 9}}, training, trials=20)
    """
    searched = {} if train is None else {"train": train}
    fields = {**(spec or {}), **searched, "framework": "tune", "space": space, "trials": trials}
    return run_job(fields, pool_name, partial(jobs.parse_spec, fields))


atune = twin(tune)


@job_task
def cleanup_pool(pool_name: PoolSource = None) -> dict[str, Any]:
    """Cancel this flow run's jobs on a pool, release the run's leases, and end unneeded nodes on this host.

    A node is unneeded if no lease and no base demand requests it. The task also records the end of lost jobs. A flow
    that uses `pool_lease` does not need this task, because `pool_lease` cleans up at the end of its block. A second
    call does nothing.

    Args:
        pool_name: Name, URI or block of the pool.

    Returns:
        A dict with four entries: ``cancelled`` (ids of the cancelled jobs), ``released`` (whether a lease was
        released), ``swept`` (actions on this host's unneeded nodes and lost jobs that concern the flow run or the pool,
        and the number of the other actions), and ``left`` (actions that another host takes by itself).

    Example:
        >>> cleanup_pool("retrain")
    """
    return jobs.clean_up(pool_of(pool_name).name, str(current_holder()), reason=_CLEANED).to_dict()


acleanup_pool = twin(cleanup_pool)
