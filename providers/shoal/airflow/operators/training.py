"""Operators that run a job: a training, the models of a table's partitions, a search for parameters, a prediction."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.definitions.context import Context
from airflow.sdk.definitions.mappedoperator import MappedOperator

from shoal import jobs
from shoal.airflow.operators import base
from shoal.airflow.operators.job_operator import JobOperator
from shoal.airflow.results import PROMOTIONS
from shoal.errors import InvalidArgumentError, shown
from shoal.jobs.spec_text import SUFFIXES, fields_of
from shoal.training.pytorch.program import TrainFunc, check_train_func


class DistributedTrainOperator(JobOperator):
    """Operator that trains on a pool: it submits a job, streams the job's log, and returns the job's result as a dict.

    The job's holder is the DAG run, and the job belongs to this task. When Airflow retries the task, the new try
    attaches to the job if the job still runs, takes the result if the job has succeeded, and otherwise starts a new
    attempt. The new try finds its job even if templates in `spec` have other values in each try. If the function,
    `framework` or the arguments in the DAG file have changed, the new try ends the old job and trains anew. If the task
    is marked or cleared, or times out, its job is cancelled. A cleared task trains anew.

    If the job registers a boosting model, and the rows, holdout and settings are the same as for the newest registered
    version, then nothing is trained, and Airflow marks the task as skipped. A first run and a run after a failed run
    always train.

    If the job promotes its model, the task adds an event of the model's asset, which can trigger other DAGs (see
    `shoal.airflow.results`).

    The other arguments are those of all operators that run a job (see `JobOperator`).

    :param spec: A `JobSpec`, a `FunctionJobSpec`, the fields of one of them as a dict, or the path of a JSON or YAML
        file (``.json``, ``.yaml``, ``.yml``) with these fields, absolute or relative to the DAG file's folder and
        ``template_searchpath``. With `train_func`, `spec` contains the remaining fields, such as ``hyper_params``,
        ``dataset_map``, ``scaling_config``, ``register``. Paths in a spec must be absolute or URIs. (templated, also in
        a file)
    :param framework: Library that trains the model. Needed only if `spec` does not contain the field ``framework``.
    :param train_func: Function that runs in every worker. Pass the function itself (which is pickled with its code),
        its name as ``pkg.module:name``, or the path of a script.
    :param op_args: Positional arguments of the function, or command line arguments of the script. (templated)
    :param op_kwargs: Keyword arguments of the function. (templated)
    :param skip_if_unchanged: Whether a training without new rows is skipped, as described above. False: the task always
        trains. By default, the field ``register.skip_if_unchanged`` of `spec` decides, and the training is skipped if
        `spec` does not contain this field. A training function is never skipped. (templated)
    """

    template_fields: Sequence[str] = (
        *base.PoolOperator.template_fields,
        "spec",
        "op_args",
        "op_kwargs",
        "skip_if_unchanged",
    )
    template_fields_renderers = {"spec": "json", "op_args": "py", "op_kwargs": "py"}  # noqa: RUF012 - Airflow's own shape
    shallow_copy_attrs: Sequence[str] = ("train_func",)

    def __init__(
        self,
        *,
        spec: jobs.AnyJobSpec | Mapping[str, Any] | XComArg | str | None = None,
        framework: str | None = None,
        train_func: TrainFunc | None = None,
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        skip_if_unchanged: bool | str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.outlets = [*self.outlets, PROMOTIONS]
        self.spec = spec
        self.framework = framework
        self.train_func = train_func
        self.op_args: Collection[Any] = op_args or []
        self.op_kwargs: Mapping[str, Any] = op_kwargs or {}
        self.skip_if_unchanged = skip_if_unchanged
        self.check(self.task_id, vars(self))

    @classmethod
    def check_arguments(cls, arguments: base.Arguments) -> None:
        """Check arguments that are known at parse time: pool, spec, training function and its arguments."""
        super().check_arguments(arguments)
        train_func = arguments["train_func"]
        # The required fields of the spec depend on the training function. So the spec cannot be checked without the
        # function.
        if train_func is base.UNKNOWN:
            return
        spec = arguments["spec"]
        # `prepare_template` checks the spec in a file later, when the DAG is complete.
        if _is_spec_file(spec):
            spec = base.UNKNOWN
        # If some fields of a dict contain templates, the other fields are checked.
        given = spec if isinstance(spec, Mapping) or base.is_known(spec) else None
        args, kwargs, framework = (arguments.get(name) for name in ("op_args", "op_kwargs", "framework"))
        check_train_func(train_func, args, kwargs, framework=framework, fields=given)
        base.check_paths(given, train_func)
        if spec is not None and given is None:
            return
        from shoal.kinds.task_spec import check_spec, skipping_if_unchanged

        checked = check_spec(
            given,
            base.is_known,
            pool=base.job_pool(arguments),
            framework=framework,
            train_func=train_func,
            args=args if isinstance(args, list | tuple) else (),
            kwargs=kwargs if isinstance(kwargs, Mapping) else {},
        )
        if checked is not None and base.is_known(arguments["skip_if_unchanged"]):
            skipping_if_unchanged(checked, arguments["skip_if_unchanged"])

    def prepare_template(self) -> None:
        """Read the spec if it is in a file, and check the spec. Airflow calls this method when the DAG is complete,
        before it renders templates."""
        super().prepare_template()
        if base.is_known(self.spec) and _is_spec_file(self.spec):
            self.spec = _spec_in_file(self, cast("str", self.spec))
            self.check(self.task_id, vars(self))

    @property
    def job_label(self) -> str:
        """The model that is registered, or the function, and the name of the MLflow run."""
        from shoal.kinds.task_spec import label_of

        given = cast("jobs.AnyJobSpec | Mapping[str, Any] | None", self.spec)
        return label_of(given, framework=self.framework, train_func=self.train_func)

    def job_spec(self, context: Context) -> jobs.AnyJobSpec:
        """Build the job's spec from the operator's arguments."""

        # `prepare_template` has not read this file, because the file's name is a template or an argument of a mapped
        # task.
        if _is_spec_file(self.spec):
            self.spec = self.render_template(_spec_in_file(self, cast("str", self.spec)), context)
        given = cast("jobs.AnyJobSpec | Mapping[str, Any] | None", self.spec)
        base.check_paths(given)
        spec = jobs.spec_of(
            given, framework=self.framework, train_func=self.train_func, args=tuple(self.op_args), kwargs=self.op_kwargs
        )
        return jobs.skipping_if_unchanged(spec, self.skip_if_unchanged)


def _is_spec_file(spec: Any) -> bool:
    """Return whether the argument `spec` is the path of a file with a spec."""
    return isinstance(spec, str) and spec.endswith(SUFFIXES)


def _spec_in_file(task: BaseOperator, path: str) -> dict[str, Any]:
    """Read the fields of a spec from a file.

    :param task: Task whose DAG determines the folders in which a relative path is looked up.
    """
    from jinja2 import TemplateNotFound

    environment = task.get_template_env()
    try:
        if os.path.isabs(path) or environment.loader is None:
            text = Path(path).read_text()
        else:
            text, _, _ = environment.loader.get_source(environment, path)
    except (OSError, ValueError, TemplateNotFound) as error:
        raise InvalidArgumentError(
            f"spec={path!r} cannot be read: {error}; a relative path is looked up in the DAG file's folder and in "
            "template_searchpath"
        ) from None
    return fields_of(text, f'the spec "{path}"', path)


class _FieldsOperator(JobOperator):
    """Base class of operators whose arguments are fields of the job's spec, with further fields in `spec`."""

    _framework: str
    """Value of the spec's field ``framework``, which selects the kind of job."""
    _named: Sequence[str]
    """Fields of the spec that are arguments of the operator."""
    spec: Mapping[str, Any] | XComArg | None

    @classmethod
    def _fields(cls, spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields of the job's spec."""
        named = {name: arguments[name] for name in cls._named if arguments[name] is not None}
        return {**spec, **named, "framework": cls._framework}

    @classmethod
    def check_arguments(cls, arguments: base.Arguments) -> None:
        """Check the arguments that are known at parse time: the pool, and the fields of the spec."""
        super().check_arguments(arguments)
        spec = arguments["spec"] or {}
        fields = cls._fields(spec if isinstance(spec, Mapping) else {}, arguments)
        base.check_paths(fields)
        if isinstance(spec, Mapping):
            from shoal.kinds.task_spec import check_spec

            check_spec(fields, base.is_known, pool=base.job_pool(arguments))
        elif base.is_known(spec):
            from shoal.jobs.kind import spec_class

            name = spec_class(fields).__name__
            raise InvalidArgumentError(f"spec={shown(spec)}: it has to be a dict with fields of a {name}")

    def job_spec(self, context: Context) -> jobs.AnyJobSpec:
        """Build the job's spec from the operator's arguments."""
        fields = self._fields(cast("Mapping[str, Any] | None", self.spec) or {}, vars(self))
        base.check_paths(fields)
        return self._spec_of(fields)

    def _spec_of(self, fields: Mapping[str, Any]) -> jobs.AnyJobSpec:
        return jobs.spec_of(fields)


class ManyModelsOperator(_FieldsOperator):
    """Operator that trains a model for each partition of a table on a pool: the rows with one value of a column.

    All models are trained in one job, which belongs to this task. A retry of the task attaches to the job if the job
    still runs. Otherwise it starts a new attempt, which repeats no partition that has succeeded. The operator returns
    the job's result as a dict, with the numbers of partitions that have ``succeeded`` and ``failed`` in ``partitions``.
    The task fails if more partitions have failed than `max_failed` allows, after all others were trained and stored.

    If the models are registered (the field ``register`` of `spec`), and the version is promoted, the task adds an event
    of the model's asset, as `DistributedTrainOperator` does.

    The other arguments are those of all operators that run a job (see `JobOperator`).

    :param dataset: A `DataConnector`, or its spec as a dict, such as ``{"paths": ["/data/{{ ds }}"]}``. (templated)
    :param by: Column whose values divide the rows, or a list of columns. (templated)
    :param function: Function of the rows and the key of a partition that returns a model. Pass the function itself
        (which is pickled with its code), or its name as ``pkg.module:name``.
    :param function_kwargs: Keyword arguments of the function. (templated)
    :param estimator: Boosting model instead of a function: a dict with the fields of a `PartitionEstimator`, such as
        ``input_cols``, ``label_col``, ``params``. (templated)
    :param max_failed: Number of partitions that may fail, or their share, such as 0.05. By default that in
        `spec`, or 0. (templated)
    :param spec: Further fields of a `PartitionsJobSpec`, such as ``register``, ``columns``, ``run_config``. (templated)
    """

    _framework = "partitions"
    _named = ("dataset", "by", "estimator", "max_failed")
    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, *_named, "function_kwargs", "spec")
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
        max_failed: float | str | None = None,
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
        self.max_failed = max_failed
        self.spec = spec
        self.check(self.task_id, vars(self))

    @classmethod
    def _fields(cls, spec: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return all fields of the job's spec, with a placeholder for the code of a function."""
        from shoal.kinds.task_spec import fields_of_models

        fields = super()._fields(spec, arguments)
        function, kwargs = arguments["function"], arguments["function_kwargs"]
        if function is base.UNKNOWN:  # of a mapped task, whose instances may have an estimator
            return {"function": function, **fields}
        return fields_of_models(fields, function, kwargs if isinstance(kwargs, Mapping) else {})

    @property
    def job_label(self) -> str:
        """The columns that divide the rows."""
        by = self.by if isinstance(self.by, str) else ", ".join(self.by)
        return f"models by {by}"

    def _spec_of(self, fields: Mapping[str, Any]) -> jobs.AnyJobSpec:
        return jobs.models_spec_of(fields, function=self.function, kwargs=self.function_kwargs)


class TuneOperator(_FieldsOperator):
    """Operator that searches for the parameters of a model on a pool, and trains the best ones on all rows.

    The search is a job that belongs to this task. A retry of the task attaches to the job if the job still runs;
    otherwise the retry continues the search, and repeats no trial that has ended. The operator returns the job's result
    as a dict, whose ``search`` contains ``best_params`` and ``best_value``. If the job promotes its model, the task
    adds an event of the model's asset, as `DistributedTrainOperator` does.

    The other arguments are those of all operators that run a job (see `JobOperator`).

    :param space: Values among which the search chooses, by the name of the parameter, such as ``{"max_depth": {"type":
        "int", "low": 2, "high": 9}}``. (templated)
    :param train: The training whose parameters are searched: fields as in the spec of a training. None: `spec` names a
        function in ``train_func``. (templated)
    :param trials: Number of trials. (templated)
    :param spec: Further fields of a `TuneJobSpec`, such as ``holdout``, ``metric``, ``register``. (templated)
    """

    _framework = "tune"
    _named = ("train", "space", "trials")
    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, *_named, "spec")
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
        self.outlets = [*self.outlets, PROMOTIONS]
        self.space = space
        self.train = train
        self.trials = trials
        self.spec = spec
        self.check(self.task_id, vars(self))

    @property
    def job_label(self) -> str:
        """The search."""
        return "search"


_OF_INSTANCE = re.compile(r"\b(ti|task|task_instance|map_index)\b")
"""Pattern of templates whose values may differ between the instances of a mapped task."""


def same_output(task: BaseOperator | MappedOperator) -> str | None:
    """Return what is wrong if all instances of a mapped task, or all runs of a scheduled DAG, write their predictions
    to one folder, and may not replace those of another one; otherwise None.

    :param task: Task of a complete DAG that predicts.
    """
    dag, arguments = task.get_dag(), base.arguments_of(task)
    output, spec = arguments.get("output_path"), arguments.get("spec") or {}
    if not isinstance(output, str) or not isinstance(spec, Mapping) or spec.get("overwrite"):
        return None
    start = f'task {task.task_id}: output_path "{output}" is the same in every'
    if isinstance(task, MappedOperator) and not _OF_INSTANCE.search(output):
        return start + ' instance of the mapped task: map output_path, too, or add "{{ ti.map_index }}"'
    if dag is None or str(dag.schedule) in ("None", "@once") or not base.is_known(output):
        return None
    return (
        f"{start} run, so the second run with other rows or another model would be refused: add a template such as "
        '"{{ ds }}", or replace the predictions of the last run with spec={"overwrite": True}'
    )


class BatchPredictOperator(_FieldsOperator):
    """Operator that computes a model's predictions for the rows of a dataset on a pool, and writes Parquet files.

    The prediction is a job that belongs to this task. A retry of the task attaches to the job if the job still runs. If
    `output_path` already contains the same predictions, the job does nothing. The operator returns the job's result as
    a dict with ``rows``, ``output_path`` and ``model_uri``, which contains the version of the model.

    The other arguments are those of all operators that run a job (see `JobOperator`).

    :param model: MLflow URI of the model: ``models:/NAME@ALIAS``, ``models:/NAME/VERSION``, ``runs:/...`` or a folder.
        (templated)
    :param dataset: A `DataConnector`, or its spec as a dict, such as ``{"paths": ["/data/{{ ds }}"]}``. (templated)
    :param output_path: Directory or URI to which the predictions are written. (templated)
    :param spec: Further fields of a `PredictJobSpec`, such as ``keep_cols``, ``overwrite``, ``scaling_config``.
        (templated)
    """

    _framework = "predict"
    _named = ("model", "dataset", "output_path")
    template_fields: Sequence[str] = (*base.PoolOperator.template_fields, *_named, "spec")
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

    def prepare_template(self) -> None:
        """Warn if runs with other rows write to one folder (see `same_output`). Airflow calls this when the DAG is
        complete."""
        super().prepare_template()
        if not base.is_known(self.dataset) and (problem := same_output(self)):
            warnings.warn(problem, stacklevel=2)

    @property
    def job_label(self) -> str:
        """The model that predicts."""
        return self.model
