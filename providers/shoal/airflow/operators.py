"""Operators on compute pools: each is one call of shoal's own API, made in the DAG run's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk import BaseOperator, XComArg
from airflow.sdk.exceptions import AirflowRuntimeError

from shoal.airflow._base import PoolOperator
from shoal.airflow.hooks import ENGINE, holder_of
from shoal.errors import InvalidArgumentError
from shoal.training.pytorch.train_func import TrainFunc, check_train_func

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    from shoal.jobs import FunctionJobSpec, JobResult, JobSpec


_ENDED = ("success", "failed")

_LOOK_S = 0.2
"""Between looks whether the task was killed: of the 5 s that Airflow leaves it then."""


class ScaleClusterOperator(PoolOperator):
    """Set a pool's base demand, which stays until it is set anew; for the duration of a run use ``pool_for_run``.

    :param expected_cluster_size: Nodes, the head among them. (templated)
    :param is_async: Return once the request is accepted; a ``NodesSensor`` waits for the nodes.
    :param options: ``rollback_after_seconds``, ``block_until_min_cluster_size``. (templated)
    :param pool_name: Name of a pool, or its URI. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "expected_cluster_size", "options")

    def __init__(
        self,
        *,
        expected_cluster_size: int,
        is_async: bool = False,
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.expected_cluster_size = expected_cluster_size
        self.returns_at_once = is_async  # `is_async` means something else to Airflow
        self.options = options

    def execute(self, context: Context) -> bool:
        """Scale; killed meanwhile, the scaling is rolled back."""
        return self.hook.pool(holder_of(context)).scale(
            int(self.expected_cluster_size),
            is_async=self.returns_at_once,
            options=self.options,
            on_progress=self.look,
        )


class LeasePoolOperator(PoolOperator):
    """Claim nodes for the DAG run: the setup of ``pool_for_run``.

    A pool that is down is brought up where the connection or URI says what it is; it goes down with its last lease.

    :param size: Nodes, the head among them. (templated)
    :param is_async: Return once the claim is accepted; a ``NodesSensor`` waits for the nodes.
    :param options: As of ``ScaleClusterOperator``. (templated)
    :param pool_name: Name of a pool, or its URI. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "size", "options")

    def __init__(
        self, *, size: int, is_async: bool = False, options: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.size = size
        self.returns_at_once = is_async
        self.options = options

    def execute(self, context: Context) -> str:
        """Claim; killed meanwhile, the claim is taken back. Returns the pool's name."""
        hook = self.hook
        pool = hook.pool(holder_of(context))
        pool.lease(
            int(self.size),
            bring_up=hook.spec is not None,
            is_async=self.returns_at_once,
            options=self.options,
            on_progress=self.look,
        )
        return pool.name


class DistributedTrainOperator(PoolOperator):
    """Train on a pool: submits a job, streams its log, returns its result as a dict.

    The job has the DAG run as holder and belongs to this task: a further try attaches to it while it runs, collects it
    when it has ended well meanwhile, and otherwise makes a new attempt. A task that is marked or cleared, or times out,
    takes its job with it.

    :param spec: A `JobSpec`, a `FunctionJobSpec`, or the fields of one as a dict; beside `train_func` the other fields,
        such as ``hyper_params``, ``dataset_map``, ``scaling_config``, ``register``. (templated)
    :param framework: What trains, where `spec` does not say.
    :param train_func: A function that runs in every worker: itself, by value; its name ``pkg.module:name``; or a
        script's path.
    :param op_args: Its arguments; of a script, its command line. (templated)
    :param op_kwargs: Its arguments by name. (templated)
    :param pool_name: Name of a pool, or its URI; by default what the spec says. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "spec", "op_args", "op_kwargs")
    template_fields_renderers = {"spec": "json", "op_args": "py", "op_kwargs": "py"}  # noqa: RUF012 - Airflow's own shape
    shallow_copy_attrs: Sequence[str] = ("train_func",)

    def __init__(
        self,
        *,
        spec: JobSpec | FunctionJobSpec | Mapping[str, Any] | XComArg | None = None,
        framework: str | None = None,
        train_func: TrainFunc | None = None,
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if spec is None and train_func is None:
            raise InvalidArgumentError(
                f"task {self.task_id} does not say what to train: give it a spec or a train_func"
            )
        known = None if isinstance(spec, XComArg) else spec
        check_train_func(train_func, op_args, op_kwargs, framework=framework, fields=known)
        self.spec = spec
        self.framework = framework
        self.train_func = train_func
        self.op_args: Collection[Any] = op_args or []
        self.op_kwargs: Mapping[str, Any] = op_kwargs or {}

    def execute(self, context: Context) -> dict[str, Any]:
        """Submit or attach, and wait."""
        return self.train(context).to_dict()

    def train(self, context: Context) -> JobResult:
        """Submit or attach, and wait."""
        from shoal.jobs import spec_of, submit

        given = cast("JobSpec | FunctionJobSpec | Mapping[str, Any] | None", self.spec)
        spec = spec_of(
            given, framework=self.framework, train_func=self.train_func, args=tuple(self.op_args), kwargs=self.op_kwargs
        )
        if self.pool_name or self.compute_pool_conn_id:
            run_config = spec.run_config.model_copy(update={"pool_name": self.hook.pool().name})
            spec = spec.model_copy(update={"run_config": run_config})
        ti = context["ti"]
        handle = submit(spec, holder=holder_of(context), key=f"{ti.task_id}/{ti.map_index}")
        self.log.info("job %s, attempt %d, on pool %s", handle.job_id, handle.attempt, handle.pool)
        # In a thread: Airflow's signals end what the main thread does, which is nothing that could be left half done.
        with ThreadPoolExecutor(1) as aside:
            result = aside.submit(handle.wait, on_log=self.log.info)
            try:
                while not wait([result], timeout=_LOOK_S).done:
                    self.end_if_killed()
            except BaseException as end:  # killed, or past its execution_timeout
                handle.cancel(str(end) or f"task {self.task_id} was ended")
                raise
            return result.result()


class CleanupPoolOperator(PoolOperator):
    """End what a run has on a pool: its jobs, its lease, and all that nobody owns. The teardown of ``pool_for_run``.

    :param holder: The run, ``airflow:<dag_id>/<run_id>``; by default this one. (templated)
    :param pool_name: Name of a pool, or its URI. (templated)
    :param compute_pool_conn_id: Connection of type ``compute_pool``, instead of the name. (templated)
    """

    template_fields: Sequence[str] = (*PoolOperator.template_fields, "holder")

    def __init__(self, *, holder: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.holder = holder

    def execute(self, context: Context) -> dict[str, Any]:
        """Clean up; twice does no harm. Returns what was done."""
        from shoal.jobs import clean_up

        report = clean_up(self.hook.pool().name, self.holder or holder_of(context))
        self.log.info("cancelled %s, lease released: %s", list(report.cancelled) or "nothing", report.released)
        for line in (*report.swept, *report.left):
            self.log.info(line)
        return report.to_dict()


class SweepPoolsOperator(BaseOperator):
    """End what DAG runs that are over still have, and what nobody owns, on every pool of this host: the janitor's task.

    A run that this Airflow does not know is left to its own time to live: it may be another one's.
    """

    def execute(self, context: Context) -> list[str]:
        """Sweep. Returns what was done, a sentence each."""
        from shoal.jobs.cleanup import clean_up_ended_runs, sweep

        def why_ended(run: str) -> str | None:
            dag_id, slash, run_id = run.partition("/")
            if not slash:  # a name that a user has chosen, and `holder_of` has not made
                return None
            try:
                state = context["ti"].get_dagrun_state(dag_id, run_id)
            except AirflowRuntimeError:
                return None
            return f"its DAG run ended as {state}" if state in _ENDED else None

        did = [*clean_up_ended_runs(ENGINE, why_ended), *sweep()]
        for line in did:
            self.log.info(line)
        return did
