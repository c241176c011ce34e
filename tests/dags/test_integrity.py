"""Every DAG file of the repository: it loads, costs nothing to load, and cleans up after itself."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import UTC
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("file", DAGS, ids=lambda file: file.stem)
@pytest.mark.processes
def test_loading_imports_nothing_heavy(file):
    check = (
        f"import runpy, sys; runpy.run_path({str(file)!r}); print([name for name in {HEAVY} if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "[]"


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


@pytest.mark.parametrize(("date", "month"), [((2013, 2, 1), 2), ((2013, 12, 1), 12), (None, None)])
def test_the_month_is_the_runs_own(date, month):
    from datetime import datetime

    spec = importlib.util.spec_from_file_location("retraining_dag", DAGS[0].parent / "scheduled_retraining.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if date is None:
        with pytest.raises(ValueError, match='set the parameter "month"'):
            module.month_of(None)
    else:
        assert module.month_of(datetime(*date, tzinfo=UTC)) == month
