"""Call a function for each partition of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.data.connector import DataConnector
from shoal.distributors import dispatch
from shoal.distributors.dispatch import Call
from shoal.distributors.same_arguments import same_arguments
from shoal.errors import InvalidArgumentError
from shoal.jobs.partitions.program import PartitionProgram, program_of
from shoal.jobs.specs.partitions import PartitionsJobSpec
from shoal.training.pytorch.program import check_runnable, name_of
from shoal.training.run_config import RunConfig
from shoal.training.scaling import ScalingConfig

if TYPE_CHECKING:
    from shoal.distributors.submitted_call import SubmittedCall
    from shoal.jobs.partitions.results import PartitionResults

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
    arguments = dict(locals())  # the call's arguments, as no other name exists yet
    # DataFrames are copied to files for this call only, so the copies are removed.
    with ExitStack() as staged:
        return _call(staged, **arguments).run()


@same_arguments(run)
def submit_run(**arguments: Any) -> SubmittedCall[PartitionResults]:
    """Call a function for each partition of a dataset as a job, and return without waiting for the job.

    The job goes on when this process ends. The arguments are those of `run`.

    Returns:
        Handle of the call, whose ``result()`` returns the same as `run`.

    Raises:
        InvalidArgumentError: An argument is not legal; or this process is connected to a Ray cluster, where calls do
            not run as jobs.
        DataError: The dataset cannot be used.
    """
    return dispatch.submitted(partial(_call, **arguments))


def _call(
    staged: ExitStack, fn: Callable[..., Any], data: Dataset, by: Any, kwargs: Mapping[str, Any] | None, **options: Any
) -> Call[PartitionResults]:
    check_runnable(fn, "fn")
    if isinstance(fn, str) or not callable(fn):
        raise InvalidArgumentError(f"fn must be a function, not {fn!r}: a spec of a job can name a function")
    return call_of(staged, partial(fn, **kwargs) if kwargs else fn, data, by=by, name=name_of(fn), **options)


def call_of(
    staged: ExitStack, function: Callable[..., Any] | PartitionProgram | None, data: Dataset, **fields: Any
) -> Call[PartitionResults]:
    """Return the `Call` object of a function, of a pickled one, or of the estimator among the fields of the spec."""
    program = program_of(function) if callable(function) else function
    given = {name: value for name, value in fields.items() if value is not None}
    config = given.pop("run_config", RunConfig())
    if program is not None:
        given |= {"program": "not stored yet", "code_digest": program.digest}
    spec = PartitionsJobSpec.parse({"dataset": connected(data, staged), "run_config": config, **given})
    return dispatch.partitions(spec, program)


def connected(data: Dataset, staged: ExitStack) -> DataConnector:
    """Return a connector to a dataset. A DataFrame is copied to files first, which `staged` removes.

    Raises:
        InvalidArgumentError: This is neither a connector nor a table.
    """
    if isinstance(data, DataConnector):
        return data
    from shoal.data.staging.data_frames import is_frame

    if not is_frame(data):
        raise InvalidArgumentError(
            f"data must be a DataConnector or a DataFrame, not {type(data).__name__}: DataConnector.from_parquet(path) "
            "creates a connector"
        )
    connector = DataConnector.from_dataframe(data)
    staged.callback(connector.discard_staging)
    return connector
