"""Every DAG file of the repository: it loads, costs nothing to load, and cleans up after itself."""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from airflow.serialization.serialized_objects import DagSerialization

from shoal.examples.flights_data import FEATURES, LABEL
from shoal.jobs import JobSpec
from tests.airflow.test_provider import HEAVY

DAGS = sorted((Path(__file__).parents[2] / "dags").glob("*.py"))


@pytest.fixture(scope="module")
def bag():
    from airflow.dag_processing.dagbag import DagBag

    return DagBag(dag_folder=str(DAGS[0].parent), bundle_name="dags")


def of_type(dag, *names):
    return [task for task in dag.tasks if type(task).__name__ in names]


def test_no_file_fails_to_load(bag):
    assert bag.import_errors == {}
    assert set(bag.dags) == {"scheduled_retraining", "pool_janitor", "train_networks"}


def test_ids_are_not_used_twice(bag):
    assert len({dag.dag_id for dag in bag.dags.values()}) == len(DAGS)


@pytest.mark.processes
def test_loading_imports_nothing_heavy():
    """All files in one process: a module that one of them imports stays, and is told with the file's name."""
    check = (
        "import runpy, sys\n"
        "for file in sys.argv[1:]:\n"
        "    runpy.run_path(file)\n"
        f"    print('loaded', file, [name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check, *map(str, DAGS)], capture_output=True, text=True, check=True)
    loaded = [line for line in ran.stdout.splitlines() if line.startswith("loaded ")]
    assert loaded == [f"loaded {file} []" for file in DAGS]


def test_everybody_knows_whose_it_is(bag):
    for dag in bag.dags.values():
        assert dag.tags
        assert dag.doc_md
        assert all(task.owner != "airflow" for task in dag.tasks), dag.dag_id


def test_every_claim_has_its_cleanup(bag):
    for dag in bag.dags.values():
        for claim in of_type(dag, "LeasePoolOperator", "ScaleClusterOperator"):
            (teardown,) = [
                task for task in of_type(dag, "CleanupPoolOperator") if task.task_id in claim.downstream_task_ids
            ]
            assert claim.is_setup
            assert teardown.is_teardown
            assert teardown.pool_name == claim.pool_name


def test_every_training_has_its_lease_and_is_cleaned_up_after(bag):
    for dag in bag.dags.values():
        for training in of_type(dag, "DistributedTrainOperator"):
            leases = [
                task
                for task in training.get_flat_relatives(upstream=True)
                if type(task).__name__ == "LeasePoolOperator"
            ]
            assert [lease.pool_name for lease in leases] == [training.pool_name]
            assert any(task.is_teardown for task in training.get_flat_relatives(upstream=False))


def test_what_follows_the_training_does_not_hold_its_nodes(bag):
    dag = bag.dags["scheduled_retraining"]
    assert dag.get_task("clean_up_pool").upstream_task_ids == {"lease_pool", "wait_for_nodes", "train"}


@pytest.fixture
def prepared(bag, fresh_home, monkeypatch):
    """The spec of a run of `scheduled_retraining`, as its task makes it; the flights are one row a month."""
    rows = pd.DataFrame({name: range(1, 13) for name in (*FEATURES, LABEL)})
    monkeypatch.setattr("shoal.examples.flights_data._joined", lambda: rows)
    prepare = bag.dags["scheduled_retraining"].get_task("prepare").python_callable

    def spec(month=None, **run) -> JobSpec:
        context = {"dag_run": SimpleNamespace(**run), "params": {"month": month, "rounds": 5}}
        monkeypatch.setitem(prepare.__globals__, "get_current_context", lambda: context)
        return JobSpec.parse(prepare())

    return spec


def months(dataset) -> list[str]:
    """The months of a dataset, by the names of its files, each of which has the rows of its month."""
    for path in dataset.paths:
        assert pd.read_parquet(path)["month"].tolist() == [int(Path(path).stem[-2:])]
    return [Path(path).stem for path in dataset.paths]


def test_the_next_ten_runs_have_a_window_and_a_holdout_before_their_date(bag, prepared):
    """As Airflow schedules them: its scheduler computes the runs from the serialised DAG."""
    dag = DagSerialization.from_dict(DagSerialization.to_dict(bag.dags["scheduled_retraining"]))
    now, info, dates = datetime.now(UTC), None, []
    for _ in range(10):
        info = dag.next_dagrun_info(last_automated_run_info=info)
        assert info.logical_date == info.run_after
        dates.append(info.logical_date)
        spec = prepared(logical_date=info.logical_date, run_after=info.run_after)
        window, [holdout] = months(spec.dataset), months(spec.register_as.holdout)
        assert len(window) == 6
        assert window == sorted(window) and window[-1] < holdout < f"{info.logical_date:%Y-%m}"
        # The holdout is the month that has ended last.
        assert f"{info.logical_date - timedelta(days=1):%Y-%m}" == holdout
    assert now - timedelta(hours=1) <= dates[0] < now + timedelta(days=32)
    assert all(timedelta(days=28) <= after - before <= timedelta(days=31) for before, after in pairwise(dates))


def test_a_run_without_a_logical_date_ends_its_window_before_it_runs(prepared):
    spec = prepared(logical_date=None, run_after=datetime(2026, 3, 31, 23, tzinfo=UTC))
    assert months(spec.dataset) == ["2025-08", "2025-09", "2025-10", "2025-11", "2025-12", "2026-01"]
    assert months(spec.register_as.holdout) == ["2026-02"]


def test_a_month_as_parameter_is_a_month_of_2013_and_another_model(prepared):
    spec = prepared(month=3, logical_date=None)
    assert (months(spec.dataset), months(spec.register_as.holdout)) == (["2013-01", "2013-02"], ["2013-03"])
    scheduled = prepared(logical_date=datetime(2026, 4, 1, tzinfo=UTC))
    assert spec.register_as.model != scheduled.register_as.model
