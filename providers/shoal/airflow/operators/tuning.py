"""Operator that searches for the parameters of a model as a job."""

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

_SEARCH = ("train", "space", "trials")
"""Fields of a search's spec that are arguments of the operator."""


class TuneOperator(JobOperator):
    """Operator that searches for the parameters of a model on a pool, and trains the best ones on all rows.

    The search is a job that belongs to this task. A retry of the task attaches to the job if the job still runs;
    otherwise the retry continues the search, and repeats no trial that has ended. The operator returns the job's result
    as a dict, whose ``search`` contains ``best_params`` and ``best_value``.

    :param space: Values among which the search chooses, by the name of the parameter, such as ``{"max_depth": {"type":
        "int", "low": 2, "high": 9}}``. (templated)
    :param train: The training whose parameters are searched: fields as in the spec of a training. None: `spec` names a
        function in ``train_func``. (templated)
    :param trials: Number of trials. (templated)
    :param spec: Further fields of a `TuneJobSpec`, such as ``holdout``, ``metric``, ``register``. (templated)
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

    template_fields: Sequence[str] = (*PoolOperator.template_fields, *_SEARCH, "spec")
    template_fields_renderers = {"train": "json", "space": "json", "spec": "json"}  # noqa: RUF012 - Airflow's own shape

    def __init__(
        self,
        *,
        space: Mapping[str, Any] | XComArg | str,
        train: Mapping[str, Any] | XComArg | str | None = None,
        trials: int | str = 40,
        spec: Mapping[str, Any] | XComArg | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.space = space
        self.train = train
        self.trials = trials
        self.spec = spec
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, the training, the space and the trials."""
        super().check_arguments(arguments)
        spec = arguments["spec"] or {}
        fields = _fields(spec if isinstance(spec, Mapping) else {}, arguments)
        check_paths(fields)
        if isinstance(spec, Mapping):
            from shoal.jobs.task_spec import check_spec

            check_spec(fields, is_known, pool=job_pool(arguments))
        elif is_known(spec):
            raise InvalidArgumentError(f"spec={shown(spec)}: it has to be a dict with fields of a TuneJobSpec")

    @property
    def job_label(self) -> str:
        """The search."""
        return "search"

    def job_spec(self, context: Context) -> AnyJobSpec:
        """Build the job's spec from the operator's arguments.

        :param context: Airflow's context of the task.
        """
        from shoal.jobs import spec_of

        fields = _fields(cast("Mapping[str, Any]", self.spec or {}), vars(self))
        check_paths(fields)
        return spec_of(fields)


def _fields(spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    given = {name: arguments[name] for name in _SEARCH if arguments[name] is not None}
    return {**spec, **given, "framework": "tune"}
