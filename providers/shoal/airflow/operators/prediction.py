"""Operator that runs a batch prediction as a job. The job writes a model's predictions for the rows of a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import XComArg

from shoal.airflow.base.pool import PoolOperator
from shoal.airflow.checks import Arguments, check_paths, is_known, job_pool
from shoal.airflow.operators.jobs import JobOperator
from shoal.errors import InvalidArgumentError, shown

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import AnyJobSpec

_PREDICTION = ("model", "dataset", "output_path")
"""Fields of a prediction's spec that are arguments of the operator."""


class BatchPredictOperator(JobOperator):
    """Operator that computes a model's predictions for the rows of a dataset on a pool, and writes Parquet files.

    The prediction is a job that belongs to this task. A retry of the task attaches to the job if the job still runs. If
    `output_path` already contains the same predictions, the job does nothing. The operator returns the job's result as
    a dict with ``rows``, ``output_path`` and ``model_uri``, which contains the version of the model.

    :param model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
        (templated)
    :param dataset: A `DataConnector`, or its spec as a dict, such as ``{"paths": ["/data/{{ ds }}"]}``. (templated)
    :param output_path: Directory or URI to which the predictions are written. (templated)
    :param spec: Further fields of a `PredictJobSpec`, such as ``keep_cols``, ``overwrite``, ``scaling_config``.
        (templated)
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

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "model", "dataset", "output_path", "spec")
    template_fields_renderers = {"dataset": "json", "spec": "json"}  # noqa: RUF012 - Airflow's own shape

    def __init__(
        self,
        *,
        model: str,
        dataset: Any,
        output_path: str,
        spec: Mapping[str, Any] | XComArg | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.model = model
        self.dataset = dataset
        self.output_path = output_path
        self.spec = spec
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, the model, the dataset and the output."""
        super().check_arguments(arguments)
        spec = arguments["spec"] or {}
        fields = {**(spec if isinstance(spec, Mapping) else {}), **{name: arguments[name] for name in _PREDICTION}}
        check_paths(fields)
        if isinstance(spec, Mapping):
            from shoal.jobs.task_spec import check_spec

            check_spec({**fields, "framework": "predict"}, is_known, pool=job_pool(arguments))
        elif is_known(spec):
            raise InvalidArgumentError(f"spec={shown(spec)}: it has to be a dict with fields of a PredictJobSpec")

    @property
    def job_label(self) -> str:
        """The model that predicts."""
        return self.model

    def job_spec(self, context: Context) -> AnyJobSpec:
        """Build the job's spec from the operator's arguments.

        :param context: Airflow's context of the task.
        """
        from shoal.jobs import spec_of

        given = cast("Mapping[str, Any] | None", self.spec)
        fields = {**(given or {}), **{name: getattr(self, name) for name in _PREDICTION}, "framework": "predict"}
        check_paths(fields)
        return spec_of(fields)
