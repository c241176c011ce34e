"""Call a function for each partition of a dataset, train a model for each, and predict rows with these models."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Literal

from shoal.data.output_tables import kept_columns
from shoal.distributors.call import Call, check_submit, run_call, submitting
from shoal.distributors.estimator import BoostingEstimator, connector_of
from shoal.errors import DataError, InvalidArgumentError
from shoal.jobs.kind import call_of
from shoal.jobs.spec import NOT_STORED
from shoal.kinds.partitions import logged_model
from shoal.kinds.partitions.call import estimator_program, program_of
from shoal.kinds.partitions.keys import check_same_kinds, key_type, shown_key
from shoal.kinds.partitions.partition_messages import PartitionProgram, SavedModel
from shoal.kinds.partitions.partition_results import PartitionResults, load_partitions
from shoal.kinds.partitions.predictions import PartitionPrediction, report_unknown, without_model
from shoal.kinds.partitions.spec import PartitionEstimator, PartitionsJobSpec, PartitionsRegister
from shoal.training.demand import ScalingConfig
from shoal.training.pytorch.program import check_runnable, name_of
from shoal.training.run_config import RunConfig
from shoal.training.tracking import check_model_version, is_mlflow_uri

Dataset = Any
"""Type of a dataset argument: a `DataConnector` or a DataFrame."""


def run(
    fn: Callable[..., Any],
    data: Dataset,
    by: str | Sequence[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    partition_timeout: float | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> PartitionResults:
    """Call a function for each partition of a dataset, on all workers of a pool, by one pass over the dataset.

    A partition has the rows with one value of the column `by`, in the order of the dataset. The function is called with
    these rows, as a pandas DataFrame, and with the value, which is the key of the partition. If it fails, or ends its
    process twice, only this partition fails, and the others go on.

    The call runs as one job on the pool, or in the Ray cluster to which this process is connected.

    Args:
        fn: Function of the rows and the key. Its return value must be possible to pickle. Inside the function,
            `get_context` returns the key, the seed and the number of threads.
        data: Rows: a connector or a pandas DataFrame.
        by: Column whose values divide the rows, or several columns, whose keys are tuples. The rows with a null are a
            partition, whose key is None.
        kwargs: Keyword arguments of the function.
        columns: Columns that the function gets; all columns by default.
        partition_timeout: Maximum seconds for one partition, which fails if it takes longer. None: no limit.
        scaling_config: Number of the workers and CPUs of each worker; by default one worker per CPU.
        run_config: Pool to run on, seed, and limits of the run.

    Returns:
        The outcome of each partition.

    Raises:
        InvalidArgumentError: An argument is not legal, or the function cannot be pickled.
        DataError: The dataset has no rows, lacks a column, or has a column whose values cannot be keys.
        JobFailedError: The job failed, for example because the function has failed for all partitions; the message
            ends with the cause.

    Example:
        >>> from shoal import many
        >>> results = many.run(lambda rows, key: rows["sales"].mean(), sales, by="store")
        >>> results[7].value
        129.4
    """
    return run_call(partial(_call, **locals()))  # the call's arguments, as no other name exists yet


def _call(
    staged: ExitStack, fn: Callable[..., Any], data: Dataset, by: Any, kwargs: Mapping[str, Any] | None, **options: Any
) -> Call[PartitionResults]:
    check_runnable(fn, "fn")
    if isinstance(fn, str) or not callable(fn):
        raise InvalidArgumentError(f"fn must be a function, not {fn!r}: a spec of a job can name a function")
    return prepared(staged, partial(fn, **kwargs) if kwargs else fn, data, by=by, name=name_of(fn), **options)


submit_run = submitting(run, _call)


def prepared(
    staged: ExitStack, function: Callable[..., Any] | PartitionProgram | None, data: Dataset, **fields: Any
) -> Call[PartitionResults]:
    """Return the `Call` object of a function, of a pickled one, or of the estimator among the fields of the spec."""
    program = program_of(function) if callable(function) else function
    given = {name: value for name, value in fields.items() if value is not None}
    config = given.pop("run_config", RunConfig())
    if program is not None:
        given |= {"program": NOT_STORED, "code_digest": program.digest}
    # Callers get the results of the others, and may call `require_all`.
    given["max_failed"] = None
    spec = PartitionsJobSpec.parse({"dataset": connector_of("data", data, staged), "run_config": config, **given})
    return Call(call_of(spec, program))


def train(
    fn_or_estimator: Callable[..., Any] | BoostingEstimator[Any, Any],
    data: Dataset,
    by: str | Sequence[str],
    *,
    input_cols: Sequence[str] | None = None,
    label_col: str | None = None,
    weight_col: str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    columns: Sequence[str] | None = None,
    partition_timeout: float | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
    register: Mapping[str, Any] | PartitionsRegister | None = None,
) -> PartitionResults:
    """Train a model for each partition of a dataset, on all workers of a pool, by one pass over the dataset.

    With an estimator, the model of a partition is that which the plain library trains on its rows with the same
    parameters, byte for byte. Boosters of XGBoost and LightGBM are stored in the own format of their library, other
    models pickled.

    Args:
        fn_or_estimator: Function of the rows and the key of a partition that returns a model; or an `XGBEstimator` or
            `LightGBMEstimator`, whose rounds, parameters, callbacks and objective are used.
        data: Rows: a connector or a pandas DataFrame.
        by: Column whose values divide the rows, or several columns; see `run`.
        input_cols: Feature columns, numeric or boolean. Only with an estimator.
        label_col: Column of the labels. Only with an estimator.
        weight_col: Column of the weights. Only with an estimator.
        kwargs: Keyword arguments of the function.
        columns: Columns that the function gets; all columns by default.
        partition_timeout: Maximum seconds for one partition, which fails if it takes longer. None: no limit.
        scaling_config: Number of the workers and CPUs of each worker; by default one worker per CPU. The scaling config
            of an estimator is not used, because one worker trains each model.
        run_config: Pool to run on, seed, and limits of the run; by default that of the estimator.
        register: Options to register the models in MLflow as one version, which predicts each row with the model of its
            partition, and to promote the version if it is better than the champion on the holdout. A partition whose
            training has failed keeps the champion's model. Only for a job.

    Returns:
        The outcome of each partition; ``results[key].value`` is the model.

    Raises:
        InvalidArgumentError: An argument is not legal.
        DataError: The dataset cannot be used.
        JobFailedError: The job failed; the message ends with the cause.

    Example:
        >>> from shoal import many
        >>> from shoal.distributors.xgboost import XGBEstimator
        >>> estimator = XGBEstimator(20, "reg:squarederror")
        >>> models = many.train(estimator, sales, by="store", input_cols=["price", "weekday"], label_col="sales")
        >>> models[7].value
        <xgboost.core.Booster object at 0x7f...>
    """
    return run_call(partial(_train_call, **locals()))  # the call's arguments, as no other name exists yet


def _train_call(
    staged: ExitStack,
    fn_or_estimator: Callable[..., Any] | BoostingEstimator[Any, Any],
    data: Dataset,
    by: Any,
    input_cols: Sequence[str] | None,
    label_col: str | None,
    weight_col: str | None,
    kwargs: Mapping[str, Any] | None,
    columns: Sequence[str] | None,
    run_config: RunConfig | None,
    register: Mapping[str, Any] | PartitionsRegister | None,
    **options: Any,
) -> Call[PartitionResults]:
    if register is not None:
        check_submit()
        options["register"] = register
    roles = {"input_cols": input_cols, "label_col": label_col, "weight_col": weight_col}
    if not isinstance(fn_or_estimator, BoostingEstimator):
        check_runnable(fn_or_estimator, "fn_or_estimator", "an estimator, a function")
        if given := [name for name, value in roles.items() if value is not None]:
            raise InvalidArgumentError(
                f"{', '.join(given)} can be given only with an estimator: the function chooses its columns itself"
            )
        name = name_of(fn_or_estimator)
        function = SavedModel(partial(fn_or_estimator, **kwargs) if kwargs else fn_or_estimator)
        return prepared(staged, function, data, by=by, name=name, columns=columns, run_config=run_config, **options)
    if kwargs or columns is not None:
        raise InvalidArgumentError("kwargs and columns can be given only with a function: remove them")
    estimator, config = fn_or_estimator, run_config or fn_or_estimator.run_config
    described = PartitionEstimator.parse(
        {
            "framework": estimator._framework,
            "params": estimator.params,
            "n_estimators": estimator.n_estimators,
            **{name: value for name, value in roles.items() if value is not None},
        }
    )
    if not estimator.user_code:
        return prepared(staged, None, data, by=by, estimator=described, run_config=config, **options)
    if estimator.user_code.metrics:
        raise InvalidArgumentError(
            "custom_metric has no effect without an eval_set, which a partition has not: remove it"
        )

    connector = connector_of("data", data, staged)
    threads = getattr(options.get("scaling_config"), "num_cpu_per_worker", 1)
    request = described.request(connector.to_spec(), config)
    program = estimator_program(request, max(1, threads), estimator.user_code)
    used = described.columns
    name = f"{described.framework} with functions"
    return prepared(staged, program, connector, by=by, name=name, columns=used, run_config=config, **options)


submit_train = submitting(train, _train_call)


def predict(
    models: PartitionResults | str,
    data: Dataset,
    by: str | Sequence[str],
    *,
    output_path: str | os.PathLike[str] | None = None,
    keep_cols: Sequence[str] | None = None,
    prediction_col: str = "prediction",
    input_cols: Sequence[str] = (),
    missing: Literal["refuse", "null"] = "refuse",
    predict_fn: Callable[..., Any] | None = None,
    scaling_config: ScalingConfig | None = None,
    run_config: RunConfig | None = None,
) -> PartitionResults:
    """Predict the rows of a dataset, each with the model of its partition.

    The rows are divided as by `train`, so that each worker loads each model once.

    Args:
        models: Result of `train`, the id of its job, or the URI of a version that was registered, such as
            models:/sales@champion, whose files this process reads.
        data: Rows: a connector or a pandas DataFrame.
        by: Column, or columns, with the keys of the models.
        output_path: Empty directory or URI to which this process writes the rows with their predictions, as Parquet
            files. None: they are only in the results.
        keep_cols: Columns of the dataset beside the predictions; all columns by default.
        prediction_col: Name of the column with the predictions; NAME_0, NAME_1 and so on if a model returns several
            values per row.
        input_cols: Feature columns of models that do not name their columns.
        missing: What happens to rows whose key has no model, or a model whose training has failed. ``refuse``: the call
            fails. ``null``: their predictions are null, and a line says how many rows and which keys these are.
        predict_fn: Function of the model, the rows and the key that returns the predictions. None: the model's method
            ``predict``.
        scaling_config: Number of the workers and CPUs of each worker; by default one worker per CPU.
        run_config: Pool to run on, and limits of the run.

    Returns:
        The outcome of each partition, whose value is a DataFrame. ``rows()`` of the result yields all rows.

    Raises:
        InvalidArgumentError: An argument is not legal, `output_path` is not empty, or the rows have a column with the
            name of `prediction_col`.
        DataError: A key has no model, or with ``missing="null"`` none has one; the keys are of another kind than those
            of the models, such as text and numbers; or the rows lack a column.
        PartitionFailedError: A model cannot predict.
        JobFailedError: The job failed; the message ends with the cause.

    Example:
        >>> predictions = many.predict(models, today, by="store", missing="null")
        >>> pandas.concat(predictions.rows())
    """
    if missing not in ("refuse", "null"):
        raise InvalidArgumentError(f'missing={missing!r} is not legal: use "refuse" or "null"')
    found = _results_of(models)
    function = PartitionPrediction(
        found.manifest,
        found.digest,
        input_cols=tuple(input_cols),
        keep_cols=None if keep_cols is None else tuple(keep_cols),
        prediction_col=prediction_col,
        missing=missing,
        predict_fn=predict_fn,
    )
    with ExitStack() as staged:
        connector = connector_of("data", data, staged)
        names = (by,) if isinstance(by, str) else tuple(by)
        try:
            connector.schema()
        except (OSError, DataError):
            pass  # this process cannot read the rows; the workers check the same
        else:
            check_same_kinds(key_type(connector.source, names), found.key_type, names)
            kept_columns(keep_cols, prediction_col, connector.source)
        call = prepared(
            staged, function, connector, by=by, name="predict", scaling_config=scaling_config, run_config=run_config
        )
        results = call.run()
    if unknown := [each.key for each in results.failed if not found.predicts(each.key)]:
        raise DataError(
            f"{len(unknown):,} keys of the dataset have no model, such as {without_model(found, unknown[0])}: leave "
            'their rows out, or set missing="null" to get null predictions'
        )
    results.require_all()
    report_unknown(
        {shown_key(each.key): each.rows for each in results if not found.predicts(each.key)},
        sum(each.rows for each in results),
    )
    if output_path is not None:
        results.write_parquet(output_path)
    return results


def _results_of(models: PartitionResults | str) -> PartitionResults:
    if isinstance(models, PartitionResults):
        return models
    if not isinstance(models, str):
        raise InvalidArgumentError(
            f"models must be the result of train, the id of its job or the URI of a model in MLflow, not {models!r}"
        )
    if is_mlflow_uri(models) or "/" in models:  # the id of a job has no slash
        check_model_version(models)
        if (model := logged_model.model_of(models)) is None:
            raise InvalidArgumentError(f"{models} is no model of partitions: use shoal.distributors.predict")
        return model.results
    from shoal import jobs

    result = jobs.attach(models).status().result
    if result is None:
        raise InvalidArgumentError(f"job {models} has no result: wait until it has succeeded")
    return load_partitions(result)
