"""Every DAG file of the repository: it has none of the problems that shoal finds in DAG files, and does its work."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowFailException
from airflow.serialization.serialized_objects import DagSerialization

from shoal.airflow.results import PROMOTIONS, model_asset
from shoal.data import DataConnector
from shoal.data.filters import describe_filters
from shoal.examples.flights import FEATURES, LABEL, retraining_spec
from shoal.jobs import FunctionJobSpec, JobSpec
from tests.support.guides import ROOT, examples

DAGS = sorted((ROOT / "dags").glob("*.py"))


@pytest.fixture(scope="module")
def bag():
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(dag_folder=str(DAGS[0].parent), bundle_name="dags")


def type_of(task) -> str:
    return (task.operator_class if isinstance(task, MappedOperator) else type(task)).__name__


def of_type(dag, *names):
    return [task for task in dag.tasks if type_of(task) in names]


@pytest.mark.processes
def test_the_dags_have_no_problems(assert_dags, monkeypatch):
    """The guide's test is that of our own DAGs."""
    monkeypatch.chdir(ROOT)
    scope: dict = {}
    exec(examples()["airflow-testing.md:airflow-testing"], scope)
    scope["test_dags"](partial(assert_dags, import_budget_s=60))  # other tests may keep the machine busy


def test_every_dag_is_there(bag):
    assert set(bag.dags) == {
        "many_models",
        "model_alerts",
        "pool_janitor",
        "retention",
        "scheduled_retraining",
        "score_on_promotion",
        "train_networks",
    }


def test_everybody_knows_whose_it_is(bag):
    for dag in bag.dags.values():
        assert dag.tags
        assert dag.doc_md
        assert all(task.owner != "airflow" for task in dag.tasks), dag.dag_id


@pytest.mark.parametrize(
    ("dag_id", "held_by"),
    [
        ("scheduled_retraining", {"wait_for_nodes", "train"}),
        ("many_models", {"train"}),
        ("train_networks", {"train_digits", "train_delays"}),
    ],
)
def test_what_follows_the_training_does_not_hold_its_nodes(bag, dag_id, held_by):
    assert bag.dags[dag_id].get_task("clean_up_pool").upstream_task_ids == {"lease_pool", *held_by}


def test_a_network_that_fails_stops_neither_the_other_nor_the_report(bag):
    dag = bag.dags["train_networks"]
    before = {
        name: {task.task_id for task in dag.get_task(f"train_{name}").get_flat_relatives(upstream=True)}
        for name in ("digits", "delays")
    }
    assert before == {name: {f"prepare_{name}", "lease_pool"} for name in before}
    assert dag.get_task("report").trigger_rule == bag.dags["many_models"].get_task("report").trigger_rule == "all_done"


@pytest.fixture
def few_flights(fresh_home, monkeypatch):
    """Flights of few rows: one a month, of the carrier with the month's number."""
    rows = pd.DataFrame({name: range(1, 13) for name in (*FEATURES, LABEL)})
    monkeypatch.setattr("shoal.examples.flights._joined", lambda: rows)
    return rows


@pytest.fixture
def prepared(bag, few_flights, monkeypatch):
    """What a task of a run of a DAG returns; the task prepares a spec or several."""

    def run(dag_id, task_id, params, **run):
        prepare = bag.dags[dag_id].get_task(task_id).python_callable
        context = {"dag_run": SimpleNamespace(**run), "params": params}
        monkeypatch.setitem(prepare.__globals__, "get_current_context", lambda: context)
        return prepare()

    return run


def retraining(prepared, month=None, **run) -> JobSpec:
    return JobSpec.parse(prepared("scheduled_retraining", "prepare", {"month": month, "rounds": 5}, **run))


def months(dataset) -> list[str]:
    """The months of a dataset, by the names of its files, each of which has the rows of its month."""
    for path in dataset.paths:
        assert pd.read_parquet(path)["month"].tolist() == [int(Path(path).stem[-2:])]
    return [Path(path).stem for path in dataset.paths]


def next_ten(bag, dag_id: str) -> Iterator[dict[str, datetime]]:
    """The dates of the next ten runs, as Airflow's scheduler computes them from the serialised DAG."""
    dag = DagSerialization.from_dict(DagSerialization.to_dict(bag.dags[dag_id]))
    info = None
    for _ in range(10):
        info = dag.next_dagrun_info(last_automated_run_info=info)
        assert info.logical_date == info.run_after
        yield {"logical_date": info.logical_date, "run_after": info.run_after}


def test_the_next_ten_runs_have_a_window_and_a_holdout_before_their_date(bag, prepared):
    now, dates = datetime.now(UTC), []
    for run in next_ten(bag, "scheduled_retraining"):
        dates.append(run["logical_date"])
        spec = retraining(prepared, **run)
        window, [holdout] = months(spec.dataset), months(spec.register_as.holdout)
        assert len(window) == 6
        assert window == sorted(window) and window[-1] < holdout < f"{dates[-1]:%Y-%m}"
        # The holdout is the month that has ended last.
        assert f"{dates[-1] - timedelta(days=1):%Y-%m}" == holdout
    assert now - timedelta(hours=1) <= dates[0] < now + timedelta(days=32)
    assert all(timedelta(days=28) <= after - before <= timedelta(days=31) for before, after in pairwise(dates))


def test_the_next_ten_runs_of_the_networks_end_before_their_date(bag, prepared):
    for run in next_ten(bag, "train_networks"):
        fields = prepared("train_networks", "prepare_delays", {"month": None}, **run)
        spec = FunctionJobSpec.parse(fields)
        window, [holdout] = months(spec.dataset_map["train"]), months(spec.register_as.holdout)
        assert len(window) == 3
        assert window[-1] < holdout == f"{run['logical_date'] - timedelta(days=1):%Y-%m}"


def test_the_next_ten_nights_have_a_model_per_carrier_and_end_before_their_date(bag, prepared):
    dates = []
    for run in next_ten(bag, "many_models"):
        dates.append(run["logical_date"])
        specs = [
            JobSpec.parse(fields) for fields in prepared("many_models", "specs", {"rounds": 5, "min_rows": 1}, **run)
        ]
        day = dates[-1].date()
        assert len({spec.register_as.model for spec in specs}) == len(specs) >= 2
        for spec in specs:
            rows, holdout = (DataConnector.from_spec(one) for one in (spec.dataset, spec.register_as.holdout))
            span = rows.time_range()
            assert str(day - timedelta(days=97)) <= span.first <= span.last < str(day - timedelta(days=7))
            assert describe_filters(spec.register_as.holdout.filters) == (
                f"date >= '{day - timedelta(days=7)}' and date < '{day}' and carrier = {spec.register_as.model[-2:]!r}"
            )
            assert set(holdout.to_arrow()["date"].to_pylist()) <= {day - timedelta(days=ago) for ago in range(1, 8)}
    assert datetime.now(UTC) - timedelta(hours=1) <= dates[0] < datetime.now(UTC) + timedelta(days=1)
    assert all(after - before == timedelta(days=1) for before, after in pairwise(dates))


def test_a_run_without_a_logical_date_ends_its_window_before_it_runs(prepared):
    run = {"logical_date": None, "run_after": datetime(2026, 3, 31, 23, tzinfo=UTC)}
    spec = retraining(prepared, **run)
    assert months(spec.dataset) == ["2025-08", "2025-09", "2025-10", "2025-11", "2025-12", "2026-01"]
    assert months(spec.register_as.holdout) == ["2026-02"]
    [first, *_] = prepared("many_models", "specs", {"rounds": 5, "min_rows": 1}, **run)
    assert first["register"]["holdout"]["filters"][0][1] == ["date", "<", "2026-03-31"]


def test_a_month_as_parameter_is_a_month_of_2013_and_another_model(prepared):
    spec = retraining(prepared, month=3, logical_date=None)
    assert spec == retraining_spec(3, n_estimators=5)  # the same job as the flow's and `make run-python`'s
    assert (months(spec.dataset), months(spec.register_as.holdout)) == (["2013-01", "2013-02"], ["2013-03"])
    scheduled = retraining(prepared, logical_date=datetime(2026, 4, 1, tzinfo=UTC))
    assert spec.register_as.model != scheduled.register_as.model


def test_the_retention_deletes_what_its_parameters_say(bag, fresh_home, monkeypatch, capsys):
    dag, given = bag.dags["retention"], {}
    delete_old = dag.get_task("delete_old").python_callable
    params = {**dag.params.dump(), "keep_last": 3}
    monkeypatch.setitem(delete_old.__globals__, "get_current_context", lambda: {"params": params})
    monkeypatch.setattr("shoal.jobs.retain", lambda **options: given.update(options) or ["model m: deleted 2"])

    assert delete_old() == ["model m: deleted 2"]

    assert "model m: deleted 2" in capsys.readouterr().out
    ages = {"versions_older_than": timedelta(days=90), "jobs_older_than": timedelta(days=90)}
    assert given == {**ages, "keep_last": 3, "tracking_uri": None, "dry_run": False}


MODEL = "recent-flight-delays"


class TestScoreOnPromotion:
    """The DAG of a promotion: when it runs, and with which version and rows."""

    @pytest.fixture
    def choose(self, bag, fresh_home, monkeypatch):
        """Runs the task `choose` in a run of a date; the flights are one row a month."""
        rows = pd.DataFrame({name: range(1, 13) for name in (*FEATURES, LABEL)})
        monkeypatch.setattr("shoal.examples.flights._joined", lambda: rows)
        dag = bag.dags["score_on_promotion"]
        choose, has_new_champion = (dag.get_task(name).python_callable for name in ("choose", "has_new_champion"))

        def run(*promoted, version=None):
            context = {
                "dag_run": SimpleNamespace(run_after=datetime(2026, 3, 31, tzinfo=UTC)),
                "params": {"version": version},
            }
            champions = iter(promoted)
            monkeypatch.setitem(choose.__globals__, "get_current_context", lambda: context)
            monkeypatch.setitem(choose.__globals__, "champion", lambda: next(champions, None))
            chosen = choose()
            return chosen, has_new_champion(chosen["version"])

        return run

    def test_airflow_runs_it_when_the_model_of_the_retraining_was_promoted(self, bag, prepared):
        dag = DagSerialization.from_dict(DagSerialization.to_dict(bag.dags["score_on_promotion"]))
        retrained = retraining(prepared, logical_date=datetime(2026, 4, 1, tzinfo=UTC)).register_as.model
        assert retrained == MODEL
        assert [key.uri for key, _ in dag.timetable.asset_condition.iter_assets()] == [model_asset(retrained).uri]
        for name in ("scheduled_retraining", "train_networks"):
            trainings = of_type(bag.dags[name], "DistributedTrainOperator")
            assert trainings and all(PROMOTIONS in training.outlets for training in trainings)

    def test_it_predicts_the_last_complete_month_with_the_champion_and_looks_again_at_its_end(self, choose):
        chosen, is_new = choose("7", "7")
        assert (chosen["model"], is_new) == (f"models:/{MODEL}/7", False)
        assert [Path(path).stem for path in chosen["dataset"]["paths"]] == ["2026-02"]
        assert Path(chosen["output_path"]).parts[-2:] == ("version-7", "2026-02")
        assert choose("7", "8")[1] is True
        chosen, is_new = choose("7", version="6")
        assert (chosen["model"], is_new) == (f"models:/{MODEL}/6", False)

    def test_a_run_without_a_champion_needs_a_version(self, choose):
        with pytest.raises(AirflowFailException, match="trigger the DAG with the parameter version"):
            choose()
