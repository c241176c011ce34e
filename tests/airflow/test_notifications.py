"""Asset events and messages about trained models, with a notifier that records what it would send."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, Asset, BaseNotifier
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time import task_runner
from airflow.sdk.execution_time.context import OutletEventAccessors

from shoal.airflow.notifications import model_message, run_message
from shoal.airflow.operators import (
    BatchPredictOperator,
    CheckModelsOperator,
    DistributedTrainOperator,
    ManyModelsOperator,
    ModelAlertError,
    PromoteModelOperator,
    TuneOperator,
)
from shoal.airflow.results import PROMOTIONS, instances_of, model_asset, promotion_of, record_failure, record_success
from shoal.errors import InvalidArgumentError, JobFailedError
from shoal.jobs import JobSpec, PromotionResult
from tests.support.job_results import decided, result_of

SPEC = {
    "dataset": {"paths": ["/data"]},
    "input_cols": ["x"],
    "label_col": "y",
    "register": {"model": "delays", "metric": "rmse", "holdout": {"paths": ["/holdout"]}},
}


class Recorder(BaseNotifier):
    """Keeps what it would send."""

    template_fields = ("subject", "text")
    sent: list[tuple[str, str]] = []  # noqa: RUF012 - of all copies

    def __init__(self) -> None:
        super().__init__()
        self.subject, self.text = "{{ shoal.subject }}", "{{ shoal.text }} {{ run_id }}"

    def notify(self, context) -> None:
        self.sent.append((self.subject, self.text))


@pytest.fixture
def sent(monkeypatch):
    sent: list[tuple[str, str]] = []
    monkeypatch.setattr(Recorder, "sent", sent)
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", None, raising=False)  # as in Airflow's processes
    return sent


class Instance(SimpleNamespace):
    """A task instance with its XComs and the states of its run, as far as the callbacks use them."""

    def __init__(self, task_id: str = "train", map_index: int = -1) -> None:
        super().__init__(dag_id="a_dag", run_id="a_run", task_id=task_id, map_index=map_index, xcoms={}, states={})

    def xcom_push(self, key, value) -> None:
        self.xcoms[self.task_id, self.map_index, key] = value

    def xcom_pull(self, task_ids, key, map_indexes):
        return self.xcoms.get((task_ids, map_indexes, key))

    def get_task_states(self, dag_id, run_ids, task_ids):
        return {"a_run": self.states}


def result(promoted: bool, rmse: float = 17.5, version: str = "7"):
    return result_of(
        promoted=promoted,
        metrics={"holdout-rmse": rmse},
        model_version=version,
        champion={"version": "6", "value": 18.0},
        decision={"reason": "better" if promoted else "champion_not_beaten", "sentence": "decided"},
        recent=[{"version": "6", "value": 18.0, "promoted": True}],
    )


def train(**kwargs) -> DistributedTrainOperator:
    return DistributedTrainOperator(task_id="train", spec=SPEC, pool_name="p", **kwargs)


def context_of(task=None, **changes):
    with DAG("a_dag", schedule=None) as dag:
        task = task() if task else train()
    ti = Instance(task.task_id)
    events = OutletEventAccessors()
    return {"dag": dag, "task": task, "ti": ti, "run_id": "a_run", "outlet_events": events, **changes}


def events_of(context):
    return context["outlet_events"][PROMOTIONS].asset_alias_events


def test_a_promotion_is_an_event_of_the_models_asset():
    context = context_of()
    record_success(context, JobSpec.parse(SPEC), result(True, math.inf))
    [event] = events_of(context)
    assert event.dest_asset_key.to_asset() == Asset("shoal://models/delays") == model_asset("delays")
    assert event.extra["version"] == "7"
    assert event.extra["model_uri"] == "models:/delays/7"
    assert event.extra["metrics"] == {"holdout-rmse": "Infinity"}
    assert (event.extra["decision"], event.extra["previous_version"]) == ("decided", "6")


def test_a_model_that_is_not_promoted_or_not_registered_gives_no_event():
    context = context_of()
    record_success(context, JobSpec.parse(SPEC), result(False))
    record_success(context, JobSpec.parse({**SPEC, "register": None}), result_of())
    record_failure(context, None, JobFailedError("lost"))
    assert events_of(context) == []


def test_an_error_in_the_event_or_the_xcom_fails_no_task(caplog):
    record_success({}, JobSpec.parse(SPEC), result(True))
    assert [line.message for line in caplog.records] == [
        "the asset event about the promotion could not be added",
        "the outcome of the task could not be stored as an XCom for messages",
    ]


def test_every_training_has_the_outlet_beside_the_users_own():
    mine = Asset("mine")
    assert train(outlets=[mine]).outlets == [mine, PROMOTIONS]
    mapped = DistributedTrainOperator.partial(task_id="mapped", pool_name="p", outlets=[mine]).expand(spec=[SPEC])
    assert mapped.unmap({"spec": SPEC}).outlets == [mine, PROMOTIONS]


@pytest.mark.parametrize(
    ("model", "alias", "uri"),
    [
        ("delays", "champion", "shoal://models/delays"),
        ("delays", "staging", "shoal://models/delays@staging"),
        ("delays UA#1 ü?", "champion", "shoal://models/delays%20UA%231%20%C3%BC%3F"),
    ],
)
def test_an_asset_can_be_written_by_its_uri(model, alias, uri):
    asset = model_asset(model, alias)
    assert (asset.name, asset.uri) == (uri, uri)
    assert Asset(uri) == asset


def test_a_name_that_is_no_models_name_is_refused():
    with pytest.raises(InvalidArgumentError, match="not a legal name for a registered model"):
        model_asset("models:/delays")


def test_the_newest_promotion_that_triggered_a_run_is_found():
    events = [
        SimpleNamespace(extra={"version": version}, timestamp=datetime(2026, 1, day, tzinfo=UTC))
        for version, day in (("8", 2), ("7", 1))
    ]
    context = {"triggering_asset_events": {model_asset("delays"): events}}
    assert promotion_of(context, "delays") == {"version": "8"}
    assert promotion_of(context, "other") is None


def test_one_message_per_model_with_the_last_versions(sent):
    send, context = model_message(Recorder()), context_of()
    for promoted in (True, False):  # with the same notifier, which renders its own templates in place
        record_success(context, JobSpec.parse(SPEC), result(promoted))
        send(context)
    assert [subject for subject, _ in sent] == [f"{what}: delays version 7, rmse 17.5" for what in ("promoted", "kept")]
    assert sent[0][1].splitlines() == [
        "promoted  delays: rmse 17.5, champion 18: decided",
        "          rmse of the last version: 18* (* promoted); version 7 is better than 1 of 1 a_run",
    ]


def test_a_failure_is_told_with_its_cause_also_without_an_xcom(sent):
    send, context = model_message(Recorder()), context_of(exception=JobFailedError("a worker was lost"))
    send(context)  # killed before it could leave a line
    record_failure(context, SPEC, context["exception"])
    send(context)
    assert [text for _, text in sent] == [
        "failed    task train: a worker was lost a_run",
        "failed    delays: a worker was lost a_run",
    ]


def test_credentials_in_a_failure_are_hidden(sent):
    model_message(Recorder())(context_of(exception=RuntimeError("postgresql://u:hunter22@h/db failed")))
    assert "hunter22" not in sent[0][1]
    assert "postgresql://h/db failed" in sent[0][1]


def test_a_task_id_that_looks_like_an_instance_is_a_task_of_its_own():
    states = {"train": "success", "train_1": "success", "many_0": "success", "many_1": "failed"}
    ids = ["train", "train_1", "many"]
    assert [instances_of(task_id, states, ids) for task_id in ids] == [[-1], [-1], [0, 1]]


PARTS = {
    "partitions": {"succeeded": 4, "failed": 1},
    "failed_partitions": [{"key": "3", "cause": "no sales"}],
}
SEARCH = {
    "best_params": {"eta": 0.1}, "best_value": 0.25, "best_trial": 3, "metric": "logloss", "direction": "minimize",
    "trials": {"complete": 3, "failed": 1}, "study": 1,
}  # fmt: skip
OUTCOMES = {
    "train": result(True),
    "many": result_of(**PARTS),
    "tune": result_of(search=SEARCH),
    "predict": result_of(rows=1200, output_path="/d/out", model_uri="models:/delays/7"),
}
SUCCESSES = {
    "train": "promoted  delays: rmse 17.5, champion 18: decided",
    "many": "trained   xgboost by k: 1 of 5 partitions have failed: 3: no sales; the model is not registered",
    "tune": "trained   search for xgboost: y: logloss 0.25: best logloss 0.25 with eta=0.1 in trial 3 (3 complete, "
    "1 failed); the model is not registered",
    "predict": "predicted delays: 1,200 rows with models:/delays/7, written to /d/out",
}


def dag_of_all_kinds():
    data = {"paths": ["/data"]}
    with DAG("a_dag", schedule=None) as dag:
        train()
        estimator = {"input_cols": ["a"], "label_col": "y"}
        ManyModelsOperator(task_id="many", pool_name="p", dataset=data, by="k", estimator=estimator)
        tuned = {"dataset": data, "input_cols": ["x"], "label_col": "y"}
        TuneOperator(task_id="tune", pool_name="p", train=tuned, space={"eta": [0.1, 0.3]}, trials=2)
        BatchPredictOperator(
            task_id="predict", pool_name="p", model="models:/delays@champion", dataset=data, output_path="/d/out"
        )
        EmptyOperator(task_id="own") >> EmptyOperator(task_id="after")
    return dag


def store_outcomes(ti, dag, outcomes) -> None:
    for task_id, outcome in outcomes.items():
        ti.task_id = task_id
        spec = dag.task_dict[task_id].job_spec({})
        context = {"ti": ti, "outlet_events": OutletEventAccessors()}
        record = record_failure if isinstance(outcome, Exception) else record_success
        record(context, spec, outcome)


@pytest.mark.parametrize(
    ("states", "outcomes", "said"),
    [
        ({}, OUTCOMES, ["success; 4 jobs: 1 promoted, 2 trained, 1 predicted", *SUCCESSES.values()]),
        (
            {"tune": "failed", "own": "failed", "after": "upstream_failed"},
            {**OUTCOMES, "tune": JobFailedError("no column x")},
            [
                "failed: tasks tune, own; 3 jobs: 1 promoted, 1 trained, 1 predicted",
                "failed    task tune: search for xgboost: y: no column x; see its log",
                "failed    task own: see its log",
                "not run   task after: a task before has failed",
                *(SUCCESSES[task_id] for task_id in ("train", "many", "predict")),
            ],
        ),
        (  # after its job; marked by a user; skipped by a branch, with the line of an earlier run
            {"train": "failed", "tune": "success", "predict": "skipped", "many": "skipped"},
            {"train": result(True), "tune": JobFailedError("no column x"), "predict": OUTCOMES["predict"]},
            [
                "failed: task train; promoted: delays version 7, rmse 17.5",
                "failed    task train: delays: the task failed after its job; see its log",
                SUCCESSES["train"],
                "skipped   task many: task many ended as skipped: see its log",
                "success   task tune: task tune ended as success: see its log",
                "skipped   task predict: task predict ended as skipped: see its log",
            ],
        ),
    ],
)  # fmt: skip
def test_a_message_of_a_run_begins_with_its_state_then_the_failed_tasks_then_the_jobs(sent, states, outcomes, said):
    dag, ti = dag_of_all_kinds(), Instance()
    ti.states = dict.fromkeys([task.task_id for task in dag.tasks], "success") | states
    store_outcomes(ti, dag, outcomes)
    reason = "success" if said[0].startswith("success") else "task_failure"
    run_message(Recorder())({"dag": dag, "run_id": "a_run", "ti": ti, "reason": reason})
    [(subject, text)] = sent
    assert subject == f"a_dag: {said[0]}"
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    assert lines == [subject, *said[1:], "run a_run a_run"]


def test_a_run_may_succeed_though_a_task_failed_and_fail_without_one(sent):
    dag, ti = dag_of_all_kinds(), Instance()
    ti.states = {"own": "failed"}
    for context in ({"ti": ti, "reason": "success"}, {"reason": "all_tasks_deadlocked"}, {"reason": "success"}):
        run_message(Recorder())({"dag": dag, "run_id": "a_run", **context})
    assert [subject for subject, _ in sent] == [
        "a_dag: success, but task own failed", "a_dag: failed (all_tasks_deadlocked)", "a_dag: success",
    ]  # fmt: skip


def test_the_run_of_dag_test_sends_no_message_and_says_so(sent, monkeypatch, caplog):
    monkeypatch.delattr(task_runner, "SUPERVISOR_COMMS")
    with caplog.at_level("INFO"):
        run_message(Recorder())({"dag": dag_of_all_kinds(), "run_id": "a_run", "reason": "success"})
    assert (sent, "no message about the run of DAG a_dag is sent" in caplog.text) == ([], True)


@pytest.mark.parametrize(
    ("task_id", "outcome", "state", "error", "said"),
    [
        *((task_id, OUTCOMES[task_id], "success", None, line) for task_id, line in SUCCESSES.items()),
        ("many", None, "success", None, "success   task many: it has stored no outcome"),
        ("own", None, "skipped", None, "skipped   task own: it has stored no outcome"),
        ("own", None, None, None, "failed    task own: see its log"),  # killed
        ("own", None, "failed", RuntimeError("the disk is full"), "failed    task own: the disk is full"),
        ("train", result(True), "failed", RuntimeError("the XCom is too large"), "failed    delays: rmse 17.5, "
         "champion 18: task train failed after its job: the XCom is too large; promoted: decided"),
    ],
)  # fmt: skip
def test_a_message_of_a_task_begins_with_its_outcome_or_else_its_state(sent, task_id, outcome, state, error, said):
    dag, ti = dag_of_all_kinds(), Instance()
    store_outcomes(ti, dag, {} if outcome is None else {task_id: outcome})
    ti.task_id, ti.state = task_id, state
    model_message(Recorder())({"dag": dag, "task": dag.task_dict[task_id], "ti": ti, "exception": error, "run_id": ""})
    [(subject, text)] = sent
    assert text.splitlines()[0].strip() == said
    assert subject.startswith(f"{said.split()[0]}: ")


def test_a_stale_model_and_a_waiting_job_fail_the_check_and_are_told(store, sent, monkeypatch):
    monkeypatch.setattr("shoal.jobs.waiting_jobs", lambda bound: ["job x waits"])
    bounds = {"promoted_within": timedelta(days=40), "started_within": timedelta(hours=1), "models": ["delays"]}
    context = context_of(lambda: CheckModelsOperator(task_id="check", **bounds))
    with pytest.raises(ModelAlertError) as raised:
        context["task"].execute(context)
    model_message(Recorder())({**context, "exception": raised.value})
    assert sent == [
        ("2 alerts about models", "delays: there was no training and no promotion to champion\njob x waits a_run")
    ]
    assert CheckModelsOperator(task_id="all", promoted_within=timedelta(days=40)).execute(context) is None
    with pytest.raises(InvalidArgumentError, match="has nothing to check"):
        CheckModelsOperator(task_id="none")
    with pytest.raises(InvalidArgumentError, match="task t: started_within=3600 must be a positive timedelta"):
        CheckModelsOperator(task_id="t", started_within=3600)
    with pytest.raises(InvalidArgumentError, match=r'\["delays"\]'):
        CheckModelsOperator(task_id="t", started_within=timedelta(hours=1), models="delays")


WAITING = result_of(
    model_name="delays",
    model_version="7",
    metrics={"holdout-rmse": 17.5},
    decision={"reason": "waiting", "sentence": "delays version 7 (rmse=17.5) waits for a decision"},
)


@pytest.mark.parametrize("promoted", [True, False])
def test_a_version_that_waits_and_its_promotion_are_told_and_only_a_promotion_is_an_event(sent, monkeypatch, promoted):
    asked = []
    monkeypatch.setattr(
        "shoal.models.promote_model", lambda *given, **options: asked.append(options) or decided(promoted)
    )
    with DAG("a_dag", schedule=None) as dag:
        task = PromoteModelOperator(task_id="promote", training=train().output)
    ti = Instance()
    context = {
        "dag": dag,
        "task": task,
        "ti": ti,
        "run_id": "a_run",
        "dag_run": SimpleNamespace(dag_id="a_dag", run_id="a_run"),
        "outlet_events": OutletEventAccessors(),
    }
    record_success(context, JobSpec.parse(SPEC), WAITING)
    model_message(Recorder())(context)
    assert events_of(context) == []
    ti.states = {"train": "success", "promote": None}
    run_message(Recorder())(context)

    ti.task_id = "promote"
    task.training = WAITING.to_dict()
    returned = task.execute(context)
    model_message(Recorder())(context)
    ti.states["promote"] = "success"
    run_message(Recorder())(context)

    outcome = "promoted" if promoted else "kept"
    assert [subject for subject, _ in sent] == [
        "waiting: delays version 7, rmse 17.5",
        "a_dag: failed; waiting: delays version 7, rmse 17.5",
        f"{outcome}: delays version 7, rmse 17.5",
        f"a_dag: failed; {outcome}: delays version 7, rmse 17.5",
    ]
    assert sent[0][1].startswith("waiting   delays: rmse 17.5: delays version 7 (rmse=17.5) waits for a decision")
    assert (asked[0]["training"], asked[0]["holder"]) == (WAITING.to_dict(), "airflow:tests:a_dag/a_run")
    assert PromotionResult.parse(returned) == decided(promoted)
    assert [event.extra["version"] for event in events_of(context)] == ["7"] * promoted
    for event in events_of(context):
        assert event.dest_asset_key.to_asset() == model_asset("delays")
        assert (event.extra["metric"], event.extra["previous_version"], event.extra["job_id"]) == ("rmse", "6", "job")


def test_a_promotion_that_cannot_succeed_is_told_and_not_tried_again(sent, store, monkeypatch):
    def refuse(*_, **__):
        raise InvalidArgumentError("delays version 7 does not wait for a decision")

    monkeypatch.setattr("shoal.models.promote_model", refuse)
    context = context_of(lambda: PromoteModelOperator(task_id="promote", model="delays", version="7"))
    context["dag_run"] = SimpleNamespace(dag_id="a_dag", run_id="a_run")
    with pytest.raises(AirflowFailException) as raised:
        context["task"].execute(context)
    model_message(Recorder())({**context, "exception": raised.value})
    assert sent == [("failed: delays", "failed    delays: delays version 7 does not wait for a decision a_run")]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({}, "task promote: the task names no version"),
        ({"model": "delays"}, "task promote: the task names no version"),
        ({"training": "job", "version": 3}, "give only one of both"),
    ],
)
def test_a_promotion_names_one_version_when_airflow_loads_the_dag(arguments, said):
    with pytest.raises(InvalidArgumentError, match=said):
        PromoteModelOperator(task_id="promote", **arguments)
    PromoteModelOperator.partial(task_id="promote").expand(training=[WAITING.to_dict()])


def test_the_credentials_of_connections_are_there_for_the_promotion_only(monkeypatch, store):
    monkeypatch.setenv("AIRFLOW_CONN_TRACKING", "mlflow://anna:secret@mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_PASSWORD", raising=False)
    seen = []
    monkeypatch.setattr(
        "shoal.models.promote_model",
        lambda *_, **__: seen.append(os.environ["MLFLOW_TRACKING_PASSWORD"]) or decided(True),
    )
    context = context_of(
        lambda: PromoteModelOperator(task_id="promote", training="job", credential_conn_ids=["tracking"])
    )
    context["dag_run"] = SimpleNamespace(dag_id="a_dag", run_id="a_run")
    context["task"].execute(context)
    assert seen == ["secret"]
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
