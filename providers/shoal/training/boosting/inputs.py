"""Check the datasets of a training, using only their Parquet footers, and divide the rows among the workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shoal.data.checks import check_categories, check_group, check_no_nulls, check_weight, validate_columns
from shoal.data.connector import DataConnector
from shoal.data.planning import Shard
from shoal.errors import DataError
from shoal.training.boosting.request import Framework, TrainRequest
from shoal.training.boosting.rows import Part

if TYPE_CHECKING:
    import pyarrow as pa

    from shoal.data.parquet.source import ParquetSource

MAX_EVAL_ROWS = 1_000_000
"""Maximum number of rows of an eval set if every worker evaluates the whole eval set.

LightGBM does not combine the metrics of its workers, and XGBoost combines some metrics only approximately, such as an
AUC without groups. In these cases each worker gets all rows of an eval set, so that the metrics are exact and all
workers stop early at the same round. The maximum keeps the copies of an eval set small. XGBoost combines all other
metrics exactly, so an eval set of any size is then divided among its workers.
"""
_COMBINES_NOTHING: frozenset[Framework] = frozenset({"lightgbm"})


def checked_data(request: TrainRequest) -> tuple[DataConnector, dict[str, DataConnector]]:
    """Open the training set and the eval sets, and check their columns, using only the Parquet files' footers.

    Raises:
        DataError: A footer shows an error (the message names file, column and row group), or an eval set has too many
            rows.
    """
    train = DataConnector.from_spec(request.dataset)
    columns = (request.input_cols, request.label_col, request.extra_cols)
    categorical = request.categorical_cols
    validate_columns(train.source, *columns, categorical_cols=categorical)
    types = {name: train.schema().field(name).type for name in categorical}
    _check_values(request, train.source)
    eval_sets = {}
    for name, spec in request.eval_set.items():
        connector = train if spec == request.dataset else DataConnector.from_spec(spec)
        if request.framework in _COMBINES_NOTHING:
            refuse_long_eval_sets({name: connector}, f"the metrics of {request.framework}")
        eval_sets[name] = connector
        if connector is train:
            continue
        try:
            validate_columns(connector.source, *columns, categorical_cols=categorical, allow_all_null=True)
            check_categories(connector.source, types)
            _check_values(request, connector.source)
        except DataError as exc:
            raise DataError(f'eval_set "{name}": {exc}') from exc
    return train, eval_sets


def check_features(request: TrainRequest, schema: pa.Schema, source: ParquetSource) -> None:
    """Check, before the training and using only Parquet footers, that the model will be able to predict a dataset.

    Raises:
        DataError: A column is missing or of an unsuitable type, or a margin is null.
    """
    categorical = request.categorical_cols
    validate_columns(
        source,
        request.input_cols,
        extra_cols=request.margin_cols,
        categorical_cols=categorical,
        allow_all_null=True,
    )
    check_categories(source, {name: schema.field(name).type for name in categorical if name in schema.names})
    for name in request.margin_cols:
        check_no_nulls(source, name, "base_margin")


def _check_values(request: TrainRequest, source: ParquetSource) -> None:
    for label in request.all_label_cols:
        check_no_nulls(source, label)
    for margin in request.margin_cols:
        check_no_nulls(source, margin, "base_margin")
    if request.weight_col is not None:
        check_no_nulls(source, request.weight_col, "weight")
        check_weight(source, request.weight_col)
    if request.group_col is not None:
        check_group(source, request.group_col)


def refuse_long_eval_sets(eval_sets: Mapping[str, DataConnector], metrics: str) -> None:
    """Raise DataError if an eval set has too many rows for every worker to evaluate the whole eval set.

    Raises:
        DataError: An eval set has too many rows.
    """
    for name, connector in eval_sets.items():
        if connector.num_rows() > MAX_EVAL_ROWS:
            raise DataError(
                f'eval_set "{name}" has {connector.num_rows():,} rows, but every worker evaluates the whole eval set '
                f"for {metrics}, so at most {MAX_EVAL_ROWS:,} rows are allowed: use a part of the eval set, for "
                "example with random_split, or with XGBoost a metric that is a mean over rows, such as logloss"
            )


def shard_datasets(
    train: DataConnector,
    eval_sets: Mapping[str, DataConnector],
    num_workers: int,
    seed: int,
    group_col: str | None,
    *,
    by_columns: bool = False,
    whole: bool = False,
) -> list[tuple[Part, dict[str, Part]]]:
    """Divide the training set and the eval sets among the workers.

    Args:
        train: Training set.
        eval_sets: Eval sets, by name.
        num_workers: Number of workers.
        seed: Seed of the random order of the rows.
        group_col: Column of groups, or None.
        by_columns: Whether each worker gets all rows of all datasets, because the workers divide the columns.
        whole: Whether each worker gets all rows of the eval sets.

    Raises:
        DataError: A dataset has too few rows or groups for the workers.
    """

    def all_rows(connector: DataConnector) -> list[Part]:
        return [Part(connector, connector.plan(1, seed, group_col)[0])] * num_workers

    mine = all_rows(train) if by_columns else [Part(train, shard) for shard in train.plan(num_workers, seed, group_col)]
    evals: list[dict[str, Part]] = [{} for _ in range(num_workers)]
    for name, connector in eval_sets.items():
        if connector is train and not whole:
            parts = mine
        elif whole or by_columns:
            parts = all_rows(connector)
        else:
            # If there are fewer rows (or groups) than workers, the last workers get an empty shard.
            most = connector.num_groups(group_col) if group_col else connector.num_rows()
            shards = connector.plan(min(num_workers, most), seed, group_col)
            parts = [Part(connector, shard) for shard in (*shards, *[Shard(())] * (num_workers - len(shards)))]
        for rank, part in enumerate(parts):
            evals[rank][name] = part
    return list(zip(mine, evals, strict=True))
