"""The datasets of a training: checked from their footers, then assigned to the workers."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.data.checks import check_categories, check_group, check_label, validate_columns
from shoal.data.connector import DataConnector
from shoal.data.planning.row_groups import Shard
from shoal.errors import DataError
from shoal.training.boosting.request import Framework, TrainRequest
from shoal.training.boosting.rows import Part

REPLICATED_ROWS: Mapping[Framework, int] = {"lightgbm": 1_000_000}
"""Most rows of an eval set, for libraries whose workers each evaluate all of it.

LightGBM evaluates in each worker what that worker has, and sums up nothing: for the workers to agree on when to stop,
and for the metrics to be of all rows, each has to have them all.
"""


def checked_data(request: TrainRequest) -> tuple[DataConnector, dict[str, DataConnector]]:
    """The datasets, checked as far as footers tell. An eval set that is the training set itself is the same object.

    Raises:
        DataError: Whatever footers can show to be wrong, naming file, column and row group; an eval set with too many
            rows.
    """
    train = DataConnector.from_spec(request.dataset)
    columns = (request.input_cols, request.label_col, request.extra_cols)
    categorical = request.categorical_cols
    validate_columns(train.source, *columns, categorical_cols=categorical)
    types = {name: train.schema().field(name).type for name in categorical}
    check_label(train.source, request.label_col)
    if request.group_col is not None:
        check_group(train.source, request.group_col)
    eval_sets = {}
    most = REPLICATED_ROWS.get(request.framework)
    for name, spec in request.eval_set.items():
        connector = train if spec == request.dataset else DataConnector.from_spec(spec)
        if most is not None and connector.num_rows() > most:
            raise DataError(
                f'eval_set "{name}" has {connector.num_rows():,} rows, but with {request.framework} every worker '
                f"evaluates all of it, which is for {most:,} rows at most: give it a part, such as one that "
                "random_split makes"
            )
        eval_sets[name] = connector
        if connector is train:
            continue
        try:
            validate_columns(connector.source, *columns, categorical_cols=categorical, allow_all_null=True)
            check_categories(connector.source, types)
            check_label(connector.source, request.label_col)
            if request.group_col is not None:
                check_group(connector.source, request.group_col)
        except DataError as exc:
            raise DataError(f'eval_set "{name}": {exc}') from exc
    return train, eval_sets


def shard_datasets(
    train: DataConnector,
    eval_sets: Mapping[str, DataConnector],
    num_workers: int,
    seed: int,
    group_col: str | None,
    *,
    whole: bool = False,
    none_empty: bool = False,
) -> list[tuple[Part, dict[str, Part]]]:
    """Each worker's rows of the training set and of every eval set.

    Args:
        train: The training set.
        eval_sets: Eval sets by name.
        num_workers: Number of workers.
        seed: Seed of the plans.
        group_col: Column of groups that stay together, if any.
        whole: Every worker is to have all rows of the eval sets.
        none_empty: Every worker is to have some rows of them.

    Returns:
        By rank.

    Raises:
        DataError: If a dataset has fewer rows (or groups) than are needed.
    """
    mine = [Part(train, shard) for shard in train.plan(num_workers, seed, group_col)]
    evals: list[dict[str, Part]] = [{} for _ in range(num_workers)]
    for name, connector in eval_sets.items():
        if whole:
            everything = Part(connector, connector.plan(1, seed, group_col)[0])
            for rank in range(num_workers):
                evals[rank][name] = everything
            continue
        if connector is train:
            for rank in range(num_workers):
                evals[rank][name] = mine[rank]
            continue
        # An eval set may have fewer rows than there are workers: the last ones evaluate on nothing.
        shards = _plan(connector, num_workers, seed, group_col)
        if none_empty and len(shards) < num_workers:
            what = "row" if group_col is None else "group"
            raise DataError(
                f'eval_set "{name}" has {len(shards)} {what}{"s" * (len(shards) > 1)}, too few for {num_workers} '
                "workers, each of which evaluates custom_metric on its own part of them: give it more"
            )
        for rank in range(num_workers):
            evals[rank][name] = Part(connector, shards[rank] if rank < len(shards) else Shard(()))
    return list(zip(mine, evals, strict=True))


def _plan(connector: DataConnector, num_workers: int, seed: int, group_col: str | None) -> tuple[Shard, ...]:
    """As many shards as an eval set has rows for, or groups, at most one a worker."""
    most = connector.num_groups(group_col) if group_col else connector.num_rows()
    return connector.plan(min(num_workers, most), seed, group_col)
