"""Asset events and messages about trained models, with a notifier that records what it would send."""

from __future__ import annotations

import math
import os
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk import DAG, Asset, BaseNotifier
from airflow.sdk.exceptions import AirflowFailException
from airflow.sdk.execution_time.context import OutletEventAccessors

from shoal.airflow.notifications import model_message, run_message
from shoal.airflow.operators import CheckModelsOperator, DistributedTrainOperator, ModelAlertError, PromoteModelOperator
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
        "the outcome of the training could not be stored as an XCom for messages",
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


def test_a_task_that_fails_after_its_training_says_both(sent):
    context = context_of(exception=RuntimeError("the XCom is too large"))
    record_success(context, JobSpec.parse(SPEC), result(True))
    model_message(Recorder())(context)
    assert "decided; the task failed after the training: the XCom is too large" in sent[0][1]


def test_one_message_per_run_with_a_line_per_model(sent):
    with DAG("a_dag", schedule=None) as dag:
        DistributedTrainOperator.partial(task_id="many", pool_name="p").expand(spec=[SPEC] * 3)
        train()
    ti = Instance()
    ti.states = {"many_0": "success", "many_1": "failed", "many_10": "skipped", "train": "upstream_failed"}
    for index, promoted in ((0, True), (1, False)):
        ti.task_id, ti.map_index = "many", index
        record_success({"ti": ti, "outlet_events": OutletEventAccessors()}, JobSpec.parse(SPEC), result(promoted))
    del ti.xcoms["many", 1, "shoal_line"]
    context = {"dag": dag, "run_id": "a_run", "ti": ti, "reason": "task_failure"}

    run_message(Recorder())(context)
    run_message(Recorder())({**context, "ti": None})

    assert [subject for subject, _ in sent] == [
        "a_dag: 4 models: 1 promoted, 2 failed, 1 skipped",
        "a_dag: no model was trained (task_failure)",
    ]
    assert [line for line in sent[0][1].splitlines() if not line.startswith(" ")] == [
        "promoted  delays: rmse 17.5, champion 18: decided",
        "failed    task many[1]: ended as failed: see its log",
        "skipped   task many[10]: ended as skipped: see its log",
        "failed    task train: ended as upstream_failed: see its log",
        "run a_run a_run",
    ]


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
        "shoal.jobs.promote_model", lambda *given, **options: asked.append(options) or decided(promoted)
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
        "a_dag: waiting: delays version 7, rmse 17.5",
        f"{outcome}: delays version 7, rmse 17.5",
        f"a_dag: {outcome}: delays version 7, rmse 17.5",
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

    monkeypatch.setattr("shoal.jobs.promote_model", refuse)
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
        "shoal.jobs.promote_model",
        lambda *_, **__: seen.append(os.environ["MLFLOW_TRACKING_PASSWORD"]) or decided(True),
    )
    context = context_of(
        lambda: PromoteModelOperator(task_id="promote", training="job", credential_conn_ids=["tracking"])
    )
    context["dag_run"] = SimpleNamespace(dag_id="a_dag", run_id="a_run")
    context["task"].execute(context)
    assert seen == ["secret"]
    assert "MLFLOW_TRACKING_PASSWORD" not in os.environ
