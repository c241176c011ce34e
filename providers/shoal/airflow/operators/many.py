"""Operator that trains a model for each partition of a table, all in one job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import XComArg

from shoal.airflow.assets import PROMOTIONS
from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.checks import Arguments, check_paths, is_known, job_pool
from shoal.airflow.operators.jobs import JobOperator
from shoal.airflow.operators.outcomes import record_failure, record_success
from shoal.errors import InvalidArgumentError, ShoalError, shown

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec, JobResult


class ManyModelsOperator(JobOperator):
    """Operator that trains a model for each partition of a table on a pool: the rows with one value of a column.

    All models are trained in one job, which belongs to this task. A retry of the task attaches to the job if the job
    still runs. Otherwise it starts a new attempt, which repeats no partition that has ended. The operator returns the
    job's result as a dict, with the numbers of partitions that have ``succeeded`` and ``failed`` in ``partitions``. The
    task fails if all partitions have failed.

    If the models are registered (the field ``register`` of `spec`), and the version is promoted, the task adds an event
    of the model's asset, as `DistributedTrainOperator` does.

    :param dataset: A `DataConnector`, or its spec as a dict, such as ``{"paths": ["/data/{{ ds }}"]}``. (templated)
    :param by: Column whose values divide the rows, or a list of columns. (templated)
    :param function: Function of the rows and the key of a partition that returns a model. Pass the function itself
        (which is pickled with its code), or its name as ``pkg.module:name``.
    :param function_kwargs: Keyword arguments of the function. (templated)
    :param estimator: Boosting model instead of a function: a dict with the fields of a `PartitionEstimator`, such as
        ``input_cols``, ``label_col``, ``params``. (templated)
    :param spec: Further fields of a `PartitionsJobSpec`, such as ``register``, ``columns``, ``run_config``. (templated)
    :param pool_name: Name or URI of the pool. By default, the pool that `spec` names. (templated)
    :param compute_pool_conn_id: Id of a connection of type ``compute_pool``, instead of `pool_name`. (templated)
    :param durable: Whether a retry attaches to the job of an earlier try, as described above. False: a retry ends the
        job of an earlier try and submits a new one.
    :param cancel_on_kill: Whether the job is cancelled when the task is marked or cleared, or times out.
    :param credential_conn_ids: Ids of connections whose credentials the job gets, for storage and MLflow (see
        `shoal.airflow.credentials`).
    :param deferrable: Whether the task waits in Airflow's triggerer, without a worker (see `WaitingOperator`).
    :param poll_interval: Seconds between two checks of the job while the task is deferred.
    :param wait_for_completion: Whether the task waits for the end of the job. False: the task submits the job, and
        returns a dict with ``job_id``, ``attempt`` and ``pool``. Without a process that waits for it, the job still
        runs to its end.
    """

    template_fields: Sequence[str] = (
        *PoolOperator.template_fields,
        "dataset",
        "by",
        "function_kwargs",
        "estimator",
        "spec",
    )
    template_fields_renderers = {"dataset": "json", "estimator": "json", "spec": "json"}  # noqa: RUF012 - Airflow's shape
    shallow_copy_attrs: Sequence[str] = ("function",)

    def __init__(
        self,
        *,
        dataset: Any,
        by: str | Sequence[str],
        function: Callable[..., Any] | str | None = None,
        function_kwargs: Mapping[str, Any] | None = None,
        estimator: Mapping[str, Any] | XComArg | None = None,
        spec: Mapping[str, Any] | XComArg | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outlets = [*self.outlets, PROMOTIONS]
        self.dataset = dataset
        self.by = by
        self.function = function
        self.function_kwargs: Mapping[str, Any] = function_kwargs or {}
        self.estimator = estimator
        self.spec = spec
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, the dataset, the function and the fields."""
        super().check_arguments(arguments)
        spec = arguments["spec"] or {}
        if not isinstance(spec, Mapping):
            if is_known(spec):
                raise InvalidArgumentError(
                    f"spec={shown(spec)}: it has to be a dict with fields of a PartitionsJobSpec"
                )
            return
        fields = _fields(spec, arguments)
        check_paths(fields)
        from shoal.jobs.task_spec import check_models_spec

        kwargs = arguments["function_kwargs"]
        check_models_spec(
            fields,
            is_known,
            pool=job_pool(arguments),
            function=arguments["function"],
            kwargs=kwargs if isinstance(kwargs, Mapping) else {},
        )

    @property
    def job_label(self) -> str:
        """The columns that divide the rows."""
        by = self.by if isinstance(self.by, str) else ", ".join(self.by)
        return f"models by {by}"

    def job_spec(self, context: Context) -> AnyJobSpec:
        """Build the job's spec from the operator's arguments.

        :param context: Airflow's context of the task.
        """
        from shoal.jobs import models_spec_of

        fields = _fields(cast("Mapping[str, Any] | None", self.spec) or {}, vars(self))
        check_paths(fields)
        return models_spec_of(fields, function=self.function, kwargs=self.function_kwargs)

    def record_success(self, context: Context, spec: AnyJobSpec, result: JobResult) -> None:
        """Store the outcome of the job as XComs, if its models are registered.

        :param context: Airflow's context of the task.
        :param spec: Spec of the job.
        :param result: Result of the job.
        """
        if spec.register_as is not None:
            record_success(context, spec, result)

    def record_failure(self, context: Context, error: ShoalError) -> None:
        """Store the failure of the job as an XCom, if its models would be registered.

        :param context: Airflow's context of the task.
        :param error: The cause of the failure.
        """
        given = cast("Mapping[str, Any] | None", self.spec) or {}
        if given.get("register"):
            record_failure(context, {**_fields(given, vars(self)), "framework": "partitions"}, error)


def _fields(spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: arguments[name] for name in ("dataset", "by", "estimator") if arguments[name] is not None}
    return {**spec, **named}
