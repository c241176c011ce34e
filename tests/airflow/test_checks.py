"""What is wrong in a DAG is refused when Airflow loads it; what a template gives, at the start of the task."""

from __future__ import annotations

import re
import warnings
from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, XComArg, literal, task, task_group
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization

from shoal.airflow.operators import (
    BatchPredictOperator,
    CleanupPoolOperator,
    DistributedTrainOperator,
    LeasePoolOperator,
    ManyModelsOperator,
    ScaleClusterOperator,
    TuneOperator,
)
from shoal.airflow.operators.base import UNKNOWN, is_known
from shoal.airflow.pool_for_run import pool_for_run
from shoal.airflow.results import FailOnPermanentErrors, no_retry_of_permanent_errors
from shoal.airflow.sensors import NodesSensor
from shoal.airflow.task_decorators import distributed_task
from shoal.data import DataConnector
from shoal.errors import (
    CapacityError,
    CapacityTimeoutError,
    DataAccessError,
    DataError,
    InvalidArgumentError,
    InvalidParamsError,
    JobBusyError,
    JobCancelledError,
    JobFailedError,
    NoPoolError,
    PoolDownError,
    ScaleError,
    WorkerLostError,
)
from shoal.jobs import JobSpec
from shoal.pool.journal import commands
from shoal.pool.spec import PoolSpec
from shoal.state import Store
from shoal.state.schema import Pool, PoolState

SPEC = {"dataset": {"paths": ["/data/x.parquet"]}, "input_cols": ["x"], "label_col": "y"}
REGISTER = {"model": "m", "metric": "rmse", "holdout": {"paths": ["/holdout"]}}
SAME = {"holdout": SPEC["dataset"]}
OF_FUNCTION = {**REGISTER, "label_col": "y", "input_cols": ["x"]}
ESTIMATOR = {"input_cols": ["x"], "label_col": "y"}
TWO = "local://p?max_nodes=2"
NO_RAY = "local://p?max_nodes=1&ray=false"
FOUR_WORKERS = {"scaling_config": {"num_workers": 4}}


def train(**arguments):
    return DistributedTrainOperator(task_id="train", **{"spec": SPEC, **arguments})


def trained(pool_name=None, **fields):
    return train(spec={**SPEC, **fields}, pool_name=pool_name)


def predict(**arguments):
    given = {"model": "models:/m@champion", "dataset": {"paths": ["/x"]}, "output_path": "/out", **arguments}
    return BatchPredictOperator(task_id="predict", **given)


def many(**arguments):
    given = {"dataset": SPEC["dataset"], "by": "store", "estimator": ESTIMATOR, **arguments}
    return ManyModelsOperator(task_id="many", **given)


def search(**arguments):
    return TuneOperator(task_id="search", space={"max_depth": [2, 3]}, train=SPEC, **arguments)


def lease(**arguments):
    return LeasePoolOperator(task_id="lease", **{"size": 2, **arguments})


def scale(**arguments):
    return ScaleClusterOperator(task_id="scale", **{"expected_cluster_size": 2, **arguments})


def sensor(**arguments):
    return NodesSensor(task_id="nodes", **{"expected_nodes": 2, **arguments})


def clean(**arguments):
    return CleanupPoolOperator(task_id="clean", **arguments)


def block(**arguments):
    with pool_for_run(**{"size": 2, **arguments}):
        pass


def function(x: int = 0) -> int:
    return x


def decorated(**arguments):
    distributed_task(**arguments)(function)()


def mapped_decorated(**arguments):
    distributed_task(**arguments)(function).expand(x=[1, 2])


def mapped(**arguments):
    DistributedTrainOperator.partial(task_id="train", **arguments).expand(op_args=[[1], [2]])


def mapped_over(**values):
    DistributedTrainOperator.partial(task_id="train").expand(**values)


def mapped_over_each(**arguments):
    DistributedTrainOperator.partial(task_id="train", spec=SPEC).expand_kwargs([{"durable": False}, arguments])


def mapped_sensor(**values):
    NodesSensor.partial(task_id="nodes", pool_name=TWO).expand(**values)


WRONG = [
    # The size.
    (lease, {"size": "auto"}, "task lease: size='auto' with plan_for=None: give"),
    (block, {"size": "auto"}, "size='auto' with plan_for=None: give"),
    (scale, {"plan_for": SPEC}, "expected_cluster_size=2 with plan_for="),
    (lease, {"size": "auto", "plan_for": {**SPEC, "n_estimator": 1}}, "did you mean n_estimators"),
    (lease, {"size": "auto", "plan_for": {**SPEC, **FOUR_WORKERS}, "pool_name": TWO}, "do not fit on pool"),
    (block, {"size": "auto", "plan_for": {**SPEC, "dataset": {"paths": ["x"]}}}, 'relative path "x"'),
    (sensor, {"expected_nodes": "auto"}, "expected_nodes='auto'"),
    # The spec.
    (trained, {"input_colss": ["x"]}, 'task train: unknown option "input_colss": did you mean input_cols?'),
    (trained, {"framework": "xgbost"}, 'task train: unknown framework "xgbost": .*did you mean xgboost'),
    (trained, {"framework": "pytoch"}, "did you mean pytorch"),
    (trained, {"n_estimators": 0}, "n_estimators=0: Input should be greater than or equal to 1"),
    (trained, {"weight_col": "x"}, "a column may have only one role"),
    (trained, {"register": {**REGISTER, "metrik": "mae"}}, '"register.metrik": did you mean metric'),
    (trained, {"register": {**REGISTER, "metric": "rsme"}}, "rsme"),
    (train, {"spec": {"dataset": SPEC["dataset"]}}, "input_cols is missing; label_col is missing"),
    (train, {"spec": "job.jsn"}, r"spec='job.jsn' is not a spec: give .* has to end with .json, .yaml or .yml"),
    (train, {"spec": [SPEC]}, "is not a spec: give a JobSpec"),
    (train, {"spec": None}, "task train: neither a spec nor a train_func is given"),
    (train, {"framework": "lightgmb"}, "did you mean lightgbm"),
    (train, {"skip_if_unchanged": True}, "skip_if_unchanged=True needs register"),
    (train, {"spec": {"hyper_parms": {}}, "train_func": function}, '"hyper_parms": did you mean hyper_params'),
    (train, {"spec": None, "train_func": "pkg.module:f", "op_args": [object()]}, "args.0"),
    # A spec with templates: what is not templated.
    (trained, {"label_col": "{{ params.y }}", "n_estimator": 5}, "did you mean n_estimators"),
    (trained, {"label_col": "{{ params.y }}", "n_estimators": 0}, "^task train: n_estimators=0"),
    (trained, {"n_estimators": "{{ params.n }}", "dataset": {"path": "{{ ds }}"}}, "did you mean paths"),
    (train, {"spec": {"dataset": {"paths": ["/data/{{ ds }}"]}}}, "input_cols is missing; label_col is missing$"),
    (mapped, {"spec": {"hyper_parms": "{{ ds }}"}, "train_func": function}, "did you mean hyper_params"),
    # What only the driver refused before, and needs no rows.
    (trained, {"dataset": {"paths": ["s3://key:word@b/{{ ds }}"]}}, r"path s3://b/{{ ds }} contains credentials"),
    (trained, {"register": {**REGISTER, "holdout": SPEC["dataset"]}}, "register.holdout selects the rows that"),
    (
        trained,
        {"dataset": {"paths": ["/{{ ds }}"]}, "register": {**REGISTER, "holdout": {"paths": ["/{{ ds }}"]}}},
        "register.holdout selects the rows that",
    ),
    (
        train,
        {
            "spec": {"dataset_map": {"train": SPEC["dataset"]}, "register": {**OF_FUNCTION, **SAME}},
            "train_func": function,
        },
        "register.holdout selects the rows that",
    ),
    (many, {"spec": {"register": {**REGISTER, "holdout": SPEC["dataset"]}}}, "register.holdout selects the rows that"),
    (search, {"spec": {"register": {**REGISTER, "holdout": SPEC["dataset"]}}}, "register.holdout selects the rows"),
    (trained, {"params": {"objective": "multi:softprob"}}, "task train: objective=.* needs the number of classes"),
    (many, {"estimator": {**ESTIMATOR, "params": {"objective": "multi:softmax"}}}, "needs the number of classes"),
    (
        trained,
        {"framework": "lightgbm", "params": {"objective": "softmax"}, "dataset": {"paths": ["/{{ ds }}"]}},
        'objective="softmax" needs the number of classes: set num_class in params',
    ),
    (trained, {"params": {"objective": "rank:ndcg"}, "verbose_eval": True}, "set group_col to the column"),
    (trained, {"params": {"objective": "survival:aft"}}, "needs the bounds of the labels"),
    (trained, {"params": {"tree_method": "exact"}}, "is not supported in shoal, because it cannot train on quantised"),
    (trained, {"params": {"objective": "survival:cox"}, **FOUR_WORKERS}, "not supported with 4 workers"),
    (trained, {"params": {"eta": 0.1, "learning_rate": 0.2}}, "two names of the same parameter"),
    (trained, {"init_model": "models/delays.ubj"}, "init_model is the relative path"),
    # Mapped values.
    (
        mapped_over,
        {"spec": [SPEC, {**SPEC, "n_estimator": 5}]},
        r"task train: .*did you mean n_estimators\? \(in the mapped values, at spec\[1\]\)",
    ),
    (mapped_over, {"spec": [SPEC, SPEC], "framework": ["xgboost", "lightgmb"]}, r"at spec\[0\], framework\[1\]\)"),
    (mapped_over, {"spec": [SPEC, {"dataset": "{{ ds }}"}]}, "input_cols is missing; label_col is missing"),
    (mapped_over_each, {"framework": "lightgmb"}, r"did you mean lightgbm\? \(in the mapped values, at item 1\)"),
    (mapped_sensor, {"expected_nodes": [1, 9]}, "task nodes: expected_nodes=9 is above max_nodes=2"),
    # The pool.
    (train, {"pool_name": "local://p?max_node=2"}, 'unknown option "max_node": did you mean max_nodes'),
    (train, {"pool_name": "spark://team/p"}, '"spark://team/p": unknown backend "spark"'),
    (train, {"pool_name": "spark://p"}, "unknown backend \"spark\": it can be 'local' or 'ray' or 'kuberay'"),
    (train, {"pool_name": "locl://p"}, "did you mean local"),
    (train, {"pool_name": "My Pool"}, '"My Pool" is not a valid pool name: 1 to 40 of a-z'),
    (train, {"pool_name": 3}, "pool_name=3: it has to be the name or the URI"),
    (train, {"pool_name": "p", "compute_pool_conn_id": "c"}, "are both given: pass only one"),
    (mapped, {"pool_name": "p", "compute_pool_conn_id": "c"}, "task train: .* are both given: pass only one"),
    (mapped_decorated, {"pool_name": "local://p?max_node=2"}, "task with @task.distributed: .*did you mean max_nodes"),
    *((made, {"pool": "local://p"}, "use pool_name=") for made in (train, predict, lease, scale, sensor, clean, block)),
    *((made, {"pool_name": "local://p?max_node=2"}, "did you mean max_nodes") for made in (predict, clean, decorated)),
    # The nodes.
    (
        lease,
        {"size": 9, "pool_name": TWO},
        r'task lease: size=9 is above max_nodes=2 of pool "p": raise max_nodes in lo',
    ),
    (block, {"size": 9, "pool_name": TWO}, "task lease_pool: size=9 is above max_nodes=2"),
    (scale, {"expected_cluster_size": "9", "pool_name": TWO}, "expected_cluster_size=9 is above max_nodes=2"),
    (sensor, {"expected_nodes": 9, "pool_name": TWO}, "task nodes: expected_nodes=9 is above max_nodes=2"),
    (lease, {"size": 2.5}, "size=2.5: it has to be a whole number of nodes, 1 or more"),
    (scale, {"expected_cluster_size": "two"}, "expected_cluster_size='two': it has to be a whole number"),
    (sensor, {"expected_nodes": 0}, "expected_nodes=0: it has to be a whole number"),
    (lease, {"options": {"rollback_after": 60}}, 'option "rollback_after": did you mean rollback_after_seconds'),
    (block, {"options": {"rollback_after_seconds": -1}}, "rollback_after_seconds=-1"),
    (block, {"options": {"rollback_after": "{{ 5 }}"}, "size": "{{ 2 }}"}, "did you mean rollback_after_seconds"),
    (scale, {"options": {"block_until_min_cluster_size": 3}}, "block_until_min_cluster_size=3 is above"),
    (scale, {"is_async": "no"}, "task scale: is_async='no': it has to be True or False"),
    (scale, {"options": "fast"}, "options='fast': it has to be a dict"),
    # The other operators.
    (predict, {"model": "models:/m"}, 'task predict: model "models:/m" names no version'),
    (predict, {"model": "models/delays"}, 'task predict: model is the relative path "models/delays", but the working'),
    (trained, {"tracking": {"uri": "sqlite:///runs.db"}}, 'task train: tracking.uri is the relative path "runs.db"'),
    (predict, {"spec": {"keep_col": ["id"]}}, 'unknown option "keep_col": did you mean keep_cols'),
    (predict, {"spec": {"keep_col": ["id"]}, "model": "models:/m/{{ ds }}"}, "did you mean keep_cols"),
    (predict, {"spec": "more.json"}, "spec='more.json': it has to be a dict"),
    (decorated, {"spec": {"hyper_parms": {}}}, "did you mean hyper_params"),
    (
        mapped_decorated,
        {"spec": {"hyper_parms": "{{ ds }}"}},
        "task with @task.distributed: .*did you mean hyper_params",
    ),
    (mapped_decorated, {"gpus": 3, "num_workers": 2}, "gpus=3 cannot be divided"),
    # The workers against the pool.
    (trained, {**FOUR_WORKERS, "pool_name": TWO}, r"do not fit on pool .p., which has at most 2 node\(s\) with 1 CPU"),
    (
        trained,
        {**FOUR_WORKERS, "label_col": "{{ params.y }}", "pool_name": TWO},
        "task train: the workers .*do not fit",
    ),
    (trained, {"scaling_config": {"num_cpu_per_worker": 2}, "pool_name": TWO}, "do not fit on pool"),
    (predict, {"spec": FOUR_WORKERS, "pool_name": TWO}, "task predict: the workers .*do not fit"),
    (decorated, {"num_workers": 4, "pool_name": TWO}, "the workers .*do not fit"),
    (mapped_decorated, {"num_workers": 4, "pool_name": TWO}, "the workers .*do not fit"),
    *((made, {"pool_name": NO_RAY, "gpus": 1}, "runs without Ray") for made in (decorated, mapped_decorated)),
    (trained, {"run_config": {"packages": ["x"]}, "label_col": "{{ ds }}", "pool_name": NO_RAY}, "runs without Ray"),
]


@pytest.mark.parametrize(("made", "arguments", "said"), WRONG)
def test_what_is_wrong_is_refused_when_the_dag_is_loaded(made, arguments, said):
    with DAG("a_dag", schedule=None), pytest.raises(InvalidArgumentError, match=said):
        made(**arguments)


def test_a_setting_leaves_the_definition_of_pools_to_connections(monkeypatch):
    monkeypatch.setenv("SHOAL_POOL_URIS", "refuse")
    with DAG("a_dag", schedule=None):
        with pytest.raises(InvalidArgumentError, match=r"task lease: local://p\?max_nodes=2 defines a pool, but"):
            lease(pool_name=TWO)
        sensor(pool_name="{{ params.pool }}")
        scale(pool_name="p")
        clean(compute_pool_conn_id="c")


@task
def earlier() -> dict:
    return SPEC


def from_an_earlier_task(field):
    return lambda: trained(**{field: earlier()})


def in_a_mapped_group():
    @task_group
    def group(rounds):
        trained(n_estimators=rounds)

    group.expand(rounds=[1, 2])


RIGHT = [
    lambda: train(spec="{{ params.spec }}"),
    lambda: train(spec=earlier()),
    lambda: train(spec=earlier()["spec"]),
    lambda: train(spec=lambda context, jinja_env: SPEC),
    lambda: train(spec=JobSpec.parse(SPEC)),
    lambda: train(framework="lightgbm", pool_name="p", skip_if_unchanged="{{ params.skip }}"),
    lambda: trained(framework="{{ params.library }}", n_estimator=5),  # which fields there are, the library decides
    lambda: trained(n_estimators="{{ params.rounds }}", params={"eta": "{{ params.eta }}"}),
    lambda: trained(n_estimators="{{ params.rounds }}", early_stopping_rounds=5),  # needs an eval_set; not seen yet
    lambda: trained(register={**REGISTER, "metric": "{{ params.metric }}"}),
    lambda: trained(register={**REGISTER, "model": "{{ dag.dag_id }}", "min_improvement": "{{ params.better }}"}),
    lambda: trained(label_col=literal("y")),
    lambda: trained(dataset=DataConnector.from_parquet("/data/x"), verbose_eval="{{ params.verbose }}"),
    lambda: trained(dataset={"paths": ["{{ params.folder }}/x"], "filters": [["date", ">=", "{{ ds }}"]]}),
    lambda: trained(dataset={"paths": "{{ params.paths }}"}),
    lambda: trained(run_config={"max_restarts": "{{ params.restarts }}", "tracking": {"run_name": "{{ ds }}"}}),
    *(from_an_earlier_task(field) for field in ("dataset", "n_estimators", "input_cols", "label_col", "register")),
    in_a_mapped_group,
    lambda: train(spec=None, train_func=function, op_args=["{{ ds }}"], op_kwargs={"x": earlier()}),
    lambda: train(spec=None, train_func="pkg.module:f", op_args=[earlier(), "{{ ds }}"]),
    lambda: train(spec={"scaling_config": {"num_workers": "{{ params.workers }}"}}, train_func=function),
    lambda: train(spec={"scaling_config": {"num_nodes": "{{ params.nodes }}"}}, train_func=function),
    lambda: DistributedTrainOperator.partial(task_id="train", pool_name=TWO).expand(spec=[SPEC, SPEC]),
    lambda: DistributedTrainOperator.partial(task_id="train", spec=SPEC).expand(pool_name=["p", "q"]),
    lambda: trained(**FOUR_WORKERS, run_config={"clamp": True}, pool_name=TWO),
    lambda: trained(**FOUR_WORKERS, pool_name="local://p?max_nodes=2&cpus_per_node=2"),
    lambda: trained(**FOUR_WORKERS, pool_name="ray://p?address=http://127.0.0.1:9&max_nodes=2"),
    lambda: trained(scaling_config={"num_workers": -1}, pool_name=TWO),
    lambda: trained(scaling_config={"num_workers": "{{ params.workers }}"}, pool_name=TWO),
    lambda: trained(**FOUR_WORKERS, run_config={"clamp": "{{ params.clamp }}"}, pool_name=TWO),
    lambda: trained(pool_name=NO_RAY),
    lambda: mapped_over(spec=[SPEC, earlier()], framework=earlier()),
    lambda: DistributedTrainOperator.partial(task_id="train", spec=SPEC).expand_kwargs(earlier()),
    lambda: DistributedTrainOperator.partial(task_id="train", train_func=function).expand(op_args=[[1], [2]]),
    lambda: BatchPredictOperator.partial(task_id="predict", model="models:/m/1").expand_kwargs(
        [{"dataset": {"paths": ["/x"]}, "output_path": "/out"}]
    ),
    lambda: NodesSensor.partial(task_id="nodes", pool_name=TWO).expand(expected_nodes=[1, 2]),
    lambda: mapped_decorated(num_workers=2, pool_name=TWO, spec={"hyper_params": {"rate": "{{ params.rate }}"}}),
    lambda: lease(size="{{ params.size }}", pool_name=TWO, options={"rollback_after_seconds": "{{ params.wait }}"}),
    lambda: lease(size="2", pool_name=TWO),
    lambda: lease(size=2.0, pool_name=TWO),
    lambda: lease(size=9, pool_name="p"),
    lambda: lease(size="auto", plan_for=SPEC, pool_name="p"),
    lambda: lease(size="{{ params.size }}", plan_for="{{ params.spec }}", pool_name="p"),
    lambda: scale(expected_cluster_size="auto", plan_for={**SPEC, "n_estimators": "{{ params.rounds }}"}),
    lambda: block(size="auto", plan_for=earlier(), pool_name="p"),
    lambda: LeasePoolOperator.partial(task_id="lease", size="auto").expand(plan_for=[SPEC]),
    lambda: lease(size=9, pool_name="local://{{ params.pool }}?max_nodes=2"),
    lambda: lease(pool_name="{{ params.pool }}", compute_pool_conn_id="{{ params.connection }}"),
    lambda: lease(pool_name="p", compute_pool_conn_id="{{ params.connection }}"),
    lambda: scale(options="{{ params.options }}"),
    lambda: sensor(expected_nodes=earlier()["nodes"], pool_name=TWO),
    lambda: predict(model="models:/m/{{ ti.xcom_pull('version') }}", output_path="/out/{{ ds }}"),
    lambda: predict(model="{{ params.folder }}/delays", spec={"tracking": {"uri": "sqlite:////runs.db"}}),
    lambda: predict(model="/models/delays"),
    lambda: predict(model="runs:/abc/model"),
    lambda: predict(spec=earlier(), model="models:/m/{{ ds }}", dataset=earlier()),
]


@pytest.mark.parametrize("made", RIGHT)
def test_what_is_right_or_not_known_yet_is_loaded(made):
    with DAG("a_dag", schedule=None) as dag:
        made()
    assert dag.tasks
    DagSerialization.from_dict(DagSerialization.to_dict(dag))


@pytest.mark.parametrize("template", ["{{ ds }}", "{% if x %}y{% endif %}", "{# x #}", UNKNOWN, literal("x"), earlier])
def test_a_template_is_found_at_any_depth(template):
    for value in (template, [template], ({"a": [1, template]},), {"a": {"b": (template,)}}):
        assert not is_known(value)
    for value in ("x", 1, None, {"a": ["{x}", {"b": 1.5}]}, JobSpec.parse(SPEC), DataConnector.from_parquet("/data")):
        assert is_known(value)


@pytest.fixture
def in_task(monkeypatch):
    """Runs code as Airflow does in a task."""
    monkeypatch.setattr("shoal.airflow.operators.base.get_current_context", lambda: SimpleNamespace())


def test_an_instance_of_a_mapped_task_with_a_wrong_argument_is_not_retried(in_task):
    """Airflow creates the instance only in its task."""
    with pytest.raises(AirflowFailException, match="task train: n_estimators=0") as caught:
        trained(n_estimators=0)
    assert isinstance(caught.value.__cause__, InvalidArgumentError)


PERMANENT = [
    InvalidArgumentError("x"),
    DataError("x"),
    CapacityError("x"),
    JobFailedError("x", permanent=True),
    JobCancelledError("x", permanent=True),
    InvalidParamsError("x"),
]
OTHER = [
    NoPoolError("x"),
    DataAccessError("x"),
    JobBusyError("x"),
    CapacityTimeoutError("x"),
    JobFailedError("x"),
    JobCancelledError("x"),
    WorkerLostError("x"),
    PoolDownError("x"),
    ScaleError("x"),
    ConnectionError("x"),
]


@pytest.mark.parametrize("error", [*PERMANENT, *OTHER], ids=repr)
def test_only_permanent_errors_are_not_retried(error):
    expected = AirflowFailException if error in PERMANENT else type(error)
    with pytest.raises(expected, match=r"^x$") as caught, no_retry_of_permanent_errors():
        raise error
    assert error in (caught.value, caught.value.__cause__)
    decision = FailOnPermanentErrors().evaluate(error, 1, 3)
    assert decision.action.value == ("fail" if error in PERMANENT else "default")


def test_a_task_of_your_own_can_have_the_retry_policy():
    with DAG("a_dag", schedule=None) as dag:
        task(retries=3, retry_policy=FailOnPermanentErrors())(function)()
        task(task_id="mapped", retry_policy=FailOnPermanentErrors())(function).expand(x=[1])
    read = DagSerialization.from_dict(DagSerialization.to_dict(dag))
    assert all(one.has_retry_policy for one in (*dag.tasks, *read.tasks))


def no_method_of_shoal(*args, **kwargs):
    raise DataError("no rows")


@pytest.mark.parametrize(
    ("made", "calls"),
    [
        (lambda: train(pool_name="p"), "execute"),
        (lambda: predict(pool_name="p"), "execute"),
        (lambda: lease(pool_name="p"), "execute"),
        (lambda: scale(pool_name="p"), "execute"),
        (lambda: clean(pool_name="p"), "execute"),
        (lambda: sensor(pool_name="p"), "poke"),
        (lambda: distributed_task(pool_name="p")(function)().operator, "execute"),
    ],
)
def test_no_operator_is_retried_after_a_permanent_error(made, calls, context, fresh_home, monkeypatch):
    monkeypatch.setattr("shoal.airflow.hooks.ComputePoolHook.pool", no_method_of_shoal)
    with DAG("a_dag", schedule=None):
        operator = made()
    with pytest.raises(AirflowFailException, match=r"^no rows$") as caught:
        getattr(operator, calls)(context)
    assert isinstance(caught.value.__cause__, DataError)


ABOVE = [
    (lease, {"size": 5}, "size=5"),
    (scale, {"expected_cluster_size": "5"}, "expected_cluster_size=5"),
    (sensor, {"expected_nodes": 5}, "expected_nodes=5"),
]


@pytest.mark.parametrize(("made", "arguments", "named"), ABOVE)
def test_in_a_task_the_limit_of_the_pool_that_is_up_counts(made, arguments, named, fresh_home, in_task):
    def is_refused(said):
        with DAG("a_dag", schedule=None), pytest.raises(AirflowFailException, match=f"{named} is above {said}"):
            made(pool_name=TWO, **arguments)

    is_refused("max_nodes=2")  # there is no such pool yet
    with Store().transaction() as session:
        commands.begin_life(session, PoolSpec.parse(TWO), owner=None, now=0.0)
        commands.alter(session, "p", min_nodes=None, max_nodes=5, now=0.0)
    with DAG("a_dag", schedule=None):
        made(pool_name=TWO, **arguments)
    with Store().transaction() as session:
        commands.alter(session, "p", min_nodes=None, max_nodes=4, now=0.0)
    is_refused("max_nodes=4")
    with Store().transaction() as session:
        session.get_one(Pool, "p").state = PoolState.DOWN
    is_refused("max_nodes=2")  # as large as the URI says when it comes up


def test_in_a_task_the_workers_are_compared_with_the_pool_that_is_up(fresh_home, in_task):
    with Store().transaction() as session:
        commands.begin_life(session, PoolSpec.parse(TWO), owner=None, now=0.0)
    for pool in (TWO, "p"):
        with DAG("a_dag", schedule=None), pytest.raises(AirflowFailException, match=r"at most 2 node\(s\)"):
            trained(**FOUR_WORKERS, pool_name=pool)
    with Store().transaction() as session:
        commands.alter(session, "p", min_nodes=None, max_nodes=4, now=0.0)
    with DAG("a_dag", schedule=None):
        trained(**FOUR_WORKERS, pool_name=TWO)


def on(pool, **arguments):
    train(pool_name=pool, **arguments)


def with_lease_of(*pools):
    def dag(of):
        for number, pool in enumerate(pools):
            with pool_for_run(size=1, pool_name=pool, prefix=f"b{number}"):
                of()

    return dag


def beside_the_lease(leased, pool, order=lambda block, train: None):
    with pool_for_run(size=1, pool_name=leased) as block:
        pass
    order(block, train(pool_name=pool))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: on("local://retrain?max_nodes=2"), "task train runs on the pool retrain, but .*use pool_for_run"),
        (lambda: with_lease_of("retrain")(lambda: on("retrian")), "on the pool retrian, .*did you mean retrain"),
        (lambda: with_lease_of(TWO)(lambda: on("other")), "on the pool other, .*use pool_for_run"),
        (lambda: beside_the_lease(TWO, "p"), "train runs on the pool p, but it may run before lease_pool leases its"),
        (lambda: beside_the_lease(TWO, TWO), "put the task into the block of pool_for_run"),
        (lambda: beside_the_lease(TWO, "p", lambda block, train: block.setup >> train), "after they are released"),
        (lambda: beside_the_lease(TWO, "p", lambda block, train: block.teardown >> train), "after they are released"),
        (lambda: beside_the_lease(TWO, "p", lambda block, train: block.setup >> train >> block.teardown), None),
        (lambda: beside_the_lease("p", "p"), None),
        (lambda: on("retrain"), None),  # may be up all the time
        (lambda: on("{{ params.pool }}"), None),
        (lambda: with_lease_of(TWO)(lambda: on("p")), None),
        (lambda: with_lease_of("p")(lambda: on(TWO)), None),
        (lambda: with_lease_of("{{ params.pool }}")(lambda: on("p")), None),
        (lambda: with_lease_of(None)(lambda: on("p")), None),
        (lambda: (scale(pool_name="p"), on(TWO)), None),
        (lambda: train(compute_pool_conn_id="c"), None),
        (lambda: with_lease_of("p")(lambda: train(compute_pool_conn_id="c")), None),
    ],
)
def test_a_training_on_a_pool_that_no_task_leases_is_warned_about(made, said):
    with DAG("a_dag", schedule=None) as dag:
        made()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        dag.resolve_template_files()
    assert len(told) == bool(said)
    assert not said or re.search(said, str(told[0].message))


def pulled(template, first=None, **options):
    """A training whose label is a template, perhaps after the task `earlier`."""
    one = train(spec={**SPEC, "label_col": template}, **options)
    return one if first is None else first >> one


def predict_day(**arguments):
    return predict(dataset={"paths": ["/x/{{ ds }}"]}, **arguments)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: pulled("{{ ds "), r"task train: the template '{{ ds ' cannot be parsed: unexpected end of template"),
        (lambda: pulled("{% if x %}y"), "cannot be parsed"),
        (lambda: predict(output_path="/out/{{ ds }"), "task predict: .* cannot be parsed"),
        (
            lambda: (earlier(), pulled("{{ ti.xcom_pull('earlyer')['x'] }}")),
            "does not exist: did you mean earlier",
        ),
        (lambda: pulled("{{ ti.xcom_pull(task_ids=['nosuch']) }}"), "pulls the result of task nosuch, which does not"),
        (
            lambda: (earlier(), pulled("{{ ti.xcom_pull('earlier') }}")),
            "not run before .*: write earlier >> train",
        ),
        (
            lambda: mapped_over(spec=["{{ ti.xcom_pull('no') }}"]),
            "task train: .* the result of task no, which does not",
        ),
        (lambda: train(lease="lease_pol"), "task train: lease names task lease_pol, which does not exist"),
        (lambda: with_lease_of("p")(lambda: train(pool="p")), "task train: pool='p' is a .*use pool_name="),
        # Right, or not known yet.
        (lambda: pulled("{{ ti.xcom_pull('earlier') }}", earlier()), None),
        (lambda: pulled("{{ ti.xcom_pull(task_ids=params.task) }}"), None),
        (lambda: pulled("{{ ti.xcom_pull('x', dag_id='other') }}{{ ti.xcom_pull('y', 'other') }}"), None),
        (lambda: pulled("{{ ti.xcom_pull('train', include_prior_dates=True) }}{{ ti.xcom_pull(key='x') }}"), None),
        (lambda: pulled("{{ ti.xcom_pull(None, key='x') }}{{ ti.xcom_pull('y', run_id='z') }}"), None),
        (lambda: trained(dataset={"paths": ["abfss://{{ ts[:4] }}@acct.dfs.core.windows.net/x"]}), None),
        (lambda: with_lease_of("p")(lambda: train(pool="slots")), None),
        (lambda: with_lease_of("p")(lambda: train(pool="p", pool_name="p")), None),
        (lambda: predict_day(output_path="/out/{{ ds }}"), None),
        (lambda: predict_day(spec={"overwrite": True}), None),
    ],
)
def test_what_concerns_other_tasks_is_refused_when_the_dag_is_complete(made, said):
    with DAG("a_dag", schedule="@daily") as dag:
        made()
    if said is None:
        return dag.resolve_template_files()
    with pytest.raises(InvalidArgumentError, match=said):
        dag.resolve_template_files()


def test_one_folder_for_the_predictions_of_all_runs_is_warned_about():
    with DAG("a_dag", schedule="@daily") as dag:
        predict_day()
    with pytest.warns(UserWarning, match='output_path "/out" is the same in every run, .*"{{ ds }}"'):
        dag.resolve_template_files()


def test_texts_with_credentials_are_hidden_where_airflow_shows_templates(monkeypatch):
    masked: list[str] = []
    monkeypatch.setattr("shoal.airflow.operators.base.mask_secret", masked.append)
    address = "s3://key:word@bucket/x"
    with DAG("a_dag", schedule=None):
        operator = trained(dataset=XComArg(earlier().operator))
    ti = SimpleNamespace(xcom_pull=lambda **options: {"paths": [address, "/x"]})
    operator.render_template_fields({"ti": ti, "params": {}})
    assert set(masked) == {address}


@pytest.fixture
def requested(monkeypatch, fresh_home):
    """The requests for nodes, of which none is carried out."""
    requests: list = []
    monkeypatch.setattr("shoal.pool.api.ComputePool.lease", lambda pool, size, **options: requests.append(size))
    return requests


def start(dag, **params):
    """Runs the setup task of the block of a DAG, in a run with these parameters."""
    results = {"earlier": {**SPEC, "n_estimators": params["rounds"]}}
    ti = SimpleNamespace(xcom_pull=lambda task_ids, **options: results[task_ids])
    run = SimpleNamespace(dag_id="a_dag", run_id="a_run")
    dag.get_task("lease_pool").execute({"dag_run": run, "ds": "2026-01-31", "params": params, "ti": ti})


def in_a_block(**arguments):
    def made():
        with pool_for_run(size=1, pool_name=TWO):
            train(**arguments)

    return made


def after_the_result_of_a_task():
    spec = earlier()
    with pool_for_run(size=1, pool_name=TWO) as pool:
        train(spec=spec)
    spec >> pool.setup


def after_a_branch():
    with pool_for_run(size=1, pool_name=TWO):
        task.branch(task_id="choose")(lambda: "train")() >> train(spec=ROUNDS)


def after_a_task_that_may_skip():
    with pool_for_run(size=1, pool_name=TWO):
        earlier() >> train(spec=ROUNDS)


def after_a_failure():
    with pool_for_run(size=1, pool_name=TWO):
        EmptyOperator(task_id="first") >> train(spec=ROUNDS, trigger_rule="one_failed")


def test_a_lease_that_brings_up_a_pool_refuses_tasks_outside_of_its_block(requested):
    with DAG("a_dag", schedule=None) as dag:
        beside_the_lease(TWO, "p")
    with pytest.raises(AirflowFailException, match="task train runs on the pool p, but it may run before"):
        start(dag, rounds=5)
    assert requested == []
    with Store().transaction() as session:
        commands.begin_life(session, PoolSpec.parse(TWO), owner=None, now=0.0)
    start(dag, rounds=5)
    assert requested == [1]


ROUNDS = {**SPEC, "n_estimators": "{{ params.rounds }}"}


@pytest.mark.parametrize(
    "made",
    [
        after_the_result_of_a_task,
        in_a_block(spec=ROUNDS),
        in_a_block(spec={**ROUNDS, "run_config": {"max_restarts": "{{ ti.max_tries }}"}}),
    ],
)
def test_what_is_known_in_the_first_task_is_checked_there_before_nodes_start(made, requested):
    with DAG("a_dag", schedule=None) as dag:
        made()
    with pytest.raises(AirflowFailException, match=r"task train: n_estimators='?0'?: Input should be greater than"):
        start(dag, rounds=0)
    assert requested == []
    start(dag, rounds=5)
    assert requested == [1]


@pytest.mark.parametrize(
    "made",
    [
        in_a_block(spec="{{ ti.xcom_pull('prepare') }}"),
        in_a_block(spec={**SPEC, "n_estimators": "{{ task.retries }}"}),
        in_a_block(spec=ROUNDS, params={"rounds": 3}),
        in_a_block(spec={**SPEC, "n_estimators": "{{ params.not_there }}"}),
        after_a_failure,
        after_a_branch,
        after_a_task_that_may_skip,
    ],
)
def test_what_only_the_task_itself_knows_stops_no_lease(made, requested):
    with DAG("a_dag", schedule=None) as dag:
        made()
    start(dag, rounds=0)
    assert requested == [1]
