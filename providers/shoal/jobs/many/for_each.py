"""Build one spec per value of a column, to train one model for each value from one table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from shoal.errors import InvalidArgumentError
from shoal.jobs.many.names import Names
from shoal.jobs.many.values import SharedColumn, check_values
from shoal.jobs.specs.base import AnySpec
from shoal.jobs.specs.function import AnyJobSpec, parse_spec
from shoal.jobs.specs.prediction import PredictJobSpec
from shoal.training.run_config import RunConfig


def for_each(
    spec: AnyJobSpec | Mapping[str, Any],
    column: str,
    values: Iterable[Any] | None = None,
    *,
    min_rows: int = 1,
    connection_url: Callable[[str], str | None] | None = None,
) -> list[dict[str, Any]]:
    """Return one spec per value of a column. The spec of a value trains a model only on the rows with this value.

    Every dataset of a spec (for training, evaluation and the holdout) is restricted to the rows with the value. In the
    names of the registered model, the experiment and the MLflow run, in tags and in `job_id`, the placeholder
    ``{column}`` is replaced by the value. The model's name and `job_id` end in ``-<value>`` if they have no
    placeholder.

    Rows with a null in the column belong to no spec; a warning is logged with their number.

    Args:
        spec: A `JobSpec` or a `FunctionJobSpec`, or its fields. The training dataset of a `FunctionJobSpec` is the
            first one in its `dataset_map`.
        column: Name of a column that all datasets have.
        values: Values for which specs are built. By default, all values in the training dataset, in ascending order.
            shoal finds the values in the names of the partition directories, by reading the column, or by a query in
            the database.
        min_rows: Number of rows of the training dataset that a value needs. Values with fewer rows get no spec; a
            warning is logged. `min_rows` cannot be given together with `values`.
        connection_url: Function that returns the SQLAlchemy URL of a dataset's connection by its name, as in `submit`.

    Returns:
        The specs as plain data for JSON, over which an operator or a task can be mapped.

    Raises:
        DataError: A dataset cannot be read or lacks the column, or the column has no values.
        InvalidArgumentError: The spec or a value is wrong, more than 1000 values were found, or two values give the
            same name.

    Example:
        >>> specs = for_each(spec, column="carrier")
        >>> DistributedTrainOperator.partial(task_id="train", pool_name="retrain").expand(spec=specs)
    """
    base, job_id = _without_job_id(spec)
    if isinstance(base, PredictJobSpec):
        raise InvalidArgumentError(
            "for_each accepts only the spec of a training, but this is the spec of a batch prediction: write one "
            "prediction spec for each model"
        )
    names = Names(base, job_id, column)
    shared = SharedColumn(base, column, connection_url)
    if values is None:
        chosen = shared.values(min_rows)
    elif min_rows != 1:
        raise InvalidArgumentError(
            f"min_rows={min_rows} applies only if shoal finds the values in the training dataset, but values are "
            "given: leave out min_rows or values"
        )
    else:
        chosen = check_values(values)
        shared.check_types(chosen)
    texts = names.texts(chosen)
    return [
        names.filled(base.with_datasets(shared.restricted_to(value)), text)
        for value, text in zip(chosen, texts, strict=True)
    ]


def _without_job_id(spec: AnyJobSpec | Mapping[str, Any]) -> tuple[AnyJobSpec, str | None]:
    """Split a spec into the parsed spec without `job_id`, and the `job_id`, which may contain a placeholder such as
    `{city}`."""
    if isinstance(spec, AnySpec):
        run_config = spec.run_config.model_copy(update={"job_id": None})
        return spec.model_copy(update={"run_config": run_config}), spec.run_config.job_id
    given = spec.get("run_config")
    if isinstance(given, RunConfig):
        return parse_spec({**spec, "run_config": given.model_copy(update={"job_id": None})}), given.job_id
    if isinstance(given, Mapping) and isinstance(given.get("job_id"), str):
        return parse_spec({**spec, "run_config": {**given, "job_id": None}}), given["job_id"]
    return parse_spec(spec), None
