"""The experiment of the job's MLflow run, as user code in the workers chooses it, on a real MLflow database."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from shoal.data.planning import GangPosition
from shoal.jobs import Tracking
from shoal.jobs.mlflow_run import Run, artifacts_of
from shoal.kinds.function.spec import FunctionJobSpec
from shoal.training import tracking
from shoal.training.reporting import GangContext
from shoal.training.tracking import after_import

Worker = Callable[[int], ModuleType]


def test_code_runs_after_the_import_of_a_module_and_not_when_it_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imported_late.py").write_text("NAME = __name__")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[str] = []
    after_import("imported_late", lambda module: seen.append(module.NAME))
    after_import("imported_late", lambda module: seen.append("too"))

    assert importlib.util.find_spec("imported_late") is not None
    assert importlib.util.find_spec("imported_never") is None
    assert seen == []
    module = importlib.import_module("imported_late")
    assert seen == ["imported_late", "too"]
    assert module.__spec__.loader.get_source("imported_late") == "NAME = __name__"
    after_import("imported_late", lambda module: seen.append("at once"))
    assert seen == ["imported_late", "too", "at once"]
    del sys.modules["imported_late"]


@pytest.fixture
def run(fresh_home: Path, own_mlflow: str) -> Iterator[Run]:
    """The run that a job begins with, which the driver has as its active one."""
    import mlflow

    run = Run.begin(Tracking(uri=own_mlflow, tags={"team": "x"}), name="job-1", tags={"shoal.job_id": "job"})
    run.log_params({"epochs": 3})
    yield run
    mlflow.end_run()


@pytest.fixture
def worker(run: Run, monkeypatch: pytest.MonkeyPatch, told: list[Any]) -> Worker:
    """Return MLflow as user code in a worker of the given rank has it, at the worker's start."""
    import mlflow

    class Fresh(ModuleType):
        """The module itself, with a `set_experiment` of its own."""

        set_experiment = staticmethod(mlflow.set_experiment)
        MlflowClient = mlflow.MlflowClient
        get_tracking_uri = staticmethod(mlflow.get_tracking_uri)
        tracking = mlflow.tracking

    monkeypatch.setattr(mlflow.tracking.fluent, "set_experiment", mlflow.set_experiment)
    monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
    for name in ("MLFLOW_EXPERIMENT_ID", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, "")

    def start(rank: int) -> ModuleType:
        module = Fresh("mlflow")
        monkeypatch.setitem(sys.modules, "mlflow", module)
        monkeypatch.setenv("MLFLOW_RUN_ID", first)
        monkeypatch.setenv("MLFLOW_TRACKING_URI", run.uri)
        monkeypatch.setenv(tracking.ARTIFACTS, str(artifacts_of(run.uri)))
        tracking.let_user_choose_experiment(GangContext(GangPosition(rank, 2), 2, told.append, told.append))
        monkeypatch.setitem(sys.modules, "mlflow", mlflow)
        return module

    first = run.run_id
    return start


@pytest.fixture
def told() -> list[Any]:
    """What workers have logged, and the notes that they have sent to the driver."""
    return []


def moves(told: list[Any]) -> list[str]:
    return [note[tracking.MOVED_NOTE] for note in told if isinstance(note, Mapping)]


class TestRanks:
    def test_rank_0_creates_the_jobs_run_and_the_others_find_it(self, run, worker, told):
        chosen = worker(0).set_experiment("/Users/me/digits")
        [moved] = moves(told)
        assert os.environ["MLFLOW_RUN_ID"] == moved != run.run_id
        assert f"file://{Path(chosen.artifact_location.removeprefix('file://')).parent}" == artifacts_of(run.uri)

        # Only rank 0's call counts: another experiment of another rank changes nothing.
        assert worker(1).set_experiment("another").name == "/Users/me/digits"
        assert os.environ["MLFLOW_RUN_ID"] == moved
        assert run.client.get_experiment_by_name("another") is None

        created = run.client.get_run(moved)
        assert created.info.experiment_id == chosen.experiment_id
        assert created.info.run_name == "job-1"
        assert (created.data.tags["shoal.job_id"], created.data.tags["team"]) == ("job", "x")

    def test_a_rank_0_that_replaces_a_lost_one_finds_the_run(self, run, worker, told):
        worker(0).set_experiment("digits")
        worker(0).set_experiment("digits")
        assert len(moves(told)) == 2
        assert len(set(moves(told))) == 1

    def test_the_experiment_of_the_first_run_moves_nothing(self, run, worker, told):
        worker(0).set_experiment("shoal")
        assert moves(told) == [run.run_id]
        worker(1).set_experiment("another")
        assert os.environ["MLFLOW_RUN_ID"] == run.run_id

    def test_without_rank_0_the_run_stays_and_the_log_says_so(self, run, worker, told, monkeypatch):
        monkeypatch.setattr(tracking, "SET_EXPERIMENT_WAIT_S", 0.0)
        monkeypatch.setattr(tracking, "_POLL_SECONDS", 0.0)
        assert worker(1).set_experiment("digits").name == "shoal"
        assert os.environ["MLFLOW_RUN_ID"] == run.run_id
        assert "only rank 0's call has an effect" in told[0]

    def test_once_a_run_has_started_or_on_another_server_it_is_mlflows_own(self, run, worker, told, monkeypatch):
        module = worker(0)
        monkeypatch.delenv("MLFLOW_RUN_ID")
        assert module.set_experiment("later").name == "later"
        elsewhere = worker(0)
        monkeypatch.setattr(elsewhere, "get_tracking_uri", lambda: "databricks", raising=False)
        assert elsewhere.set_experiment(experiment_name="mine").name == "mine"
        assert "MLFLOW_RUN_ID" not in os.environ
        assert told == []


class TestDriver:
    def test_it_moves_and_at_the_end_deletes_the_first_run(self, run, worker, told):
        first, client = run.run_id, run.client
        worker(0).set_experiment("digits")
        client.log_metric(first, "of-rank-1", 2.0, step=3)  # a rank that has not called set_experiment
        client.log_param(first, "late", "x")
        [moved] = moves(told)

        run.move_to(moved)
        run.move_to(moved)
        assert (run.run_id, client.get_run(moved).data.params) == (moved, {"epochs": "3", "late": "x"})
        assert f"{moved} (to view it" in run.link
        run.log_metrics([("loss", 0.5, 1, 2.0)])
        run.finish("FAILED")

        ended = client.get_run(moved)
        assert (ended.info.status, ended.data.metrics) == ("FAILED", {"loss": 0.5, "of-rank-1": 2.0})
        assert client.get_metric_history(moved, "of-rank-1")[0].step == 3
        assert client.get_run(first).info.lifecycle_stage == "deleted"

    def test_a_first_run_with_artifacts_is_kept(self, run, worker, told, capsys):
        first, client = run.run_id, run.client
        worker(0).set_experiment("digits")
        run.move_to(moves(told)[0])
        client.log_text(first, "x", "note.txt")
        run.finish("FINISHED")

        assert client.get_run(first).info.lifecycle_stage == "active"
        assert f"run {first} is kept" in capsys.readouterr().out

    @pytest.mark.parametrize("told_in_time", [True, False], ids=["moved", "killed before it moved"])
    def test_the_next_attempt_ends_what_a_killed_driver_left(self, run, worker, told, told_in_time):
        import mlflow

        first, client = run.run_id, run.client
        worker(0).set_experiment("digits")
        [moved] = moves(told)
        mlflow.end_run()  # this process is the next attempt's driver

        for _ in range(2):
            run.end_other(moved if told_in_time else first, "FAILED")

        assert client.get_run(moved).info.status == "FAILED"
        assert client.get_run(moved).data.params == {"epochs": "3"}
        assert client.get_run(first).info.lifecycle_stage == "deleted"


class TestCaller:
    """What a job takes over from the MLflow settings of the process that submits it."""

    @pytest.fixture
    def session(self, fresh_home: Path, own_mlflow: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
        """MLflow in a process that has set nothing; the database is where MLflow looks for it by default."""
        import mlflow

        folder = Path(own_mlflow.removeprefix("sqlite:///")).parent
        monkeypatch.chdir(folder)
        monkeypatch.setattr(mlflow.tracking.fluent, "_active_experiment_id", None)
        mlflow.set_tracking_uri(None)
        yield folder
        mlflow.set_tracking_uri(None)

    def test_the_run_is_a_child_of_the_callers_in_its_experiment(self, session):
        import mlflow

        spec = FunctionJobSpec(train_func="a:b")
        alone, identity = spec.completed("p", os.environ), spec.identifying("p", {})
        assert (alone.tracking.uri, alone.tracking.experiment_id, alone.tracking.parent_run_id) == (None, None, None)
        experiment = mlflow.set_experiment("mine")
        chosen = spec.completed("p", os.environ)
        with mlflow.start_run() as parent:
            nested = spec.completed("p", os.environ)
            assert spec.identifying("p", {}) == identity == alone
        assert nested.tracking.uri == chosen.tracking.uri == f"sqlite:///{session}/mlflow.db"
        assert nested.tracking.experiment_id == chosen.tracking.experiment_id == experiment.experiment_id
        assert (chosen.tracking.parent_run_id, nested.tracking.parent_run_id) == (None, parent.info.run_id)
        assert FunctionJobSpec.parse(nested.document()) == nested

        run = Run.begin(nested.tracking, name="job-1", tags={})
        run.finish("FINISHED")
        created = run.client.get_run(run.run_id)
        assert created.info.experiment_id == experiment.experiment_id
        assert created.data.tags["mlflow.parentRunId"] == parent.info.run_id
